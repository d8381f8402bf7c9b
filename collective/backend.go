package collective

import (
	"context"
	"errors"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Backend executes the calls of one rank. [Open] makes the backends that execute plans over a transport;
// package library makes those on third-party libraries, such as MPI and NCCL.
//
// Every communicator is a backend behind the same front end. The front end validates calls, numbers them and
// runs them one at a time, in the order in which they were started; it reports them to the monitor, records
// them, and makes the first failure the cause that all local ranks return. Programs use a [Communicator];
// only an implementation of a backend needs this interface.
type Backend interface {
	// Rank and Size return the rank, and the number of ranks of the communicator.
	Rank() int
	Size() int
	// Properties returns what the backend guarantees; the front end sets Canonical and Epoch.
	Properties() Properties
	// Attach passes the backend its front end. It is called once, before the first Run.
	Attach(f FrontEnd)
	// Run executes a valid call, as the only call of its rank. It calls [FrontEnd.Begin] before it waits for
	// a peer. It returns when the result is in Dst and no rank accesses the call's memory any more. An error
	// becomes the cause of the communicator's failure, unless there is one; [FrontEnd.Fail] makes it the
	// cause earlier, where other ranks must be notified before Run can return.
	Run(r *Running) error
	// Fail notifies other processes why the communicator has failed. It is called once, by any goroutine,
	// before a call returns the cause. The end of [FrontEnd.Failed] then ends the waits of local ranks.
	Fail(cause error)
	// NewBuffer implements [Communicator.NewBuffer].
	NewBuffer(bytes int) (tensor.Memory, error)
	// Split makes the backend of this rank's part, or nil if it is in none. All ranks call it, as part of a
	// call that all of them have executed.
	Split(ctx context.Context, p *Partition) (Backend, error)
	// Rebuild makes a backend of the same rank for the next epoch. The front end calls it for one local rank
	// after the other, in their order, before it closes the old ones.
	Rebuild(ctx context.Context) (Backend, error)
	// Close frees the backend once its last call has ended. A backend that was never attached is closed too.
	Close() error
}

// Running is the call that a rank executes.
type Running struct {
	Ctx     context.Context
	Call    *Call
	Count   int     // elements of the whole vector
	Options Options // those of the call, and the communicator's where it has none
	ticket
	user bool // it runs on the caller's goroutine, which the monitor watches
}

// Seq returns the call's number, from 0: among the collectives, among the sends to one peer, or among the
// receives from one peer.
func (r *Running) Seq() uint64 { return r.seq }

// Partition is the result of the exchange of colors in a Split.
type Partition struct {
	Number uint64  // how many Splits of the communicator there have been, including this one
	Colors []int   // those of the new communicators, in ascending order
	Ranks  [][]int // by the index of the color: the ranks in the order that they have in the new communicator
	Own    int     // the index of this rank's color, or -1
}

// FrontEnd is a rank's communicator as its backend sees it. Its methods can be called by any goroutine unless
// they say otherwise.
type FrontEnd struct{ c *communicator }

// Config returns the configuration, with its defaults filled in. It must not be changed.
func (f FrontEnd) Config() *Config { return &f.c.group.cfg }

// Failing reports whether the communicator has failed, or is about to fail.
func (f FrontEnd) Failing() bool { return f.c.group.fate.Load() != sound }

// Failed returns a channel that is closed when the communicator has failed.
func (f FrontEnd) Failed() <-chan struct{} { return f.c.group.done }

// Err returns the cause of the failure, or nil if there is none yet.
func (f FrontEnd) Err() error { return f.c.group.cause() }

// Fail makes err the cause of the communicator's failure, unless there is one already, and returns the cause.
func (f FrontEnd) Fail(err error) error { return f.c.group.fail(err, f.c.rank) }

// Abort is Fail for an error that needs no description or explanation, because the monitor has returned it.
func (f FrontEnd) Abort(err error) error {
	g := f.c.group
	g.abort(f.c.asError(err))
	<-g.done
	return g.err
}

// over returns how many calls of the rank have ended.
func (f FrontEnd) over() uint64 {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	return f.c.turn
}

// Error returns an error of a call.
func (f FrontEnd) Error(r *Running, kind, err error) *Error {
	return f.c.callError(r.Call, r.ticket, kind, err)
}

// Begin records that a call begins; by names what executes it. Only Run may call it.
func (f FrontEnd) Begin(r *Running, by string) {
	record := newRecord(r.Call, r.Count, &r.Options, by)
	f.c.log.mu.Lock()
	f.c.log.keep(r, &record, true)
	f.c.log.mu.Unlock()
}

// Waits records that the current call waits for other ranks since a moment. A call that fails counts as waiting
// until it has ended.
func (f FrontEnd) Waits(r *Running, since time.Time, ranks []int) {
	f.c.log.waitsFor(r.turn, since, ranks)
}

// Resumes records that the current call does not wait any more.
func (f FrontEnd) Resumes() { f.c.log.resumes() }

// Park reports to the monitor that the rank is about to wait, if it runs on the caller's goroutine. It returns
// the monitor to notify by Unpark when the rank runs again, or nil; an error means that the wait would never
// end: Abort takes it.
func (f FrontEnd) Park(r *Running) (Monitor, error) {
	if !r.user {
		return nil, nil
	}
	return f.c.watchPark(r.ticket, r.Call)
}

// OpenBackends makes a communicator of this process's ranks over backends, in the order of rank, which it
// attaches and closes. All local ranks have the same Size.
func OpenBackends(backends []Backend, cfg Config) (Group, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if len(backends) == 0 {
		return nil, errors.New("collective: a communicator needs at least one local rank")
	}
	return open(backends, cfg, newBook()), nil
}
