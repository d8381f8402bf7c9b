package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport"
)

// TestKinds: the kind of an error in a record, and the workers that it blames. This is worker 1, whose ranks are 2
// and 3.
func TestKinds(t *testing.T) {
	w := &Worker{job: &cluster.Job{Worker: 1, Workers: 3}, session: &session{members: []Member{
		{Worker: 0, Replicas: 2},
		{Worker: 1, First: 2, Replicas: 2},
		{Worker: 2, First: 4, Replicas: 1},
	}}}
	for name, c := range map[string]struct {
		err    error
		kind   string
		blames []int
	}{
		"an own error":      {errors.New("no"), "error", nil},
		"a full disk":       {fmt.Errorf("writing: %w", syscall.ENOSPC), "disk", nil},
		"no memory":         {fmt.Errorf("mapping: %w", syscall.ENOMEM), "memory", nil},
		"asked to end":      {fmt.Errorf("%w: train", ErrInterrupted), "interrupted", nil},
		"its context ended": {context.Canceled, "interrupted", nil},
		"a lost peer": {
			&collective.Error{Kind: collective.ErrPeerLost, Rank: 2, Peers: []int{4}}, "lost",
			[]int{2},
		},
		"peers that do not join": {
			&collective.Error{Kind: collective.ErrTimeout, Rank: 3, Peers: []int{0, 1, 4}}, "timeout",
			[]int{0, 2},
		},
		"a reported lost peer": {
			&collective.Error{Kind: collective.ErrPeerLost, Rank: 0, Peers: []int{4}}, "lost",
			[]int{2},
		},
		"lost by another": {
			&collective.Error{Kind: collective.ErrPeerLost, Rank: 0, Peers: []int{2}}, "lost",
			[]int{0},
		},
		"a reported failure": {
			&collective.Error{Kind: collective.ErrAborted, Rank: 4, Err: errors.New("no")}, "error",
			[]int{2},
		},
		"a peer that does not connect": {
			fmt.Errorf("joining: %w", &transport.NotConnected{Ranks: []int{4}, Err: context.DeadlineExceeded}), "timeout",
			[]int{2},
		},
		"a peer that refuses":   {&transport.NotConnected{Ranks: []int{0, 1}, Err: errors.New("no")}, "lost", []int{0}},
		"a worker in the error": {fmt.Errorf("restoring: %w", fromWorker{0}), "error", []int{0}},
		"this worker, reported": {fromWorker{1}, "error", nil},
		"an own replica panics": {fmt.Errorf("replica 2: %w", collective.ErrPeerLost), "panic", nil},
		"an own replica hangs":  {&collective.Error{Kind: collective.ErrTimeout, Rank: 2, Peers: []int{3}}, "timeout", nil},
		"the calls differ": {
			&collective.Error{Kind: collective.ErrMismatch, Rank: 0, Peers: []int{2}}, "mismatch",
			nil,
		},
	} {
		if kind, blames := kindOf(c.err), w.blames(c.err); kind != c.kind || !slices.Equal(blames, c.blames) {
			t.Errorf("%s: %s, blames %v; want %s, %v", name, kind, blames, c.kind, c.blames)
		}
	}
}

// fromWorker is an error that names the worker that failed.
type fromWorker struct{ worker int }

func (t fromWorker) Error() string { return "no" }

func (t fromWorker) FromWorker() int { return t.worker }

// plainly is an error with details that the other workers do not need.
type plainly struct{ error }

func (p plainly) Plain() error { return p.error }

// TestPlain: a failure is reported as its plain error, if it has one.
func TestPlain(t *testing.T) {
	w := &Worker{job: &cluster.Job{Worker: 0, Workers: 2}, session: newSession()}
	err := fmt.Errorf("replica 0 returned an error: %w, from the function at agree.go",
		plainly{fmt.Errorf("writing: %w", syscall.ENOSPC)})
	if r := w.record(err); r.Message != "writing: no space left on device" || r.Kind != "disk" {
		t.Errorf("got %+v", r)
	}
}

func BenchmarkProgress(b *testing.B) {
	w := &Worker{session: newSession()}
	phases := []string{"compute", "reduce"}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		w.Progress(int64(i), phases[i&1])
	}
}
