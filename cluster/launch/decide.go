package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// decide is what the launcher does next: it returns the state after an input, and the actions to perform, in their
// order. An input is a message of another agent, what happened on this node, or the result of an action. decide has no
// side effects, and knows only the time that it is given; [Agent.run] performs the actions.
func decide(s state, now time.Time, in input) (state, []action) {
	d := decision{state: s, now: now}
	switch {
	case d.result != nil || d.ignores(in): // the agent only ends what it has begun
	case d.phase == entering || d.phase == checking:
		d.enter(in)
	case d.phase == joining:
		d.join(in)
	case d.phase == running:
		d.watch(in)
	default:
		d.resume(in)
	}
	return d.state, d.actions
}

// state is what an agent knows of its job. A step makes a new one: it does not change the maps and slices of the state
// before it.
type state struct {
	cfg      *Config      // does not change
	mine     registration // this agent's, without ports
	nonce    string       // this agent's
	phase    phase
	first    uint32          // the first one with this agent
	slots    []*nodeSlot     // by node, nil: free; as of the messages received
	before   map[string]bool // the nonces of the agents of an earlier run of the job, nil: none; earlier describes it
	earlier  string
	rival    string // the nonce of the agent whose heartbeat is checked, or that sends none
	restart  string // to print when the next epoch has begun
	delays   restartDelays
	signal   os.Signal // the user's first one, on any node; nil: none
	canceled bool      // the context of Run has ended
	epoch              // that is joined, runs, or is over
	result   *result   // nil: the agent runs
}

// ignores reports whether an input does not concern this agent.
func (s *state) ignores(in input) bool {
	if m, ok := in.(interface{ epoch() uint32 }); ok && m.epoch() < s.first {
		return true // the agent has joined later
	}
	switch m := in.(type) {
	case *nodeSlot:
		return m.Node >= s.cfg.Nodes || m.cleared()
	case *nodeEnd:
		return m.Node >= s.cfg.Nodes
	case *interruption:
		return m.Node == s.cfg.Node
	}
	return false
}

// phase is what an agent does.
type phase int

const (
	entering phase = iota // it takes its node's slot
	checking              // it has the slot, and compares it with the others
	joining               // it waits for the other agents at the start of an epoch
	running               // its workers run, or have ended and those of other nodes have not
	resuming              // an epoch is over: it checks the store, or waits before the next epoch
)

// result is how the agent ends.
type result struct {
	Outcome
	err error
}

// epoch is the state of one run of the job's workers, as one agent sees it: from the wait for the other agents on.
type epoch struct {
	number   uint32
	joinBy   time.Time // when the wait for the other agents ends
	proposed bool      // this agent has proposed the members of the epoch
	cutOff   error     // the store cannot be reached: the state of the other nodes is unknown

	layout       layout
	began        time.Time
	running      []int  // the ranks of this node's workers that have not ended
	exits        []exit // of those that have
	stoppedSince map[int]time.Time
	userFirst    bool // the user ended the job before a worker had failed

	failing  bool      // a worker has failed
	cause    int       // which one, as far as this agent knows
	causeAt  time.Time // when; zero: another agent has reported it
	settleAt time.Time // when the other workers have had time to report it themselves
	stopping bool      // the workers have been asked to exit
	killAt   time.Time // when the workers that still run are killed
	giveUpAt time.Time // when nodes that do not respond are abandoned
	gaveUp   bool
	storeOut bool // giveUpAt bounds the wait for the store, which is not back yet
	ends     map[int]nodeEnd
	losses   map[int]loss // by node: those whose agent is lost
	err      error        // why this agent ends, while others may continue: its slot or the store is lost
}

// loss describes a lost agent.
type loss struct {
	why   string
	since time.Time
}

// exit is how a worker of this node has ended, as far as its launcher can tell.
type exit struct {
	failure.Record          // without what only the worker knows
	failed         bool     // else it has ended normally
	clean          bool     // with code 0, without being asked to
	signalled      bool     // this agent had asked it to exit, or has killed it
	halted         bool     // it was found stopped
	native         bool     // it crashed in native code
	started        bool     // false: it could not be
	stderr         []string // its last output
	seen           string   // ends a sentence: its last heartbeat
}

// answerTime is how long an agent may take, in addition to the grace, to publish that its workers have ended.
const answerTime = 10 * time.Second

// Inputs: the messages, and these.
type (
	input any

	begin     struct{}                   // the agent starts
	signalled struct{ sig os.Signal }    // by this node's user
	canceled  struct{ err error }        // the context of Run has ended
	tick      struct{}                   // the state's deadline is reached
	storeLost struct{ err error }        // for the heartbeat timeout, or for good
	storeBack struct{}                   // the store shows all heartbeats again
	exited    struct{ exit }             // all processes of a worker have ended
	stopsSeen struct{ pids map[int]int } // the processes of the workers, by rank, that are stopped

	// The results of actions.
	found struct { // of readMessages
		stoppable
		messages []message
	}
	cleared struct{ stoppable } // of clearEnds
	contest struct {            // of checkHolder
		stoppable
		alive bool
	}
	written struct { // of writeSlot
		stoppable
		done bool // else another agent was faster
	}
	reporting struct{ stoppable } // of takeReports
	ready     struct {            // of joinEpoch
		stoppable
		slot *nodeSlot // this node's
	}
	launched struct{ err error }         // of startWorkers
	listed   struct{ slots []*nodeSlot } // of readSlots
	halted   struct{ exit }              // of haltWorker
	gathered struct {                    // of gatherRecords, by rank
		err  error
		own  map[int]failure.Record // the failures that workers have recorded themselves
		seen map[int]string         // the end of a sentence: the last heartbeat
	}
	probed struct { // of probeStore
		err       error  // the store cannot be reached
		unrelated string // describes processes of other jobs at the store
	}
	waited struct{ stoppable } // of pauseFor and awaitStore
)

// Actions.
type (
	action any

	printText      string
	readMessages   struct{}
	clearEnds      struct{ held []message } // removes the end of an earlier run
	checkHolder    struct{}                 // looks for reports of the agent that has this node's slot
	writeSlot      struct{ slot, old *nodeSlot }
	takeReports    struct{}               // makes this agent the one that reports for its node
	startPeers     struct{}               // begins to report, and to receive messages
	joinEpoch      struct{ by time.Time } // reports in this node's slot that it is ready for the epoch
	propose        struct{ message }      // the first one of all agents counts
	publish        struct{ message }
	startWorkers   struct{}
	readSlots      struct{}
	signalWorkers  struct{ sig os.Signal }
	stopWorkers    struct{} // asks them to exit
	killWorkers    struct{}
	haltWorker     struct{ rank int } // records that it was found stopped
	publishFailure struct{ failure.Record }
	gatherRecords  struct{} // of this node's workers, which have ended
	releaseWorkers struct{} // releases what the workers of an epoch have used
	printFailure   struct {
		report *failure.Report
		of     epoch
	}
	probeStore struct{}
	pauseFor   struct{ time.Duration }
	awaitStore struct{}
	withdraw   struct{ result } // ends the job, if the others count on this agent
	endJob     struct {
		code int
		why  string
	}
)

// decision is a step of decide.
type decision struct {
	state
	now     time.Time
	actions []action
}

func (d *decision) do(a action) { d.actions = append(d.actions, a) }

// print prints a message about the other nodes, unless another agent does.
func (d *decision) print(format string, args ...any) {
	if !d.cfg.Quiet {
		d.printOwn(format, args...)
	}
}

// printOwn prints a message about this node.
func (d *decision) printOwn(format string, args ...any) {
	d.do(printText(fmt.Sprintf(format, args...)))
}

// publish sends a message to the other agents.
func (d *decision) publish(m message) {
	if d.cfg.Nodes > 1 {
		d.do(publish{m})
	}
}

// setSlot records a node's slot.
func (d *decision) setSlot(s *nodeSlot) {
	d.slots = slices.Clone(d.slots)
	d.slots[s.Node] = s
}

// joinNext joins an epoch.
func (d *decision) joinNext(number uint32) {
	d.phase, d.epoch = joining, epoch{number: number, joinBy: d.now.Add(d.cfg.RendezvousTimeout)}
	for _, s := range d.slots {
		d.await(s)
	}
	d.do(joinEpoch{d.joinBy})
}

// await reports that an agent is lost, and that a replacement is awaited.
func (d *decision) await(s *nodeSlot) {
	if s != nil && s.State == lost && s.Node != d.cfg.Node {
		d.print("lockstep run: %v is lost: %s; waiting up to %v for another agent with --node-rank %d\n", &s.registration,
			s.Why, d.cfg.RendezvousTimeout, s.Node)
	}
}

// join decides about the input of an agent that waits until the agents of all nodes have joined an epoch, or the next
// one if it has started without this agent. The wait ends for all agents when the user or another agent ends the job,
// or when a node's agent does not join in time: the first one, or the replacement of a lost one.
func (d *decision) join(in input) {
	if m, is := in.(message); is && endIn(m) != nil {
		d.fail(&jobEndedError{*endIn(m)})
		return
	}
	switch in := in.(type) {
	case ready:
		switch late := errors.Is(in.err, context.DeadlineExceeded) && !d.now.Before(d.joinBy); {
		case in.sig != nil:
			d.stop(in.sig)
		case late:
			d.do(probeStore{})
		case in.err != nil:
			d.fail(in.err)
		default:
			d.setSlot(in.slot)
		}
	case tick:
		d.do(probeStore{})
	case probed:
		if d.cutOff = in.err; in.err == nil {
			in.err = d.missing(in.unrelated)
		}
		d.fail(in.err)
	case signalled:
		d.stop(in.sig)
	case canceled:
		d.canceled = true
		d.fail(in.err)
	case storeLost:
		if d.cfg.storeGone(in.err) {
			d.cutOff = in.err
			d.fail(in.err)
			return
		}
		// it can still recover before the rendezvous timeout
		d.print("lockstep run: node %d cannot reach the other nodes, and retries: %v\n", d.cfg.Node, in.err)
	case *interruption:
		d.signal = in.signal()
		d.fail(fmt.Errorf("node %d was stopped by %s", in.Node, signalText(d.signal)))
	case *killRequest:
		d.signal = sigInterrupt
		d.fail(errors.New("another node was stopped by its user"))
	case *epochMembers:
		d.begun(in)
	case *nodeSlot:
		d.slotWhileJoining(in)
	}
	if d.phase == joining && d.result == nil && !d.proposed && d.complete() {
		d.proposed = true
		m := &epochMembers{ofEpoch: ofEpoch{d.number}}
		for _, s := range d.slots {
			m.Slots = append(m.Slots, *s)
		}
		if d.cfg.Nodes == 1 {
			d.start(m)
			return
		}
		d.do(propose{m})
	}
}

// stop ends the agent: its user has stopped it before the epoch has begun.
func (d *decision) stop(sig os.Signal) {
	d.signal = sig
	d.fail(d.stoppedEarly())
}

// complete reports whether all agents have joined the epoch.
func (d *decision) complete() bool {
	return !slices.ContainsFunc(d.slots, func(s *nodeSlot) bool {
		return s == nil || s.State != present || s.Epoch != d.number || !s.Ready
	})
}

// begun starts the workers, if an epoch has begun with this agent.
func (d *decision) begun(m *epochMembers) {
	switch {
	case m.Epoch != d.number:
	case len(m.Slots) != d.cfg.Nodes:
		d.fail(fmt.Errorf("this agent expects %d nodes, but the job has started with %d", d.cfg.Nodes, len(m.Slots)))
	case m.has(d.nonce):
		d.start(m)
	case int(d.number) >= d.cfg.RestartsMax: // it was declared lost when the others began
		d.fail(fmt.Errorf("the job continues without %v, which was declared lost", &d.slots[d.cfg.Node].registration))
	default:
		d.epoch = epoch{number: d.number + 1, joinBy: d.joinBy}
		d.do(joinEpoch{d.joinBy})
	}
}

// slotWhileJoining handles a change of a node's slot before the epoch has begun.
func (d *decision) slotWhileJoining(s *nodeSlot) {
	before, own := d.slots[s.Node], s.Node == d.cfg.Node
	d.setSlot(s)
	d.await(s)
	switch {
	case before == nil:
	case before.Nonce == s.Nonce && before.State == lost && s.State == present && !own:
		d.print("lockstep run: %v is back\n", &s.registration)
	case before.Nonce != s.Nonce && s.State == present:
		d.print("lockstep run: %v has replaced the agent on host %s with pid %d\n", &s.registration, before.Host,
			before.PID)
	}
	switch {
	case !own:
	case s.Nonce != d.nonce:
		d.fail(before.replaced(s))
	case s.State == lost: // wrongly
		d.do(joinEpoch{d.joinBy})
	}
}

// start starts this node's workers in an epoch.
func (d *decision) start(m *epochMembers) {
	d.phase = running
	if d.restart != "" {
		d.printOwn("%s", d.restart)
		d.restart = ""
	}
	d.layout, d.began = lay(m.Slots, d.cfg.Node), d.now
	for local := range d.cfg.Workers {
		d.epoch.running = append(d.epoch.running, d.epoch.layout.first+local)
	}
	d.do(startWorkers{})
	if slices.ContainsFunc(d.slots, d.epoch.away) { // no further message reports it
		d.do(readSlots{}) // the messages may be older than the agreed membership
	}
}

// away reports whether a slot is that of an agent that was lost, or replaced, while the epoch was formed with it.
func (e *epoch) away(s *nodeSlot) bool {
	return s != nil && (s.State == lost || s.Nonce != e.layout.slots[s.Node].Nonce)
}

// fail ends the agent, and the job for all, because the epoch cannot begin.
func (d *decision) fail(err error) {
	if d.cutOff != nil {
		err = d.isolated(err)
	}
	o := Outcome{Code: d.code(), Restarts: int(d.number), Interrupted: d.signal != nil}
	if ended := (*jobEndedError)(nil); errors.As(err, &ended) {
		o.Code = ended.Code
	}
	d.end(o, err, err.Error())
}

// end ends the agent, and the job for all; why is for agents that join too late. An agent whose slot another one has
// taken ends nothing, nor does one that cannot reach the store: the others decide about the job.
func (d *decision) end(o Outcome, err error, why string) {
	d.result = &result{o, err}
	if d.cfg.Nodes > 1 && d.cutOff == nil && !errors.Is(err, errReplaced) {
		d.do(endJob{o.Code, why})
	}
}

// code is the exit code of an agent that ends without a result of its workers.
func (d *decision) code() int {
	if d.signal != nil {
		return codeInterrupted
	}
	return 1
}

// resume decides what follows an epoch that is over.
func (d *decision) resume(in input) {
	switch in := in.(type) {
	case probed: // the nodes that do not respond are at fault, or this node's connection to the store
		if in.err != nil {
			d.isolate(in.err)
		}
		d.conclude()
	case waited:
		switch {
		case in.sig != nil:
			d.stop(in.sig)
			return
		case in.err != nil:
			d.fail(in.err)
			return
		case d.cutOff != nil:
			e := &d.epoch // which may not be over for the other nodes: they may not have noticed that these workers have ended
			d.publish(&epochStop{ofEpoch{d.number}, e.layout.first})
			end := e.ends[d.cfg.Node]
			d.publish(end.bounded())
			d.printOwn("lockstep run: node %d reaches the other nodes again\n", d.cfg.Node)
		}
		d.joinNext(d.number + 1)
	}
}

// conclude decides, at the end of an epoch, between the end of the job and a restart.
func (d *decision) conclude() {
	e := &d.epoch
	d.phase = resuming
	d.do(releaseWorkers{})
	o := d.outcome()
	last := int(d.number) >= d.cfg.RestartsMax || o.Interrupted || d.canceled || e.err != nil ||
		d.cutOff != nil && e.storeOut // it was awaited for the rendezvous timeout already
	if o.Report != nil && !d.cfg.Quiet {
		d.do(printFailure{o.Report, *e})
	}
	if o.Code == 0 || last {
		err := d.finalError()
		d.end(o, err, d.summary(&o, err))
		return
	}
	if (o.Report != nil || d.cutOff != nil) && !d.cfg.Quiet {
		d.restart = fmt.Sprintf("lockstep run: starting all %d workers again: restart %d of %d\n", e.layout.world, d.number+1,
			d.cfg.RestartsMax)
	}
	if d.cutOff != nil {
		d.printOwn("lockstep run: node %d waits up to %v to reach the other nodes again\n", d.cfg.Node,
			d.cfg.RendezvousTimeout)
		d.do(awaitStore{})
		return
	}
	wait := d.delays.next(o.Report)
	if wait == 0 {
		d.joinNext(d.number + 1)
		return
	}
	d.print("lockstep run: waiting %v before the restart: the workers made no progress\n", wait)
	d.do(pauseFor{wait})
}

// deadline returns the time of the next tick; zero: there is none.
func (s *state) deadline() (first time.Time) {
	e, times := &s.epoch, []time.Time{s.joinBy}
	if s.phase == running {
		times = []time.Time{e.settleAt, e.killAt, e.giveUpAt}
	}
	for _, at := range times {
		if first.IsZero() || !at.IsZero() && at.Before(first) {
			first = at
		}
	}
	return first
}
