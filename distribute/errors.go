package distribute

import (
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/deadlock"
)

// The kinds of failure; an error of this package matches one of them with errors.Is. What fails inside a collective
// call is a *[collective.Error] and matches that package's kinds, some of which are the same values.
var (
	ErrInvalid     = collective.ErrInvalid  // an argument is wrong by itself
	ErrMismatch    = collective.ErrMismatch // the replicas' values or calls differ where they must not
	ErrTimeout     = collective.ErrTimeout  // a replica did not come in time
	ErrDesync      = collective.ErrDesync   // the replicas' calls can never meet
	ErrPeerLost    = collective.ErrPeerLost // a replica panicked or called runtime.Goexit
	ErrBusy        = collective.ErrBusy     // two goroutines used one replica at the same time
	ErrAborted     = collective.ErrAborted  // a call was given up, with its context for one
	ErrClosed      = collective.ErrClosed   // used after Close
	ErrNested      = deadlock.ErrNested     // a Run inside a Run of the same strategy; it matches ErrContext, too
	ErrContext     = errors.New("wrong context")
	ErrUnsupported = errors.ErrUnsupported
)

// Error is a failure of an operation of this package.
type Error struct {
	Op   string // what was called: "Reduce"
	Kind error  // one of the kinds above, or nil where Err says it all
	Err  error  // what was wrong and what would be right
	At   string // the user's code that called Op on a replica, as "file:line (function)"; else empty
}

// Error returns the operation and what was wrong.
func (e *Error) Error() string {
	if e.At != "" {
		return "distribute: " + e.Op + " at " + e.At + ": " + e.Err.Error()
	}
	return "distribute: " + e.Op + ": " + e.Err.Error()
}

// located adds the place of the user's call to an error that was made for it: when a step has returned the error, its
// stack is gone.
func located(err error) error {
	if e, ok := err.(*Error); ok && e.At == "" {
		if at := deadlock.Site(); at != (deadlock.Frame{}) {
			e.At = at.String()
		}
	}
	return err
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Kind == nil {
		return []error{e.Err}
	}
	return []error{e.Kind, e.Err}
}

// errorf returns an *Error; the format may wrap causes with %w.
func errorf(op string, kind error, format string, args ...any) error {
	return &Error{Op: op, Kind: kind, Err: fmt.Errorf(format, args...)}
}

// StepError is what every replica and the caller of [Run] get when a step fails: its cause, and what each replica was
// doing then, with file and line.
type StepError = deadlock.StepError
