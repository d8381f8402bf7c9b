package mem

import (
	"reflect"
	"runtime"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/affinity"
)

// TestSeparate lets a rank wait on the processor of another one. Other load may move the thread back at once, so that a
// move is only seen after some attempts.
func TestSeparate(t *testing.T) {
	if len(affinity.Allowed()) < 2 {
		t.Skip("one processor, or it is unknown")
	}
	defer func() { runtime.UnlockOSThread() }()
	runtime.LockOSThread()
	const otherThread = 1 << 12
	for _, c := range []struct {
		name  string
		ranks int
		calls uint64 // of rank 1, which is in its call 10
		other uint64 // difference of its place
		busy  bool   // another rank moves
		moves bool
	}{
		{"another thread", 2, 10, otherThread, false, true},
		{"another thread, in the call before", 2, 9, otherThread, false, true},
		{"another thread, of three ranks", 3, 11, otherThread, false, true},
		{"another thread, long ago", 2, 7, otherThread, false, false},
		{"the same thread", 2, 10, 0, false, false},
		{"another thread, while another rank moves", 2, 10, otherThread, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			moved := false
			for i := 0; i < 1000 && !moved; i++ {
				h := newHub(c.ranks, true)
				h.moving.Store(c.busy)
				e, other := &h.ends[0], &h.ends[1]
				e.calls, other.calls = 10, c.calls
				here := other.locate()
				other.at.Store(here ^ c.other)
				before := e.mover
				e.separate()
				if moved = !reflect.DeepEqual(e.mover, before); moved && e.at.Load() != 0 {
					t.Error("others take it to be where it was")
				}
				if moved && !c.moves && other.locate() != here { // the kernel has moved this thread meanwhile
					moved = false
					continue
				}
				if !moved && e.at.Load() == 0 {
					t.Error("others do not know where it is")
				}
				if h.moving.Load() != c.busy {
					t.Error("whether a rank moves has changed")
				}
			}
			if moved != c.moves {
				t.Errorf("moved is %v, want %v", moved, c.moves)
			}
		})
	}
	h := newHub(2, true)
	if h.ends[0].yieldAndLeave(); h.moving.Load() {
		t.Error("the rank still moves")
	}
}

// TestSpins: a wait spins for longer after many waits that have not blocked, and while another rank moves.
func TestSpins(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	rounds := func(change func(e *endpoint)) int {
		e := &newHub(2, true).ends[0]
		e.procs = 2
		change(e)
		for round := 0; ; round++ {
			if round > 0 {
				e.procs = 2 // this machine may have fewer
			}
			if !e.spins(round) {
				return round
			}
		}
	}
	if runtime.NumCPU() < 2 {
		t.Skip("one processor")
	}
	quick := func(n, last int) func(e *endpoint) {
		return func(e *endpoint) {
			for range n - 1 {
				e.spun(0, 1)
			}
			e.spun(last, 1)
		}
	}
	for _, c := range []struct {
		name   string
		change func(e *endpoint)
		want   int
	}{
		{"first", func(*endpoint) {}, spinRounds},
		{"few waits", quick(streakMin-1, 0), spinRounds},
		{"many waits", quick(streakMin, 0), spinLong},
		{"many waits and a long one", quick(streakMin, spinRounds), spinRounds},
		{"another moves", func(e *endpoint) { e.hub.moving.Store(true) }, spinLong},
		{"more ranks than processors", func(e *endpoint) { e.hub.n = 3 }, 0},
	} {
		if got := rounds(c.change); got != c.want {
			t.Errorf("%s: a wait spins for %d rounds, want %d", c.name, got, c.want)
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
