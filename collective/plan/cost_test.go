package plan

import (
	"flag"
	"math/bits"
	"slices"
	"testing"
	"time"
)

// Bounds of a cost, relative to the time of the slowest rank. Costs are approximate: they do not follow how ranks wait
// for each other, a rank's part of an incomplete end may be shorter than the longest path, and uneven parts count as
// the longest one. If one of two rows takes twice as long as the other, their costs still differ in the same direction.
const (
	costLeast = 0.9
	costMost  = 1.6
)

var manyRanks = flag.Bool("many-ranks", false, "TestCost also predicts for 16, 31 and 33 ranks, which takes minutes")

// TestCost compares each cost function with a run of the plans in virtual time.
func TestCost(t *testing.T) {
	near := Links{
		Memory: Link{time.Microsecond, 12e9}, Host: Link{5 * time.Microsecond, 3e9},
		Network: Link{30 * time.Microsecond, 1e9},
		Combine: 20e9, Copy: 10e9, ElementBytes: 4,
	}
	crowded := near
	crowded.Cores = 2
	sizes := []int{2, 3, 4, 5, 7, 8, 11}
	if !testing.Short() {
		sizes = append(sizes, 17)
	}
	if *manyRanks {
		sizes = append(sizes, 16, 31, 33)
	}
	for _, a := range Algorithms {
		t.Run(a.Name, func(t *testing.T) {
			t.Parallel()
			for _, n := range sizes {
				for p := range costly(n) {
					for i, l := range []Links{near, crowded} {
						if a.Fits(p) != nil {
							continue
						}
						cost, took := a.Cost(p, l), virtualTime(t, a, p, l)
						if slack := time.Duration(4 * n); float64(cost+slack) < costLeast*float64(took) ||
							float64(cost-slack) > costMost*float64(took) {
							t.Errorf("%v over links %d costs %v, takes %v", p, i, cost, took)
						}
					}
				}
			}
		})
	}
}

// costly returns problems of n ranks, in one domain and in domains of four.
func costly(n int) func(func(Problem) bool) {
	return func(yield func(Problem) bool) {
		for _, at := range placements(n)[:3] {
			for _, p := range []Problem{
				{Op: AllReduce, Count: 3},
				{Op: AllReduce, Count: 5000 * n},
				{Op: AllReduce, Count: 1_000_000, Order: Any},
				{Op: Reduce, Count: 5000 * n, Root: n / 3},
				{Op: ReduceScatter, Count: 5000 * n},
				{Op: Broadcast, Count: 5000 * n, Root: n / 3},
				{Op: AllGather, Count: 5000 * n},
				{Op: Gather, Count: 5000 * n, Root: n / 3},
				{Op: Scatter, Count: 5000 * n, Root: n / 3},
				{Op: AllToAll, Count: 5000 * n},
				{Op: Send, Count: 5000, Peer: n - 1},
				{Op: Barrier},
			} {
				p.Size, p.Places, p.Private, p.Stage = n, at.places, at.private, 1<<18
				if p.Validate() == nil && !yield(p) {
					return
				}
			}
		}
	}
}

// TestDoublingSteps checks the number of exchanges that docs/algorithms.md states.
func TestDoublingSteps(t *testing.T) {
	for size, want := range map[int]int{1: 0, 2: 1, 3: 3, 4: 2, 5: 5, 6: 4, 7: 4, 8: 3, 9: 7, 12: 5, 15: 5, 16: 4, 17: 9} {
		l := Links{Host: Link{Latency: 1}}
		if got := recursiveDoubling.Cost(Problem{Op: AllReduce, Size: size}, l); int(got) != want {
			t.Errorf("%d ranks take %d steps, want %d", size, got, want)
		}
		if got := virtualTime(t, recursiveDoubling, Problem{Op: AllReduce, Size: size}, l); int(got) != want {
			t.Errorf("%d ranks take %d steps in virtual time, want %d", size, got, want)
		}
		for _, op := range []Op{Broadcast, Reduce, Gather, Scatter, AllGather, Barrier} {
			p := Problem{Op: op, Size: size, Root: size / 2}
			if got, want := virtualTime(t, recursiveDoubling, p, l), bits.Len(uint(size-1)); int(got) > want {
				t.Errorf("%v takes %d steps, want %d", p, got, want)
			}
		}
	}
}

// virtual executes all ranks' plans in virtual time.
type virtual struct {
	p     Problem
	c     costs
	plans [][]Step
	next  []int
	now   []time.Duration
	flags [][]time.Duration // by rank
}

// virtualTime returns when the slowest rank has ended, where frames and flags take their latency, links their
// bandwidth, and reading and copying their rates.
func virtualTime(t *testing.T, a Algorithm, p Problem, l Links) time.Duration {
	v := &virtual{
		p: p, c: l.of(p), plans: solve(a, p).plans, next: make([]int, p.Size),
		now: make([]time.Duration, p.Size), flags: make([][]time.Duration, p.Size),
	}
	for v.round() {
	}
	for rank := range v.plans {
		if v.next[rank] != len(v.plans[rank]) {
			t.Fatalf("%s: %v: rank %d makes no progress at %v", a.Name, p, rank, v.current(rank))
		}
	}
	return slices.Max(v.now)
}

func (v *virtual) current(rank int) *Step {
	if v.next[rank] == len(v.plans[rank]) {
		return &Step{}
	}
	return &v.plans[rank][v.next[rank]]
}

// round executes one step of every rank that can proceed, and reports whether any could.
func (v *virtual) round() bool {
	var ready []int
	for rank := range v.plans {
		if v.ready(rank) {
			ready = append(ready, rank)
		}
	}
	started := slices.Clone(v.now)
	for _, rank := range ready {
		v.now[rank] = v.ends(rank, v.current(rank), started)
	}
	for _, rank := range ready {
		v.next[rank]++
	}
	return len(ready) > 0
}

func (v *virtual) ready(rank int) bool {
	s := v.current(rank)
	switch s.Kind {
	case 0:
		return false
	case Exchange:
		to, from := s, s
		if s.To >= 0 {
			to = v.current(s.To)
		}
		if s.From >= 0 {
			from = v.current(s.From)
		}
		return (s.To < 0 || to.Kind == Exchange && to.From == rank && v.hasPeers(s.To)) &&
			(s.From < 0 || from.Kind == Exchange && from.To == rank && v.hasPeers(s.From))
	case Await:
		for _, peer := range v.awaited(rank, s) {
			if s.Flag >= len(v.flags[peer]) {
				return false
			}
		}
	}
	return true
}

// hasPeers reports whether the peers of a rank's exchange are in theirs: both halves of a step end at once.
func (v *virtual) hasPeers(rank int) bool {
	seen := map[int]bool{}
	var ready func(rank int) bool
	ready = func(rank int) bool {
		if seen[rank] {
			return true
		}
		seen[rank] = true
		s := v.current(rank)
		return (s.To < 0 || v.current(s.To).Kind == Exchange && v.current(s.To).From == rank && ready(s.To)) &&
			(s.From < 0 || v.current(s.From).Kind == Exchange && v.current(s.From).To == rank && ready(s.From))
	}
	return ready(rank)
}

func (v *virtual) awaited(rank int, s *Step) []int {
	if s.From >= 0 {
		return []int{s.From}
	}
	var all []int
	for peer := range v.p.Size {
		if v.p.domain(peer) == v.p.domain(rank) {
			all = append(all, peer)
		}
	}
	return all
}

// ends returns when a rank ends its step.
func (v *virtual) ends(rank int, s *Step, started []time.Duration) time.Duration {
	now, n := v.now[rank], s.In.length()
	switch s.Kind {
	case Exchange:
		return v.exchanged(rank, s, started)
	case Signal:
		v.flags[rank] = append(v.flags[rank], now)
	case Await:
		for _, peer := range v.awaited(rank, s) {
			if peer != rank || v.p.Size == 1 {
				now = max(now, v.flags[peer][s.Flag]+v.c.Memory.Latency)
			}
		}
	case Combine:
		now += v.c.combining((s.Ranks.Hi - s.Ranks.Lo) * n)
	case Fold:
		now += v.c.combining(2 * n)
	case Pull, Push:
		now += v.c.reading(n)
	case Copy:
		if s.In.Buffer != Work || s.Out.Buffer != Dst { // the same memory
			now += v.c.copying(n)
		}
	}
	return now
}

func (v *virtual) exchanged(rank int, s *Step, started []time.Duration) time.Duration {
	now := v.now[rank]
	var took time.Duration
	for _, half := range []struct {
		peer, elements int
	}{{s.To, s.Out.length()}, {s.From, s.In.length()}} {
		if half.peer < 0 {
			continue
		}
		link := v.c.Host
		if v.p.Places != nil && v.p.Places[rank].Host != v.p.Places[half.peer].Host {
			link = v.c.Network
		}
		now = max(now, started[half.peer])
		took = max(took, v.c.over(link, half.elements))
	}
	now += took
	if s.Side != Replace {
		now += v.c.combining(2 * s.In.length())
	}
	return now
}
