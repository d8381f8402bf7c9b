// Package kinds has the errors of package distribute and of the packages below it.
package kinds

import (
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
)

// The kinds of errors that packages below distribute return.
var (
	Invalid     = collective.ErrInvalid
	Mismatch    = collective.ErrMismatch
	Unsupported = errors.ErrUnsupported
)

// Error describes a failed operation.
type Error struct {
	Op   string // the operation: "Reduce"; empty until package distribute adds it
	Kind error  // such as one of the kinds above, or nil if Err suffices
	Err  error  // what was wrong and what was expected
	At   string // call site of Op on a replica, as "file:line (function)"; else empty
}

// Errorf returns an *Error without an operation; the format may wrap causes with %w.
func Errorf(kind error, format string, args ...any) error {
	return &Error{Kind: kind, Err: fmt.Errorf(format, args...)}
}

// OpErrorf is [Errorf] with an operation.
func OpErrorf(op string, kind error, format string, args ...any) error {
	return &Error{Op: op, Kind: kind, Err: fmt.Errorf(format, args...)}
}

// Error returns the operation and what was wrong.
func (e *Error) Error() string {
	switch {
	case e.Op == "":
		return e.Err.Error()
	case e.At != "":
		return "distribute: " + e.Op + " at " + e.At + ": " + e.Err.Error()
	}
	return "distribute: " + e.Op + ": " + e.Err.Error()
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Kind == nil {
		return []error{e.Err}
	}
	return []error{e.Kind, e.Err}
}
