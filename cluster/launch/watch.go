package launch

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// watch decides about the input of an agent whose workers run, or have ended while those of other nodes have not. The
// epoch is over when the workers of all nodes have ended, or nothing more can be learned.
func (d *decision) watch(in input) {
	e := &d.epoch
	m, fromOther := in.(message)
	if _, back := in.(storeBack); e.storeOut && (back || fromOther) { // a message came through the store
		e.giveUpAt, e.storeOut = time.Time{}, false
		d.expect()
	}
	if fromOther && endIn(m) != nil {
		in = endIn(m)
	}
	switch in := in.(type) {
	case launched:
		if in.err != nil {
			d.fail(in.err)
			return
		}
	case listed:
		for _, s := range in.slots {
			if e.away(s) {
				d.slotChanged(s)
			}
		}
	case exited:
		d.workerEnded(in.exit)
	case stopsSeen:
		d.findStopped(in.pids)
	case halted:
		in.Time = e.stoppedSince[in.Worker]
		d.workerFailed(in.exit)
	case gathered:
		d.finish(&in)
	case signalled:
		d.signalled(in.sig)
	case tick:
		d.expired()
	case canceled:
		d.canceled, e.failing, e.stopping = true, true, true
		d.do(killWorkers{})
		d.giveUpAfter(answerTime)
	case storeLost:
		d.storeFailed(in.err)
	case *jobEnd:
		d.jobEnded(in)
	case *nodeSlot:
		d.setSlot(in)
		d.slotChanged(in)
	case *killRequest:
		if d.signal == nil {
			d.interrupt(sigInterrupt)
		}
		d.do(killWorkers{})
	case *interruption:
		if d.signal == nil { // else this node's user has sent one too
			d.interrupt(in.signal())
		}
	case *epochStop:
		if in.Epoch == d.number {
			d.failed(in.Worker)
			d.expect()
		}
	case *nodeEnd:
		if in.Epoch == d.number {
			d.setEnd(*in)
		}
	}
	if !d.over() {
		return
	}
	d.phase = resuming
	if e.gaveUp && e.err == nil && d.cutOff == nil && d.cfg.Nodes > 1 && !d.canceled {
		d.do(probeStore{})
		return
	}
	d.conclude()
}

// over reports whether the epoch is over.
func (d *decision) over() bool {
	e := &d.epoch
	if _, own := e.ends[d.cfg.Node]; !own || len(e.running) > 0 {
		return false
	}
	for node := range e.layout.slots {
		_, ended := e.ends[node]
		if _, lost := e.losses[node]; !ended && !lost {
			return e.gaveUp || e.err != nil || d.cutOff != nil
		}
	}
	return true
}

func (d *decision) setEnd(end nodeEnd) {
	e := &d.epoch
	if e.ends = maps.Clone(e.ends); e.ends == nil {
		e.ends = map[int]nodeEnd{}
	}
	e.ends[end.Node] = end
}

// expired handles the deadlines that are reached.
func (d *decision) expired() {
	e := &d.epoch
	reached := func(at *time.Time) bool {
		if at.IsZero() || d.now.Before(*at) {
			return false
		}
		*at = time.Time{}
		return true
	}
	if reached(&e.settleAt) {
		d.stopWorkers()
	}
	if reached(&e.killAt) {
		d.do(killWorkers{})
	}
	if reached(&e.giveUpAt) {
		e.gaveUp = true
	}
}

func (d *decision) workerEnded(x exit) {
	e := &d.epoch
	e.running = slices.DeleteFunc(slices.Clone(e.running), func(rank int) bool { return rank == x.Worker })
	e.exits = append(slices.Clip(e.exits), x)
	switch {
	case x.failed && !x.signalled && !e.failing:
		d.workerFailed(x)
	case e.failing:
	case d.signal != nil && len(e.running) > 0 && e.killAt.IsZero():
		e.killAt = d.now.Add(d.cfg.Grace) // the others wait for it in vain
	}
	if len(e.running) == 0 {
		d.do(gatherRecords{})
	}
}

// findStopped detects workers that were stopped, by SIGSTOP for example, which nothing else may detect: one
// that stays stopped has failed. pids are the processes of the workers that are stopped now, by rank.
func (d *decision) findStopped(pids map[int]int) {
	e := &d.epoch
	if e.failing {
		return
	}
	since := map[int]time.Time{}
	for _, rank := range e.running {
		pid, is := pids[rank]
		if !is {
			continue
		}
		at, known := e.stoppedSince[rank]
		if since[rank] = at; !known {
			since[rank] = d.now
			d.printOwn("lockstep run: worker %d (pid %d) is stopped: resume it with kill -CONT %d; it counts as failed after "+
				"%v\n", rank, pid, pid, d.cfg.HeartbeatTimeout)
		}
	}
	e.stoppedSince = since
	for _, rank := range e.running {
		if at, is := since[rank]; is && d.now.Sub(at) >= d.cfg.HeartbeatTimeout {
			d.do(haltWorker{rank})
			return
		}
	}
}

// workerFailed ends the epoch on all nodes: a worker of this one has failed.
func (d *decision) workerFailed(x exit) {
	if x.Kind == "signal" || x.Kind == "memory" { // else the worker has published it itself
		r := x.Record
		r.Message += x.seen
		d.do(publishFailure{r})
	}
	d.epoch.causeAt = x.Time
	d.publish(&epochStop{ofEpoch{d.number}, x.Worker})
	d.failed(x.Worker)
}

// failed gives the workers of this node time to notice that another has failed, to report what they know and
// to exit, before they are asked to.
func (d *decision) failed(worker int) {
	if e := &d.epoch; !e.failing {
		e.failing, e.cause, e.settleAt = true, worker, d.now.Add(d.cfg.Settle)
	}
}

// stopWorkers asks all workers of this node to exit.
func (d *decision) stopWorkers() {
	e := &d.epoch
	if e.stopping {
		return
	}
	e.failing, e.stopping, e.settleAt, e.killAt = true, true, time.Time{}, d.now.Add(d.cfg.Grace)
	d.do(stopWorkers{})
}

// signalled handles a user's signal: the first is forwarded; the second kills the workers, also those of the
// other nodes.
func (d *decision) signalled(sig os.Signal) {
	if d.signal != nil {
		d.publish(&killRequest{ofEpoch{d.number}})
		d.do(killWorkers{})
		d.giveUpAfter(answerTime)
		return
	}
	d.printOwn("\nlockstep run: forwarded %s to the workers, which may finish their step; a second signal kills them\n",
		signalName(sig))
	d.publish(&interruption{ofEpoch{d.number}, d.cfg.Node, sig == sigTerminate})
	d.interrupt(sig)
}

func (d *decision) interrupt(sig os.Signal) {
	e := &d.epoch
	// A worker's failure may arrive before the signal that caused it, which came to another node.
	d.signal, e.userFirst = sig, !e.failing || d.now.Sub(e.causeAt) < d.cfg.Settle
	if !e.stopping { // else they have been asked already
		d.do(signalWorkers{sig})
	}
}

// jobEnded handles that another agent has ended the job. All earlier messages of the others have been handled before.
func (d *decision) jobEnded(o *jobEnd) {
	e := &d.epoch
	e.gaveUp = true
	if len(e.running) > 0 && !e.failing {
		e.err = &jobEndedError{*o}
		d.stopWorkers()
	}
}

// storeFailed ends this node's workers when the store cannot be reached any more. The others may continue
// without them, or restart: this agent cannot know that, and must not end them.
func (d *decision) storeFailed(err error) {
	e := &d.epoch
	switch {
	case e.err != nil || d.cutOff != nil:
	case d.cfg.storeGone(err):
		e.err, d.cutOff = d.cfg.storeLost(err), err
		d.stopWorkers()
	case len(e.running) == 0 && !e.failing: // they have exited normally, which the others may yet report of theirs
		if e.giveUpAt.IsZero() {
			d.giveUpAfter(d.cfg.RendezvousTimeout)
			e.storeOut = true
		}
	default:
		d.isolate(err)
		d.stopWorkers()
	}
}

// isolate records that this node is cut off.
func (d *decision) isolate(err error) {
	d.cutOff, d.epoch.failing = err, true
	d.printOwn("lockstep run: %v cannot reach the other nodes, and ends its workers: %v\n",
		&d.epoch.layout.slots[d.cfg.Node].registration, err)
}

// slotChanged ends the epoch when a node's agent is lost before its workers have ended, or when another has
// replaced it.
func (d *decision) slotChanged(s *nodeSlot) {
	e, own := &d.epoch, s.Node == d.cfg.Node
	was := &e.layout.slots[s.Node]
	l := loss{why: s.Why, since: s.Since}
	switch {
	case s.Nonce != was.Nonce && own:
		e.err = was.replaced(s)
		d.stopWorkers()
		return
	case s.Nonce != was.Nonce:
		l = loss{why: fmt.Sprintf("the agent on host %s with pid %d has replaced it", s.Host, s.PID), since: d.now}
	case s.State == gone:
		l = loss{why: "it has left the job", since: d.now}
	case s.State == present:
		return
	case own: // declared lost: the others have ended the epoch, and this agent can join the next
		d.failed(e.layout.first)
		return
	}
	_, ended := e.ends[s.Node]
	if _, known := e.losses[s.Node]; ended || known {
		return
	}
	if e.losses = maps.Clone(e.losses); e.losses == nil {
		e.losses = map[int]loss{}
	}
	e.losses[s.Node] = l
	if !e.failing {
		e.causeAt = l.since
		d.print("lockstep run: %v is lost, and its workers with it: %s\n", &was.registration, l.why)
	}
	d.failed(e.layout.firstOf(s.Node))
	d.expect()
}

// expect abandons the nodes that do not publish in time that their workers have ended.
func (d *decision) expect() {
	if e := &d.epoch; e.failing && len(e.running) == 0 && e.giveUpAt.IsZero() {
		d.giveUpAfter(d.cfg.Settle + d.cfg.Grace + answerTime)
	}
}

// giveUpAfter abandons the nodes that do not respond within a time, whether or not the store is back.
func (d *decision) giveUpAfter(most time.Duration) {
	d.epoch.giveUpAt, d.epoch.storeOut = d.now.Add(most), false
}

// finish publishes how this node's workers have ended.
func (d *decision) finish(g *gathered) {
	e := &d.epoch
	if g.err != nil {
		d.printOwn("lockstep run: %v\n", g.err)
	}
	e.order()
	end := nodeEnd{ofEpoch: ofEpoch{d.number}, Node: d.cfg.Node, Failures: e.failures(g)}
	for _, x := range e.byRank() {
		if x.clean {
			end.CleanExits = append(end.CleanExits, cleanExit{x.Worker, x.Host, x.PID})
		}
	}
	d.setEnd(end)
	d.publish(end.bounded())
	d.expect()
}

// order determines which of this node's workers failed first, now that all have ended: the message of a
// consequence may have arrived earlier.
func (e *epoch) order() {
	if !e.failing || !slices.ContainsFunc(e.exits, func(x exit) bool { return x.Worker == e.cause }) {
		return // it was another node's
	}
	for _, x := range e.exits {
		if x.failed && !x.signalled && x.Time.Before(e.causeAt) {
			e.cause, e.causeAt = x.Worker, x.Time
		}
	}
}

// byRank returns the exits in the order of ranks.
func (e *epoch) byRank() []exit {
	return slices.SortedFunc(slices.Values(e.exits), func(a, b exit) int { return a.Worker - b.Worker })
}

// failures merges the records of this node's workers with the agent's observations.
func (e *epoch) failures(g *gathered) (out []failureReport) {
	for _, x := range e.byRank() {
		r, own := g.own[x.Worker]
		switch {
		case own && !x.halted:
			x.Record = failure.Merge(r, x.Record)
		case own:
		case x.failed:
			x.seen = g.seen[x.Worker]
			e.attribute(&x)
		default:
			continue
		}
		if x.native && x.Kind == "signal" {
			x.stderr = nil // the goroutines, which the stack contains already
		}
		out = append(out, failureReport{x.Record, x.stderr})
	}
	return out
}

// attribute adds to a record that only this agent can write what the worker itself would have reported.
func (e *epoch) attribute(x *exit) {
	if !x.signalled && x.Worker != e.cause && x.Kind != "signal" && x.Kind != "memory" && !x.Time.Before(e.causeAt) {
		x.Blames = []int{e.cause} // most likely it has lost that one
	}
	if x.started && x.Kind != "interrupted" {
		x.Message += x.seen
	}
}
