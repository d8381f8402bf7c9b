package gomlx

import (
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/gomlx/compute"
)

// ModelError is an error in a model, found by this package, the model function or GoMLX while a program was
// built, compiled or run. GoMLX reports errors in a model by panics, which become ModelErrors.
type ModelError struct {
	Doing string // "build the gradients program", …
	File  string // of the innermost frame of user code; empty if none
	Line  int    // in File
	Cause error  // the error, or the value of the panic
}

// Error returns the operation, the position in the user's code, and the cause.
func (e *ModelError) Error() string {
	if e.File == "" {
		return fmt.Sprintf("gomlx: %s: %v", e.Doing, e.Cause)
	}
	return fmt.Sprintf("gomlx: %s: %s:%d: %v", e.Doing, e.File, e.Line, e.Cause)
}

// Unwrap returns Cause.
func (e *ModelError) Unwrap() error { return e.Cause }

// catch calls f and returns its error or panic as a [ModelError]. For a panic, it includes the position in
// the user's code.
func catch(doing string, f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fromPanic(doing, r)
		}
	}()
	if err := f(); err != nil {
		return &ModelError{Doing: doing, Cause: explained(err)}
	}
	return nil
}

// unimplemented matches the Go backend's error for an operation that it lacks.
var unimplemented = regexp.MustCompile(`op "(\w+)" not implemented in the "go" backend`)

// explained returns err, or an error that adds what to use instead where GoMLX's text lacks it.
func explained(err error) error {
	if !compute.IsNotImplemented(err) {
		return err
	}
	const otherwise = "run the model on the xla engine (OpenXLA), or build it from other operations"
	m := unimplemented.FindStringSubmatch(err.Error())
	if m == nil {
		return fmt.Errorf("%w: want another type or operation, or %s", err, otherwise)
	}
	return &explanation{fmt.Sprintf("the Go engine lacks the operation %s: %s", m[1], otherwise), err}
}

// explanation replaces the text of an error.
type explanation struct {
	text  string
	cause error
}

func (e *explanation) Error() string { return e.text }
func (e *explanation) Unwrap() error { return e.cause }

// fromPanic returns the error for a panic with r. A runtime error, such as an index out of range, has no
// context. If it did not happen in user code, the error names the function in which it did.
func fromPanic(doing string, r any) *ModelError {
	cause, ok := r.(error)
	if !ok {
		cause = fmt.Errorf("%v", r)
	}
	e := &ModelError{Doing: doing, Cause: explained(cause)}
	var where, loss string
	e.File, e.Line, where, loss = panicFrames()
	if loss != "" {
		e.Cause = fmt.Errorf("GoMLX's loss.%s: %w: %s", loss, e.Cause, insteadOf(loss))
	}
	if _, accident := r.(runtime.Error); accident && e.File == "" {
		e.Cause = fmt.Errorf("panic in %s: %w", where, cause)
	}
	return e
}

// panicFrames returns three results. file and line are the innermost frame below catch that is neither Go's,
// GoMLX's nor this package's; they are empty if the panic did not pass through user code. function is the
// innermost function below catch that is not Go's. loss is the name of the GoMLX loss that panicked, if any.
// It must be called while the panic unwinds, when the frames still exist.
func panicFrames() (file string, line int, function, loss string) {
	pcs := make([]uintptr, 256)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	panicking := false
	for {
		f, more := frames.Next()
		if f.Function == "runtime.gopanic" {
			panicking, function = true, ""
		}
		if panicking && function == "" && !hasPrefix(f.Function, ofGo) {
			function = f.Function
		}
		if name, theirs := strings.CutPrefix(f.Function, theirLosses); panicking && theirs {
			loss, _, _ = strings.Cut(name, ".")
		}
		if f.File != "" && isUser(f) {
			return f.File, f.Line, function, loss
		}
		if !more || f.Function == foreign[0]+"catch" {
			return "", 0, function, loss
		}
	}
}

// ofGo lists the prefixes of the standard library's functions that may be on a stack that panics.
var ofGo = []string{
	"runtime.", "reflect.", "internal/", "slices.", "maps.", "sort.", "strings.", "iter.", "sync.",
	"fmt.", "math.",
}

// foreign lists the prefixes of other functions that are not user code, this package first.
var foreign = []string{
	"github.com/lockstep-ml/lockstep/engine/gomlx.", "github.com/lockstep-ml/lockstep/engine/gomlx/layer.",
	"github.com/lockstep-ml/lockstep/engine/gomlx/internal/", "github.com/lockstep-ml/lockstep/backend",
	"github.com/lockstep-ml/lockstep/internal/record.", "github.com/gomlx/", "github.com/pkg/errors",
}

func isUser(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return true
	}
	return !hasPrefix(f.Function, ofGo) && !hasPrefix(f.Function, foreign)
}

func hasPrefix(s string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}
