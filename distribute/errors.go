package distribute

import (
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/ledger"
)

// The kinds of failure; an error of this package matches one of them with errors.Is. What fails inside a collective
// call is a *[collective.Error] and matches that package's kinds, some of which are the same values.
var (
	ErrInvalid     = collective.ErrInvalid  // an argument is wrong by itself
	ErrMismatch    = collective.ErrMismatch // the replicas' values or calls differ where they must not
	ErrTimeout     = collective.ErrTimeout  // a replica did not come in time
	ErrDesync      = collective.ErrDesync   // the replicas' calls can never meet
	ErrBusy        = collective.ErrBusy     // two goroutines used one replica at the same time
	ErrClosed      = collective.ErrClosed   // used after Close
	ErrContext     = errors.New("wrong context")
	ErrUnsupported = errors.ErrUnsupported
)

// Error is a failure of an operation of this package.
type Error struct {
	Op   string // what was called: "Reduce"
	Kind error  // one of the kinds above, or nil where Err says it all
	Err  error  // what was wrong and what would be right
}

// Error returns the operation and what was wrong.
func (e *Error) Error() string { return "distribute: " + e.Op + ": " + e.Err.Error() }

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
type StepError = ledger.StepError
