package plan

import (
	"slices"
	"testing"
	"time"
)

// TestCost holds each cost function against a run of the plans in virtual time: never less than the slowest rank takes,
// and at most a quarter more (a rank's part in the incomplete end may be shorter than the longest path).
func TestCost(t *testing.T) {
	l := Links{Memory: Link{Latency: 10 * time.Microsecond}, Network: Link{10 * time.Microsecond, 1e9}, Combine: 8e9, ElementBytes: 4}
	for _, a := range Algorithms {
		for n := 1; n <= 33; n++ {
			for _, p := range []Problem{
				{Op: AllReduce, Size: n, Count: 0},
				{Op: AllReduce, Size: n, Count: 3},
				{Op: AllReduce, Size: n, Count: 5000},
				{Op: AllReduce, Size: n, Count: 1_000_000},
				{Op: Broadcast, Size: n, Count: 5000, Root: n / 3},
				{Op: Barrier, Size: n},
			} {
				cost, took := a.Cost(p, l), virtualTime(t, a, p, l)
				if slack := time.Duration(n); cost < took-slack || cost > took+took/4+slack {
					t.Errorf("%s: %v costs %v, takes %v", a.Name, p, cost, took)
				}
			}
		}
	}
}

// virtualTime returns when the slowest rank has ended, where frames and marks take their latency, links their bandwidth,
// and only reading in order to combine, or from another rank, takes time besides.
func virtualTime(t *testing.T, a Algorithm, p Problem, l Links) time.Duration {
	plans, next, now := make([][]Step, p.Size), make([]int, p.Size), make([]time.Duration, p.Size)
	marks := map[int][]time.Duration{}
	for rank := range plans {
		plans[rank] = slices.Collect(a.Steps(p, rank))
	}
	// met reports whether rank's current step is the other half of an exchange with peer. Both halves of a step end
	// at once, so a step of a cycle needs all its peers to stand in theirs.
	current := func(rank int) Step {
		if next[rank] == len(plans[rank]) {
			return Step{}
		}
		return plans[rank][next[rank]]
	}
	for moved := true; moved; {
		moved = false
		var ready []int
		for rank := range plans {
			switch s := current(rank); s.Kind {
			case Exchange:
				if (s.To < 0 || current(s.To).Kind == Exchange && current(s.To).From == rank) &&
					(s.From < 0 || current(s.From).Kind == Exchange && current(s.From).To == rank) {
					ready = append(ready, rank)
				}
			case Await:
				if len(marks[s.Mark]) == p.Size {
					ready = append(ready, rank)
				}
			case 0:
			default:
				ready = append(ready, rank)
			}
		}
		started := slices.Clone(now)
		for _, rank := range ready {
			switch s := current(rank); s.Kind {
			case Exchange:
				for _, peer := range []int{s.To, s.From} {
					if peer >= 0 {
						now[rank] = max(now[rank], started[peer])
					}
				}
				now[rank] += l.frame(max(s.Out.Hi-s.Out.Lo, s.In.Hi-s.In.Lo))
				if s.Side != Replace {
					now[rank] += l.combining(2 * (s.In.Hi - s.In.Lo))
				}
			case Signal:
				marks[s.Mark] = append(marks[s.Mark], now[rank])
			case Await:
				now[rank] = max(now[rank], slices.Max(marks[s.Mark])+l.Network.Latency)
			case Combine:
				now[rank] += l.combining(p.Size * (s.In.Hi - s.In.Lo))
			case Pull:
				now[rank] += l.combining(s.In.Hi - s.In.Lo)
			}
		}
		for _, rank := range ready {
			next[rank]++
			moved = true
		}
	}
	for rank := range plans {
		if next[rank] != len(plans[rank]) {
			t.Fatalf("%s: %v: rank %d stands still at %v", a.Name, p, rank, current(rank))
		}
	}
	return slices.Max(now)
}
