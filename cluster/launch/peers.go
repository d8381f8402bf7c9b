package launch

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// peers are the agents of the other nodes. With one node there are none, and all methods do next to nothing.
//
// The agents share these keys under =launch/<job>/. event/slot/<node> holds the agent of a node slot, its
// state, and whether it has ended the job. event/members/<epoch> lists the agents of an epoch, and begins it.
// event/stop/<epoch> ends it; event/end/<epoch>/<node> holds how a node's workers ended.
// event/interrupt/<epoch> and event/kill/<epoch> hold the user's signals. event/ended ends the job.
// Heartbeats go through package membership: an agent reports for its node, with the heartbeats of its workers.
// reporter/<node> holds the nonce of the agent that may do so: it is the fencing token of the reports, and of the
// events and failure records that an agent writes.
type peers struct {
	store       rendezvous.Store // nil: none
	fenced      rendezvous.Store // the same, whose writes are refused once another agent reports for this node
	job         string
	prefix      string
	host        string
	node        int
	nodes       int
	nonce       string
	timing      membership.Timing // of the reports
	interval    time.Duration     // a tenth of the heartbeat timeout
	wait        time.Duration
	gone        func(error) bool // reports whether a store with this error will not come back
	inputs      chan input       // messages of other agents, and news of the store
	ctx         context.Context
	cancel      context.CancelFunc
	work        sync.WaitGroup
	writes      sync.WaitGroup  // writes in progress
	writing     context.Context // bounds them
	stopWriting context.CancelFunc

	reporter      *membership.Reporter // nil: no store
	stopReporting func()               // nil: it does not run
	file          *membership.NodeFile // of the current epoch's workers; nil: none
	folder        string               // which holds it
	guard         *guard
	recorded      map[int]string // the nonces of agents recorded as lost, by node

	mine nodeSlot // this agent's, as it has written it
}

func newPeers(a *Agent) *peers {
	p := &peers{
		store: a.cfg.Store, job: a.cfg.ID,
		prefix: "=launch/" + url.PathEscape(a.cfg.ID) + "/",
		host:   a.host, node: a.cfg.Node, nodes: a.cfg.Nodes, nonce: rand.Text(),
		timing: membership.NewTiming(a.cfg.HeartbeatTimeout, a.cfg.Nodes),
		wait:   a.cfg.RendezvousTimeout, gone: a.cfg.storeGone, inputs: make(chan input),
	}
	p.interval = p.timing.Timeout / missedMax
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.writing, p.stopWriting = context.WithCancel(context.Background())
	p.guard = a.guard
	if p.store != nil {
		p.fenced = rendezvous.WithToken(p.store, rendezvous.Token{Key: p.reporterKey(), Value: []byte(p.nonce)})
		p.reporter = membership.NewReporter(membership.ReporterConfig{
			Store: p.fenced,
			Key:   rendezvous.JobKey(p.job, status.Heartbeats), Node: p.node, Order: p.node, Nonce: p.nonce,
			NodesMax: p.nodes, Timing: p.timing, Early: p.nodes <= membership.EarlyMax, By: -1, OnView: p.recordLost,
		})
	}
	return p
}

// storeTime bounds a write to the store.
const storeTime = 20 * time.Second

// publish writes a message for the other agents, asynchronously. If that fails, the others time out.
func (p *peers) publish(m message) { p.set(p.keyOf(m), encode(m)) }

// propose writes a message for the other agents of which only the first one is kept.
func (p *peers) propose(m message) {
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.writing, storeTime)
		defer cancel()
		// the message that is kept, or the loss of the store, is an input
		_, _ = rendezvous.Replace(ctx, p.fenced, p.keyOf(m), 0, encode(m), p.retry())
	})
}

// createPause is the longest pause after a write whose result is unknown.
const createPause = 500 * time.Millisecond

// endJob ends the job for all agents, unless one has done so already. It is the last write: everything
// published earlier is stored before it. An agent that the others have declared lost ends nothing.
func (p *peers) endJob(ctx context.Context, code int, why string) {
	p.writes.Wait()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	why = why[:min(len(why), endTextMax)]
	o := jobEnd{Node: p.node, Nonce: p.nonce, Host: p.host, PID: os.Getpid(), Time: time.Now(), Code: code, Text: why}
	store := p.store
	if p.mine.Nonce != "" {
		if !p.signEnd(ctx, &o) { // the others time out
			return
		}
		store = p.fenced // a later run may have begun by now
	}
	_, _ = rendezvous.Replace(ctx, store, p.keyOf(&o), 0, encode(&o), p.retry()) // for agents that join too late
}

// endTextMax bounds the text of the end of a job, in bytes: a later run deletes the end by its value.
const endTextMax = 16 << 10

// signEnd writes into this agent's slot that it ends the job. It returns false if it must not: the slot is
// marked lost or has another agent, or the store cannot be reached.
func (p *peers) signEnd(ctx context.Context, o *jobEnd) bool {
	done, _ := p.changeSlot(ctx, func(old, s *nodeSlot) bool {
		s.JobEnd = o
		return old.State == present
	})
	return done
}

// withdraw ends the job for all agents when this one leaves it, if they count on it: it has taken its slot
// already, or its user has ended it before it could, in a job that has not begun. Where another agent has the
// slot, or may still take it, the job continues with that agent.
func (p *peers) withdraw(ctx context.Context, o *Outcome, why error) {
	reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	slots, begun, _, err := p.read(reading)
	if err != nil {
		return // the others detect a lost store themselves
	}
	switch s := slots[p.node]; {
	case s != nil && s.Nonce == p.nonce:
		p.mine = *s // the store may have written it without reporting success
	case !o.Interrupted || len(begun) > 0 || s != nil && s.State == present:
		return
	}
	p.endJob(ctx, o.Code, why.Error())
}

func (p *peers) set(key string, value []byte) {
	p.writes.Go(func() {
		ctx, cancel := context.WithTimeout(p.writing, storeTime)
		defer cancel()
		for err := p.fenced.Set(ctx, key, value); err != nil && !rendezvous.Final(err) && pause.For(ctx, p.interval) == nil; {
			err = p.fenced.Set(ctx, key, value) // no other agent sets it
		}
	})
}

// record writes a worker's failure where the other workers look for the reason why they lost it.
func (p *peers) record(r failure.Record) {
	if p.store == nil {
		return
	}
	if text, err := failure.Encode(&r); err == nil {
		p.set(rendezvous.Key(r.Job, r.Epoch, "failure", strconv.Itoa(r.Worker)), text)
	}
}

// lastSeen returns the end of a sentence with the position in the last heartbeat of a worker of this node, "" if it had
// none.
func (p *peers) lastSeen(worker int) string {
	if p.reporter == nil {
		return ""
	}
	heartbeat, seen := p.reporter.Latest(worker)
	if !seen {
		return ""
	}
	var parts []string
	if heartbeat.Step >= 0 {
		parts = append(parts, fmt.Sprintf("in step %d", heartbeat.Step))
	}
	switch {
	case heartbeat.Phase != "" && len(parts) == 0:
		parts = append(parts, "in "+heartbeat.Phase)
	case heartbeat.Phase != "":
		parts = append(parts, heartbeat.Phase)
	}
	if heartbeat.Text != "" {
		parts = append(parts, heartbeat.Text)
	}
	if len(parts) == 0 {
		return ""
	}
	return "; last seen " + strings.Join(parts, ", ")
}

// close leaves the job. The agent that serves the store, or else the first one that leaves, waits for a
// limited time until the others have left too, and then deletes the job's keys from the store.
// An agent that is cut off from the store does nothing of that.
func (p *peers) close(cutOff bool) {
	defer p.stopWriting()
	p.unwatchWorkers()
	if cutOff { // the others cannot receive it
		p.stopWriting()
		p.cancel()
		if p.stopReporting != nil {
			p.stopReporting()
		}
		p.writes.Wait()
		p.work.Wait()
		return
	}
	p.writes.Wait()
	p.endReporting()
	last := p.node == 0 && p.store != nil
	if p.nodes > 1 {
		last = p.leave() && p.awaitOthers()
	}
	p.cancel()
	p.work.Wait()
	if last {
		p.clean()
	}
}

// leave releases this agent's slot; false if it has none.
func (p *peers) leave() bool {
	if p.mine.Nonce == "" {
		return false
	}
	ctx, cancel := context.WithTimeout(p.ctx, leaveTime)
	defer cancel()
	done, _ := p.changeSlot(ctx, func(_, s *nodeSlot) bool { s.State = gone; return true })
	return done
}

// clean deletes the job's keys from the store: not every store ends with the job. The job's result stays, for
// agents that join too late. A new run of the same name may have begun meanwhile: its keys stay. Each key is deleted
// only if it still has the value that was listed. Longer ones, and those of workers, are deleted while the token of
// reports is that of this agent: no worker of a new run starts before its agent of this node has taken it.
func (p *peers) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	token, mine := p.reporterKey(), p.fenced
	entries, _, err := p.store.List(ctx, p.prefix)
	for i := 0; i < len(entries) && err == nil; i++ {
		switch e := &entries[i]; {
		case e.Key == p.keyOf(&jobEnd{}), e.Key == token:
		case len(e.Value) > rendezvous.TokenMax:
			err = mine.Delete(ctx, e.Key)
		default:
			err = rendezvous.DeleteValue(ctx, p.store, e.Key, e.Value)
		}
	}
	if err == nil {
		err = rendezvous.DeleteJob(ctx, mine, p.job)
	}
	if err == nil {
		_ = mine.Delete(ctx, token) // a store that has ended keeps nothing
	}
}

// leaveTime is how long an agent waits for the others to leave.
const leaveTime = 5 * time.Second

// awaitOthers waits until no agent is left, and reports whether this one must clean up: the first that left. An
// earlier agent in the order of nodes does so itself.
func (p *peers) awaitOthers() bool {
	ctx, cancel := context.WithTimeout(p.ctx, leaveTime)
	defer cancel()
	for {
		slots, _, revision, err := p.read(ctx)
		if err != nil {
			return false
		}
		left := false
		for n, s := range slots {
			switch {
			case s == nil || s.State == lost || s.cleared():
			case n < p.node:
				return false
			case s.State == present:
				left = true
			}
		}
		if !left {
			return true
		}
		if _, _, err = p.store.Changes(ctx, p.slotsKey(), revision); err != nil {
			return false
		}
	}
}

// start starts to receive inputs and to report for this node, until close.
func (p *peers) start() {
	p.work.Go(p.receive)
	p.startReporting()
	p.work.Go(p.findLost)
}

// startReporting starts to report for this node.
func (p *peers) startReporting() {
	ctx, cancel := context.WithCancel(p.ctx)
	var ended sync.WaitGroup
	ended.Go(func() { p.reporter.Run(ctx) })
	p.stopReporting = func() { cancel(); ended.Wait() }
}

// endReporting sends this node's last report.
func (p *peers) endReporting() {
	if p.stopReporting == nil {
		return
	}
	p.stopReporting()
	p.stopReporting = nil
	ctx, cancel := context.WithTimeout(context.Background(), reportTime)
	defer cancel()
	p.reporter.Leave(ctx)
}

// reportTime bounds the last report.
const reportTime = 2 * time.Second

// watchWorkers makes this agent report for the workers of an epoch, and returns the file for their heartbeats; "":
// they report themselves.
func (p *peers) watchWorkers(epoch uint32, first, workers int) string {
	if p.stopReporting == nil {
		return ""
	}
	folder, err := os.MkdirTemp("", recordsPrefix+"node-*")
	if err != nil {
		return ""
	}
	p.guard.add(folder)
	p.folder = folder
	path := filepath.Join(folder, "heartbeats")
	if p.file, err = membership.CreateNodeFile(path, workers); err != nil {
		p.unwatchWorkers()
		return ""
	}
	all := make([]int, workers)
	for i := range all {
		all[i] = first + i
	}
	p.reporter.Watch(epoch, p.file, all, -1, time.Time{})
	return path
}

// unwatchWorkers ends what watchWorkers began: the workers have ended.
func (p *peers) unwatchWorkers() {
	if p.file != nil {
		p.reporter.Watch(0, nil, nil, -1, time.Time{})
		p.file.Close()
		p.file = nil
	}
	if p.folder != "" {
		os.RemoveAll(p.folder)
		p.guard.remove(p.folder)
		p.folder = ""
	}
}

// recordLost records which agents are lost, on the one that coordinates: the others receive that as events.
func (p *peers) recordLost(ctx context.Context, lost []membership.Doubt) error {
	now := map[int]string{}
	for i := range lost {
		d := &lost[i]
		if d.Node < 0 || d.Node >= p.nodes || d.Nonce == "" {
			continue
		}
		if p.recorded[d.Node] != d.Nonce {
			if err := p.lose(ctx, d.Node, d.Nonce, time.Duration(d.Silent)*time.Millisecond); err != nil {
				return err
			}
		}
		now[d.Node] = d.Nonce
	}
	p.recorded = now
	return nil
}

// findLost reports to this agent when the store is lost, and when it is back. Agents that were silent while the store
// was lost may be healthy: it is back when it has answered for long enough to show which are not.
func (p *peers) findLost() {
	limit := missedMax * p.interval
	for p.ctx.Err() == nil {
		silent := p.reporter.StoreSilence()
		if silent < limit*3/2 {
			_ = pause.For(p.ctx, min(limit*3/2-silent, p.interval))
			continue
		}
		p.send(storeLost{fmt.Errorf("%w: it has not acknowledged this agent's reports for %v", rendezvous.ErrLost,
			silent.Round(time.Second/10))})
		for p.reach(p.ctx) != nil && pause.For(p.ctx, p.interval) == nil { //nolint:revive // retry
		}
		back := time.Now()
		for p.ctx.Err() == nil && time.Since(back) < 3*limit && (p.reporter.StoreSilence() < limit ||
			time.Since(back) < limit) {
			_ = pause.For(p.ctx, p.interval)
		}
		if time.Since(back) >= 3*limit {
			p.send(storeBack{})
		}
	}
}

// reach returns nil if the store answers now.
func (p *peers) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, missedMax*p.interval)
	defer cancel()
	return p.probe(ctx)
}

// probe returns nil when the store answers, or its error after its own patience.
func (p *peers) probe(ctx context.Context) error {
	_, _, err := p.store.Get(ctx, p.slotKey())
	if errors.Is(err, rendezvous.ErrNotFound) {
		return nil
	}
	return err
}

// awaitStore waits until the store can be reached again, up to the rendezvous timeout.
func (p *peers) awaitStore(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.wait)
	defer cancel()
	for {
		err := p.probe(ctx)
		if err == nil || p.gone(err) || pause.For(ctx, p.interval) != nil {
			return err
		}
	}
}

// missedMax is the number of intervals, [peers.interval], in the heartbeat timeout.
const missedMax = 10

func (p *peers) send(in input) {
	select {
	case p.inputs <- in:
	case <-p.ctx.Done():
	}
}

// receive makes inputs of the changes in the store. If the store cannot be reached for too long, findLost reports it.
func (p *peers) receive() {
	for after := uint64(0); p.ctx.Err() == nil; _ = pause.For(p.ctx, p.interval) {
		err := rendezvous.Watch(p.ctx, p.store, p.events(), &after, func(changes []rendezvous.Entry) error {
			for _, entry := range changes {
				if m, ok := p.decode(entry); ok {
					p.send(m)
				}
			}
			return nil
		})
		if p.ctx.Err() == nil && (!errors.Is(err, rendezvous.ErrLost) || p.gone(err)) {
			p.send(storeLost{err})
		}
	}
}

// events is the prefix of the keys of messages.
func (p *peers) events() string { return p.prefix + "event/" }

// keyOf returns the key of a message.
func (p *peers) keyOf(m message) string { return p.events() + m.path() }

// slotKey returns the key of this node's slot.
func (p *peers) slotKey() string { return p.slotsKey() + strconv.Itoa(p.node) }

// slotsKey is the prefix of the keys of all slots.
func (p *peers) slotsKey() string { return p.events() + "slot/" }

// reporterKey returns the key of the agent that may report for this node.
func (p *peers) reporterKey() string { return p.prefix + "reporter/" + strconv.Itoa(p.node) }

// decode returns the message of an entry, and false if it has none.
func (p *peers) decode(entry rendezvous.Entry) (message, bool) {
	return decode(strings.TrimPrefix(entry.Key, p.events()), entry)
}
