package collective

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// The kinds of failure. An error returned by this package matches one of them with errors.Is. A deadline also
// matches context.DeadlineExceeded; the end of a context also matches its cause and context.Canceled.
var (
	ErrTimeout  = errors.New("deadline exceeded")           // a peer did not arrive in time
	ErrPeerLost = errors.New("peer lost")                   // a peer's process or goroutine has ended
	ErrMismatch = errors.New("mismatch")                    // the ranks' calls differ
	ErrDesync   = errors.New("desynchronised")              // the calls can never meet: a deadlock
	ErrInvalid  = errors.New("invalid argument")            // the call is invalid
	ErrClosed   = errors.New("communicator closed")         // used after Close
	ErrBusy     = errors.New("concurrent call on one rank") // a second goroutine used a communicator that is in a call
	ErrAborted  = errors.New("aborted")                     // Abort, or the end of a context
)

// Error is a failure of a communicator: the rank that detected it, the call, and the cause.
type Error struct {
	Kind  error  // one of the kinds above
	Comm  string // the communicator's name
	Rank  int    // the rank that detected it, or -1
	Op    Op     // the operation of the call; 0: outside of a call
	Seq   uint64 // number of the call, from 0
	Name  string // name of the call's tensor
	Peers []int  // the other ranks concerned: missing, lost or different
	Err   error  // the cause; may be nil
	Who   string // the workers concerned and their last reported state ([Config.Describe]): lines, or empty
}

// Error returns the failure in one line, followed by one line for each worker concerned if they are known.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "collective: communicator %q", e.Comm)
	if e.Rank >= 0 {
		fmt.Fprintf(&b, ", rank %d", e.Rank)
	}
	if e.Op != 0 {
		fmt.Fprintf(&b, ", call %d, %v", e.Seq, e.Op)
	}
	if e.Name != "" {
		fmt.Fprintf(&b, " of %q", e.Name)
	}
	fmt.Fprintf(&b, ": %v", e.Kind)
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	if e.Who != "" {
		b.WriteString("\n  " + strings.ReplaceAll(e.Who, "\n", "\n  "))
	}
	return b.String()
}

// within returns the error translated to the communicator whose ranks those of this one are.
func (e *Error) within(ranks []int) *Error {
	of := func(rank int) int {
		if rank < 0 || rank >= len(ranks) {
			return -1
		}
		return ranks[rank]
	}
	out := *e
	out.Rank, out.Peers = of(e.Rank), make([]int, len(e.Peers))
	for i, p := range e.Peers {
		out.Peers[i] = of(p)
	}
	return &out
}

// Unwrap returns the kind, the cause, and for a deadline context.DeadlineExceeded.
func (e *Error) Unwrap() []error {
	out := []error{e.Kind}
	if e.Err != nil {
		out = append(out, e.Err)
	}
	if e.Kind == ErrTimeout {
		out = append(out, context.DeadlineExceeded)
	}
	return out
}

// Timeout reports whether the failure was a deadline, as net.Error does.
func (e *Error) Timeout() bool { return e.Kind == ErrTimeout }

// ended is the end of a context: it matches both the context's error and its cause.
type ended struct{ err, cause error }

func endOf(ctx context.Context) *ended { return &ended{ctx.Err(), context.Cause(ctx)} }

func (e *ended) Error() string {
	if e.cause == nil || errors.Is(e.err, e.cause) {
		return e.err.Error()
	}
	return e.err.Error() + ": " + e.cause.Error()
}

func (e *ended) Unwrap() []error {
	if e.cause == nil {
		return []error{e.err}
	}
	return []error{e.err, e.cause}
}

// kind returns the kind of failure for the end of the context.
func (e *ended) kind() error {
	if errors.Is(e.err, context.DeadlineExceeded) {
		return ErrTimeout
	}
	return ErrAborted
}
