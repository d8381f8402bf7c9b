package nccl

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/foreign"
)

// thread is the OS thread of one communicator: CUDA's current device belongs to a thread.
type thread struct {
	*api
	work    chan func()
	quit    chan struct{}
	pending []*request // the thread's own
	scratch *scratch   // the thread's own

	mu    sync.Mutex
	stuck string // the function that has not returned
}

// scratch is memory that C writes to: of the heap, so it does not move.
type scratch struct {
	number int32
	handle uintptr
	id     [idBytes]byte
}

// idBytes is NCCL_UNIQUE_ID_BYTES.
const idBytes = 128

// request is an operation on its way: poll asks whether the GPU is done with it, and finish fetches the result.
type request struct {
	poll   func() (over bool, err error)
	finish func() error
	done   chan error
}

func (a *api) newThread() *thread {
	t := &thread{api: a, work: make(chan func(), 64), quit: make(chan struct{}), scratch: &scratch{}}
	go t.serve()
	return t
}

func (t *thread) serve() {
	runtime.LockOSThread() // and so the thread ends with the goroutine
	idle := 0
	for {
		if len(t.pending) == 0 {
			select {
			case f := <-t.work:
				f()
			case <-t.quit:
				return
			}
			idle = 0
			continue
		}
		select {
		case f := <-t.work:
			f()
			idle = 0
			continue
		case <-t.quit:
			return
		default:
		}
		if t.poll() {
			idle = 0
		} else if idle++; idle < 200 {
			runtime.Gosched()
		} else {
			time.Sleep(50 * time.Microsecond)
		}
	}
}

// poll looks after the operations under way, and reports whether one is over.
func (t *thread) poll() bool {
	over := false
	rest := t.pending[:0]
	for _, r := range t.pending {
		done, err := r.poll()
		if !done && err == nil {
			rest = append(rest, r)
			continue
		}
		if err == nil {
			err = r.finish()
		}
		over = true
		r.done <- err
	}
	clear(t.pending[len(rest):])
	t.pending = rest
	return over
}

// do has the thread call functions, and returns when they have, or when ctx ends: then the thread is stuck in them.
func (t *thread) do(ctx context.Context, name string, f func() error) error {
	t.mu.Lock()
	stuck := t.stuck
	t.mu.Unlock()
	if stuck != "" {
		return fmt.Errorf("nccl: %s has not returned: the communicator is of no more use", stuck)
	}
	done := make(chan error, 1)
	select {
	case t.work <- func() { done <- f() }:
	case <-ctx.Done():
		return fmt.Errorf("nccl: waiting to call %s: %w", name, context.Cause(ctx))
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		t.mu.Lock()
		t.stuck = name
		t.mu.Unlock()
		return fmt.Errorf("nccl: %s has not returned; it waits for all processes to call it too: %w", name, context.Cause(ctx))
	}
}

func (a *api) check(name string, code int32) error { return said(a.f.errorString, name, code) }

func (a *api) cudaCheck(name string, code int32) error { return said(a.f.cudaErrorString, name, code) }

// said is the error behind a function's result.
func said(errorString uintptr, name string, code int32) error {
	if code == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (error %d)", name, foreign.Text(errorString, uintptr(code)), code)
}

// address is that of memory of the heap.
func address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
