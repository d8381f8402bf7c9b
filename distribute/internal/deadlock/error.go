package deadlock

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/stacks"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ErrNested matches the error of a run that was started inside a replica of another run of the same strategy.
var ErrNested = errors.New("run inside a run of the same strategy")

// nestedError is the error of a run inside a run.
type nestedError string

func (e nestedError) Error() string { return string(e) }

func (nestedError) Unwrap() []error { return []error{ErrNested, collective.ErrInvalid} }

// StepError is the failure of a step, the same on all replicas. Its text is one sentence with the cause, then a
// description of each local replica at that moment, then the replicas of other workers that the failure involves.
// With errors.Is and errors.As it matches the error kinds of package collective, and the cause: the error that a
// replica returned or panicked with, or a *[collective.Error].
type StepError struct {
	// Reason is the first line of the text: the cause in one sentence.
	Reason string
	// Cause is the error behind the failure, or nil: a deadlock has none.
	Cause error
	// Replicas describes each local replica, by replica id.
	Replicas []ReplicaReport

	kinds []error
	ended <-chan struct{} // closed when every replica of the run has ended; nil outside a run
}

// ReplicaReport describes what a replica was doing when a step failed.
type ReplicaReport struct {
	Replica int
	Device  string
	State   State
	// Call is the call that the replica was in, if State is Waiting or Merging (or the replica died in a merge function);
	// else nil.
	Call *CallReport
	// Calls is the number of collective and merge calls that the replica had finished in this run.
	Calls uint64
	// Err is the error that the replica returned, Panic the value that it panicked with.
	Err   error
	Panic any
	// Site is the location in user code that made the call, or that runs or blocks; for a replica that returned, its
	// function. It is zero if unknown.
	Site Frame
	// Goroutine is the number of the goroutine that made the call or runs, 0 if unknown. Other is true if user code
	// started that goroutine, not the strategy. Block is its state as the runtime describes it, such as "chan receive, 5
	// minutes".
	Goroutine uint64
	Other     bool
	Block     string
	// Stack is the user code's part of that goroutine's stack, innermost call first.
	Stack []Frame

	text      string  // of Err or Panic
	callers   []Frame // the user frames that called Site, of a call
	executes  bool    // it runs the merge function of Call
	complete  bool    // all replicas have entered Call
	cause     bool    // Err or Panic is the cause of the failure
	showStack bool
}

// Frame is one function call on a stack.
type Frame = stacks.Frame

// CallReport describes a call.
type CallReport struct {
	Communicator string // its name; empty for merge calls, and for the communicator between a strategy's replicas
	Op           string // "all_reduce", …, "merge_call"
	Reduce       string // "SUM", …; empty if the operation is not a reduction
	Seq          uint64 // number of the call on this communicator, from 0
	Name         string // name of the tensor, or purpose of a merge call; or empty
	DType        tensor.DType
	Shape        []int
	Root         int // of a broadcast
	// Purpose describes the call of the user for which this one exchanges something first; or empty.
	Purpose string
}

// State is the state of a replica.
type State uint8

// The states of a replica.
const (
	Idle     State = iota // not started
	Running               // in the user's code, perhaps blocked there
	Waiting               // in a collective call
	Merging               // in a merge call
	Returned              // its function has returned
	Panicked              // its function has panicked
	Gone                  // its function has called runtime.Goexit
)

var stateNames = [...]string{"idle", "running", "waiting", "merging", "returned", "panicked", "gone"}

// String returns the state in lower case.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Ended reports whether the replica has ended, so that it makes no more calls.
func (s State) Ended() bool { return s >= Returned }

// died reports whether it ended in a way that can leave a call unfinished.
func (s State) died() bool { return s == Panicked || s == Gone }

// Error returns the whole report; see [StepError].
func (e *StepError) Error() string {
	var b strings.Builder
	b.WriteString(e.Reason)
	for i := range e.Replicas {
		b.WriteString("\n  ")
		e.Replicas[i].write(&b)
	}
	if found := (*collective.Error)(nil); errors.As(e.Cause, &found) && found.Who != "" {
		b.WriteString("\n  " + strings.ReplaceAll(found.Who, "\n", "\n  "))
	}
	return b.String()
}

// Unwrap returns the kinds of the failure, and its cause.
func (e *StepError) Unwrap() []error {
	if e.Cause == nil {
		return e.kinds
	}
	return append(e.kinds[:len(e.kinds):len(e.kinds)], e.Cause)
}

// Wait waits until the step function has returned on every replica. Run returns earlier if a replica does not return
// within 10 seconds after the failure. What the step function uses, such as an engine's variables, must not be
// changed or closed before. A step function must not call Wait with the failure of the Run in progress.
func (e *StepError) Wait() {
	if e.ended != nil {
		<-e.ended
	}
}

// String returns the replica's lines of the report.
func (r *ReplicaReport) String() string {
	var b strings.Builder
	r.write(&b)
	return b.String()
}

// How much the text of a report shows; the struct has all.
const (
	framesShown = 16 // of a stack
	framesFoot  = 3  // of these, from its foot
	linesShown  = 12 // of the rest of an error's or a panic's text
)

func (r *ReplicaReport) write(b *strings.Builder) {
	fmt.Fprintf(b, "replica %d (%s) %s", r.Replica, r.Device, r.doing())
	if _, rest, more := strings.Cut(strings.TrimSpace(r.text), "\n"); more {
		lines := strings.Split(rest, "\n")
		for _, line := range lines[:min(len(lines), linesShown)] {
			b.WriteString("\n      | " + strings.TrimRight(line, " \t\r"))
		}
		if n := len(lines) - linesShown; n > 0 {
			fmt.Fprintf(b, "\n      | … %d more lines", n)
		}
	}
	if !r.showStack || len(r.Stack) == 1 && r.Stack[0] == r.Site && !r.State.died() {
		return // the stack adds nothing to the line above
	}
	// In a deep recursion both ends are more informative than the middle.
	head, foot := r.Stack, []Frame(nil)
	if len(head) > framesShown {
		head, foot = head[:framesShown-framesFoot], head[len(head)-framesFoot:]
	}
	for _, frame := range head {
		b.WriteString("\n      " + frame.String())
	}
	if len(foot) > 0 {
		fmt.Fprintf(b, "\n      … %d more", len(r.Stack)-framesShown)
	}
	for _, frame := range foot {
		b.WriteString("\n      " + frame.String())
	}
}

// doing describes the state, to follow "replica 1 (CPU:1)".
func (r *ReplicaReport) doing() string {
	switch r.State {
	case Waiting, Merging:
		if r.executes {
			return "runs the merge function of " + r.Call.String() + r.place(" at ") + r.blocked()
		}
		by := ", called at "
		if r.Other {
			by = fmt.Sprintf(", called by goroutine %d at ", r.Goroutine)
		}
		verb := "waits in "
		if r.complete {
			verb = "is in "
		}
		at := r.place(by)
		for _, f := range r.callers {
			at += ", from " + f.String()
		}
		return verb + r.Call.String() + at
	case Returned:
		what := "returned"
		switch {
		case r.cause:
			what = "returned that error"
		case r.Err != nil:
			what = "returned an error (" + firstLine(r.text) + ")"
		}
		return fmt.Sprintf("%s after %s%s", what, plural(r.Calls, "call"), r.place(" from the function at "))
	case Panicked:
		return "panicked" + r.inMerge() + ": " + firstLine(r.text)
	case Gone:
		return "called runtime.Goexit" + r.inMerge()
	case Running:
		if at := r.place(" at "); at != "" {
			if r.blocked() != "" {
				return "is blocked" + at + r.blocked()
			}
			return "runs" + at
		}
		return "runs" + r.blocked()
	}
	return "has not started"
}

func (r *ReplicaReport) inMerge() string {
	if r.Call == nil {
		return ""
	}
	return " in the merge function of " + r.Call.String()
}

func (r *ReplicaReport) place(before string) string {
	if r.Site == (Frame{}) {
		return ""
	}
	return before + r.Site.String()
}

// blocked returns " [chan receive]", or nothing if the goroutine is not blocked.
func (r *ReplicaReport) blocked() string {
	switch r.Block {
	case "", "running", "runnable", "preempted", "copystack":
		return ""
	}
	return " [" + r.Block + "]"
}

// String describes the call as in: all_reduce SUM #3 "dense/kernel" float32 (784, 512) on main.
func (c *CallReport) String() string {
	var b strings.Builder
	if c.Purpose != "" {
		b.WriteString(c.Purpose + ", whose first step is ")
	}
	b.WriteString(c.Op)
	if c.Reduce != "" {
		b.WriteString(" " + c.Reduce)
	}
	b.WriteString(" #" + strconv.FormatUint(c.Seq, 10))
	switch {
	case c.Name == "":
	case c.Op == mergeOp:
		b.WriteString(" for " + c.Name)
	default:
		b.WriteString(" " + strconv.Quote(c.Name))
	}
	if c.DType.Valid() {
		b.WriteString(" " + c.DType.String())
	}
	if c.Shape != nil {
		b.WriteString(" " + tensor.FormatShape(c.Shape))
	}
	if c.Op == collective.Broadcast.String() {
		b.WriteString(" from rank " + strconv.Itoa(c.Root))
	}
	if c.Communicator != "" {
		b.WriteString(" on " + c.Communicator)
	}
	return b.String()
}

// brief describes the call by operation and number.
func (c *CallReport) brief() string {
	if c.Purpose != "" {
		return c.Purpose
	}
	short := CallReport{Op: c.Op, Reduce: c.Reduce, Seq: c.Seq, Communicator: c.Communicator}
	if c.Op == mergeOp {
		short.Name = c.Name
	}
	return short.String()
}

// Operation names that are not from package collective.
const (
	mergeOp   = "merge_call"
	unknownOp = "call" // a call whose description was overwritten
)

// describe returns the report of a call; call is nil if its description was overwritten.
func describe(m *Monitor, seq uint64, call *collective.Call) *CallReport {
	switch {
	case m.isMerge && call == nil:
		return &CallReport{Op: mergeOp, Seq: seq}
	case m.isMerge:
		return &CallReport{Op: mergeOp, Seq: seq, Name: call.Manifest.Name}
	case call == nil:
		return &CallReport{Op: unknownOp, Seq: seq, Communicator: m.name}
	}
	c := &CallReport{Communicator: m.name, Op: call.Op.String(), Seq: seq, DType: call.Type, Root: call.Root}
	if call.Op == collective.AllReduce {
		c.Reduce = call.Reduce.String()
	}
	if call.Manifest != nil {
		c.Name, c.Purpose = call.Manifest.Name, call.Manifest.Purpose
		c.Shape = append(c.Shape, call.Manifest.Shape...)
	}
	if size := call.Type.Bytes(); c.Shape == nil && size > 0 {
		c.Shape = []int{max(call.Src.Bytes, call.Dst.Bytes) / size}
	}
	return c
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return strings.TrimRight(line, "\r")
}

// text formats an error or the value of a panic, even if its methods panic.
func text(v any) string {
	s := fmt.Sprint(v) // unlike Error, it survives a method that panics
	if s == "<nil>" && v != nil {
		return fmt.Sprintf("a nil %T in an interface, which is not nil itself: return nil instead", v)
	}
	return s
}

func plural(n uint64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
