package collective

import "errors"

// The kinds of failure. An error returned by this package matches one of them with errors.Is; a deadline also matches
// context.DeadlineExceeded.
var (
	ErrTimeout  = errors.New("deadline exceeded")           // a peer did not come in time
	ErrPeerLost = errors.New("peer lost")                   // a peer's process or goroutine is gone
	ErrMismatch = errors.New("mismatch")                    // the ranks' calls differ
	ErrDesync   = errors.New("desynchronised")              // the calls can never meet: a deadlock
	ErrInvalid  = errors.New("invalid argument")            // the call is wrong by itself
	ErrClosed   = errors.New("communicator closed")         // used after Close
	ErrBusy     = errors.New("concurrent call on one rank") // a second goroutine used a communicator that is in a call
	ErrAborted  = errors.New("aborted")                     // Abort without a cause
)
