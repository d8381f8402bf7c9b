package mem

import (
	"runtime"
	"testing"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// TestSeparate lets ranks wait on the processor of others. Other load may move the thread back at once, so that a move
// is only seen after some attempts.
func TestSeparate(t *testing.T) {
	if len(affinity.Allowed()) < 2 {
		t.Skip("one processor, or it is unknown")
	}
	defer func() { runtime.UnlockOSThread() }()
	runtime.LockOSThread()
	separate := func(ranks, rank int, share func(h *hub, cpu int)) (moved bool) {
		h := newHub(ranks, true)
		e := &h.ends[rank]
		cpu := affinity.Current()
		share(h, cpu)
		asked := e.mover
		e.separate()
		if at := int(e.at.Load()) - 1; at < 0 {
			t.Error("its processor is not known to others")
		}
		return e.mover != asked
	}
	with := func(other int) func(h *hub, cpu int) {
		return func(h *hub, cpu int) { h.ends[other].at.Store(int32(cpu + 1)) }
	}
	moves := func(ranks, rank int, share func(h *hub, cpu int)) bool {
		for range 1000 {
			if separate(ranks, rank, share) {
				return true
			}
		}
		return false
	}
	if !moves(2, 1, with(0)) {
		t.Error("rank 1 stays on the processor of rank 0")
	}
	if !moves(3, 2, with(1)) {
		t.Error("rank 2 stays on the processor of rank 1")
	}
	for range 100 {
		if separate(2, 0, with(1)) {
			t.Fatal("rank 0 leaves the processor to rank 1: both would move")
		}
		if separate(2, 1, func(*hub, int) {}) {
			t.Fatal("rank 1 moves although rank 0 waits nowhere")
		}
	}
}
