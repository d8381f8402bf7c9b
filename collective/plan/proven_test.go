package plan

import (
	"fmt"
	"iter"
	"slices"
	"testing"
)

// TestAlgorithmsProven proves every row of the table for every problem that it fits: all operations, all sizes up to 64
// and some larger ones, all roots if they are few, several placements, and counts that do not divide evenly.
func TestAlgorithmsProven(t *testing.T) {
	largest := 64
	if testing.Short() {
		largest = 7
		t.Log("-short: only up to 7 ranks, more repeat what these show")
	}
	for _, a := range Algorithms {
		for _, sizes := range sizesToProve(largest) {
			t.Run(fmt.Sprintf("%s/%d-%d", a.Name, sizes[0], sizes[len(sizes)-1]), func(t *testing.T) {
				t.Parallel()
				for _, n := range sizes {
					if err := prove(a, n); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	}
}

// prove checks an algorithm's plans for the problems of one size, in all placements.
func prove(a Algorithm, n int) error {
	var proven []solved // those that use frames only: they prove as much for other places, and other orders
	for p := range operations(n) {
		p.Stage = 192*n + 70 // three windows of 64 elements a rank
		if p.Order != Any {
			proven = proven[:0]
		}
		for _, at := range placements(n) {
			p.Places, p.Private = at.places, at.private
			if a.Fits(p) != nil {
				continue
			}
			s := solve(a, p)
			if slices.ContainsFunc(proven, s.equal) {
				continue
			}
			if err := Check(a, p); err != nil {
				return err
			}
			if s.framesOnly() {
				proven = append(proven, s)
			}
		}
	}
	return nil
}

func (s *solved) framesOnly() bool {
	for _, plan := range s.plans {
		for i := range plan {
			switch plan[i].Kind {
			case Exchange, Copy, Fold, Scale:
			default:
				return false
			}
		}
	}
	return !s.uses(Stage)
}

// TestPlansArePure generates each plan twice, and once partially.
func TestPlansArePure(t *testing.T) {
	sizes := []int{1, 2, 3, 6, 5, 8}
	if testing.Short() {
		sizes = sizes[:4]
		t.Log("-short: only 1, 2, 3 and 6 ranks, more repeat what these show")
	}
	for _, a := range Algorithms {
		for _, n := range sizes {
			for p := range operations(n) {
				p.Stage = 192 * n
				for _, at := range placements(n) {
					p.Places, p.Private = at.places, at.private
					if a.Fits(p) == nil {
						takeInPart(t, a, p)
					}
				}
			}
		}
	}
}

func takeInPart(t *testing.T, a Algorithm, p Problem) {
	for rank := range p.Size {
		whole := slices.Collect(a.Steps(p, rank))
		buffer := make([]Step, 0, len(whole))
		for i := range whole {
			part := buffer[:0]
			for s := range a.Steps(p, rank) {
				part = append(part, s)
				if len(part) == i+1 {
					break
				}
			}
			if !slices.Equal(part, whole[:i+1]) {
				t.Fatalf("%s, %v, rank %d: first %d steps are %v, then %v", a.Name, p, rank, i+1, whole[:i+1], part)
			}
		}
	}
}

// sizesToProve are groups of sizes that take about as long as each other.
func sizesToProve(largest int) [][]int {
	var groups [][]int
	for lo, hi := 1, min(17, largest+1); lo <= largest; lo, hi = hi, min(hi+8, largest+1) {
		var g []int
		for n := lo; n < hi; n++ {
			g = append(g, n)
		}
		groups = append(groups, g)
	}
	if largest >= 64 {
		groups = append(groups, []int{100}, []int{128}, []int{255}, []int{256})
	}
	return groups
}

// placed is the placement of ranks, and whether peers reach their sources and destinations.
type placed struct {
	places  []Place
	private bool
}

// placements returns placements of n ranks: together; in domains of four, which are nodes of the tree; of three, which
// are not; each alone; in domains of increasing size; alternately in two domains of one host.
func placements(n int) []placed {
	all := []placed{{}, {private: true}}
	if n == 1 {
		return all
	}
	add := func(private bool, domain func(rank int) int, host func(domain int) int) {
		places := make([]Place, n)
		for rank := range places {
			d := domain(rank)
			places[rank] = Place{Worker: rank, Domain: d, Host: host(d)}
		}
		all = append(all, placed{places, private})
	}
	same := func(d int) int { return d }
	add(false, func(rank int) int { return rank / 4 }, same)
	add(true, func(rank int) int { return rank / 3 }, func(d int) int { return d / 2 })
	if n > 64 {
		return all
	}
	add(false, func(rank int) int { return rank }, same)
	add(false, func(rank int) int { return rank % 2 }, func(int) int { return 0 })
	add(true, func(rank int) int {
		d := 0
		for size := 1; rank >= size; size++ {
			rank -= size
			d++
		}
		return d
	}, same)
	return all
}

// operations returns the calls that n ranks can make.
func operations(n int) iter.Seq[Problem] {
	return func(yield func(Problem) bool) {
		ok := yield(Problem{Op: Barrier, Size: n})
		for _, count := range countsToProve(n) {
			ok = ok && yield(Problem{Op: AllReduce, Size: n, Count: count, Reduce: Mean}) &&
				(n > 64 || yield(Problem{Op: AllReduce, Size: n, Count: count, Reduce: Mean, Order: Any}))
			for _, root := range rootsToProve(n) {
				ok = ok && yield(Problem{Op: Broadcast, Size: n, Count: count, Root: root}) &&
					yield(Problem{Op: Reduce, Size: n, Count: count, Reduce: Mean, Root: root}) &&
					(n == 1 || yield(Problem{Op: Send, Size: n, Count: count, Root: root, Peer: (root + n/2 + n%2) % n}))
			}
		}
		ok = ok && yield(Problem{Op: AllToAll, Size: n, Count: countsToProve(n)[len(countsToProve(n))-1] / n * n}) &&
			(n > 9 || yield(Problem{Op: AllToAll, Size: n}))
		for _, parts := range partitions(n) {
			count := 0
			for _, length := range parts {
				count += length
			}
			p := Problem{Size: n, Count: count, Counts: parts}
			if slices.Min(parts) == slices.Max(parts) {
				p.Counts = nil
			}
			for _, p.Op = range []Op{AllGather, ReduceScatter} {
				ok = ok && yield(p)
			}
			for _, p.Op = range []Op{Gather, Scatter} {
				for _, p.Root = range rootsToProve(n) {
					ok = ok && yield(p)
				}
			}
		}
	}
}

func countsToProve(n int) []int {
	switch {
	case n <= 9:
		counts := []int{0, 1, n - 1, 2*n + 1, 64*n + 1, 300*n + 77}
		slices.Sort(counts)
		return slices.Compact(counts)
	case n <= 17 || n <= 64 && n%3 == 0:
		return []int{n - 1, 300*n + 77}
	case n <= 64:
		return []int{300*n + 77}
	}
	return []int{100*n + 77}
}

// rootsToProve returns all ranks if they are few, else some.
func rootsToProve(n int) []int {
	switch {
	case n <= 17:
		var all []int
		for r := range n {
			all = append(all, r)
		}
		return all
	case n <= 64 && n%2 == 0:
		return []int{0, n / 3}
	case n <= 64:
		return []int{n / 2, n - 1}
	}
	return []int{n / 3}
}

// partitions returns lengths of the ranks' parts: equal ones, and some empty and some long ones.
func partitions(n int) [][]int {
	equal, uneven := make([]int, n), make([]int, n)
	for rank := range n {
		equal[rank] = 300
		uneven[rank] = []int{0, 7, 200, 1, 0, 130, 64}[(rank*5+n)%7]
	}
	switch {
	case n > 64, n > 17 && n%3 > 0:
		return [][]int{uneven}
	case n > 9:
		return [][]int{equal, uneven}
	}
	none, single := make([]int, n), make([]int, n)
	single[n/2] = 77
	return [][]int{equal, uneven, none, single}
}
