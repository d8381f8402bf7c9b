package deadlock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// fault describes a failure before its report is created.
type fault struct {
	kind    faultKind
	replica int // the replica that failed, waits, or found it; -1: none
	cause   error
	chain   []hop          // of faultStuck
	monitor *Monitor       // of the call, if the fault concerns one call
	seq     uint64         // of that call
	waited  time.Duration  // before a deadline, if known
	value   any            // of a panic in a merge function
	stack   []stacks.Frame // of that panic
	text    string         // of the cause or the value, formatted before the lock was taken
}

// format returns the text of the cause. It calls methods of user code, so the caller must not hold the lock.
func (f fault) format() string {
	switch {
	case f.kind == faultMergePanicked:
		return text(f.value)
	case f.cause == nil:
		return ""
	case f.kind == faultFound && ofContext(f.cause), f.kind == faultLeft:
		return text(root(f.cause))
	case f.kind == faultFound:
		return detail(f.cause)
	}
	return text(f.cause)
}

type faultKind uint8

const (
	faultStuck         faultKind = iota // a wait that cannot end
	faultReturned                       // a replica returned an error
	faultPanicked                       // a replica panicked
	faultGone                           // a replica called runtime.Goexit
	faultOpenCall                       // a replica returned during a call
	faultBusy                           // concurrent calls of one replica
	faultFound                          // the collective layer or a merge call failed with cause
	faultMergePanicked                  // a merge function panicked
	faultMergeGone                      // a merge function called runtime.Goexit
	faultLeft                           // the context ended, but a replica did not
	faultGiven                          // Run.Fail
)

// report creates the error of a fault. The caller holds the detector's lock.
func (r *Run) report(f fault) *StepError {
	l := r.detector
	l.reporting.Store(true)
	defer l.reporting.Store(false)
	v := newView(r)
	e := &StepError{Cause: f.cause, Replicas: make([]ReplicaReport, len(r.replicas))}
	for i := range e.Replicas {
		r.describe(&e.Replicas[i], i, v, f)
	}
	e.Reason, e.kinds = r.reason(f, e.Replicas, v)
	return e
}

// idleReport creates the error of a fault that was found outside a run.
func (l *Detector) idleReport(f fault) *StepError {
	f.text = f.format()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dirty = true
	return newRun(context.Background(), l, nil).report(f)
}

// nested returns the error of a run started inside this one by a replica; -1: unknown.
func (r *Run) nested(replica int) error {
	who := "a replica"
	if replica >= 0 {
		who = r.detector.name(replica)
	}
	at := ""
	if site := Site(); site != (Frame{}) {
		at = " at " + site.String()
	}
	return nestedError(fmt.Sprintf("%s calls Run%s inside a Run of the same strategy, for whose end it would wait: "+
		"call it after that Run, or make the computation part of it", who, at))
}

// describe fills in the report of one replica.
func (r *Run) describe(out *ReplicaReport, replica int, v *view, f fault) {
	them := &r.replicas[replica]
	out.Replica, out.Device, out.State = r.detector.cfg.IDs[replica], r.detector.cfg.Devices[replica], them.state
	out.Err, out.Panic, out.text, out.Stack = them.err, them.value, them.text, them.stack
	out.Calls = r.callsLeft(replica) - them.before
	if them.state.Ended() {
		out.showStack = them.state.died()
		out.cause = f.kind == faultReturned && f.replica == replica
		if them.state == Returned {
			out.Site = stepSite(r.step)
		} else if len(out.Stack) > 0 {
			out.Site = firstUser(out.Stack)
		}
		return
	}
	if f.replica == replica && (f.kind == faultMergePanicked || f.kind == faultMergeGone) {
		out.State, out.Panic, out.text, out.Stack, out.showStack = Gone, f.value, f.text, f.stack, true
		if f.kind == faultMergePanicked {
			out.State = Panicked
		}
		out.Call, out.Site = waiting{f.monitor, f.seq}.call(replica), firstUser(out.Stack)
		return
	}
	w, call := r.callOf(replica, f)
	out.Call = call
	if call != nil {
		out.State = Waiting
		out.complete = w.complete()
		if w.monitor.isMerge {
			out.State = Merging
			out.executes = r.merge.executing && r.merge.executor == replica
		}
	}
	g := v.goroutine(replica, call != nil && !out.executes, f)
	if g != nil {
		out.Goroutine, out.Block = g.ID, g.State
		if g.Minutes > 0 {
			out.Block += fmt.Sprintf(", %d minutes", g.Minutes)
		}
		out.Other = g.ID != them.goroutine.Load()
		out.Site = siteOf(g)
		out.Stack = userPart(g.Frames, false)
		if call != nil {
			out.callers = callers(out.Stack, out.Site)
		} else if inLibrary(g) {
			out.Block = "" // it is entering or leaving a call
		}
	}
	out.showStack = out.State == Running && f.wantsStacks() || out.executes
}

// wantsStacks reports whether a replica that is in no call may have caused the fault.
func (f fault) wantsStacks() bool {
	switch f.kind {
	case faultFound:
		return !errors.Is(f.cause, collective.ErrMismatch)
	case faultGiven, faultBusy, faultLeft:
		return true
	}
	return false
}

// callOf returns the call that a replica is in: the one in which it is parked, or else any that it has entered and
// not left. The report is nil if it is in no call.
func (r *Run) callOf(replica int, f fault) (waiting, *CallReport) {
	them := &r.replicas[replica]
	w, found := them.wait, them.parked.Load() && !r.merge.executing
	if !found && f.replica == replica && f.monitor != nil && !f.monitor.isMerge {
		w, found = waiting{f.monitor, f.seq}, true
	}
	if !found {
		w.monitor = r.merge.monitor
		w.seq, found = w.monitor.slots[replica].open()
	}
	if !found {
		w.monitor, w.seq, found = r.openCall(replica)
	}
	if !found {
		return w, nil
	}
	return w, w.call(replica)
}

// complete reports whether all local members have entered the call.
func (w waiting) complete() bool {
	for rank, replica := range w.monitor.members {
		if replica < 0 || w.monitor.slots[rank].entered.Load() <= w.seq {
			return false
		}
	}
	return true
}

// call describes the replica's call in w.
func (w waiting) call(replica int) *CallReport {
	rank := w.monitor.rank(replica)
	if rank < 0 {
		return describe(w.monitor, w.seq, nil)
	}
	return describe(w.monitor, w.seq, w.monitor.slots[rank].call(w.seq))
}

// callsLeft returns the number of calls that a replica has finished. The caller holds the lock.
func (r *Run) callsLeft(replica int) uint64 {
	n := r.merge.monitor.slots[replica].left.Load()
	for _, m := range r.detector.monitors {
		if rank := m.rank(replica); rank >= 0 {
			n += m.slots[rank].left.Load()
		}
	}
	return n
}

// reason returns the sentence and the kinds of a fault.
func (r *Run) reason(f fault, replicas []ReplicaReport, v *view) (string, []error) {
	name := r.detector.name
	switch f.kind {
	case faultStuck:
		return r.reasonStuck(f.chain)
	case faultReturned:
		return fmt.Sprintf("%s returned an error: %s", name(f.replica), firstLine(f.text)), nil
	case faultPanicked:
		return fmt.Sprintf("%s panicked: %s", name(f.replica), firstLine(f.text)), []error{collective.ErrPeerLost}
	case faultGone:
		return name(f.replica) + " called runtime.Goexit", []error{collective.ErrPeerLost}
	case faultMergePanicked:
		return fmt.Sprintf("the merge function of %s panicked on %s: %s",
				waiting{f.monitor, f.seq}.call(f.replica).brief(), name(f.replica), firstLine(f.text)),
			[]error{collective.ErrPeerLost}
	case faultMergeGone:
		return fmt.Sprintf("the merge function of %s called runtime.Goexit on %s",
			waiting{f.monitor, f.seq}.call(f.replica).brief(), name(f.replica)), []error{collective.ErrPeerLost}
	case faultOpenCall:
		w := waiting{f.monitor, f.seq}
		return fmt.Sprintf("%s returned while its call %s was under way: a started call must be awaited, and one "+
			"that another goroutine makes must end, before the function returns", name(f.replica), w.call(f.replica)), nil
	case faultBusy:
		return r.reasonBusy(f, replicas, v), nil
	case faultLeft:
		return fmt.Sprintf("%s, but %s did not end: it %s", firstLine(f.text), name(f.replica),
			replicas[f.replica].doing()), nil
	case faultFound:
		return r.reasonFound(f, replicas)
	}
	return firstLine(f.text), nil
}

func (r *Run) reasonStuck(chain []hop) (string, []error) {
	name := r.detector.name
	last := chain[len(chain)-1]
	before := chain[len(chain)-2]
	if them := &r.replicas[last.replica]; them.state.Ended() {
		return fmt.Sprintf("%s returned, but %s waits for it in %s", name(last.replica), name(before.replica),
			before.wait.call(before.replica).brief()), []error{collective.ErrDesync}
	}
	for chain[0].replica != last.replica {
		chain = chain[1:]
	}
	chain = chain[:len(chain)-1]
	lowest := 0
	for i := range chain {
		if chain[i].replica < chain[lowest].replica {
			lowest = i
		}
	}
	chain = slices.Concat(chain[lowest:], chain[:lowest])
	merges := 0
	waits := make([]string, len(chain))
	for i, h := range chain {
		if h.wait.monitor.isMerge {
			merges++
		}
		next := chain[(i+1)%len(chain)].replica
		waits[i] = fmt.Sprintf("%s waits for replica %d in %s", name(h.replica), r.detector.cfg.IDs[next],
			h.wait.call(h.replica).brief())
	}
	kinds := []error{collective.ErrDesync}
	if merges > 0 {
		kinds = append(kinds, collective.ErrMismatch)
	}
	return "the replicas wait for each other: " + strings.Join(waits, ", "), kinds
}

func (r *Run) reasonBusy(f fault, replicas []ReplicaReport, v *view) string {
	them, name := &replicas[f.replica], r.detector.name(f.replica)
	second := "another goroutine"
	if v.self != nil {
		if site := siteOf(v.self); site != (Frame{}) {
			second = site.String()
		}
	}
	switch {
	case r.replicas[f.replica].state.Ended():
		return fmt.Sprintf("a goroutine makes a call for %s, which has returned, at %s", name, second)
	case r.merge.executing && them.State == Merging:
		return fmt.Sprintf("%s makes a call at %s while it is in %s: a merge function makes the calls of "+
			"cross-replica context only", name, second, them.Call.brief())
	case them.Call == nil:
		return fmt.Sprintf("two goroutines make calls for %s at the same time, one of them at %s", name, second)
	}
	return fmt.Sprintf("two goroutines make calls for %s at the same time: one is in %s%s, another makes a call at %s",
		name, them.Call.brief(), them.place(" at "), second)
}

func (r *Run) reasonFound(f fault, replicas []ReplicaReport) (string, []error) {
	if f.replica < 0 {
		return f.text, nil
	}
	name, w := r.detector.name, waiting{f.monitor, f.seq}
	switch {
	case errors.Is(f.cause, collective.ErrMismatch):
		if differing := r.differing(f); differing != "" {
			return "the calls differ: " + differing, nil
		}
	case ofContext(f.cause):
		var kinds []error
		if errors.Is(f.cause, context.DeadlineExceeded) {
			kinds = []error{collective.ErrTimeout, context.DeadlineExceeded}
		}
		absent := r.absent(f, replicas)
		if strings.HasPrefix(absent, " for ") {
			absent = ", waiting" + absent
		}
		return fmt.Sprintf("%s: %s gave up in %s%s", firstLine(f.text), name(f.replica), w.call(f.replica).brief(),
			absent), kinds
	case errors.Is(f.cause, collective.ErrTimeout):
		absent := r.absent(f, replicas)
		if absent == "" && slices.Contains(f.monitor.members, -1) {
			break // it waited for a replica of another process, which the cause names
		}
		return fmt.Sprintf("deadline exceeded: %s waited%s in %s%s", name(f.replica), f.timeout(),
				w.call(f.replica).brief(), absent),
			[]error{collective.ErrTimeout, context.DeadlineExceeded}
	}
	return fmt.Sprintf("%s in %s: %s", name(f.replica), w.call(f.replica).brief(), f.text), nil
}

// timeout returns the time that the call of a fault waited until its deadline, after a space, or "" if unknown.
func (f fault) timeout() string {
	d := f.waited
	if d == 0 {
		if call := f.monitor.slots[f.monitor.rank(f.replica)].call(f.seq); call != nil && call.Options != nil {
			d = call.Options.Timeout
		}
	}
	if d <= 0 {
		return ""
	}
	return " " + d.String()
}

// ofContext reports whether an error of the collective layer or a merge call is the end of a context.
func ofContext(err error) bool {
	if e, ok := err.(*collective.Error); ok {
		err = e.Err // its kind matches DeadlineExceeded for every deadline
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// root returns the innermost error of a chain; the outer ones repeat what the report says of the call.
func root(err error) error {
	for {
		inner := errors.Unwrap(err)
		if e, ok := err.(*collective.Error); ok {
			inner = e.Err
		}
		if inner == nil {
			return err
		}
		err = inner
	}
}

// detail returns the text of an error without the parts that the report says of the call.
func detail(err error) string {
	e, ok := err.(*collective.Error)
	switch {
	case !ok:
		return firstLine(text(err))
	case e.Err == nil:
		return e.Kind.Error()
	}
	return firstLine(e.Kind.Error() + ": " + text(e.Err))
}

// differing lists the calls and the replicas that make them, the call of the fewest replicas first, since that is the
// most likely mistake. It returns "" if the descriptions are equal.
func (r *Run) differing(f fault) string {
	w := waiting{f.monitor, f.seq}
	var calls []string
	makers := map[string][]int{}
	for rank, replica := range f.monitor.members {
		if replica < 0 || f.monitor.slots[rank].entered.Load() <= f.seq {
			continue
		}
		call := w.call(replica)
		if call.Op == unknownOp {
			continue
		}
		text := call.String()
		if makers[text] == nil {
			calls = append(calls, text)
		}
		makers[text] = append(makers[text], replica)
	}
	if len(calls) < 2 {
		return ""
	}
	slices.SortStableFunc(calls, func(a, b string) int { return len(makers[a]) - len(makers[b]) })
	for i, text := range calls {
		who := makers[text]
		verb := " makes "
		if len(who) > 1 {
			verb = " make "
		}
		calls[i] = r.names(who) + verb + text
	}
	return strings.Join(calls, ", ")
}

// names lists replicas: the first few by name, and the number of the rest.
func (r *Run) names(replicas []int) string {
	const shown = 4
	names := make([]string, 0, shown)
	for _, replica := range replicas[:min(len(replicas), shown)] {
		names = append(names, r.detector.name(replica))
	}
	if n := len(replicas) - shown; n > 0 {
		return strings.Join(names, ", ") + fmt.Sprintf(" and %d more", n)
	}
	return strings.Join(names, ", ")
}

// absent describes the replicas that have not entered the call of a fault, or "".
func (r *Run) absent(f fault, replicas []ReplicaReport) string {
	var absent []int
	for rank, other := range f.monitor.members {
		if other >= 0 && f.monitor.slots[rank].entered.Load() <= f.seq {
			absent = append(absent, other)
		}
	}
	switch len(absent) {
	case 0:
		if f.monitor.isMerge && r.merge.executing {
			return ", whose merge function still runs"
		}
		return ""
	case 1:
		return fmt.Sprintf(" for %s, which %s", r.detector.name(absent[0]), replicas[absent[0]].doing())
	}
	return " for " + r.names(absent)
}

// stepSite returns the location of the user's function.
func stepSite(step any) Frame {
	v := reflect.ValueOf(step)
	if v.Kind() != reflect.Func || v.IsNil() {
		return Frame{}
	}
	f := runtime.FuncForPC(v.Pointer())
	if f == nil {
		return Frame{}
	}
	file, line := f.FileLine(f.Entry())
	return Frame{Func: f.Name(), File: file, Line: line}
}
