package collective

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Communicator is one rank's view of a set of ranks that execute collectives together (MPI's communicator,
// Gloo's context). Every rank issues the same calls in the same order. One goroutine at a time may use a
// communicator: a second concurrent blocking call is an error.
//
// After the first failure a communicator is failed: every later call returns that first cause.
type Communicator interface {
	// Rank returns this member's rank, from 0 to Size()-1.
	Rank() int
	// Size returns the number of members.
	Size() int
	// Do executes the call after the calls already started. It returns when this rank's result is in Dst and
	// no peer reads or writes this rank's memory any more. Its error is, or wraps, an *[Error]; it is the
	// same value on all ranks of the process, and the same text on ranks of other processes. Where all ranks
	// are in one process and access each other's memory, a call fails on all ranks or on none; once all ranks
	// have entered it, the end of ctx no longer stops it.
	Do(ctx context.Context, call *Call) error
	// Start queues the call after the calls already started and returns at once. The call and the memory that
	// it names belong to the library until the handle's Wait has returned.
	Start(ctx context.Context, call *Call) (Handle, error)
	// Split makes a communicator of all ranks that pass the same color, ordered by key, then by rank. Every
	// rank must call it; a rank with a negative color receives nil.
	Split(ctx context.Context, color, key int) (Communicator, error)
	// NewBuffer returns zeroed memory of the given size, aligned to 64 bytes. Peers of the same domain (the
	// process, or the host if the transport shares memory between processes) access it in place: a call that
	// uses only such buffers makes no extra copy. Any other memory works too. The buffer has an owner to
	// release it, unless the transport leaves it to the garbage collector; the communicator's Close releases
	// it at the latest. A buffer that took part in a failed call must not be used again.
	NewBuffer(bytes int) (tensor.Memory, error)
	// Abort fails the communicator on all ranks of this process with cause. Blocked calls return the cause.
	Abort(cause error)
	// Err returns the cause that failed the communicator, or nil.
	Err() error
	// Properties returns what this communicator guarantees.
	Properties() Properties
	// Pending returns how many started calls were not yet awaited.
	Pending() int
	// Progress returns how many calls this rank has begun, how many of them have ended and, if a call is running, the
	// latest one in the form used in errors. Any goroutine may call it at any time.
	Progress() (begun, over uint64, call string)
	// Close ends the communicator and frees its resources once its calls have ended. Blocked and later calls
	// of this rank return [ErrClosed]; peers that need this rank return [ErrPeerLost]. Any goroutine may call
	// it at any time, more than once. It is an error if started calls were not awaited.
	Close() error
}

// Handle is a started call.
type Handle interface {
	// Wait returns when the call has ended, with its error. It must be called exactly once; afterwards the
	// library may reuse the handle for another call. The end of ctx aborts the communicator; Wait still
	// returns only when the library no longer uses the call's memory.
	Wait(ctx context.Context) error
}

// Group is one process's view of all its local ranks of a communicator. One caller can act for all of them,
// which merge functions need.
type Group interface {
	// Local returns the communicators of this process's ranks, in the order of rank.
	Local() []Communicator
	// DoAll executes one call per local rank concurrently; calls[i] is that of Local()[i].
	DoAll(ctx context.Context, calls []Call) error
	// Rebuild makes a new group of the same ranks at the next epoch, and closes this one, failed or not. Every
	// process of the job must call it. It waits for other processes only where the backend does, until ctx ends. With
	// an error this group stays open, and Rebuild can be called again; the new communicators are closed.
	Rebuild(ctx context.Context) (Group, error)
	// Watch attaches the monitor to the group and to the groups that Rebuild makes of it. No call may be running.
	Watch(m Monitor)
	// SetTimeline sets the recorder of the group and of the groups that Rebuild and Split make of it later, as
	// [Config].Timeline does. No call may be running.
	SetTimeline(r *timeline.Recorder)
	// Flights returns the records of the last calls of the local ranks, also those of communicators that were split
	// off. Any goroutine may call it at any time. It does not wait for a call.
	Flights() []flight.Rank
	// Close closes the communicators of all local ranks.
	Close() error
}

// Properties are the guarantees of a communicator.
type Properties struct {
	Canonical bool // reductions follow the canonical tree unless Order: Any is requested
	Epoch     uint32
	Transport string // "mem", …
	Encrypted bool   // everything that this rank sends to other ranks is encrypted
	// Memory: all ranks are in one process or on one host, and access each other's memory. They do the work
	// of a call themselves, so Do is faster than a Start that is awaited at once.
	Memory bool
}

// Monitor watches the calls of the local ranks of one communicator, to prove that none can hang (see
// distribute/internal/deadlock). Enter, Park, Unpark and Leave of a rank are called on the goroutine that makes the
// call or awaits it, never on a goroutine of the library.
//
// The proof relies on this: a call that all ranks have entered ends without further help from their
// goroutines.
type Monitor interface {
	// Enter reports that rank begins call number seq, before any peer can see it. It is on the hot path: it must not
	// allocate, lock or block. [Group.DoAll] enters the calls of all local ranks before it waits.
	//
	// Collectives are numbered from 0. So are the sends of one rank to another, and the receives of the other rank
	// from the first; a send and a receive with the same number belong together.
	Enter(rank int, seq uint64, call *Call)
	// Park reports that rank's goroutine is about to block until its peers have entered the call. An error means that
	// they never will: the communicator fails with exactly that error. The monitor may also abort any communicator
	// from inside Park.
	Park(rank int, seq uint64, call *Call) error
	// Unpark reports that rank's goroutine runs again, after a Park that returned nil.
	Unpark(rank int)
	// Leave reports that the call of rank has ended, with the error that it returns. It may block while a report is
	// written.
	Leave(rank int, seq uint64, call *Call, err error)
	// Explain is called once, by the first rank that detects a failure (a mismatch, an invalid call, the end
	// of a context, a deadline), before any other rank is notified. It returns the error that every rank will
	// return. The monitor may inspect what all ranks do, and wraps err. Abort and Close are not explained.
	Explain(rank int, err error) error
	// Split returns the monitor of a new communicator that [Communicator.Split] makes. It is called once per new
	// communicator, on the goroutine of any local rank. ranks[i] is the parent's rank of the new communicator's rank
	// i; abort aborts the new communicator; release is called when all its local ranks have closed it.
	Split(name string, ranks []int, abort func(cause error)) (m Monitor, release func())
}
