package distribute

import (
	"errors"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
)

// The kinds of errors. Errors of this package match one of them with errors.Is, except a [*StepError] whose cause
// is an error that a replica returned, or the end of the context: it matches that error. A failure inside of a
// collective call is a *[collective.Error], which matches that package's kinds; some of these are the same
// values.
var (
	ErrInvalid     = collective.ErrInvalid       // an argument is invalid
	ErrMismatch    = collective.ErrMismatch      // values or calls differ between replicas where they must be equal
	ErrTimeout     = collective.ErrTimeout       // timed out waiting for a replica
	ErrDesync      = collective.ErrDesync        // the replicas' calls can never match
	ErrPeerLost    = collective.ErrPeerLost      // a replica panicked or called runtime.Goexit, or a worker was lost
	ErrBusy        = collective.ErrBusy          // two goroutines used one replica at the same time
	ErrAborted     = collective.ErrAborted       // cancelled: by its context, or by a failed replica of another worker
	ErrClosed      = collective.ErrClosed        // used after Close
	ErrNested      = deadlock.ErrNested          // a Run inside a Run of the same strategy; it also matches ErrContext
	ErrContext     = errors.New("wrong context") // called in the wrong context, or between strategies
	ErrUnsupported = errors.ErrUnsupported       // not available for these values or this strategy
)

// Error describes a failed operation of this package. Its fields are Op, the operation; Kind, one of the kinds above or
// nil; Err, what was wrong and what was expected; and At, the call site of Op on a replica, as "file:line (function)",
// else empty.
type Error = kinds.Error

// located adds the user's call site to an error. The stack of the call is gone when the step has returned.
func located(err error) error {
	if e, ok := err.(*Error); ok && e.At == "" {
		if at := deadlock.Site(); at != (deadlock.Frame{}) {
			e.At = at.String()
		}
	}
	return err
}

// errorf returns an *Error; the format may wrap causes with %w.
func errorf(op string, kind error, format string, args ...any) error {
	return kinds.OpErrorf(op, kind, format, args...)
}

// failed adds the operation to an error of an internal package, and returns any other error unchanged.
func failed(op string, err error) error {
	if e, ok := err.(*Error); ok && e.Op == "" {
		return &Error{Op: op, Kind: e.Kind, Err: e.Err}
	}
	return err
}

// StepError is the error of a failed step; get it by errors.As with a *StepError. Every replica and the caller of
// [Run] get the same one. Its fields are Reason, the cause in one sentence; Cause, the error behind it or nil; and
// Replicas, which has for each replica what it was doing at that time: its state, its call, its stack with files
// and lines. Its text has all of them. Its method Wait waits until the step function of every replica has returned.
type StepError = deadlock.StepError
