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

// epoch is one life of the job's workers, as one agent sees it. All but the workers themselves happens on one goroutine.
type epoch struct {
	agent    *Agent
	number   uint32
	layout   layout
	began    time.Time
	workers  []*worker
	running  []*worker
	ended    chan *worker
	patience atomic.Bool // the workers are ending in order: nothing that they started is killed at once
	memory   memoryKills // before the start
	counted  bool

	asleep map[*worker]time.Time // since when workers have been seen stopped

	failing  bool // a worker has failed
	first    int  // which, as far as this agent knows
	firstAt  time.Time
	settle   <-chan time.Time // when the other workers have had the time to tell of it themselves
	stopping bool             // they have been asked to end
	ends     map[int]nodeEnd
	kill     <-chan time.Time // when what still runs is killed
	giveUp   <-chan time.Time // when nodes that do not answer are given up
	gaveUp   bool
	losses   map[int]loss // by node: those whose agent is gone
	alone    error        // the store is gone, or this agent's place in the job
	cutOff   error        // the store cannot be reached: what has become of the other nodes is not known
}

// loss is what is known of an agent that is gone.
type loss struct {
	why   string
	since time.Time
}

// nodeEnd is what an agent tells the others when all its workers have ended.
type nodeEnd struct {
	Node     int    `json:"node"`
	Failures []told `json:"failures,omitempty"`
	Fine     []fine `json:"fine,omitempty"`
}

// fine is a worker that ended with exit code 0, which is no failure unless the others still needed it.
type fine struct {
	Worker int    `json:"worker"`
	Host   string `json:"host"`
	PID    int    `json:"pid"`
}

// told is a failure, and what the worker wrote last.
type told struct {
	failure.Record

	Stderr []string `json:"stderr,omitempty"`
}

// answerTime is how long an agent may take, besides the grace, to say that its workers have ended.
const answerTime = 10 * time.Second

// watch returns when the workers of all nodes have ended, or nothing more can be learned.
func (e *epoch) watch(ctx context.Context) {
	a, done := e.agent, ctx.Done()
	look := time.NewTicker(a.cfg.HeartbeatTimeout / silentBeats)
	defer look.Stop()
	for !e.over() {
		select {
		case w := <-e.ended:
			e.workerEnded(w)
		case ev := <-a.peers.events:
			e.heard(ev)
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
			e.giveUp = time.After(answerTime)
		}
	}
}

func (e *epoch) over() bool {
	if len(e.running) > 0 {
		return false
	}
	for node := range e.layout.cards {
		_, ended := e.ends[node]
		if _, lost := e.losses[node]; !ended && !lost {
			return e.gaveUp || e.alone != nil || e.cutOff != nil
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
	case failed && !w.asked && !e.failing:
		e.fail(record)
	case e.failing:
	case e.agent.asked != nil && len(e.running) > 0 && e.kill == nil:
		e.kill = time.After(e.agent.cfg.Grace) // the others wait for it in vain
	}
	if len(e.running) == 0 {
		e.finish()
	}
}

// findStopped looks for workers that were stopped, by SIGSTOP say, of which nobody else may take notice: one that stays so has failed.
func (e *epoch) findStopped() {
	if e.failing {
		return
	}
	now := time.Now()
	for _, w := range e.running {
		if !suspended(e.agent.root, w.pid()) {
			delete(e.asleep, w)
			continue
		}
		since, known := e.asleep[w]
		switch {
		case !known:
			e.asleep[w] = now
			e.agent.screen.say(fmt.Sprintf("lockstep run: worker %d (pid %d) is stopped: kill -CONT %d has it go on; it has failed if it stays so for %v\n", w.rank, w.pid(), w.pid(), e.agent.cfg.HeartbeatTimeout))
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
	if r.Kind == "signal" || r.Kind == "memory" { // else it has told itself
		r.Job, r.Epoch, r.Host = e.agent.cfg.ID, e.number, e.agent.host
		r.Message += e.agent.peers.lastSeen(r.Epoch, r.Worker)
		e.agent.peers.record(r)
	}
	e.firstAt = r.Time
	e.agent.peers.publish(r.Worker, "event", "stop", e.number)
	e.failed(r.Worker)
}

// failed gives the workers of this node a moment to notice that another has failed, to tell what they know and to end, before they are
// asked to.
func (e *epoch) failed(worker int) {
	if !e.failing {
		e.failing, e.first, e.settle = true, worker, time.After(e.agent.cfg.Settle)
	}
}

// stop asks all workers of this node to end.
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
	e.ask(sigTerminate)
	e.kill = time.After(e.agent.cfg.Grace)
}

// ask sends a signal to all workers that have not ended.
func (e *epoch) ask(sig os.Signal) {
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

// each calls f for all workers whose process has not ended, and notes that how they end is not of their own.
func (e *epoch) each(f func(*worker)) {
	for _, w := range e.running {
		select {
		case <-w.ended:
		default:
			w.asked = true
			f(w)
		}
	}
}

// signalled acts on the user's wish: it is passed on once; the second time the workers are killed, and those of the other nodes too.
func (e *epoch) signalled(sig os.Signal) {
	p := e.agent.peers
	if e.agent.asked != nil {
		p.publish(e.agent.cfg.Node, "event", "kill", e.number)
		e.killAll()
		e.giveUp = time.After(answerTime)
		return
	}
	e.agent.screen.say(fmt.Sprintf("\nlockstep run: passed %s on to the workers, which may end their step; once more kills them\n", signalName(sig)))
	p.publish(interruption{Node: e.agent.cfg.Node, Terminate: sig == sigTerminate}, "event", "interrupt", e.number)
	e.interrupt(sig)
}

func (e *epoch) interrupt(sig os.Signal) {
	e.agent.asked = sig
	if !e.stopping { // else they have been asked
		e.ask(sig)
	}
}

// heard acts on what another agent has said.
func (e *epoch) heard(ev event) {
	switch {
	case ev.err != nil:
		e.storeFailed(ev.err)
	case ev.over != nil:
		e.gaveUp = true // what the others had to tell has been heard before this
		if len(e.running) > 0 && !e.failing {
			e.alone = &overError{*ev.over}
			e.stop()
		}
	case ev.seat != nil && ev.seat.Node < len(e.layout.cards):
		e.agent.peers.seats[ev.seat.Node] = ev.seat
		e.seatChanged(ev.seat)
	case ev.kill:
		if e.agent.asked == nil {
			e.agent.asked = sigInterrupt
		}
		e.killAll()
	case ev.interruption != nil:
		if e.agent.asked != nil {
			break // by this node's user as well
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

// storeFailed ends this node's workers when the store cannot be reached any more. The others may go on without them,
// or begin again: that is not for this agent to know, nor to end.
func (e *epoch) storeFailed(err error) {
	a := e.agent
	switch {
	case e.alone != nil || e.cutOff != nil:
	case a.peers.gone(err):
		e.alone = a.peers.storeLost(err)
		a.peers.cutOff = err
		e.stop()
	case len(e.running) == 0 && !e.failing: // they have ended as they should, which the others may yet say of theirs
		if e.giveUp == nil {
			e.giveUp = time.After(a.cfg.RendezvousTimeout)
		}
	default:
		e.isolate(err)
		e.stop()
	}
}

func (e *epoch) isolate(err error) {
	a := e.agent
	e.cutOff, e.failing, a.peers.cutOff = err, true, err
	a.screen.say(fmt.Sprintf("lockstep run: %v cannot reach the other nodes, and ends its workers: %v\n",
		&e.layout.cards[e.layout.node].card, err))
}

// doubt finds out whether nodes that do not answer are to blame for it, or this node's own connection to the store.
func (e *epoch) doubt(ctx context.Context) {
	if !e.gaveUp || e.alone != nil || e.cutOff != nil || e.agent.cfg.Nodes == 1 {
		return
	}
	if err := e.agent.peers.reach(ctx); err != nil && ctx.Err() == nil {
		e.isolate(err)
	}
}

// seatChanged sees to it that the epoch ends when a node's agent is lost before its workers have ended, or when another has taken its place.
func (e *epoch) seatChanged(s *seat) {
	was := &e.layout.cards[s.Node]
	l := loss{why: s.Why, since: s.Since}
	switch {
	case s.Nonce != was.Nonce && s.Node == e.layout.node:
		e.alone = fmt.Errorf("%v was taken for lost, and %w by the agent on host %s with pid %d", &was.card, errReplaced, s.Host, s.PID)
		e.stop()
		return
	case s.Nonce != was.Nonce:
		l = loss{why: fmt.Sprintf("the agent on host %s with pid %d has come in its place", s.Host, s.PID), since: time.Now()}
	case s.State == gone:
		l = loss{why: "it has left the job", since: time.Now()}
	case s.State == here:
		return
	case s.Node == e.layout.node: // taken for lost: the others have ended the epoch, and it can come to the next
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
		e.agent.remark(fmt.Sprintf("lockstep run: %v is lost, and its workers with it: %s\n", &was.card, l.why))
	}
	e.failed(e.layout.firstOf(s.Node))
	e.expect()
}

// catchUp acts on agents that were lost, or replaced, while the epoch was put together with them: of that nothing more is heard.
func (e *epoch) catchUp(ctx context.Context) {
	p := e.agent.peers
	away := func(s *seat) bool { return s != nil && (s.State == lost || s.Nonce != e.layout.cards[s.Node].Nonce) }
	if !slices.ContainsFunc(p.seats, away) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	seats, _, _, err := p.read(ctx) // what was heard may be older than what was agreed on
	if err != nil {
		return // of a store that is lost is heard
	}
	for _, s := range seats {
		if away(s) {
			e.seatChanged(s)
		}
	}
}

// expect gives up on the nodes that do not say within reasonable time that their workers have ended.
func (e *epoch) expect() {
	if e.failing && len(e.running) == 0 && e.giveUp == nil {
		e.giveUp = time.After(e.agent.cfg.Settle + e.agent.cfg.Grace + answerTime)
	}
}

// order finds out which of this node's workers failed first, now that all have ended: of one that only followed may have been heard earlier.
func (e *epoch) order() {
	if !slices.ContainsFunc(e.workers, func(w *worker) bool { return w.rank == e.first && e.failing }) {
		return // it was another node's
	}
	for _, w := range e.workers {
		if _, failed := w.record(e.agent.cfg.Grace); failed && !w.asked && w.at.Before(e.firstAt) {
			e.first, e.firstAt = w.rank, w.at
		}
	}
}

// finish tells the other agents how this node's workers ended.
func (e *epoch) finish() {
	e.order()
	end := nodeEnd{Node: e.agent.cfg.Node, Failures: e.failures(), Fine: e.fine()}
	e.ends[end.Node] = end
	p := e.agent.peers
	p.publish(end.bounded(), "event", "end", e.number, end.Node)
	e.expect()
}

// failures joins what the workers of this node have recorded with what was seen of them.
func (e *epoch) failures() []told {
	own := map[int]failure.Record{}
	if dir := e.agent.cfg.Records; dir != "" {
		records, err := failure.Read(dir, e.number)
		if err != nil {
			e.agent.screen.say(fmt.Sprintf("lockstep run: %v\n", err))
		}
		for _, r := range records {
			own[r.Worker] = r
		}
	}
	var out []told
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
			last = w.halted // what it wrote when it was woken up to end says nothing
		case seen.Kind == "signal" && nativeCrash(crash) >= 0:
			last = nil // the goroutines, after what is in the stack
		}
		out = append(out, told{seen, last})
	}
	return out
}

// fine returns this node's workers that ended with exit code 0, unasked.
func (e *epoch) fine() (out []fine) {
	for _, w := range e.workers {
		if w.err == nil && w.ending.code == 0 && !w.asked {
			out = append(out, fine{w.rank, e.agent.host, w.pid()})
		}
	}
	return out
}

// complete adds to the record of a root cause that told nothing itself that its worker ended as if all were well.
func (e *epoch) complete(rep *failure.Report) {
	if !rep.Unseen {
		return
	}
	for _, end := range e.ends {
		for _, f := range end.Fine {
			if f.Worker == rep.Root.Worker {
				rep.Root.Host, rep.Root.PID = f.Host, f.PID
				rep.Root.Message = "ended with exit code 0 while others still waited for it; " + strings.TrimPrefix(rep.Root.Message, "it told nothing; ")
			}
		}
	}
}

// attribute adds to a record that only this agent can write what a worker itself would have told.
func (e *epoch) attribute(w *worker, r *failure.Record) {
	if !w.asked && r.Worker != e.first && r.Kind != "signal" && r.Kind != "memory" && !r.Time.Before(e.firstAt) {
		r.Blames = []int{e.first} // most likely it has lost that one
	}
	if w.err == nil && r.Kind != "interrupted" {
		r.Message += e.agent.peers.lastSeen(e.number, r.Worker)
	}
}

// outcome says what the epoch came to.
func (e *epoch) outcome() Outcome {
	o := Outcome{Restarts: int(e.number), Interrupted: e.agent.asked != nil}
	if errors.Is(e.alone, errReplaced) { // the job goes on without this agent, which knows nothing of it
		o.Code = 1
		return o
	}
	var records []failure.Record
	for _, end := range e.ends {
		for _, f := range end.Failures {
			records = append(records, f.Record)
		}
	}
	unknown := e.alone != nil || e.cutOff != nil // what has become of the others
	for node := range e.layout.cards {
		if _, ok := e.ends[node]; !ok && !unknown {
			records = append(records, e.silent(node)...)
		}
	}
	rep, failed := failure.Find(records)
	if unknown && (rep.Unseen || follows(rep.Root)) {
		failed = false // the root is that this node is cut off
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

// follows reports whether a failure follows from another.
func follows(r failure.Record) bool {
	return len(r.Blames) > 0 || slices.Contains([]string{"lost", "store", "timeout", "interrupted"}, r.Kind)
}

// silent makes up records for the workers of a node whose agent has not said how they ended. They are causes of their own: the workers went
// with their agent, and that others lost them follows from it.
func (e *epoch) silent(node int) (out []failure.Record) {
	c, first := &e.layout.cards[node], e.layout.firstOf(node)
	l, known := e.losses[node]
	if !known {
		l = loss{why: "it does not answer", since: time.Now()}
	}
	for i := range c.Workers {
		out = append(out, failure.Record{
			Job: e.agent.cfg.ID, Epoch: e.number, Worker: first + i, Host: c.Host, Time: l.since, Kind: "exit",
			Message: fmt.Sprintf("the agent of its %v is lost: %s; it was killed, or its host or network is gone", &c.card, l.why), Step: -1, ExitCode: -1,
		})
	}
	return out
}

// lastWord is the error of an agent whose job cannot go on for want of another agent, or of the store.
func (e *epoch) lastWord() error {
	if e.alone != nil {
		return e.alone
	}
	if e.cutOff != nil {
		return e.agent.isolated(e.cutOff)
	}
	for node := range e.layout.cards {
		if l, ok := e.losses[node]; ok {
			return fmt.Errorf("%v is lost: %s", &e.layout.cards[node].card, l.why)
		}
	}
	return nil
}

// summary says in one sentence how the job has ended, for agents that come too late.
func (e *epoch) summary(o *Outcome, err error) string {
	switch {
	case o.Interrupted:
		return "the user has ended it"
	case o.Report != nil:
		return fmt.Sprintf("%s: %s", e.who(o.Report.Root), short(o.Report.Root.Message))
	case err != nil:
		return err.Error()
	}
	return ""
}
