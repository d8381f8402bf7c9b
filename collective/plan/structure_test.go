package plan

import (
	"math"
	"math/bits"
	"strings"
	"testing"
)

// moves counts what a rank's plan sends and receives.
type moves struct{ steps, sent, received int }

// counted returns the moves of all ranks, and the most of each.
func counted(a Algorithm, p Problem) (of []moves, most moves) {
	for _, plan := range solve(a, p).plans {
		var m moves
		for i := range plan {
			s := &plan[i]
			if s.Kind != Exchange {
				continue
			}
			m.steps++
			if s.To >= 0 {
				m.sent += s.Out.length()
			}
			if s.From >= 0 {
				m.received += s.In.length()
			}
		}
		of = append(of, m)
		most = moves{max(most.steps, m.steps), max(most.sent, m.sent), max(most.received, m.received)}
	}
	return of, most
}

// near reports whether a number of elements is the expected one, up to an additional granule in each of some frames.
func near(got, want, frames int) bool { return got <= want+frames*sliceElements }

// TestRabenseifnerMoves checks the numbers of docs/algorithms.md: for powers of two 2·log2(n) steps and 2S(n-1)/n; for
// other sizes, joining a block of 2^b to one of 2^c costs c-b+1 steps and S/2^b.
func TestRabenseifnerMoves(t *testing.T) {
	const count = 64 * 7 * 9 * 11 * 64
	for n := 2; n <= 64; n++ {
		of, most := counted(rabenseifner, Problem{Op: AllReduce, Size: n, Count: count})
		rounds := bits.Len(uint(n - 1))
		if n&(n-1) == 0 {
			for rank, m := range of {
				if m.steps != 2*rounds || !near(m.sent, 2*count*(n-1)/n, m.steps) || !near(m.received, 2*count*(n-1)/n, m.steps) {
					t.Errorf("%d ranks, rank %d: %+v, want %d steps and %d elements", n, rank, m, 2*rounds, 2*count*(n-1)/n)
				}
			}
			continue
		}
		// Halving sends at most S and an all-gather S; who passes on what joined has at most half of it more.
		if want := 2*count + count/2; most.sent > want || most.received > want {
			t.Errorf("%d ranks: at most %+v, want at most %d elements", n, most, want)
		}
		if most.steps > 4*rounds+1 {
			t.Errorf("%d ranks: at most %d steps, want at most %d", n, most.steps, 4*rounds+1)
		}
	}
}

// TestRabenseifnerPath checks the number of steps on the longest path: those of the blocks, the joins, the share and
// the all-gather.
func TestRabenseifnerPath(t *testing.T) {
	for size, want := range map[int]int{
		1: 0, 2: 2, 3: 3 + 1 + 2, 4: 4, 5: 5 + 1 + 3, 6: 4 + 1 + 3, 7: 5 + 1 + 3, 8: 6,
		12: 5 + 1 + 4, 15: 7 + 1 + 4, 16: 8, 24: 6 + 1 + 5, 33: 11 + 1 + 6, 64: 12,
	} {
		l := Links{Host: Link{Latency: 1}}
		p := Problem{Op: AllReduce, Size: size}
		if got := int(virtualTime(t, rabenseifner, p, l)); got != want {
			t.Errorf("%d ranks take %d steps, want %d", size, got, want)
		}
		if got := int(rabenseifner.Cost(p, l)); got != want {
			t.Errorf("%d ranks cost %d steps, want %d", size, got, want)
		}
	}
}

// TestRabenseifnerBytes checks the number of vectors on the longest path that docs/algorithms.md states.
func TestRabenseifnerBytes(t *testing.T) {
	const count = 64 * 64 * 33 * 7 * 5 * 9
	for size, want := range map[int]float64{
		2: 1, 3: 2.7, 4: 1.5, 5: 2.8, 6: 2.3, 7: 3.1, 8: 1.8, 12: 2.2, 15: 3.3,
		16: 1.9, 24: 2.1, 33: 3, 64: 2,
	} {
		l := Links{Host: Link{Bandwidth: 1e9}, ElementBytes: 1} // an element a nanosecond
		if got := float64(virtualTime(t, rabenseifner, Problem{Op: AllReduce, Size: size, Count: count},
			l)) / count; math.Abs(got-want) > 0.06 {
			t.Errorf("%d ranks move %.2f vectors, want %.1f", size, got, want)
		}
	}
}

// TestPlaces checks that places are a permutation of the members, that owners is its inverse, and that the parts of a
// slice are those of its owner and of the next member.
func TestPlaces(t *testing.T) {
	for n := 1; n <= 200; n++ {
		p := Problem{Op: AllReduce, Size: n}
		h := halvingOf(p.everyone(0, Work))
		seen := make([]bool, n)
		for member := range n {
			place := h.place(member)
			if place < 0 || place >= n || seen[place] || h.owner(place) != member {
				t.Fatalf("%d members: member %d has place %d, which is that of %d", n, member, place, h.owner(place))
			}
			seen[place] = true
		}
		for s := range 1 << h.levels {
			parts := 1
			if h.reversed(s)+1<<h.levels < n {
				parts = 2
			}
			if h.cut(s+1)-h.cut(s) != parts || h.owner(h.cut(s)) != h.reversed(s) {
				t.Fatalf("%d members: slice %d has the places [%d, %d), want %d from member %d's on", n, s, h.cut(s), h.cut(s+1),
					parts, h.reversed(s))
			}
		}
	}
}

// TestDoubleTreeMoves checks that no rank sends or receives more than 5S/2 in an all-reduce, S in a broadcast, and 3S/2
// in a reduce except for the root; and that a rank is an inner node of one reduce tree only.
func TestDoubleTreeMoves(t *testing.T) {
	const count = 200_000
	for n := 2; n <= 40; n++ {
		for _, c := range []struct {
			op   Op
			want int
		}{{AllReduce, 5 * count / 2}, {Broadcast, count}, {Reduce, 3 * count / 2}} {
			of, _ := counted(doubleTree, Problem{Op: c.op, Size: n, Count: count, Root: n - 1})
			for rank, m := range of {
				want := c.want
				if c.op == Reduce {
					top := reduceTree{n}.top()
					switch rank {
					case n - 1:
						want += count
					case top - 1, top:
						want += count / 2
					}
				}
				if !near(m.sent, want, 5) || !near(m.received, want, 5) {
					t.Errorf("%v of %d ranks, rank %d: %+v, want at most %d elements", c.op, n, rank, m, want)
				}
			}
		}
		for rank := range n {
			inner := 0
			for tree := range 2 {
				if x := (reduceTree{n}).hosted(tree, rank); x > 0 && x%2 == 0 {
					inner++
				}
			}
			if inner > 1 {
				t.Errorf("%d ranks: rank %d combines nodes of several levels in both trees", n, rank)
			}
		}
	}
}

// TestColours checks that no rank sends, or receives, on two edges of one colour, and that parents and children agree
// on the colour.
func TestColours(t *testing.T) {
	type end struct{ rank, colour int }
	for n := 2; n <= 130; n++ {
		sent, received := map[end]arc{}, map[end]arc{}
		take := func(what string, from, to, colour int, a arc) {
			if other, twice := sent[end{from, colour}]; twice {
				t.Errorf("%d ranks, %s: rank %d sends %v and %v in one time slot", n, what, from, other, a)
			}
			if other, twice := received[end{to, colour}]; twice {
				t.Errorf("%d ranks, %s: rank %d receives %v and %v in one time slot", n, what, to, other, a)
			}
			sent[end{from, colour}], received[end{to, colour}] = a, a
		}
		up := reduceTree{n}
		for tree := range 2 {
			for x := 1; x <= n; x++ {
				if a := (arc{tree, x}); up.climbs(a) {
					take("up", up.host(tree, x), up.host(tree, up.parent(x)), colour(a, up.atSender, up.atReceiver), a)
				}
			}
		}
		for _, roots := range [][2]int{{up.top() - 1, up.top()}, {n / 3, n / 3}} {
			clear(sent)
			clear(received)
			down := broadcastTree{n, roots}
			for tree := range 2 {
				for u := 1; u < n; u++ {
					left, right := down.children(down.parent(u))
					if left != u && right != u || down.number(tree, down.rank(tree, u)) != u {
						t.Fatalf("%d ranks: number %d of tree %d has the parent %d, whose children are %d and %d", n, u, tree,
							down.parent(u), left, right)
					}
					a := arc{tree, u}
					take("down", down.rank(tree, down.parent(u)), down.rank(tree, u), colour(a, down.atSender, down.atReceiver), a)
				}
			}
		}
	}
}

// TestRingMoves checks that every rank sends and receives S(n-1)/n for each half, in n-1 steps.
func TestRingMoves(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5, 8, 13} {
		count := 64 * n * 30
		for _, c := range []struct {
			op     Op
			halves int
		}{{AllReduce, 2}, {ReduceScatter, 1}, {AllGather, 1}} {
			of, _ := counted(ring, Problem{Op: c.op, Size: n, Count: count, Order: Any})
			for rank, m := range of {
				if want := (moves{c.halves * (n - 1), c.halves * count / n * (n - 1), c.halves * count / n * (n - 1)}); m != want {
					t.Errorf("%v of %d ranks, rank %d: %+v, want %+v", c.op, n, rank, m, want)
				}
			}
		}
	}
}

func TestRingRefusesOrder(t *testing.T) {
	for _, p := range []Problem{
		{Op: AllReduce, Size: 4, Count: 64},
		{Op: ReduceScatter, Size: 4, Count: 64, Order: Canonical},
	} {
		if err := ring.Fits(p); err == nil || !strings.Contains(err.Error(), "it needs Order: Any") {
			t.Errorf("ring for %v: %v", p, err)
		}
	}
	if err := ring.Fits(Problem{Op: AllGather, Size: 4, Count: 64}); err != nil {
		t.Errorf("ring for what adds nothing: %v", err)
	}
}

// TestReduceBroadcastMoves checks that 2(n-1) frames are sent in total.
func TestReduceBroadcastMoves(t *testing.T) {
	for n := 1; n <= 40; n++ {
		for _, p := range []Problem{{Op: AllReduce, Size: n, Count: 10}, {Op: Barrier, Size: n}} {
			frames := 0
			of, _ := counted(reduceBroadcast, p)
			for _, m := range of {
				frames += m.steps // each is a send or a receive
			}
			if frames != 4*(n-1) {
				t.Errorf("%v: %d ends of frames, want %d", p, frames, 4*(n-1))
			}
		}
	}
}

// TestSegmented proves plans of many segments.
func TestSegmented(t *testing.T) {
	for n := 2; n <= 17; n++ {
		for _, p := range []Problem{
			{Op: AllReduce, Size: n, Count: 200_003, Reduce: Mean},
			{Op: Reduce, Size: n, Count: 200_003, Reduce: Mean, Root: n / 2},
			{Op: Broadcast, Size: n, Count: 200_003, Root: n / 2},
		} {
			for _, a := range []Algorithm{doubleTree, ring} {
				if a.Fits(p) != nil {
					continue
				}
				if err := Check(a, p); err != nil {
					t.Error(err)
				}
				if _, most := counted(a, p); most.steps < 8 {
					t.Errorf("%s: %v has only %d steps", a.Name, p, most.steps)
				}
			}
		}
	}
}
