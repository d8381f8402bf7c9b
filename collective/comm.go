package collective

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
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
	// Do carries out the call, behind those already started, and returns when this rank's result is in Dst and no peer
	// reads or writes this rank's memory any more. Its error is, or wraps, a *[Error]; it is the same for all ranks of the
	// process, and the same in words for those of others. Where all ranks are in one process and reach each other's memory, a call
	// fails on all ranks or on none; and once all have entered it, the end of ctx does not stop it any more.
	Do(ctx context.Context, call *Call) error
	// Start queues the call behind those already started and returns at once. The call, and the memory that it
	// names, belong to the library until the handle's Wait has returned.
	Start(ctx context.Context, call *Call) (Handle, error)
	// Split makes a communicator of all ranks that give the same color, ordered by key, then by rank. Every rank must
	// call it; a negative color gets nil.
	Split(ctx context.Context, color, key int) (Communicator, error)
	// NewBuffer returns zeroed memory of so many bytes, aligned to 64, that the peers near this rank (of its process, and on its
	// host if the transport shares memory between processes) reach in place: a call whose memories are such buffers copies nothing on
	// the way. Any other memory does as well. The buffer has an owner to release it where the transport does not leave it to the
	// garbage collector; it ends with the communicator's Close at the latest. One that took part in a failed call must not be used again.
	NewBuffer(bytes int) (tensor.Memory, error)
	// Abort poisons the communicator on all ranks of this process with cause. Waiting calls return it.
	Abort(cause error)
	// Err returns the cause that poisoned the communicator, or nil.
	Err() error
	// Properties says what this communicator promises.
	Properties() Properties
	// Pending returns how many started calls were not awaited yet.
	Pending() int
	// Close ends the communicator and frees what it holds, once its calls have ended. Waiting and later calls of this rank
	// return [ErrClosed]; peers that need this rank get [ErrPeerLost]. It may be called at any time, by any goroutine,
	// and again. Started calls that were not awaited are an error.
	Close() error
}

// Observable is a Communicator that says how far it has come, to any goroutine at any time. Those of [Open] are.
type Observable interface {
	Communicator
	// Progress returns how many calls this rank has begun and how many of these are over and, if one is under way, the latest
	// that it carries out, as errors write it.
	Progress() (begun, over uint64, call string)
}

// Handle is a started call.
type Handle interface {
	// Wait returns when the call is over, with its error. It must be called, once; the library may use the handle again
	// for another call then. The end of ctx aborts the communicator; Wait still returns only when the library is done with the call's memory.
	Wait(ctx context.Context) error
}

// Group is one process's view of all its local ranks of a communicator: it lets one caller act for all of them, which
// merge functions need.
type Group interface {
	// Local returns the communicators of this process's ranks, by rank.
	Local() []Communicator
	// DoAll carries out one call per local rank, by the order of Local, at the same time.
	DoAll(ctx context.Context, calls []Call) error
	// Rebuild closes the group, poisoned or not, and makes a new one of the same ranks, at the next epoch. Every process
	// of the job must call it.
	Rebuild(ctx context.Context) (Group, error)
	// Close closes the communicators of all local ranks.
	Close() error
}

// Watchable is a [Group] that a [Monitor] can watch though it was made without one. Those of [Open] are.
type Watchable interface {
	Group
	// Watch gives the group its monitor, which also watches what Rebuild makes of it. It is called while no call is under way.
	Watch(m Monitor)
}

// Properties is what a communicator promises.
type Properties struct {
	Canonical bool // reductions keep the canonical tree unless Order: Any is asked for
	Epoch     uint32
	Transport string // "mem", …
	Encrypted bool   // all that this rank sends to any other is encrypted
	// Memory: all ranks reach memory of each other's, of one process or of one host. They do the work of a call themselves, so that a
	// call that is started and awaited at once is better made by Do.
	Memory bool
}

// Monitor watches the calls of the local ranks of one communicator, to prove that none can hang (see internal/deadlock).
// Enter, Park, Unpark and Leave of a rank are called on the goroutine that makes the call or awaits it, never on one of
// the library's own.
//
// The proof rests on this: a call that all ranks have entered ends without any further help of theirs.
type Monitor interface {
	// Enter says that rank begins collective number seq (from 0), before any peer can see it. It is on the hot path: no
	// allocation, no lock, no blocking. [Group.DoAll] enters the calls of all local ranks before it waits.
	Enter(rank int, seq uint64, call *Call)
	// Park says that rank's goroutine is about to block until its peers have entered call seq. An error means that they
	// never will: the communicator fails with exactly that error. The monitor may also abort any communicator from
	// inside Park.
	Park(rank int, seq uint64) error
	// Unpark says that rank's goroutine runs again, after a Park that returned nil.
	Unpark(rank int)
	// Leave says that call seq of rank is over, with the error that it returns. It may block while a report is made.
	Leave(rank int, seq uint64, err error)
	// Explain is called once, by the first rank that finds a failure (a mismatch, a wrong call, the end of a context, a
	// deadline), before any other rank is told: it returns the error that every rank will get. The monitor may look at
	// what all ranks do, and wraps err. Abort and Close are not explained.
	Explain(rank int, err error) error
}

// PairMonitor is a Monitor that can watch calls of two ranks, Send and Recv, as well. They have numbers of their own: seq counts
// the sends of one rank to another, and the receives of the other from that one, each from 0; two of one number meet. Without
// it they are not watched.
type PairMonitor interface {
	Monitor
	// EnterPair is Enter of such a call.
	EnterPair(rank int, seq uint64, call *Call)
	// ParkPair is Park, until the peer has entered its half. Unpark ends it.
	ParkPair(rank int, seq uint64, call *Call) error
	// LeavePair is Leave.
	LeavePair(rank int, seq uint64, call *Call, err error)
}

// SplitMonitor is a Monitor that can watch the communicators which [Communicator.Split] makes. Without it they are not
// watched.
type SplitMonitor interface {
	Monitor
	// Split returns the monitor of a new communicator. It is called once for each, on any local rank's goroutine. ranks[i]
	// is the number in the parent of the new communicator's rank i; abort aborts the new one; release is called when all its local ranks
	// have closed it.
	Split(name string, ranks []int, abort func(cause error)) (m Monitor, release func())
}
