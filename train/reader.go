package train

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// endTimeout is how long a dataset may take to return after its context has ended.
const endTimeout = 10 * time.Second

// stuckTimeout is the same for a dataset that yielded no batch within Config.DataTimeout.
const stuckTimeout = time.Second

// DataTimeoutError reports that a dataset yielded no batch in time, or did not return after its context
// ended. It matches distribute.ErrTimeout and context.DeadlineExceeded with errors.Is.
type DataTimeoutError struct {
	// Waited is how long training waited.
	Waited time.Duration
	// Stack is the stack of the goroutine that reads the dataset, innermost call first, followed by those of
	// the goroutines that it started, at the time of the error.
	Stack string

	what  string // "the dataset gave no batch for 5m0s"
	where string // " it is blocked at …"
	want  string
}

// Error implements error.
func (e *DataTimeoutError) Error() string {
	return fmt.Sprintf("%s%s: %s\n\n%s", e.what, e.where, e.want, e.Stack)
}

// Is reports whether target is a timeout.
func (e *DataTimeoutError) Is(target error) bool {
	return target == distribute.ErrTimeout || target == context.DeadlineExceeded
}

// reader is a goroutine that runs a dataset's code.
type reader struct {
	id   atomic.Uint64 // of the goroutine
	done chan struct{} // closed when it ends
}

// read runs f on a new goroutine, and then calls end with f's error. A panic or runtime.Goexit of f becomes
// an error.
func read(f func() error, end func(error)) *reader {
	r := &reader{done: make(chan struct{})}
	go func() {
		r.id.Store(stacks.ID())
		err := errors.New("the dataset called runtime.Goexit") // unless f returns or panics
		defer close(r.done)
		defer func() { end(err) }()
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("the dataset panicked: %v\n\n%s", v, debug.Stack())
			}
		}()
		err = f()
	}()
	return r
}

// wait reports whether the goroutine ends within d.
func (r *reader) wait(d time.Duration) bool {
	deadline, stop := after(d)
	defer stop()
	select {
	case <-r.done:
		return true
	case <-deadline:
		return false
	}
}

// noBatchError returns the error for a dataset that yielded no batch for the given time.
func (r *reader) noBatchError(waited time.Duration) error {
	return r.timeout(waited, fmt.Sprintf("the dataset gave no batch for %v", waited),
		"want one within Config.DataTimeout, or a longer DataTimeout (negative: no limit)")
}

// notReturnedError returns the error for a dataset that did not return after its context ended.
func (r *reader) notReturnedError() error {
	return r.timeout(endTimeout, fmt.Sprintf("the dataset has not returned within %v after the end of its context",
		endTimeout),
		"want an Iter that looks at its context while it waits; its goroutine stays until it returns")
}

func (r *reader) timeout(waited time.Duration, what, want string) error {
	e := &DataTimeoutError{Waited: waited, what: what, want: want}
	all := family(stacks.Snapshot(), r.id.Load())
	if f, g := placeOf(all); g != nil {
		e.where = fmt.Sprintf(": it is at %v [%s]", f, g.State)
	}
	var b strings.Builder
	for _, g := range all[:min(len(all), goroutinesShown)] {
		fmt.Fprintf(&b, "goroutine %d [%s]:\n", g.ID, g.State)
		for _, f := range g.Frames[:min(len(g.Frames), framesShown)] {
			fmt.Fprintf(&b, "    %v\n", f)
		}
	}
	e.Stack = strings.TrimSuffix(b.String(), "\n")
	return e
}

// goroutinesShown and framesShown bound the text of an error.
const goroutinesShown, framesShown = 8, 32

// family returns the goroutine with the given id, and all goroutines that it started, directly or indirectly.
func family(all []stacks.Goroutine, id uint64) (list []stacks.Goroutine) {
	members := map[uint64]bool{id: true}
	for grown := true; grown; {
		grown = false
		for _, g := range all {
			if g.ID != 0 && !members[g.ID] && members[g.Creator] {
				members[g.ID], grown = true, true
			}
		}
	}
	for _, g := range all {
		if g.ID == id {
			list = append([]stacks.Goroutine{g}, list...)
		} else if members[g.ID] {
			list = append(list, g)
		}
	}
	return list
}

// placeOf returns the frame of user code in which the first goroutine is, else that of the first other
// goroutine in user code, else the first goroutine's frame in the library.
func placeOf(list []stacks.Goroutine) (place stacks.Frame, in *stacks.Goroutine) {
	for i, g := range list {
		inner := slices.IndexFunc(g.Frames, func(f stacks.Frame) bool { return !f.Standard() })
		if inner < 0 {
			continue
		}
		if f := g.Frames[inner]; f.User() {
			return f, &list[i]
		} else if i == 0 {
			place, in = f, &list[i]
		}
	}
	return place, in
}

// after is time.After with a stop function. If d is not positive, the channel is nil and never receives.
func after(d time.Duration) (<-chan time.Time, func()) {
	if d <= 0 {
		return nil, func() {}
	}
	timer := time.NewTimer(d)
	return timer.C, func() { timer.Stop() }
}
