package mpi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/foreign"
)

// MPI belongs to the process: it can be initialised once, and finalised once. So this variable is global.
var (
	processMu  sync.Mutex
	theProcess *process
)

// process is MPI in this process. One OS thread calls it, the one that has initialised it: that is the mode
// that every library supports (MPI_THREAD_FUNNELED), and the library needs no locks for it. The thread
// progresses all pending operations.
type process struct {
	*abi
	work    chan func()
	mine    bool       // it was initialised here, and is finalised here
	broken  error      // the error of its initialisation
	pending []*request // used only by the thread
	scratch *scratch   // used only by the thread: memory for what functions return

	mu    sync.Mutex
	users int    // open drivers
	stuck string // the function that has not returned
	ended bool
}

// scratch is memory that C writes to. It is on the heap, so it does not move.
type scratch struct {
	number, other int32
	handle        uintptr
	text          [errorTextMax]byte
}

// request is a pending operation.
type request struct {
	handle uintptr // MPI_Request
	flag   int32
	counts [][]int32
	keep   any // holds the memory
	done   chan error
}

// acquire returns MPI, initialised.
func acquire(ctx context.Context) (*process, error) {
	processMu.Lock()
	defer processMu.Unlock()
	if p := theProcess; p != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.broken != nil {
			return nil, p.broken
		}
		if p.ended {
			return nil, errors.New("mpi: MPI was finalised in this process by the last communicator's Close, and cannot be " +
				"started again: keep one communicator open")
		}
		p.users++
		return p, nil
	}
	a, err := load()
	if err != nil {
		return nil, err
	}
	p := &process{abi: a, work: make(chan func(), 64), scratch: &scratch{}, users: 1}
	theProcess = p
	go p.serve()
	p.broken = p.do(ctx, "MPI_Init_thread", p.start)
	return p, p.broken
}

// start initialises MPI, unless other code in this process has.
func (p *process) start() error {
	s := p.scratch
	if err := p.check("MPI_Initialized", foreign.Call(p.f.initialized, address(&s.number))); err != nil {
		return err
	}
	if s.number != 0 {
		if err := p.check("MPI_Query_thread", foreign.Call(p.f.queryThread, address(&s.number))); err != nil {
			return err
		}
		if s.number <= threadFunneled {
			return errors.New("mpi: MPI was initialised elsewhere in this process, for a single other thread: want " +
				"MPI_THREAD_SERIALIZED or more")
		}
	} else {
		if err := p.check("MPI_Init_thread", foreign.Call(p.f.initThread, 0, 0, threadFunneled,
			address(&s.number))); err != nil {
			return err
		}
		p.mine = true
		if s.number < threadFunneled {
			return fmt.Errorf("mpi: %s allows no other threads in its process, as Go has them", p.library.Version)
		}
	}
	return p.check("MPI_Comm_set_errhandler", foreign.Call(p.f.setErrhandler, p.world, p.errorsReturn))
}

// serve is the thread. It sleeps while no operation is pending, and polls less and less often while there is
// no progress: MPI makes none by itself.
func (p *process) serve() {
	runtime.LockOSThread() // never unlocked: MPI ends with the process
	idle := 0
	for {
		if len(p.pending) == 0 {
			(<-p.work)()
			idle = 0
			continue
		}
		select {
		case f := <-p.work:
			f()
			idle = 0
			continue
		default:
		}
		if p.poll() {
			idle = 0
			continue
		}
		idle++
		p.pause(idle)
	}
}

// pause yields to other goroutines between two polls: at first without sleep.
func (p *process) pause(idle int) {
	const (
		eager  = 200
		longer = 2000
	)
	switch {
	case idle < eager:
		runtime.Gosched()
	case idle < longer:
		time.Sleep(20 * time.Microsecond)
	default:
		time.Sleep(500 * time.Microsecond)
	}
}

// poll tests every operation, and reports whether one has completed.
func (p *process) poll() bool {
	over := false
	rest := p.pending[:0]
	for _, r := range p.pending {
		code := foreign.Call(p.f.test, address(&r.handle), address(&r.flag), p.statusIgnore)
		if code == 0 && r.flag == 0 {
			rest = append(rest, r)
			continue
		}
		over = true
		r.done <- p.check("MPI_Test", code)
	}
	clear(p.pending[len(rest):])
	p.pending = rest
	return over
}

// begin starts an operation: f calls the function that makes the request.
func (p *process) begin(name string, r *request, f func(r *request) int32) {
	r.done = make(chan error, 1)
	p.work <- func() {
		if err := p.check(name, f(r)); err != nil {
			r.done <- err
			return
		}
		p.pending = append(p.pending, r)
	}
}

// do makes the thread call functions that wait for other processes. It returns when they have returned, or
// when ctx ends: then the thread is stuck in them, and MPI is unusable.
func (p *process) do(ctx context.Context, name string, f func() error) error {
	p.mu.Lock()
	stuck := p.stuck
	p.mu.Unlock()
	if stuck != "" {
		return fmt.Errorf("mpi: %s has not returned: MPI is unusable in this process", stuck)
	}
	done := make(chan error, 1)
	select {
	case p.work <- func() { done <- f() }:
	case <-ctx.Done():
		return fmt.Errorf("mpi: waiting to call %s: %w", name, context.Cause(ctx))
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		p.mu.Lock()
		p.stuck = name
		p.mu.Unlock()
		return fmt.Errorf("mpi: %s (%s) has not returned; it returns only when all processes of the launcher have "+
			"called it: %w",
			name, p.library.Version, context.Cause(ctx))
	}
}

// release undoes acquire. The last sound release finalises MPI, if no operation is pending.
func (p *process) release(ctx context.Context, sound bool) error {
	p.mu.Lock()
	p.users--
	if p.users > 0 || !sound || p.ended || !p.mine {
		p.mu.Unlock()
		return nil
	}
	p.ended = true
	p.mu.Unlock()
	// MPI_Finalize cannot be abandoned. So the processes first wait for each other in a barrier, which can.
	r := &request{}
	quiet := make(chan bool, 1)
	p.work <- func() { quiet <- len(p.pending) == 0 }
	if !<-quiet {
		return nil
	}
	p.begin("MPI_Ibarrier", r, func(r *request) int32 { return foreign.Call(p.f.ibarrier, p.world, address(&r.handle)) })
	select {
	case err := <-r.done:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return fmt.Errorf("mpi: finalising MPI: the other processes have not reached it: %w", context.Cause(ctx))
	}
	return p.do(ctx, "MPI_Finalize", func() error { return p.check("MPI_Finalize", foreign.Call(p.f.finalize)) })
}

// check returns the error for a function's result. It is called on the thread.
func (p *process) check(name string, code int32) error {
	if code == 0 {
		return nil
	}
	s := p.scratch
	text := fmt.Sprintf("error %d", code)
	if foreign.Call(p.f.errorString, uintptr(code), address(&s.text[0]), address(&s.number)) == 0 {
		message, _, _ := bytes.Cut(s.text[:], []byte{0})
		text = string(bytes.ReplaceAll(bytes.TrimSpace(message), []byte("\n"), []byte(" ")))
	}
	err := fmt.Errorf("%s: %s", name, text)
	if bytes.Contains(s.text[:], []byte("TRUNCATE")) || bytes.Contains(s.text[:], []byte("truncated")) {
		err = fmt.Errorf("%w: %w", collective.ErrMismatch, err)
	}
	clear(s.text[:])
	return err
}

// address returns the address of heap memory.
func address[T any](p *T) uintptr { return uintptr(unsafe.Pointer(p)) }
