package overlay_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
)

// TestGraph: links are mutual, few and connect all within the stated number of hops; the tree uses links only.
func TestGraph(t *testing.T) {
	for n := 1; n < 130; n++ {
		checkGraph(t, overlay.New(n, 0), n)
	}
	for _, n := range []int{1000, 1024, 4096} {
		checkGraph(t, overlay.New(n, overlay.MeshMax), n)
	}
	if g := overlay.New(overlay.MeshMax, overlay.MeshMax); !g.Mesh() || len(g.Neighbours(3)) != overlay.MeshMax-1 {
		t.Errorf("%d processes have %v as neighbours of 3, want a mesh", overlay.MeshMax, g.Neighbours(3))
	}
}

func checkGraph(t *testing.T, g overlay.Graph, n int) {
	t.Helper()
	digits := 0
	for p := 1; p < n; p *= 4 {
		digits++
	}
	next := make([][]int, n)
	for i := range n {
		next[i] = g.Neighbours(i)
		if len(next[i]) > 2*digits || slices.Contains(next[i], i) {
			t.Fatalf("of %d processes, %d has neighbours %v, want at most %d", n, i, next[i], 2*digits)
		}
		for _, j := range next[i] {
			if !g.Linked(i, j) || !g.Linked(j, i) {
				t.Fatalf("of %d processes, %d has neighbour %d, but they are not linked", n, i, j)
			}
		}
		if n < 130 {
			for j := range n {
				if g.Linked(i, j) != slices.Contains(next[i], j) {
					t.Fatalf("of %d processes, %d has neighbours %v, but %d is linked", n, i, next[i], j)
				}
			}
		}
		depth := 0
		for at := i; at != 0; depth++ {
			parent := g.Parent(at)
			if !g.Linked(at, parent) || !slices.Contains(g.Children(parent), at) {
				t.Fatalf("of %d processes, %d has parent %d: no link, or not its child", n, at, parent)
			}
			at = parent
		}
		if depth > 3*digits {
			t.Fatalf("of %d processes, %d is at depth %d, want at most %d", n, i, depth, 3*digits)
		}
	}
	if hops := reach(next, 0, nil); slices.Max(hops) > 2*digits || slices.Min(hops) < 0 {
		t.Fatalf("of %d processes, %v are the hops from process 0, want at most %d", n, slices.Max(hops), 2*digits)
	}
}

// TestLosses: 40 random processes of 4,096, and hosts of 8, can be lost without cutting the others off from each other.
func TestLosses(t *testing.T) {
	const n = 4096
	g := overlay.New(n, overlay.MeshMax)
	next := make([][]int, n)
	for i := range n {
		next[i] = g.Neighbours(i)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		lost := map[int]bool{}
		for len(lost) < 40 {
			host := random.IntN(n) &^ 7
			for i := range 8 {
				if lost[host+i] = true; round%2 == 0 {
					break
				}
			}
		}
		from := 0
		for lost[from] {
			from++
		}
		for i, hops := range reach(next, from, lost) {
			if hops < 0 && !lost[i] {
				t.Fatalf("round %d: news from %d cannot reach %d", round, from, i)
			}
		}
	}
}

// reach returns the number of hops from a process to each, around those that are lost; -1: it cannot be reached.
func reach(next [][]int, from int, lost map[int]bool) []int {
	hops := make([]int, len(next))
	for i := range hops {
		hops[i] = -1
	}
	hops[from] = 0
	for queue := []int{from}; len(queue) > 0; queue = queue[1:] {
		for _, j := range next[queue[0]] {
			if hops[j] < 0 && !lost[j] {
				hops[j] = hops[queue[0]] + 1
				queue = append(queue, j)
			}
		}
	}
	return hops
}
