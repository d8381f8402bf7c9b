package plan

import (
	"fmt"
	"strings"
	"testing"
)

// TestCanonical compares the tree with its definition, level by level.
func TestCanonical(t *testing.T) {
	for n := 1; n <= 300; n++ {
		level := make([]string, n)
		for rank := range level {
			level[rank] = fmt.Sprint(rank)
		}
		for len(level) > 1 {
			var next []string
			for i := 0; i+1 < len(level); i += 2 {
				next = append(next, "("+level[i]+"+"+level[i+1]+")")
			}
			if len(level)%2 == 1 {
				next = append(next, level[len(level)-1])
			}
			level = next
		}
		got := canonical(0, n, func(rank int) string { return fmt.Sprint(rank) },
			func(l, r string) string { return "(" + l + "+" + r + ")" })
		if got != level[0] {
			t.Fatalf("tree of %d: %s, want %s", n, got, level[0])
		}
	}
}

// TestSlice checks that slices are consecutive, cover the vector, begin at cache lines and are equal up to one granule.
func TestSlice(t *testing.T) {
	for _, size := range []int{1, 2, 3, 7, 64, 255} {
		for _, count := range []int{0, 1, 63, 64, 65, 1000, 64 * 255, 1_000_003} {
			end, least, most := 0, count, 0
			for rank := range size {
				lo, hi := slice(count, size, rank)
				if lo != end || hi < lo || hi > count || lo%sliceElements != 0 && lo != count {
					t.Errorf("slice(%d, %d, %d) = [%d, %d) after one that ends at %d", count, size, rank, lo, hi, end)
				}
				end, least, most = hi, min(least, hi-lo), max(most, hi-lo)
			}
			if end != count || most-least >= 2*sliceElements {
				t.Errorf("slices of %d over %d ranks end at %d and have %d to %d elements", count, size, end, least, most)
			}
		}
	}
}

// TestTail checks that the places of a tail's ranks are a permutation, that place and rank are inverse to each other,
// and that some rank always has the tail's sum.
func TestTail(t *testing.T) {
	for size := 1; size <= 130; size++ {
		tails := tailOf(size)
		for k := 0; size>>k > 0; k++ {
			length, seen := tails.length(k), map[int]bool{}
			for rank := size - length; rank < size; rank++ {
				place := tails.place(k, rank)
				if place < 0 || place >= length || seen[place] || tails.rank(k, place) != rank {
					t.Fatalf("size %d, round %d: rank %d has place %d, where rank %d is; places taken %v", size, k, rank, place,
						tails.rank(k, place), seen)
				}
				seen[place] = true
			}
			if h := tails.holders[k]; h > length || length > 0 && h < 1 {
				t.Fatalf("size %d, round %d: %d of %d ranks hold the sum", size, k, h, length)
			}
		}
	}
}

func TestFindAlgorithm(t *testing.T) {
	for _, a := range Algorithms {
		if got, ok := FindAlgorithm(a.Name); !ok || got.Name != a.Name {
			t.Errorf("FindAlgorithm(%q) = %q, %v", a.Name, got.Name, ok)
		}
		if a.Name != strings.ToLower(a.Name) || a.Fits == nil || a.Steps == nil || a.Cost == nil {
			t.Errorf("row %q is not whole", a.Name)
		}
	}
	if got, ok := FindAlgorithm("ring of fire"); ok {
		t.Errorf("FindAlgorithm of no name = %q", got.Name)
	}
}
