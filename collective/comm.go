package collective

import (
	"context"
)

// Communicator is one rank's view of a set of ranks that take part in collectives together (MPI's communicator,
// Gloo's context). Every rank issues the same calls in the same order. One goroutine at a time may use it: a second
// concurrent blocking call is an error.
//
// After the first failure a communicator is poisoned: every later call returns that first cause.
type Communicator interface {
	// Rank returns this member's number, from 0 to Size()-1.
	Rank() int
	// Size returns the number of members.
	Size() int
	// Do carries out the call and returns when this rank's result is in Dst and no peer reads or writes this rank's
	// memory any more. It returns a *[Error].
	Do(ctx context.Context, call *Call) error
	// Start queues the call behind those already started and returns at once. The call, and the memory that it
	// names, belong to the library until the handle's Wait has returned.
	Start(ctx context.Context, call *Call) (Handle, error)
	// Split makes a communicator of all ranks that give the same color, ordered by key, then by rank. Every rank must
	// call it; a negative color gets nil.
	Split(ctx context.Context, color, key int) (Communicator, error)
	// Abort poisons the communicator on all ranks of this process with cause. Waiting calls return it.
	Abort(cause error)
	// Err returns the cause that poisoned the communicator, or nil.
	Err() error
	// Properties says what this communicator promises.
	Properties() Properties
	// Close ends the communicator and frees what it holds. Waiting and later calls return [ErrClosed].
	Close() error
}

// Handle is a started call.
type Handle interface {
	// Wait returns when the call is over. It may be called once. Ending ctx aborts the communicator.
	Wait(ctx context.Context) error
}

// Group is one process's view of all its local ranks of a communicator: it lets one caller act for all of them, which
// merge functions need.
type Group interface {
	// Local returns the communicators of this process's ranks, by rank.
	Local() []Communicator
	// DoAll carries out one call per local rank, by the order of Local, at the same time.
	DoAll(ctx context.Context, calls []Call) error
	// Rebuild closes the group, poisoned or not, and makes a new one of the same ranks, at the next epoch.
	Rebuild(ctx context.Context) (Group, error)
}

// Properties is what a communicator promises.
type Properties struct {
	Canonical bool // reductions keep the canonical tree unless Order: Any is asked for
	Epoch     uint32
	Transport string // "mem", …
}

// Monitor watches the calls of the local ranks of one communicator, to prove that none can hang (see internal/ledger).
// All methods are called on the goroutine that makes the call.
type Monitor interface {
	// Enter says that rank begins call number seq (from 0). It is on the hot path: no allocation, no lock.
	Enter(rank int, seq uint64, call *Call)
	// Park says that rank's goroutine is about to block until its peers arrive. An error means that they never will:
	// the call fails with it. The monitor may also abort the communicator from inside Park.
	Park(rank int) error
	// Unpark says that rank's goroutine runs again.
	Unpark(rank int)
	// Leave says that rank's call is over, with the error that it will return.
	Leave(rank int, err error)
	// Explain is called once, by the first rank that finds a failure (a mismatch, the end of a context, a deadline), before
	// any other rank is told: it returns the error that every rank will get. The monitor may look at what all ranks
	// do, and wraps err.
	Explain(rank int, err error) error
}
