package mem

import (
	"reflect"
	"runtime"
	"testing"
	"unsafe"

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
		return !reflect.DeepEqual(e.mover, asked)
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

// TestSlotLines: what peers read of a rank in a small call is one cache line.
func TestSlotLines(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("laid out for 64 bits")
	}
	var s slotLines
	if end := unsafe.Offsetof(s.Sum) + 8; end > 64 || unsafe.Offsetof(s.data)%8 != 0 {
		t.Errorf("the flags, the data and the sum end at byte %d, want at most 64", end)
	}
	h := newHub(9, true)
	for r := range h.ends {
		for i, s := range h.ends[r].slots {
			if at := uintptr(unsafe.Pointer(s)); at%64 != 0 {
				t.Errorf("slot %d of rank %d begins %d bytes after the beginning of a cache line", i, r, at%64)
			}
		}
	}
}
