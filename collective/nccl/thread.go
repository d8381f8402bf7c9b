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

// thread is the OS thread of one communicator: CUDA's current device is per thread.
type thread struct {
	*api
	work    chan func()
	quit    chan struct{}
	pending []*request // used only by the thread
	scratch *scratch   // used only by the thread

	mu    sync.Mutex
	stuck string // the function that has not returned
}

// scratch is memory that C writes to. It is on the heap, so it does not move.
type scratch struct {
	number int32
	handle uintptr
	id     [idBytes]byte
}

// idBytes is NCCL_UNIQUE_ID_BYTES.
const idBytes = 128

// request is a pending operation: poll reports whether the GPU has finished it, and finish copies the result
// back.
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
	runtime.LockOSThread() // so the thread ends with the goroutine
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

// poll tests the pending operations, and reports whether one has completed.
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

// do makes the thread call functions. It returns when they have returned, or when ctx ends: then the thread
// is stuck in them.
func (t *thread) do(ctx context.Context, name string, f func() error) error {
	t.mu.Lock()
	stuck := t.stuck
	t.mu.Unlock()
	if stuck != "" {
		return fmt.Errorf("nccl: %s has not returned: the communicator is unusable", stuck)
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
		return fmt.Errorf("nccl: %s has not returned; it returns only when all processes have called it: %w", name,
			context.Cause(ctx))
	}
}

func (a *api) check(name string, code int32) error { return resultError(a.f.errorString, name, code) }

func (a *api) cudaCheck(name string, code int32) error {
	return resultError(a.f.cudaErrorString, name, code)
}

// resultError returns the error for a function's result.
func resultError(errorString uintptr, name string, code int32) error {
	if code == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (error %d)", name, foreign.Text(errorString, uintptr(code)), code)
}

// address returns the address of heap memory.
func address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
