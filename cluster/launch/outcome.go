package launch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// outcome returns the result of the epoch.
func (d *decision) outcome() Outcome {
	e := &d.epoch
	o := Outcome{Restarts: int(d.number), Interrupted: d.signal != nil}
	if errors.Is(e.err, errReplaced) { // the job continues without this agent, which cannot know its result
		o.Code = 1
		return o
	}
	var records []failure.Record
	for _, end := range e.ends {
		for _, f := range end.Failures {
			records = append(records, f.Record)
		}
	}
	unknown := e.err != nil || d.cutOff != nil // the state of the other nodes
	for node := range e.layout.slots {
		if _, ok := e.ends[node]; !ok && !unknown {
			records = append(records, d.silent(node)...)
		}
	}
	rep, failed := failure.Find(records)
	if failed && !slices.ContainsFunc(records, func(r failure.Record) bool { return r.ExitCode != 0 }) {
		d.printRecovered(records)
		failed = false
	}
	if unknown && (rep.Unseen || follows(rep.Root)) {
		failed = false // the root cause is that this node is cut off
	}
	e.complete(&rep)
	switch {
	case failed && !(o.Interrupted && e.causedByUser(rep.Root, records)):
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

// causedByUser reports whether a failure follows from the user's signal: it is an interruption, or the others lost a
// worker because the signal reached that one first.
func (e *epoch) causedByUser(root failure.Record, records []failure.Record) bool {
	return root.Kind == "interrupted" || e.userFirst && slices.ContainsFunc(records, func(r failure.Record) bool {
		return r.Worker == root.Worker && r.Kind == "interrupted"
	})
}

// printRecovered prints the failures that workers have reported and continued from: all have exited with code 0.
func (d *decision) printRecovered(records []failure.Record) {
	for _, r := range records {
		if r.Kind != "interrupted" {
			d.print("lockstep run: worker %d exited with code 0 after it reported a failure: %s\n", r.Worker,
				indent(short(r.Message)))
		}
	}
}

// follows reports whether a failure is a consequence of another.
func follows(r failure.Record) bool {
	return len(r.Blames) > 0 || slices.Contains([]string{"lost", "store", "timeout", "interrupted"}, r.Kind)
}

// silent builds records for the workers of a node whose agent has not published how they ended. They are
// causes, not consequences: the workers ended with their agent, and the others lost them because of that.
func (d *decision) silent(node int) (out []failure.Record) {
	e := &d.epoch
	c, first := &e.layout.slots[node], e.layout.firstOf(node)
	l, known := e.losses[node]
	if !known {
		l = loss{why: "it does not respond", since: d.now}
	}
	for i := range c.Workers {
		out = append(out, failure.Record{
			Job: d.cfg.ID, Epoch: d.number, Worker: first + i, Host: c.Host, Time: l.since, Kind: "exit",
			Message: fmt.Sprintf("the agent of its %v is lost: %s; it was killed, or its host or network is down",
				&c.registration, l.why),
			Step: -1, ExitCode: -1,
		})
	}
	return out
}

// finalError returns the error of an agent whose job cannot continue because another agent, or the store, is
// missing.
func (d *decision) finalError() error {
	e := &d.epoch
	if e.err != nil {
		return e.err
	}
	if d.cutOff != nil {
		return d.isolated(d.cutOff)
	}
	for node := range e.layout.slots {
		if l, ok := e.losses[node]; ok {
			return fmt.Errorf("%v is lost: %s", &e.layout.slots[node].registration, l.why)
		}
	}
	return nil
}

// summary describes in one sentence how the job has ended, for agents that join too late.
func (d *decision) summary(o *Outcome, err error) string {
	switch {
	case o.Interrupted:
		return "the user ended it"
	case o.Report != nil:
		return fmt.Sprintf("%s: %s", d.epoch.who(o.Report.Root), short(o.Report.Root.Message))
	case err != nil:
		return err.Error()
	}
	return ""
}

// missing returns the error of a rendezvous that timed out: the agents that are missing, those that joined,
// and other processes at the store.
func (d *decision) missing(unrelated string) error {
	var away, joined []string
	for n, s := range d.slots {
		switch {
		case s == nil:
			away = append(away, fmt.Sprintf("node %d is missing", n))
		case s.State == present && s.Epoch == d.number:
			joined = append(joined, s.String())
		case s.State == present:
			away = append(away, fmt.Sprintf("%v is alive, but has not ended its earlier workers", &s.registration))
		default:
			away = append(away, fmt.Sprintf("%v is lost, and no agent with --node-rank %d has replaced it", &s.registration, n))
		}
	}
	if d.earlier != "" {
		unrelated += "; " + d.earlier
	}
	return fmt.Errorf("rendezvous of job %q (epoch %d) timed out after %v: %d of %d nodes joined (%s); %s%s",
		d.cfg.ID, d.number, d.cfg.RendezvousTimeout, len(joined), d.cfg.Nodes, strings.Join(joined, ", "),
		strings.Join(away, ", "), unrelated)
}

// isolated returns the error of an agent that cannot reach the store.
func (d *decision) isolated(why error) error {
	if d.cfg.storeGone(why) {
		return d.cfg.storeLost(why)
	}
	cause := "the store is down"
	if d.cfg.StoreHolder != "" {
		cause = "the host of " + d.cfg.StoreHolder + " is"
	}
	return fmt.Errorf("node %d (host %s, pid %d) cannot reach the rendezvous store, so the state of "+
		"the other nodes is unknown: its link is cut, or %s: %w", d.cfg.Node, d.mine.Host, d.mine.PID, cause, why)
}

// stoppedEarly returns the error of an agent whose user has ended the job before it, or its next epoch, has
// begun; the others receive the same text.
func (d *decision) stoppedEarly() error {
	before := "all nodes joined"
	switch {
	case d.restart != "":
		before = "the workers were restarted"
	case d.cfg.Nodes == 1:
		before = "the workers were started"
	}
	if d.cfg.Nodes == 1 {
		return fmt.Errorf("stopped by %s before %s", signalText(d.signal), before)
	}
	return fmt.Errorf("node %d was stopped by %s before %s", d.cfg.Node, signalText(d.signal), before)
}

// storeGone reports whether a store with this error will not come back: it has ended, or the process that served
// it has.
func (c *Config) storeGone(err error) bool {
	refused := c.StoreHolder != "" && errors.Is(err, syscall.ECONNREFUSED)
	return refused || errors.Is(err, rendezvous.ErrEnded) || errors.Is(err, rendezvous.ErrClosed)
}

// storeLost returns the error of an agent whose store is lost.
func (c *Config) storeLost(err error) error {
	if c.StoreHolder == "" {
		return fmt.Errorf("the store cannot be reached any more: %w", err)
	}
	return fmt.Errorf("the store cannot be reached any more; it ended with %s, and so does the job: %w", c.StoreHolder,
		err)
}
