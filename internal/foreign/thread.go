package foreign

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"
)

// Thread is an OS thread that calls a library, for libraries whose state belongs to a thread. It starts operations and
// polls those that are pending, because such libraries make no progress by themselves. Its methods may be called by any
// goroutine.
type Thread struct {
	cfg     ThreadConfig
	work    chan func()
	quit    chan struct{}
	pending []*operation // used only by the thread

	mu    sync.Mutex
	stuck string // the function that has not returned
}

// ThreadConfig describes a library in errors, and how it is polled.
type ThreadConfig struct {
	Library  string        // "mpi"
	Version  string        // of the library; may be empty
	Unusable string        // what cannot be used after a function has not returned: "the communicator is unusable"
	Callers  string        // who must call such a function: "all processes"
	PauseMax time.Duration // the longest pause between two polls
}

// operation is a pending operation: poll reports whether it is over, and its error.
type operation struct {
	poll func() (over bool, err error)
	done chan error
}

// NewThread starts a thread.
func NewThread(cfg ThreadConfig) *Thread {
	t := &Thread{cfg: cfg, work: make(chan func(), 64), quit: make(chan struct{})}
	go t.serve()
	return t
}

// serve executes the operations on a locked thread. It blocks while none is pending, and polls less and less often
// while none makes progress.
func (t *Thread) serve() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	for idle := 0; ; {
		var polls chan struct{}
		if len(t.pending) > 0 {
			polls = closed
		}
		select {
		case <-t.quit:
			return
		case f := <-t.work:
			f()
			idle = 0
			continue
		case <-polls:
		}
		if idle++; t.poll() {
			idle = 0
		} else {
			t.pause(idle)
		}
	}
}

// closed is ready to receive from.
var closed = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// pause yields to other goroutines between two polls: at first without sleep.
func (t *Thread) pause(idle int) {
	const (
		eager  = 200
		longer = 2000
	)
	switch {
	case idle < eager:
		runtime.Gosched()
	case idle < longer:
		time.Sleep(min(20*time.Microsecond, t.cfg.PauseMax))
	default:
		time.Sleep(t.cfg.PauseMax)
	}
}

// poll polls every operation, and reports whether one is over.
func (t *Thread) poll() (progress bool) {
	rest := t.pending[:0]
	for _, o := range t.pending {
		over, err := o.poll()
		if !over && err == nil {
			rest = append(rest, o)
			continue
		}
		progress = true
		o.done <- err
	}
	clear(t.pending[len(rest):])
	t.pending = rest
	return progress
}

// Start makes the thread begin an operation, and then poll it until it is over or has failed. The channel receives the
// error, once. Both functions run on the thread.
func (t *Thread) Start(begin func() error, poll func() (over bool, err error)) <-chan error {
	o := &operation{poll: poll, done: make(chan error, 1)}
	t.work <- func() {
		if err := begin(); err != nil {
			o.done <- err
			return
		}
		t.pending = append(t.pending, o)
	}
	return o.done
}

// Do makes the thread call functions that wait for other processes. It returns when they have returned, or when ctx
// ends: then the thread is stuck in them, and later calls of Do fail. name is that of the function.
func (t *Thread) Do(ctx context.Context, name string, f func() error) error {
	t.mu.Lock()
	stuck := t.stuck
	t.mu.Unlock()
	if stuck != "" {
		return fmt.Errorf("%s: %s has not returned: %s", t.cfg.Library, stuck, t.cfg.Unusable)
	}
	done := make(chan error, 1)
	select {
	case t.work <- func() { done <- f() }:
	case <-ctx.Done():
		return fmt.Errorf("%s: waiting to call %s: %w", t.cfg.Library, name, context.Cause(ctx))
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		t.mu.Lock()
		t.stuck = name
		t.mu.Unlock()
		if t.cfg.Version != "" {
			name += " (" + t.cfg.Version + ")"
		}
		return fmt.Errorf("%s: %s has not returned; it returns only when %s have called it: %w", t.cfg.Library, name,
			t.cfg.Callers, context.Cause(ctx))
	}
}

// Idle reports whether no operation is pending. It waits for the thread.
func (t *Thread) Idle() bool {
	idle := make(chan bool, 1)
	t.work <- func() { idle <- len(t.pending) == 0 }
	return <-idle
}

// Close ends the thread once it is not stuck.
func (t *Thread) Close() { close(t.quit) }

// Address returns the address of memory that stays where it is, such as that of the heap.
func Address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
