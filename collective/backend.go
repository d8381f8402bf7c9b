package collective

import (
	"context"

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
	// Fail notifies other processes why the communicator has failed. It is called at most once, by any
	// goroutine, before a call returns the cause. Then the channel of [FrontEnd.Failed] is closed, which must
	// end the waits of a running call. If a communicator fails while a local rank is still in the Split that
	// makes it, Fail is not called for that rank: [FrontEnd.Failing] is true from its first call on.
	Fail(cause error)
	// NewBuffer implements [Communicator.NewBuffer].
	NewBuffer(bytes int) (tensor.Memory, error)
	// Split makes the backend of this rank's part, or nil if it is in none. All ranks call it, as part of a
	// call r that all of them have executed. An error other than *Error gets the kind ErrInvalid.
	Split(r *Running, p *Partition) (Backend, error)
	// Rebuild makes a backend of the same rank for the next epoch. The front end calls it for one local rank
	// after the other, in their order, before it closes the old ones. If one fails, the front end closes the
	// backends already made and keeps the old ones; a later Rebuild begins with the first rank again.
	Rebuild(ctx context.Context) (Backend, error)
	// Close frees the backend once its last call has ended. A backend that was never attached is closed too.
	Close() error
}

// Running is the call that a rank executes. It is valid only until Run or Split returns: the rank's next
// call reuses it.
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

// ticket is the position of a call among the calls of its rank.
type ticket struct {
	turn uint64 // among all calls
	// among the collectives, the sends to one peer, or the receives from one peer; it is in the call's header
	seq uint64
}

// Partition is the result of the exchange of colors in a Split.
type Partition struct {
	Number uint64  // how many Splits of the communicator there have been, including this one
	Colors []int   // those of the new communicators, in ascending order
	Ranks  [][]int // by the index of the color: the ranks in the order that they have in the new communicator
	Own    int     // the index of this rank's color, or -1
}
