package fault

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
)

// group is a fake of Peers: ranks with fixed states, of which some answer late, or never.
type group struct {
	missing []int
	states  []State          // by rank
	quiet   map[int]int      // by rank: how many queries it leaves unanswered, for half a second each
	left    map[int]bool     // ranks to which no query can be sent
	seen    map[int]LastSeen // by rank
	process func(int) int    // nil: one process a rank
	failed  func() bool      // whether the communicator has failed; nil: it has not
	changes func()           // called before each query; nil: nothing

	all     int         // number of queries
	queries map[int]int // by rank
}

func (g *group) Missing() []int { return slices.Clone(g.missing) }

func (g *group) State(rank int) (State, bool) {
	g.all++
	if g.changes != nil {
		g.changes()
	}
	if g.queries == nil {
		g.queries = map[int]int{}
	}
	g.queries[rank]++
	switch {
	case g.left[rank]:
		return State{}, false
	case g.queries[rank] <= g.quiet[rank]:
		time.Sleep(500 * time.Millisecond)
		return State{}, false
	}
	s := g.states[rank]
	s.Waits = slices.Clone(s.Waits)
	return s, true
}

func (g *group) LastSeen(rank int) LastSeen { return g.seen[rank] }

func (g *group) Process(rank int) int {
	if g.process != nil {
		return g.process(rank)
	}
	return rank
}

func (g *group) Failed() bool { return g.failed != nil && g.failed() }

// probe searches as rank 0 in a call, and returns the finding, its text, and how long the search took.
func (g *group) probe(call fingerprint.Call) (f Finding, text string, took time.Duration) {
	w := &Wait{Rank: 0, Size: len(g.states), Call: call, Silent: -1, Peers: g}
	begin := time.Now()
	f = w.Probe()
	took = time.Since(begin)
	return f, w.Describe(10*time.Minute, f), took
}

// collective returns the barrier with a number, and message the receipt of a message of a peer.
func collective(seq uint64) fingerprint.Call {
	c := fingerprint.New(&fingerprint.Params{Op: plan.Barrier})
	c.Header.Seq = seq
	return c
}

func message(peer int) fingerprint.Call {
	return fingerprint.New(&fingerprint.Params{Op: plan.Recv, Type: tensor.Float32, Count: 3, Peer: peer})
}

// waits returns the state of a rank that waits in call 5; before is that of one whose latest call was 4.
func waits(ranks ...int) State {
	return State{Call: collective(5), Activity: Waiting, Entered: 6, Waits: ranks}
}

var before = State{Call: collective(4), Activity: Idle, Entered: 5}

// check compares a finding with the ranks and the end of the text that are expected.
func check(t *testing.T, f Finding, text string, ranks []int, says string) {
	t.Helper()
	if !slices.Equal(f.Ranks, ranks) || !strings.HasSuffix(text, says) {
		t.Errorf("blames %v: %s\nwant %v: … %s", f.Ranks, text, ranks, says)
	}
}

func TestAbsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, waits(2), waits(3), before, waits(3)}}
		f, text, took := g.probe(collective(5))
		check(t, f, text, []int{3}, "rank 0 waited 10m0s for rank 1, which waits for rank 2, "+
			"which waits for rank 3 in barrier, rank 3 last entered call 4, barrier")
		if took > 0 {
			t.Errorf("took %v although a rank is certainly at fault", took)
		}
		g = &group{missing: []int{1, 2}, states: []State{{}, waits(3), waits(3), {}}}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, []int{3}, "for ranks 1, 2 (rank 1 waits for rank 3) in barrier, rank 3 has made no call")
		g = &group{missing: []int{1}, states: []State{{}, waits(2), waits(3), waits(4), waits(5), waits(6), before}}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, []int{6}, "which waits through 2 more for rank 6 in barrier, rank 6 last entered call 4, barrier")
	})
}

// TestAbsentFromMemory checks that memory shows that a rank has not entered the call, where it does not answer.
func TestAbsentFromMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{
			missing: []int{1}, states: []State{{}, {}, waits(1)}, quiet: map[int]int{1: 99},
			seen: map[int]LastSeen{1: {Previous: collective(4), Frame: 3}},
		}
		f, text, _ := g.probe(collective(5))
		check(t, f, text, []int{1}, "for rank 1 in barrier, rank 1 last entered call 4, barrier")
	})
}

func TestCycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		receives := func(peer int) State { return State{Call: message(peer), Activity: Waiting, Waits: []int{peer}} }
		g := &group{missing: []int{1}, states: []State{{}, receives(2), receives(3), receives(1)}}
		f, text, took := g.probe(message(1))
		check(t, f, text, []int{1, 2, 3}, "for rank 1, which waits for rank 2, which waits for rank 3, "+
			"which waits for rank 1 in recv float32 [3] from rank 1: they wait for each other")
		if took < roundsMost/2 || took > roundsMost {
			t.Errorf("took %v: a cycle is certain only after repeated rounds, of %v", took, roundsMost)
		}
		g = &group{missing: []int{1}, states: []State{{}, receives(0)}}
		f, text, _ = g.probe(message(1))
		check(t, f, text, []int{1}, "for rank 1, which waits for rank 0 in "+
			"recv float32 [3] from rank 1: they wait for each other")
	})
}

// TestSilent checks that a rank that does not answer is blamed only after two probes, and that its process is
// then not probed again.
func TestSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{
			missing: []int{1}, states: []State{{}, {}, waits(1), waits(1)}, quiet: map[int]int{1: 99},
			seen: map[int]LastSeen{1: {Frame: 5}},
		}
		f, text, took := g.probe(collective(5))
		check(t, f, text, []int{1}, "rank 1 was last seen in call 4, and does not answer")
		if g.queries[1] != silences || took < time.Second || took > 1100*time.Millisecond {
			t.Errorf("%d probes in %v, want %d in one second", g.queries[1], took, silences)
		}
		g = &group{
			missing: []int{1}, states: []State{{}, {}, waits(1)}, quiet: map[int]int{1: 99},
			seen: map[int]LastSeen{1: {Entered: true}},
		}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, []int{1}, "rank 1 is in this call, and does not answer")

		g = &group{
			missing: []int{1, 2}, states: []State{{}, {}, {}, waits(1)}, quiet: map[int]int{1: 99, 2: 99},
			process: func(r int) int { return (r + 1) / 2 },
		}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, []int{1}, "rank 1 does not answer") // the time is over when its process has not answered twice
		if g.queries[2] != 0 {
			t.Errorf("rank 2 was probed %d times although its process did not answer for rank 1", g.queries[2])
		}
	})
}

// TestSlow checks that a rank that answers late, and waits like all others, is not blamed.
func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, waits(2), before}, quiet: map[int]int{1: 1}}
		f, text, _ := g.probe(collective(5))
		check(t, f, text, []int{2}, "rank 2 last entered call 4, barrier, rank 1 does not answer")

		message := State{Call: message(2), Activity: Waiting, Waits: []int{2}}
		g = &group{missing: []int{1}, states: []State{{}, message, before}, quiet: map[int]int{1: 1}}
		f, text, _ = g.probe(message.Call)
		check(t, f, text, []int{2}, "which waits for rank 2 in recv float32 [3] from rank 2, "+
			"rank 2 last entered call 4, barrier")
	})
}

// TestManySlow checks that the search ends although every rank is slow.
func TestManySlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: make([]State, 50), quiet: map[int]int{}}
		for r := range g.states {
			g.states[r], g.quiet[r] = waits((r+1)%50), 99
		}
		if _, _, took := g.probe(collective(5)); took > searchMost+500*time.Millisecond {
			t.Errorf("took %v, want %v and one probe at most", took, searchMost)
		}
		w := &Wait{Size: 50, Call: collective(5), Silent: -1, Peers: g}
		begin := time.Now()
		if f := w.ProbeBriefly(); len(f.Ranks) > 0 {
			t.Errorf("blames %v, which it had no time to probe twice", f.Ranks)
		}
		if took := time.Since(begin); took > briefMost+500*time.Millisecond {
			t.Errorf("a brief search took %v, want %v and one probe at most", took, briefMost)
		}
	})
}

// TestSilentBefore checks that a query that was left unanswered before the search counts.
func TestSilentBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, {}, waits(1)}, quiet: map[int]int{1: 99}}
		w := &Wait{Size: 3, Call: collective(5), Silent: 1, Peers: g}
		if f := w.Probe(); !slices.Equal(f.Ranks, []int{1}) || g.queries[1] != 1 {
			t.Errorf("blames %v after %d probes, want rank 1 after one", f.Ranks, g.queries[1])
		}
	})
}

func TestOtherStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, {Activity: Broken}, waits(1)}}
		f, text, took := g.probe(collective(5))
		check(t, f, text, []int{1}, "for rank 1 in barrier, rank 1 has failed")
		if !f.Failed || took > 0 {
			t.Errorf("Failed is %v after %v", f.Failed, took)
		}
		g = &group{missing: []int{1}, states: []State{{}, {}, waits(1)}, left: map[int]bool{1: true}}
		f, text, took = g.probe(collective(5))
		check(t, f, text, []int{1}, "for rank 1 in barrier, rank 1 does not answer")
		if took > 0 {
			t.Errorf("took %v to find that a rank has left", took)
		}
		computes := State{Call: collective(5), Activity: Busy, Entered: 6}
		g = &group{missing: []int{1}, states: []State{{}, computes, waits(1)}}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, []int{1}, "for rank 1 in barrier, rank 1 is in this call, and waits for no peer")
		past, ended := State{Call: collective(6), Activity: Busy, Entered: 7}, State{Call: collective(5), Entered: 6}
		g = &group{missing: []int{1}, states: []State{{}, past, ended}}
		f, text, _ = g.probe(collective(5))
		check(t, f, text, nil, "for rank 1 in barrier, rank 1 is past this call")
	})
}

// TestInconsistent checks that a state that no rank can have does no harm: it comes from another process.
func TestInconsistent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, waits(1, -1, 7), waits(1)}}
		f, text, _ := g.probe(collective(5))
		check(t, f, text, []int{1}, "rank 1 is in this call, and waits for no peer")
	})
}

// TestProgress checks that a rank that has entered the call by the second round is not blamed, and that the
// search ends when the communicator fails.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{missing: []int{1}, states: []State{{}, {Call: collective(5), Activity: Busy, Entered: 6}, waits(1)}}
		g.changes = func() {
			if g.all > 2 {
				g.states[1] = waits(2)
				g.states[2] = before
			}
		}
		f, text, _ := g.probe(collective(5))
		check(t, f, text, []int{2}, "for rank 1, which waits for rank 2 in barrier, rank 2 last entered call 4, barrier")
		g.changes, g.all = nil, 0
		g.failed = func() bool { return g.all > 0 }
		if g.probe(collective(5)); g.all > len(g.states) {
			t.Errorf("%d queries after the failure", g.all)
		}
	})
}
