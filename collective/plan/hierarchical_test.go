package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// shaped places ranks in domains of the given sizes, each on a separate host.
func shaped(sizes ...int) []Place {
	var places []Place
	for d, size := range sizes {
		for range size {
			places = append(places, Place{Worker: len(places), Domain: d, Host: d})
		}
	}
	return places
}

// shapes lists sizes of domains: domains that are nodes of the tree and domains that are not, equal and unequal ones.
var shapes = [][]int{
	{2, 2},
	{4, 4},
	{2, 2, 2, 2},
	{2, 2, 2},
	{3, 3},
	{2, 2, 2, 2, 2},
	{5, 1},
	{1, 5},
	{1, 4, 1},
	{4, 2},
	{3, 2, 1},
	{6, 6},
	{4, 4, 4},
	{5, 5, 5},
	{3, 3, 3, 3},
	{8, 8},
	{7, 9},
	{1, 1, 2, 4},
	{4, 4, 3},
	{3, 3, 3, 3, 3, 3, 3},
	{2, 2, 2, 2, 2, 2, 1},
	{16, 3},
	{8, 8, 8},
}

// TestHierarchicalProven proves the plans for all shapes, where peers reach sources and destinations and where not.
func TestHierarchicalProven(t *testing.T) {
	for _, sizes := range shapes {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			t.Parallel()
			places := shaped(sizes...)
			if testing.Short() && len(places) > 7 {
				t.Skip("-short: only up to 7 ranks, more repeat what these show")
			}
			proven := 0
			for p := range operations(len(places)) {
				p.Places = places
				for _, p.Stage = range []int{0, 128*len(places) + 70} {
					p.Private = p.Stage > 0
					for _, a := range []Algorithm{hierarchical, hierarchicalLong} {
						if a.Fits(p) != nil {
							continue
						}
						if err := Check(a, p); err != nil {
							t.Fatal(err)
						}
						proven++
					}
				}
			}
			if proven < 20 {
				t.Errorf("only %d problems were proven", proven)
			}
		})
	}
}

// TestHierarchicalFrames checks that the frames do not depend on Private: each domain may decide for itself.
func TestHierarchicalFrames(t *testing.T) {
	frames := func(a Algorithm, p Problem, rank int) (all []string) {
		for s := range a.Steps(p, rank) {
			if s.Kind == Exchange {
				all = append(all, fmt.Sprint(s.To, s.Out.length(), s.From, s.In.length(), s.Side))
			}
		}
		return all
	}
	for _, sizes := range shapes {
		places := shaped(sizes...)
		for p := range operations(len(places)) {
			p.Places, p.Stage = places, 128*len(places)
			for _, a := range []Algorithm{hierarchical, hierarchicalLong} {
				if a.Fits(p) != nil {
					continue
				}
				for rank := range places {
					p.Private = false
					open := frames(a, p, rank)
					p.Private = true
					if private := frames(a, p, rank); !slices.Equal(open, private) {
						t.Fatalf("%s, %v, rank %d: frames are\n%v, if private\n%v", a.Name, p, rank, open, private)
					}
				}
			}
		}
	}
}

// TestHierarchicalMoves checks the amount of data between domains in an all-reduce. With equal domains that are nodes
// it is a slice a round, or 2S(m-1)/m of it, where m is the number of domains; otherwise at most as many slices as a
// domain has nodes.
func TestHierarchicalMoves(t *testing.T) {
	for _, c := range []struct {
		sizes       []int
		rounds      int // exchanges of one sum
		short, long int // elements that a rank sends at most, in 64ths of S
	}{
		{[]int{4, 4}, 1, 16, 16},
		{[]int{4, 4, 4, 4}, 2, 32, 24},
		{[]int{2, 2, 2, 2}, 2, 64, 48},
		{[]int{8, 8, 8, 8, 8, 8, 8, 8}, 3, 24, 14},
		{[]int{3, 3}, 2, 43, 32}, // two nodes in each: 2/3 S; half of each, and half a slice back
		// two rounds up of at most three sums, then one back; a third of two sums to each of two, and 2/3 of the slice
		{[]int{6, 6, 6}, 7, 75, 22},
	} {
		const count = 64 * 64 * 3 * 5 * 8
		p := Problem{Op: AllReduce, Places: shaped(c.sizes...), Count: count}
		p.Size = len(p.Places)
		_, short := counted(hierarchical, p)
		_, long := counted(hierarchicalLong, p)
		if short.steps > c.rounds || !near(short.sent, count/64*c.short, 8) || !near(long.sent, count/64*c.long, 8) {
			t.Errorf("%v: short %+v, long %+v of %d elements; want at most %d steps, %d and %d 64ths", c.sizes, short, long,
				count, c.rounds, c.short, c.long)
		}
	}
}

func TestHierarchicalRefuses(t *testing.T) {
	dealt := []Place{{0, 0, 0}, {1, 1, 1}, {2, 0, 0}, {3, 1, 1}}
	for _, c := range []struct {
		p    Problem
		want string
	}{
		{
			Problem{Op: AllReduce, Size: 4, Places: dealt},
			"the ranks of a domain to follow each other: ranks 0 and 2 are in domain 0, rank 1 is not",
		},
		{Problem{Op: AllReduce, Size: 4}, "needs several domains"},
		{Problem{Op: AllReduce, Size: 3, Places: shaped(1, 1, 1)}, "needs a domain of several ranks"},
		{
			Problem{Op: AllReduce, Size: 4, Places: shaped(2, 2), Private: true, Stage: 255},
			"a staging buffer of 256 elements at least, it has 255",
		},
		{Problem{Op: AllToAll, Size: 4, Places: shaped(2, 2)}, "no plan for all_to_all"},
	} {
		if err := hierarchical.Fits(c.p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %q", c.p, err, c.want)
		}
	}
}

// TestNodes checks that the nodes of some ranks are nodes of the tree, are consecutive, are as few as documented, and
// that no two are neighbours.
func TestNodes(t *testing.T) {
	for n := 1; n <= 70; n++ {
		s := &sums{size: n}
		for lo := range n {
			for hi := lo + 1; hi <= n; hi++ {
				at := lo
				all := s.nodes(Ranks{lo, hi})
				for i, node := range all {
					if node.Lo != at || !isNode(n, node) || i > 0 && isNode(n, Ranks{all[i-1].Lo, node.Hi}) {
						t.Fatalf("%d ranks: the nodes of %d to %d are %v", n, lo, hi-1, all)
					}
					at = node.Hi
				}
				if most := 2 * (reduceTree{n}.level(reduceTree{n}.top()) + 1); at != hi || len(all) > max(1, most) {
					t.Fatalf("%d ranks: the nodes of %d to %d are %v", n, lo, hi-1, all)
				}
			}
		}
	}
}

// TestHierarchicalCost compares the costs with virtual time for all shapes.
func TestHierarchicalCost(t *testing.T) {
	l := Links{
		Memory: Link{time.Microsecond, 12e9}, Host: Link{5 * time.Microsecond, 3e9},
		Network: Link{30 * time.Microsecond, 1e9},
		Combine: 20e9, Copy: 10e9, ElementBytes: 4,
	}
	for _, sizes := range shapes {
		places := shaped(sizes...)
		n := len(places)
		for _, p := range []Problem{
			{Op: AllReduce, Count: 3},
			{Op: AllReduce, Count: 5000 * n},
			{Op: AllReduce, Count: 1_000_000},
			{Op: Reduce, Count: 5000 * n, Root: n / 3},
			{Op: ReduceScatter, Count: 5000 * n},
			{Op: Broadcast, Count: 5000 * n, Root: n / 3},
			{Op: AllGather, Count: 5000 * n},
			{Op: Barrier},
		} {
			for _, p.Stage = range []int{0, 1 << 14} {
				p.Size, p.Places, p.Private = n, places, p.Stage > 0
				for _, a := range []Algorithm{hierarchical, hierarchicalLong} {
					if a.Fits(p) != nil {
						continue
					}
					cost, took := a.Cost(p, l), virtualTime(t, a, p, l)
					if float64(cost) < costLeast*float64(took) || float64(cost) > costMost*float64(took) {
						t.Errorf("%s: %v costs %v, takes %v", a.Name, p, cost, took)
					}
				}
			}
		}
	}
}
