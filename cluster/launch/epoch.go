package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// epoch is one run of the job's workers, as one agent sees it. All its state except the workers is confined
// to one goroutine.
type epoch struct {
	agent    *Agent
	number   uint32
	layout   layout
	began    time.Time
	workers  []*worker
	running  []*worker
	ended    chan *worker
	patience atomic.Bool // the workers are exiting in order: their child processes are not killed at once
	memory   memoryKills // before the start
	counted  bool

	clusterFile, clusterFolder string // TF_CONFIG's cluster, if it is too long for the environment, and its folder

	stoppedSince map[*worker]time.Time // since when workers have been seen stopped

	failing  bool // a worker has failed
	first    int  // which one, as far as this agent knows
	firstAt  time.Time
	settle   <-chan time.Time // when the other workers have had time to report it themselves
	stopping bool             // they have been asked to exit
	ends     map[int]nodeEnd
	kill     <-chan time.Time // when the workers that still run are killed
	giveUp   <-chan time.Time // when nodes that do not respond are abandoned
	gaveUp   bool
	storeOut bool         // giveUp bounds the wait for the store, which is not back yet
	losses   map[int]loss // by node: those whose agent is lost
	ownErr   error        // the store has ended, or this agent's slot was taken
	cutOff   error        // the store cannot be reached: the state of the other nodes is unknown
}

// loss describes a lost agent.
type loss struct {
	why   string
	since time.Time
}

// nodeEnd is what an agent publishes when all its workers have ended.
type nodeEnd struct {
	Node       int             `json:"node"`
	Failures   []failureReport `json:"failures,omitempty"`
	CleanExits []cleanExit     `json:"clean_exits,omitempty"`
}

// cleanExit is a clean exit: a worker that ended with code 0. It is a failure only if the others still needed it.
type cleanExit struct {
	Worker int    `json:"worker"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
}

// failureReport is a failure: the record, with the last output of the worker.
type failureReport struct {
	failure.Record

	Stderr []string `json:"stderr,omitempty"`
}

// answerTime is how long an agent may take, in addition to the grace, to publish that its workers have ended.
const answerTime = 10 * time.Second

// watch returns when the workers of all nodes have ended, or nothing more can be learned.
func (e *epoch) watch(ctx context.Context) {
	a, done := e.agent, ctx.Done()
	look := time.NewTicker(a.cfg.HeartbeatTimeout / missedMax)
	defer look.Stop()
	for !e.done() {
		select {
		case w := <-e.ended:
			e.workerEnded(w)
		case ev := <-a.peers.events:
			e.handle(ev)
		case sig := <-a.signals:
			e.signalled(sig)
		case <-look.C:
			e.findStopped()
		case <-e.settle:
			e.stop()
		case <-e.kill:
			e.killAll()
		case <-e.giveUp:
			e.giveUp, e.gaveUp = nil, true
		case <-done:
			done = nil
			e.failing, e.stopping = true, true
			e.killAll()
			e.giveUpAfter(answerTime)
		}
	}
}

func (e *epoch) done() bool {
	if len(e.running) > 0 {
		return false
	}
	for node := range e.layout.slots {
		_, ended := e.ends[node]
		if _, lost := e.losses[node]; !ended && !lost {
			return e.gaveUp || e.ownErr != nil || e.cutOff != nil
		}
	}
	return true
}

func (e *epoch) workerEnded(w *worker) {
	e.running = slices.DeleteFunc(e.running, func(o *worker) bool { return o == w })
	if now, ok := readMemoryKills(e.agent.root); ok && e.counted {
		w.memory = memoryKills{now.count - e.memory.count, now.where}
	}
	record, failed := w.record(e.agent.cfg.Grace)
	switch {
	case failed && !w.signalled && !e.failing:
		e.fail(record)
	case e.failing:
	case e.agent.userSignal != nil && len(e.running) > 0 && e.kill == nil:
		e.kill = time.After(e.agent.cfg.Grace) // the others wait for it in vain
	}
	if len(e.running) == 0 {
		e.finish()
	}
}

// findStopped detects workers that were stopped, by SIGSTOP for example, which nothing else may detect: one
// that stays stopped has failed.
func (e *epoch) findStopped() {
	if e.failing {
		return
	}
	now := time.Now()
	for _, w := range e.running {
		if !suspended(e.agent.root, w.pid()) {
			delete(e.stoppedSince, w)
			continue
		}
		since, known := e.stoppedSince[w]
		switch {
		case !known:
			e.stoppedSince[w] = now
			e.agent.screen.print(fmt.Sprintf("lockstep run: worker %d (pid %d) is stopped: resume it with kill -CONT %d; it "+
				"counts as failed after %v\n", w.rank, w.pid(), w.pid(), e.agent.cfg.HeartbeatTimeout))
		case now.Sub(since) >= e.agent.cfg.HeartbeatTimeout:
			w.halt()
			record, _ := w.record(e.agent.cfg.Grace)
			record.Time = since
			e.fail(record)
			return
		}
	}
}

// fail ends the epoch on all nodes: a worker of this one has failed.
func (e *epoch) fail(r failure.Record) {
	if r.Kind == "signal" || r.Kind == "memory" { // else the worker has published it itself
		r.Job, r.Epoch, r.Host = e.agent.cfg.ID, e.number, e.agent.host
		r.Message += e.agent.peers.lastSeen(r.Worker)
		e.agent.peers.record(r)
	}
	e.firstAt = r.Time
	e.agent.peers.publish(r.Worker, "event", "stop", e.number)
	e.failed(r.Worker)
}

// failed gives the workers of this node time to notice that another has failed, to report what they know and
// to exit, before they are asked to.
func (e *epoch) failed(worker int) {
	if !e.failing {
		e.failing, e.first, e.settle = true, worker, time.After(e.agent.cfg.Settle)
	}
}

// stop asks all workers of this node to exit.
func (e *epoch) stop() {
	if e.stopping {
		return
	}
	e.failing, e.stopping, e.settle = true, true, nil
	for _, w := range e.running {
		if w.pid() > 0 && stopped(e.agent.root, w.pid()) {
			w.halt()
		}
	}
	e.signalAll(sigTerminate)
	e.kill = time.After(e.agent.cfg.Grace)
}

// signalAll sends a signal to all workers that are running.
func (e *epoch) signalAll(sig os.Signal) {
	e.patience.Store(true)
	e.each(func(w *worker) { signalGroup(w.pid(), sig) })
}

func (e *epoch) killAll() {
	e.patience.Store(false)
	e.each(func(w *worker) {
		w.killed = true
		killGroup(w.pid())
	})
}

// each calls f for all workers whose process is running, and records that this agent causes their end.
func (e *epoch) each(f func(*worker)) {
	for _, w := range e.running {
		select {
		case <-w.ended:
		default:
			w.signalled = true
			f(w)
		}
	}
}

// signalled handles a user's signal: the first is forwarded; the second kills the workers, also those of the
// other nodes.
func (e *epoch) signalled(sig os.Signal) {
	p := e.agent.peers
	if e.agent.userSignal != nil {
		p.publish(e.agent.cfg.Node, "event", "kill", e.number)
		e.killAll()
		e.giveUpAfter(answerTime)
		return
	}
	e.agent.screen.print(fmt.Sprintf("\nlockstep run: forwarded %s to the workers, which may finish their step; a "+
		"second signal kills them\n", signalName(sig)))
	p.publish(interruption{Node: e.agent.cfg.Node, Terminate: sig == sigTerminate}, "event", "interrupt", e.number)
	e.interrupt(sig)
}

func (e *epoch) interrupt(sig os.Signal) {
	e.agent.userSignal = sig
	if !e.stopping { // else they have been asked already
		e.signalAll(sig)
	}
}

// handle processes an event from another agent.
func (e *epoch) handle(ev event) {
	if e.storeOut && ev.err == nil { // another agent's event came through it, or ev.storeBack
		e.giveUp, e.storeOut = nil, false
		e.expect()
	}
	switch {
	case ev.err != nil:
		e.storeFailed(ev.err)
	case ev.jobEnd != nil:
		e.gaveUp = true // all earlier events of the others have been handled before this
		if len(e.running) > 0 && !e.failing {
			e.ownErr = &jobEndedError{*ev.jobEnd}
			e.stop()
		}
	case ev.slot != nil && ev.slot.Node < len(e.layout.slots):
		e.agent.peers.slots[ev.slot.Node] = ev.slot
		e.slotChanged(ev.slot)
	case ev.kill:
		if e.agent.userSignal == nil {
			e.agent.userSignal = sigInterrupt
		}
		e.killAll()
	case ev.interruption != nil:
		if e.agent.userSignal != nil {
			break // by this node's user too
		}
		sig := sigInterrupt
		if ev.interruption.Terminate {
			sig = sigTerminate
		}
		e.interrupt(sig)
	case ev.epoch != e.number: // of an epoch that is over
	case ev.stop:
		e.failed(ev.worker)
		e.expect()
	case ev.end != nil:
		e.ends[ev.end.Node] = *ev.end
	}
}

// storeFailed ends this node's workers when the store cannot be reached any more. The others may continue
// without them, or restart: this agent cannot know that, and must not end them.
func (e *epoch) storeFailed(err error) {
	a := e.agent
	switch {
	case e.ownErr != nil || e.cutOff != nil:
	case a.peers.gone(err):
		e.ownErr = a.peers.storeLost(err)
		a.peers.cutOff = err
		e.stop()
	case len(e.running) == 0 && !e.failing: // they have exited normally, which the others may yet report of theirs
		if e.giveUp == nil {
			e.giveUpAfter(a.cfg.RendezvousTimeout)
			e.storeOut = true
		}
	default:
		e.isolate(err)
		e.stop()
	}
}

func (e *epoch) isolate(err error) {
	a := e.agent
	e.cutOff, e.failing, a.peers.cutOff = err, true, err
	a.screen.print(fmt.Sprintf("lockstep run: %v cannot reach the other nodes, and ends its workers: %v\n",
		&e.layout.slots[e.layout.node].registration, err))
}

// doubt determines whether nodes that do not respond are at fault, or this node's own connection to the
// store.
func (e *epoch) doubt(ctx context.Context) {
	if !e.gaveUp || e.ownErr != nil || e.cutOff != nil || e.agent.cfg.Nodes == 1 {
		return
	}
	if err := e.agent.peers.reach(ctx); err != nil && ctx.Err() == nil {
		e.isolate(err)
	}
}

// slotChanged ends the epoch when a node's agent is lost before its workers have ended, or when another has
// replaced it.
func (e *epoch) slotChanged(s *nodeSlot) {
	was := &e.layout.slots[s.Node]
	l := loss{why: s.Why, since: s.Since}
	switch {
	case s.Nonce != was.Nonce && s.Node == e.layout.node:
		e.ownErr = fmt.Errorf("%v was declared lost, and %w by the agent on host %s with pid %d", &was.registration,
			errReplaced, s.Host, s.PID)
		e.stop()
		return
	case s.Nonce != was.Nonce:
		l = loss{why: fmt.Sprintf("the agent on host %s with pid %d has replaced it", s.Host, s.PID), since: time.Now()}
	case s.State == gone:
		l = loss{why: "it has left the job", since: time.Now()}
	case s.State == present:
		return
	case s.Node == e.layout.node: // declared lost: the others have ended the epoch, and this agent can join the next
		e.failed(e.layout.first)
		return
	}
	_, ended := e.ends[s.Node]
	if _, known := e.losses[s.Node]; ended || known {
		return
	}
	e.losses[s.Node] = l
	if !e.failing {
		e.firstAt = l.since
		e.agent.printUnlessQuiet(fmt.Sprintf("lockstep run: %v is lost, and its workers with it: %s\n", &was.registration,
			l.why))
	}
	e.failed(e.layout.firstOf(s.Node))
	e.expect()
}

// catchUp handles agents that were lost, or replaced, while the epoch was formed with them: no further event
// reports that.
func (e *epoch) catchUp(ctx context.Context) {
	p := e.agent.peers
	away := func(s *nodeSlot) bool {
		return s != nil && (s.State == lost || s.Nonce != e.layout.slots[s.Node].Nonce)
	}
	if !slices.ContainsFunc(p.slots, away) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	slots, _, _, err := p.read(ctx) // the events may be older than the agreed membership
	if err != nil {
		return // an event reports a lost store
	}
	for _, s := range slots {
		if away(s) {
			e.slotChanged(s)
		}
	}
}

// expect abandons the nodes that do not publish in time that their workers have ended.
func (e *epoch) expect() {
	if e.failing && len(e.running) == 0 && e.giveUp == nil {
		e.giveUpAfter(e.agent.cfg.Settle + e.agent.cfg.Grace + answerTime)
	}
}

// giveUpAfter abandons the nodes that do not respond within d, whether or not the store is back.
func (e *epoch) giveUpAfter(d time.Duration) { e.giveUp, e.storeOut = time.After(d), false }

// order determines which of this node's workers failed first, now that all have ended: the event of a
// consequence may have arrived earlier.
func (e *epoch) order() {
	if !slices.ContainsFunc(e.workers, func(w *worker) bool { return w.rank == e.first && e.failing }) {
		return // it was another node's
	}
	for _, w := range e.workers {
		if _, failed := w.record(e.agent.cfg.Grace); failed && !w.signalled && w.at.Before(e.firstAt) {
			e.first, e.firstAt = w.rank, w.at
		}
	}
}

// finish publishes how this node's workers ended.
func (e *epoch) finish() {
	e.order()
	end := nodeEnd{Node: e.agent.cfg.Node, Failures: e.failures(), CleanExits: e.cleanExits()}
	e.ends[end.Node] = end
	p := e.agent.peers
	p.publish(end.bounded(), "event", "end", e.number, end.Node)
	e.expect()
}

// failures merges the records of this node's workers with the agent's observations.
func (e *epoch) failures() []failureReport {
	own := map[int]failure.Record{}
	if dir := e.agent.cfg.Records; dir != "" {
		records, err := failure.Read(dir, e.number)
		if err != nil {
			e.agent.screen.print(fmt.Sprintf("lockstep run: %v\n", err))
		}
		for _, r := range records {
			own[r.Worker] = r
		}
	}
	var out []failureReport
	for _, w := range e.workers {
		seen, failed := w.record(e.agent.cfg.Grace)
		seen.Job, seen.Epoch, seen.Host = e.agent.cfg.ID, e.number, e.agent.host
		if r, ok := own[w.rank]; ok {
			if w.halted == nil {
				seen = failure.Merge(r, seen)
			}
		} else if !failed {
			continue
		} else {
			e.attribute(w, &seen)
		}
		last, crash := w.tail.lines()
		switch {
		case w.halted != nil:
			last = w.halted // its output after it was continued in order to exit is irrelevant
		case seen.Kind == "signal" && nativeCrash(crash) >= 0:
			last = nil // the goroutines, which the stack contains already
		}
		out = append(out, failureReport{seen, last})
	}
	return out
}

// cleanExits returns this node's workers that ended with exit code 0 without being asked to.
func (e *epoch) cleanExits() (out []cleanExit) {
	for _, w := range e.workers {
		if w.err == nil && w.ending.code == 0 && !w.signalled {
			out = append(out, cleanExit{w.rank, e.agent.host, w.pid()})
		}
	}
	return out
}

// complete adds to the record of a root cause that reported nothing that its worker exited with code 0.
func (e *epoch) complete(rep *failure.Report) {
	if !rep.Unseen {
		return
	}
	for _, end := range e.ends {
		for _, f := range end.CleanExits {
			if f.Worker == rep.Root.Worker {
				rep.Root.Host, rep.Root.PID = f.Host, f.PID
				rep.Root.Message = "exited with code 0 while others still waited for it; " +
					strings.TrimPrefix(rep.Root.Message, "it reported nothing; ")
			}
		}
	}
}

// attribute adds to a record that only this agent can write what the worker itself would have reported.
func (e *epoch) attribute(w *worker, r *failure.Record) {
	if !w.signalled && r.Worker != e.first && r.Kind != "signal" && r.Kind != "memory" && !r.Time.Before(e.firstAt) {
		r.Blames = []int{e.first} // most likely it has lost that one
	}
	if w.err == nil && r.Kind != "interrupted" {
		r.Message += e.agent.peers.lastSeen(r.Worker)
	}
}

// outcome returns the result of the epoch.
func (e *epoch) outcome() Outcome {
	o := Outcome{Restarts: int(e.number), Interrupted: e.agent.userSignal != nil}
	if errors.Is(e.ownErr, errReplaced) { // the job continues without this agent, which cannot know its result
		o.Code = 1
		return o
	}
	var records []failure.Record
	for _, end := range e.ends {
		for _, f := range end.Failures {
			records = append(records, f.Record)
		}
	}
	unknown := e.ownErr != nil || e.cutOff != nil // the state of the other nodes
	for node := range e.layout.slots {
		if _, ok := e.ends[node]; !ok && !unknown {
			records = append(records, e.silent(node)...)
		}
	}
	rep, failed := failure.Find(records)
	if unknown && (rep.Unseen || follows(rep.Root)) {
		failed = false // the root cause is that this node is cut off
	}
	e.complete(&rep)
	switch {
	case failed && (!o.Interrupted || rep.Root.Kind != "interrupted"):
		o.Report, o.Code = &rep, rep.Root.ExitCode
		if o.Code <= 0 {
			o.Code = 1
		}
	case o.Interrupted:
		o.Code = codeInterrupted
	case unknown || e.failing:
		o.Code = 1
	}
	return o
}

// follows reports whether a failure is a consequence of another.
func follows(r failure.Record) bool {
	return len(r.Blames) > 0 || slices.Contains([]string{"lost", "store", "timeout", "interrupted"}, r.Kind)
}

// silent builds records for the workers of a node whose agent has not published how they ended. They are
// causes, not consequences: the workers ended with their agent, and the others lost them because of that.
func (e *epoch) silent(node int) (out []failure.Record) {
	c, first := &e.layout.slots[node], e.layout.firstOf(node)
	l, known := e.losses[node]
	if !known {
		l = loss{why: "it does not respond", since: time.Now()}
	}
	for i := range c.Workers {
		out = append(out, failure.Record{
			Job: e.agent.cfg.ID, Epoch: e.number, Worker: first + i, Host: c.Host, Time: l.since, Kind: "exit",
			Message: fmt.Sprintf("the agent of its %v is lost: %s; it was killed, or its host or network is down",
				&c.registration, l.why),
			Step: -1, ExitCode: -1,
		})
	}
	return out
}

// finalError returns the error of an agent whose job cannot continue because another agent, or the store, is
// missing.
func (e *epoch) finalError() error {
	if e.ownErr != nil {
		return e.ownErr
	}
	if e.cutOff != nil {
		return e.agent.isolated(e.cutOff)
	}
	for node := range e.layout.slots {
		if l, ok := e.losses[node]; ok {
			return fmt.Errorf("%v is lost: %s", &e.layout.slots[node].registration, l.why)
		}
	}
	return nil
}

// summary describes in one sentence how the job has ended, for agents that join too late.
func (e *epoch) summary(o *Outcome, err error) string {
	switch {
	case o.Interrupted:
		return "the user ended it"
	case o.Report != nil:
		return fmt.Sprintf("%s: %s", e.who(o.Report.Root), short(o.Report.Root.Message))
	case err != nil:
		return err.Error()
	}
	return ""
}
