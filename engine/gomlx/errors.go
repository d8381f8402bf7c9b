package gomlx

import (
	"fmt"
	"runtime"
	"strings"
)

// ModelError is what a model function, or GoMLX on its behalf, raised while a program was built or run. GoMLX reports
// mistakes in a model by panics; they end here.
type ModelError struct {
	Doing string // "build the gradients program", …
	File  string // of the innermost frame of the user's code, empty if there is none
	Line  int
	Cause error
}

// Error says what was being done, where in the user's code, and what went wrong.
func (e *ModelError) Error() string {
	if e.File == "" {
		return fmt.Sprintf("gomlx: %s: %v", e.Doing, e.Cause)
	}
	return fmt.Sprintf("gomlx: %s: %s:%d: %v", e.Doing, e.File, e.Line, e.Cause)
}

// Unwrap returns the cause.
func (e *ModelError) Unwrap() error { return e.Cause }

// catch calls f and returns what it returns; a panic inside becomes a [ModelError] with the place in the user's code
// that it came from.
func catch(doing string, f func() error) (err error) {
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		cause, ok := r.(error)
		if !ok {
			cause = fmt.Errorf("%v", r)
		}
		e := &ModelError{Doing: doing, Cause: cause}
		e.File, e.Line = userFrame()
		err = e
	}()
	return f()
}

// userFrame returns the innermost frame below catch that is neither Go's, GoMLX's nor this package's: none if the
// panic did not pass through the user's code. Called while a panic unwinds, it sees the frames that panicked.
func userFrame() (file string, line int) {
	pcs := make([]uintptr, 256)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		if f.File != "" && isUser(f) {
			return f.File, f.Line
		}
		if !more || f.Function == foreign[0]+"catch" {
			return "", 0
		}
	}
}

// foreign lists the prefixes of functions that are not the user's, this package first.
var foreign = []string{
	"github.com/lockstep-ml/lockstep/engine/gomlx.",
	"github.com/gomlx/", "github.com/pkg/errors",
	"runtime.", "reflect.", "internal/", "slices.", "sync.",
}

func isUser(f runtime.Frame) bool {
	if strings.HasSuffix(f.File, "_test.go") {
		return true
	}
	for _, prefix := range foreign {
		if strings.HasPrefix(f.Function, prefix) {
			return false
		}
	}
	return true
}
