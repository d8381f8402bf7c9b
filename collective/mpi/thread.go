package mpi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

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
	thread  *foreign.Thread
	mine    bool     // it was initialised here, and is finalised here
	broken  error    // the error of its initialisation
	scratch *scratch // used only by the thread: memory for what functions return

	mu    sync.Mutex
	users int // open drivers
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
	p := &process{abi: a, scratch: &scratch{}, users: 1, thread: foreign.NewThread(foreign.ThreadConfig{
		Library: "mpi", Version: a.library.Version, Unusable: "MPI is unusable in this process",
		Callers: "all processes of the launcher", PauseMax: 500 * time.Microsecond,
	})}
	theProcess = p
	p.broken = p.thread.Do(ctx, "MPI_Init_thread", p.start)
	return p, p.broken
}

// start initialises MPI, unless other code in this process has.
func (p *process) start() error {
	s := p.scratch
	if err := p.check("MPI_Initialized", foreign.Call(p.f.initialized, foreign.Address(&s.number))); err != nil {
		return err
	}
	if s.number != 0 {
		if err := p.check("MPI_Query_thread", foreign.Call(p.f.queryThread, foreign.Address(&s.number))); err != nil {
			return err
		}
		if s.number <= threadFunneled {
			return errors.New("mpi: MPI was initialised elsewhere in this process, for a single other thread: want " +
				"MPI_THREAD_SERIALIZED or more")
		}
	} else {
		if err := p.check("MPI_Init_thread", foreign.Call(p.f.initThread, 0, 0, threadFunneled,
			foreign.Address(&s.number))); err != nil {
			return err
		}
		p.mine = true
		if s.number < threadFunneled {
			return fmt.Errorf("mpi: %s allows no other threads in its process, as Go has them", p.library.Version)
		}
	}
	return p.check("MPI_Comm_set_errhandler", foreign.Call(p.f.setErrhandler, p.world, p.errorsReturn))
}

// begin starts an operation: f calls the function that makes the request. It is over when MPI_Test says so.
func (p *process) begin(name string, r *request, f func(r *request) int32) <-chan error {
	return p.thread.Start(func() error { return p.check(name, f(r)) }, func() (bool, error) {
		code := foreign.Call(p.f.test, foreign.Address(&r.handle), foreign.Address(&r.flag), p.statusIgnore)
		return r.flag != 0, p.check("MPI_Test", code)
	})
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
	if !p.thread.Idle() {
		return nil
	}
	barrier := p.begin("MPI_Ibarrier", &request{}, func(r *request) int32 {
		return foreign.Call(p.f.ibarrier, p.world, foreign.Address(&r.handle))
	})
	select {
	case err := <-barrier:
		if err != nil {
			return err
		}
	case <-ctx.Done():
		return fmt.Errorf("mpi: finalising MPI: the other processes have not reached it: %w", context.Cause(ctx))
	}
	return p.thread.Do(ctx, "MPI_Finalize", func() error { return p.check("MPI_Finalize", foreign.Call(p.f.finalize)) })
}

// check returns the error for a function's result. It is called on the thread.
func (p *process) check(name string, code int32) error {
	if code == 0 {
		return nil
	}
	s := p.scratch
	text := fmt.Sprintf("error %d", code)
	if foreign.Call(p.f.errorString, uintptr(code), foreign.Address(&s.text[0]), foreign.Address(&s.number)) == 0 {
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
