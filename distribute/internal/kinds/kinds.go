// Package kinds classifies errors of packages that do not know which operation of package distribute calls them.
package kinds

import (
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/collective"
)

// The kinds of errors, those of package distribute.
var (
	Invalid     = collective.ErrInvalid
	Mismatch    = collective.ErrMismatch
	Unsupported = errors.ErrUnsupported
)

// Error is an error of a kind. Package distribute adds the operation.
type Error struct {
	Kind error // one of the kinds above
	Err  error // what was wrong and what was expected
}

// Errorf returns an *Error; the format may wrap causes with %w.
func Errorf(kind error, format string, args ...any) error {
	return &Error{kind, fmt.Errorf(format, args...)}
}

// Error returns what was wrong.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error { return []error{e.Kind, e.Err} }
