package data

import (
	"context"
	"math/rand/v2"
	"testing"
)

// TestPermutation checks that the permutation without a list is a bijection, and another one with other keys.
func TestPermutation(t *testing.T) {
	for _, n := range []uint64{1, 2, 3, 4, 5, 17, 64, 1000, 65537, 1 << 18} {
		a, b := newPermutation(rand.NewPCG(1, n), n), newPermutation(rand.NewPCG(2, n), n)
		seen := make([]bool, n)
		fixed, equal := 0, 0
		for i := range n {
			x := a.at(i)
			if x >= n || seen[x] {
				t.Fatalf("%d numbers: position %d has %d, which is too large or there twice", n, i, x)
			}
			seen[x] = true
			if x == i {
				fixed++
			}
			if x == b.at(i) {
				equal++
			}
		}
		if n >= 1000 && (fixed > 12 || equal > 12) { // 1 each are expected
			t.Errorf("%d numbers: %d stay where they are, %d are where other keys have them", n, fixed, equal)
		}
	}
}

// TestPermutationSpreads checks that neighbours are spread evenly: of numbers in each tenth, a tenth comes from each
// tenth.
func TestPermutationSpreads(t *testing.T) {
	const n = 100_000
	p := newPermutation(rand.NewPCG(1, 1), n)
	var count [10][10]int
	for i := range uint64(n) {
		count[i*10/n][p.at(i)*10/n]++
	}
	for i, row := range count {
		for j, c := range row {
			if c < 850 || c > 1150 { // 1000 expected, with a standard deviation of 28
				t.Errorf("%d of tenth %d come from tenth %d", c, i, j)
			}
		}
	}
}

// TestLargeShuffle shuffles more elements than fit in a list, without memory for them.
func TestLargeShuffle(t *testing.T) {
	n := listedMax + 12345
	p := FromFunc(n, func(context.Context, int) (Element, error) { return nil, nil }).Shuffle(3).Skip(n - 100).Batch(10)
	r, err := Open(WithEpoch(t.Context(), 7), p)
	if err != nil || r.Len() != 10 {
		t.Fatalf("got %v, %v", r, err)
	}
	seen := map[uint64]bool{}
	for batch := range 10 {
		for row := range 10 {
			id := r.(RowReader).RowID(batch, row)
			if id >= uint64(n) || seen[id] {
				t.Errorf("example %d is too large or there twice", id)
			}
			seen[id] = true
		}
	}
}
