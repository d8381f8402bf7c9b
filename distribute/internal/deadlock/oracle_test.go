package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// move is one step of a replica's program: it computes for some time, then makes a call.
type move struct {
	think time.Duration
	room  int // number of the communicator; that after the last one: a merge call
	size  int // of the vector
}

// program is the calls of each replica, and the communicators.
type program struct {
	rooms [][]int // members by communicator
	moves [][]move
}

// drawProgram draws a program in which all replicas take part in the same calls, and then breaks it in a few places,
// or in none.
func drawProgram(t *rapid.T) program {
	n := rapid.IntRange(2, 5).Draw(t, "replicas")
	var p program
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	p.rooms = append(p.rooms, all, all)
	for range rapid.IntRange(0, 3).Draw(t, "subsets") {
		members := slices.Clone(rapid.Permutation(all).Draw(t, "members")[:rapid.IntRange(2, n).Draw(t, "size")])
		p.rooms = append(p.rooms, members)
	}
	p.moves = make([][]move, n)
	draw := func() move {
		return move{
			think: time.Duration(rapid.SampledFrom([]int{0, 0, 0, 1, 2, 5}).Draw(t, "think")) * time.Second,
			room:  rapid.IntRange(0, len(p.rooms)).Draw(t, "room"),
			size:  1,
		}
	}
	for range rapid.IntRange(0, 8).Draw(t, "calls") {
		m := draw()
		for _, replica := range p.members(m.room) {
			p.moves[replica] = append(p.moves[replica], m)
		}
	}
	for range rapid.IntRange(0, 3).Draw(t, "faults") {
		replica := rapid.IntRange(0, n-1).Draw(t, "replica")
		moves := p.moves[replica]
		if len(moves) == 0 {
			continue
		}
		at := rapid.IntRange(0, len(moves)-1).Draw(t, "at")
		switch rapid.IntRange(0, 4).Draw(t, "fault") {
		case 0:
			p.moves[replica] = slices.Delete(moves, at, at+1)
		case 1:
			p.moves[replica] = moves[:at]
		case 2:
			other := rapid.IntRange(0, len(moves)-1).Draw(t, "other")
			moves[at], moves[other] = moves[other], moves[at]
		case 3:
			if m := draw(); slices.Contains(p.members(m.room), replica) {
				p.moves[replica] = slices.Insert(moves, at, m)
			}
		case 4:
			moves[at].size = 2
		}
	}
	return p
}

func (p program) members(room int) []int {
	if room == len(p.rooms) {
		return p.rooms[0]
	}
	return p.rooms[room]
}

// verdict is the expected result of a program.
type verdict struct {
	ok       bool
	mismatch bool          // matched calls differ, so another failure may be found, at another time
	at       time.Duration // when the run ends, or the failure is found
	done     []int         // calls that each replica has finished at the end, at most
}

// foresee simulates a program step by step, and searches at every moment for replicas that cannot continue: the largest
// set of which each has ended, or is in a call that needs another one of the set.
func foresee(p program) verdict {
	type status struct {
		at      int           // index of its move
		arrives time.Duration // when it makes the call of this move, or ends
	}
	n := len(p.moves)
	v := verdict{done: make([]int, n)}
	all := make([]status, n)
	for i := range all {
		if len(p.moves[i]) > 0 {
			all[i].arrives = p.moves[i][0].think
		}
	}
	ended := func(i int) bool { return all[i].at == len(p.moves[i]) }
	room := func(i int) int { return p.moves[i][all[i].at].room }
	for now := time.Duration(0); ; {
		// Complete every call that all members have entered.
		for progress := true; progress; {
			progress = false
			for r := range len(p.rooms) + 1 {
				here := func(i int) bool { return all[i].arrives <= now && !ended(i) && room(i) == r }
				members := p.members(r)
				if slices.ContainsFunc(members, func(i int) bool { return !here(i) }) {
					continue
				}
				size := p.moves[members[0]][all[members[0]].at].size
				for _, i := range members {
					if r < len(p.rooms) && p.moves[i][all[i].at].size != size {
						v.ok, v.mismatch = false, true
						return v
					}
				}
				for _, i := range members {
					all[i].at++
					v.done[i]++
					all[i].arrives = now
					if !ended(i) {
						all[i].arrives += p.moves[i][all[i].at].think
					}
				}
				progress = true
			}
		}
		stuck := make([]bool, n)
		for i := range stuck {
			stuck[i] = all[i].arrives <= now
		}
		for shrinks := true; shrinks; {
			shrinks = false
			for i := range stuck {
				if !stuck[i] || ended(i) {
					continue
				}
				needs := slices.ContainsFunc(p.members(room(i)), func(j int) bool {
					here := all[j].arrives <= now && !ended(j) && room(j) == room(i)
					return !here && stuck[j]
				})
				if !needs {
					stuck[i], shrinks = false, true
				}
			}
		}
		v.at, v.ok = now, true
		next := time.Duration(-1)
		for i := range all {
			switch {
			case stuck[i] && !ended(i):
				v.ok = false
				// Two calls may have differed before; that need not be detected before all have entered.
				for j := range all {
					if !ended(j) && j != i && all[j].arrives <= now && room(j) == room(i) &&
						p.moves[i][all[i].at].size != p.moves[j][all[j].at].size {
						v.mismatch = true
					}
				}
			case all[i].arrives > now && (next < 0 || all[i].arrives < next):
				next = all[i].arrives
			}
		}
		if !v.ok || next < 0 {
			return v
		}
		now = next
	}
}

// play executes a program on a detector.
func play(t *testing.T, p program) (took time.Duration, each []error, err error) {
	w := newWorld(t, len(p.moves), deadlock.Config{Timeout: -1})
	rank := make([]map[int]collective.Communicator, len(p.rooms)) // by room, then replica
	for r, members := range p.rooms {
		name := fmt.Sprintf("room %d", r)
		var group collective.Group
		monitor := w.detector.Monitor(name, members, func(cause error) { group.Local()[0].Abort(cause) })
		var e error
		if group, e = collective.Open(mem.New(len(members)), collective.Config{
			Name: name, Monitor: monitor, Timeout: time.Hour, Stall: -1,
		}); e != nil {
			t.Fatal(e)
		}
		defer group.Close()
		rank[r] = make(map[int]collective.Communicator)
		for i, replica := range members {
			rank[r][replica] = group.Local()[i]
		}
	}
	start := time.Now()
	each, _, err = w.run(context.Background(), func(ctx context.Context, r replica) error {
		for _, m := range p.moves[r.id] {
			if m.think > 0 {
				select {
				case <-time.After(m.think):
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
			var err error
			if m.room == len(p.rooms) {
				_, err = r.run.Merge(ctx, r.id, "", 0, func() (any, error) { return nil, nil })
			} else {
				err = rank[m.room][r.id].Do(ctx, vector("w", m.size))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return time.Since(start), each, err
}

// The detector's result for a random program equals that of a slow search over its whole execution: whether it fails,
// with which failure, and when.
func TestRandomPrograms(t *testing.T) {
	failed, right := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		p := drawProgram(rt)
		want := foresee(p)
		var (
			each []error
			err  error
			took time.Duration
		)
		synctest.Test(t, func(t *testing.T) { took, each, err = play(t, p) })
		if want.ok {
			right++
			if err != nil || took != want.at {
				rt.Fatalf("a right program of %v ended after %v: %v", want.at, took, err)
			}
			return
		}
		failed++
		var failure *deadlock.StepError
		if !errors.As(err, &failure) {
			rt.Fatalf("a wrong program ended after %v with %v", took, err)
		}
		for i, e := range each {
			if e != error(failure) && (e != nil || failure.Replicas[i].State != deadlock.Returned) {
				rt.Fatalf("replica %d got %v of\n%v", i, e, failure)
			}
			if got := failure.Replicas[i].Calls; !want.mismatch && got > uint64(want.done[i]) {
				rt.Fatalf("replica %d is said to have finished %d calls, want at most %d\n%v", i, got, want.done[i], failure)
			}
		}
		if want.mismatch {
			if !errors.Is(err, collective.ErrMismatch) && !errors.Is(err, collective.ErrDesync) {
				rt.Fatalf("differing calls ended with %v", err)
			}
			return
		}
		if !errors.Is(err, collective.ErrDesync) || took != want.at {
			rt.Fatalf("after %v, want %v: %v", took, want.at, err)
		}
	})
	if failed == 0 || right == 0 {
		t.Errorf("%d programs were right and %d wrong: the test shows little", right, failed)
	}
	t.Logf("%d programs were right, %d wrong", right, failed)
}
