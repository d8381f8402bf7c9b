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

// ErrNested is matched by the error of a run that was begun inside a replica of another run of the same strategy.
var ErrNested = errors.New("run inside a run of the same strategy")

// nestedError is the error of a run inside a run.
type nestedError string

func (e nestedError) Error() string { return string(e) }

func (nestedError) Unwrap() []error { return []error{ErrNested, collective.ErrInvalid} }

// StepError says why a step failed on all replicas. Its text is one sentence with the cause, then what each replica
// was doing at that moment, one after the other, then who the replicas of other workers are that the failure concerns. It matches, with errors.Is and errors.As, the kinds of failure of package
// collective and the error behind it: what a replica returned or panicked with, or a *[collective.Error].
type StepError struct {
	// Reason is the first line of the text: the cause in one sentence.
	Reason string
	// Cause is the error behind the failure, or nil: a deadlock has none.
	Cause error
	// Replicas says what each local replica was doing, by replica id.
	Replicas []ReplicaReport

	kinds []error
}

// ReplicaReport says what one replica was doing when a step failed.
type ReplicaReport struct {
	Replica int
	Device  string
	State   State
	// Call is the call that the replica was in, if State is Waiting or Merging (or the replica died in a merge function);
	// else nil.
	Call *CallReport
	// Calls is how many collective and merge calls the replica had finished in this run.
	Calls uint64
	// Err is what the replica returned, Panic what it panicked with.
	Err   error
	Panic any
	// Site is where the user's code made the call, or where it runs or blocks; for a replica that returned, its
	// function. It is zero if unknown.
	Site Frame
	// Goroutine is the number of the goroutine that made the call or runs, 0 if unknown; Other is true if it is not the
	// one that the strategy started for the replica, but one that the user's code started. Block is what the runtime says
	// that it is doing, such as "chan receive, 5 minutes".
	Goroutine uint64
	Other     bool
	Block     string
	// Stack is the user's part of that goroutine's stack, innermost call first.
	Stack []Frame

	text      string  // of Err or Panic
	callers   []Frame // the user's that called Site, of a call
	executes  bool    // it runs the merge function of Call
	complete  bool    // all have come to Call
	cause     bool    // Err or Panic is the cause of the failure
	showStack bool
}

// Frame is one function call on a stack.
type Frame = stacks.Frame

// CallReport describes a call.
type CallReport struct {
	Communicator string // its name; empty for merge calls, and for the communicator between a strategy's replicas
	Op           string // "all_reduce", …, "merge_call"
	Reduce       string // "SUM", …; empty if the operation is no reduction
	Seq          uint64 // number of the call on this communicator, from 0
	Name         string // of the tensor, or what a merge call is for; or empty
	DType        tensor.DType
	Shape        []int
	Root         int // of a broadcast
}

// State is what a replica does.
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

// Ended reports whether the replica makes no call any more.
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
		return // there is nothing that the line above does not say
	}
	// Of a deep recursion both ends tell more than the middle.
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

// doing says what the replica does, for "replica 1 (CPU:1) …".
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
	short := CallReport{Op: c.Op, Reduce: c.Reduce, Seq: c.Seq, Communicator: c.Communicator}
	if c.Op == mergeOp {
		short.Name = c.Name
	}
	return short.String()
}

// Names that are no operation of package collective.
const (
	mergeOp   = "merge_call"
	unknownOp = "call" // one whose description is gone
)

// describe returns the report of a call; call is nil if it is not known any more.
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
		c.Name = call.Manifest.Name
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

// text returns how an error or the value of a panic reads, whatever its methods do.
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
