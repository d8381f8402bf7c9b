package backend

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// team executes the tasks of instructions: the goroutine that executes a plan does, and helpers that have nothing else
// to do.
type team struct {
	helpers []helper
	closed  atomic.Bool
	running atomic.Int32 // plans that are executed
	done    sync.WaitGroup
}

// helper is a goroutine that waits for offers.
type helper struct {
	offer  atomic.Pointer[job]
	blocks atomic.Bool   // it waits for wake
	wake   chan struct{} // has room for one
	_      [64]byte      // separates the cache lines of helpers
}

// worker is what a goroutine has for the tasks that it executes.
type worker struct {
	scratch   unsafe.Pointer
	in        [3]unsafe.Pointer // operands of a loop
	registers []unsafe.Pointer  // of a loop
	memory    []uint64          // of scratch
}

// reserve makes scratch as large as needed.
func (w *worker) reserve(bytes int) {
	if need := (bytes + 7 + alignment) / 8; need > len(w.memory) {
		w.memory = make([]uint64, need)
		w.scratch = align(unsafe.Pointer(&w.memory[0]))
	}
}

// job is an instruction whose tasks are executed. It can be used again.
type job struct {
	instruction *tasksInstruction
	memory      []unsafe.Pointer
	next        atomic.Int64
	offers      atomic.Int32 // to helpers, that are not withdrawn or finished
	pending     sync.WaitGroup
}

func newTeam(helpers int) *team {
	t := &team{helpers: make([]helper, helpers)}
	for i := range t.helpers {
		t.helpers[i].wake = make(chan struct{}, 1)
		t.done.Go(func() { t.help(&t.helpers[i]) })
	}
	return t
}

// spinTime is how long a goroutine polls before it blocks. The next instruction often follows sooner, and to wake a
// goroutine that blocks takes several microseconds.
const spinTime = 20 * time.Microsecond

// spin polls for some time. It reports whether the condition has been met.
func spin(condition func() bool) bool {
	for start := time.Now(); ; runtime.Gosched() {
		if condition() {
			return true
		}
		if time.Since(start) > spinTime {
			return false
		}
	}
}

// help takes tasks until the team is closed.
func (t *team) help(h *helper) {
	w := &worker{}
	var j *job
	offered := func() bool {
		j = h.offer.Swap(nil)
		return j != nil || t.closed.Load()
	}
	for {
		if !spin(offered) {
			h.blocks.Store(true)
			if !offered() {
				<-h.wake
			}
			h.blocks.Store(false)
		}
		switch {
		case j != nil:
			w.reserve(j.instruction.scratch)
			j.take(w)
			j.offers.Add(-1)
			j.pending.Done()
			j = nil
		case t.closed.Load():
			return
		}
	}
}

func (h *helper) notify() {
	if h.blocks.Load() {
		select {
		case h.wake <- struct{}{}:
		default: // it will wake up
		}
	}
}

// take executes tasks until none is left.
func (j *job) take(w *worker) {
	for {
		task := int(j.next.Add(1)) - 1
		if task >= j.instruction.tasks {
			return
		}
		j.instruction.task(task, j.memory, w)
	}
}

// execute executes all tasks, with as many helpers as no other plan needs. w is for those of the caller.
func (t *team) execute(x *tasksInstruction, memory []unsafe.Pointer, j *job, w *worker) {
	helpers := min(len(t.helpers)+1-int(t.running.Load()), x.tasks-1)
	if helpers <= 0 {
		for i := range x.tasks {
			x.task(i, memory, w)
		}
		return
	}
	j.instruction, j.memory = x, memory
	j.next.Store(0)
	for i := range t.helpers {
		h := &t.helpers[i]
		j.pending.Add(1)
		j.offers.Add(1)
		if !h.offer.CompareAndSwap(nil, j) { // another plan's
			j.offers.Add(-1)
			j.pending.Done()
			continue
		}
		h.notify()
		if helpers--; helpers == 0 {
			break
		}
	}
	j.take(w)
	for i := range t.helpers {
		if t.helpers[i].offer.CompareAndSwap(j, nil) {
			j.offers.Add(-1)
			j.pending.Done()
		}
	}
	if j.offers.Load() > 0 {
		spin(func() bool { return j.offers.Load() == 0 })
	}
	j.pending.Wait()
}

func (t *team) close() {
	t.closed.Store(true)
	for i := range t.helpers {
		t.helpers[i].notify()
	}
	t.done.Wait()
}

// alignment is that of memory, in bytes.
const alignment = 64

func align(p unsafe.Pointer) unsafe.Pointer {
	return unsafe.Add(p, -int(uintptr(p))&(alignment-1))
}
