package launch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// interruption is a user's signal, forwarded to the other agents.
type interruption struct {
	Node      int  `json:"node"`
	Terminate bool `json:"terminate,omitempty"` // SIGTERM, else Ctrl-C
}

// event is a message received from the other agents.
type event struct {
	epoch        uint32
	slot         *nodeSlot
	members      *epochMembers
	jobEnd       *jobEnd
	stop         bool
	worker       int // the one that failed
	end          *nodeEnd
	interruption *interruption // the first signal
	kill         bool          // the second signal
	err          error         // the store cannot be reached
	text         []byte        // of the entry, for the end of the job
	storeBack    bool          // the store, of whose loss err was sent, shows all heartbeats again
}

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
	holder      string           // the process that serves the store, for display; "": it outlives all agents
	lasts       bool
	job         string
	prefix      string
	host        string
	node        int
	nodes       int
	nonce       string
	timing      membership.Timing // of the reports
	interval    time.Duration     // a tenth of the heartbeat timeout
	wait        time.Duration
	events      chan event
	ctx         context.Context
	cancel      context.CancelFunc
	work        sync.WaitGroup
	writes      sync.WaitGroup  // writes in progress
	writing     context.Context // bounds them
	stopWriting context.CancelFunc
	cutOff      error // why the last access to the store failed; nil: it succeeded

	reporter      *membership.Reporter // nil: no store
	stopReporting func()               // nil: it does not run
	file          *membership.NodeFile // of the current epoch's workers; nil: none
	folder        string               // which holds it
	guard         *guard
	recorded      map[int]string // the nonces of agents recorded as lost, by node

	mine    nodeSlot // this agent's, set by takeSlot
	first   uint32
	slots   []*nodeSlot // by node, as of the events received
	earlier string      // describes an earlier run of a job of this name
}

func newPeers(a *Agent) *peers {
	p := &peers{
		store: a.cfg.Store, holder: a.cfg.StoreHolder, lasts: a.cfg.StoreHolder == "", job: a.cfg.ID,
		prefix: "=launch/" + url.PathEscape(a.cfg.ID) + "/",
		host:   a.host, node: a.cfg.Node, nodes: a.cfg.Nodes, nonce: rand.Text(),
		timing: membership.NewTiming(a.cfg.HeartbeatTimeout, a.cfg.Nodes),
		wait:   a.cfg.RendezvousTimeout, events: make(chan event),
		slots: make([]*nodeSlot, a.cfg.Nodes),
	}
	p.interval = p.timing.Timeout / missedMax
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.writing, p.stopWriting = context.WithCancel(context.Background())
	p.guard = a.guard
	if p.store != nil {
		p.fenced = rendezvous.WithToken(p.store, rendezvous.Token{Key: p.key("reporter", p.node), Value: []byte(p.nonce)})
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

// publish writes a value for the other agents, asynchronously. If that fails, the others time out.
func (p *peers) publish(value any, key ...any) {
	if p.nodes == 1 {
		return
	}
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // our own types
	}
	p.set(p.key(key...), text)
}

// propose writes a value for the other agents of which only the first one is kept.
func (p *peers) propose(value any, key ...any) {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // our own types
	}
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.writing, storeTime)
		defer cancel()
		p.create(ctx, p.fenced, p.key(key...), text) // the value that is kept, or the loss of the store, arrives as an event
	})
}

// create writes a value of which only the first one is kept; it retries when it is unknown whether the value
// was written.
func (p *peers) create(ctx context.Context, store rendezvous.Store, key string, value []byte) {
	for {
		_, _, err := store.Create(ctx, key, value)
		if err == nil || final(err) || pause.For(ctx, min(p.interval, createPause)) != nil {
			return
		}
	}
}

const createPause = 500 * time.Millisecond

// endJob ends the job for all agents, unless one has done so already. It is the last write: everything
// published earlier is stored before it. An agent that the others have declared lost ends nothing, nor does
// one that cannot reach the store: the others decide about the job.
func (p *peers) endJob(ctx context.Context, code int, why string) {
	if p.nodes == 1 || p.cutOff != nil {
		return
	}
	p.writes.Wait()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	why = why[:min(len(why), endTextMax)]
	o := jobEnd{Node: p.node, Host: p.host, PID: os.Getpid(), Time: time.Now(), Code: code, Text: why}
	store := p.store
	if p.mine.Nonce != "" {
		if !p.signEnd(ctx, &o) {
			return
		}
		store = p.fenced // a later run may have begun by now
	}
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // our own types
	}
	p.create(ctx, store, p.key("event", "ended"), text) // for agents that join too late
}

// endTextMax bounds the text of the end of a job, in bytes: a later run deletes the end by its value.
const endTextMax = 16 << 10

// signEnd writes into this agent's slot that it ends the job. It returns false if it must not: the slot is
// marked lost or has another agent, or the store cannot be reached.
func (p *peers) signEnd(ctx context.Context, o *jobEnd) bool {
	for {
		slots, _, _, err := p.read(ctx)
		if err != nil {
			return false // the others time out
		}
		now := slots[p.node]
		if now == nil || now.Nonce != p.nonce || now.State != present {
			return false
		}
		s := *now
		s.JobEnd = o
		if done, err := p.writeSlot(ctx, &s, now); done || err != nil {
			return done
		}
	}
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
		for err := p.fenced.Set(ctx, key, value); err != nil && !final(err) && pause.For(ctx, p.interval) == nil; {
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
func (p *peers) close() {
	defer p.stopWriting()
	p.unwatchWorkers()
	if p.cutOff != nil { // the others cannot receive it
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
	for {
		slots, _, _, err := p.read(ctx)
		if err != nil || slots[p.node] == nil || slots[p.node].Nonce != p.nonce {
			return false
		}
		s := p.mine
		s.State = gone
		if done, err := p.writeSlot(ctx, &s, slots[p.node]); done || err != nil {
			return done
		}
	}
}

// clean deletes the job's keys from the store: not every store ends with the job. The job's result stays, for
// agents that join too late. A new run of the same name may have begun meanwhile: its keys stay. Each key is deleted
// only if it still has the value that was listed. Longer ones, and those of workers, are deleted while the token of
// reports is that of this agent: no worker of a new run starts before its agent of this node has taken it.
func (p *peers) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	token, mine := p.key("reporter", p.node), p.fenced
	entries, _, err := p.store.List(ctx, p.prefix)
	for i := 0; i < len(entries) && err == nil; i++ {
		switch e := &entries[i]; {
		case e.Key == p.key("event", "ended"), e.Key == token:
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
		if _, _, err = p.store.Changes(ctx, p.key("event", "slot")+"/", revision); err != nil {
			return false
		}
	}
}

// bounded drops the parts that make a message too long for the store.
func (n nodeEnd) bounded() nodeEnd {
	size := func() int { b, _ := json.Marshal(n); return len(b) }
	n.Failures = slices.Clone(n.Failures)
	for i := len(n.Failures) - 1; i >= 0 && size() > rendezvous.ValueMax/2; i-- {
		n.Failures[i].Stack, n.Failures[i].Stderr = "", nil
	}
	return n
}

// start starts to receive events and to report for this node, until close.
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
		p.send(event{err: fmt.Errorf("%w: it has not acknowledged this agent's reports for %v", rendezvous.ErrLost,
			silent.Round(time.Second/10))})
		for p.reach(p.ctx) != nil && pause.For(p.ctx, p.interval) == nil { //nolint:revive // retry
		}
		back := time.Now()
		for p.ctx.Err() == nil && time.Since(back) < 3*limit && (p.reporter.StoreSilence() < limit ||
			time.Since(back) < limit) {
			_ = pause.For(p.ctx, p.interval)
		}
		if time.Since(back) >= 3*limit {
			p.send(event{storeBack: true})
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
	_, _, err := p.store.Get(ctx, p.key("event", "slot", p.node))
	if errors.Is(err, rendezvous.ErrNotFound) {
		return nil
	}
	return err
}

// gone reports whether a store with this error will not come back: it has ended, or the process that served
// it has.
func (p *peers) gone(err error) bool {
	refused := p.holder != "" && errors.Is(err, syscall.ECONNREFUSED)
	return refused || errors.Is(err, rendezvous.ErrEnded) || errors.Is(err, rendezvous.ErrClosed)
}

// missedMax is the number of intervals, [peers.interval], in the heartbeat timeout.
const missedMax = 10

func (p *peers) send(ev event) {
	select {
	case p.events <- ev:
	case <-p.ctx.Done():
	}
}

// receive turns changes in the store into events. If the store cannot be reached for too long, findLost reports
// it.
func (p *peers) receive() {
	var after uint64
	for {
		entries, revision, err := p.store.Changes(p.ctx, p.key("event")+"/", after)
		switch {
		case errors.Is(err, rendezvous.ErrCompacted):
			after = 0 // receiving all events again does no harm
			continue
		case p.ctx.Err() != nil:
			return
		case err != nil:
			if !errors.Is(err, rendezvous.ErrLost) || p.gone(err) {
				p.send(event{err: err})
			}
			_ = pause.For(p.ctx, p.interval)
			continue
		}
		after = revision
		for _, entry := range entries {
			if ev, ok := p.decode(entry); ok && !ev.before(p.first) && (ev.slot == nil || !ev.slot.cleared()) {
				p.send(ev)
			}
		}
	}
}

// decode decodes an event from another agent.
func (p *peers) decode(entry rendezvous.Entry) (ev event, ok bool) {
	parts := strings.Split(strings.TrimPrefix(entry.Key, p.prefix+"event/"), "/")
	numbers := [2]int{-1, -1}
	for i, part := range parts[1:] {
		n, err := strconv.ParseUint(part, 10, 31)
		if err != nil || i == len(numbers) {
			return event{}, false
		}
		numbers[i] = int(n)
	}
	if entry.Deleted || parts[0] != "ended" && numbers[0] < 0 {
		return event{}, false
	}
	ev.epoch = uint32(max(0, numbers[0]))
	var into any
	switch parts[0] {
	case "slot":
		ev.slot = &nodeSlot{}
		into = ev.slot
	case "members":
		ev.members = &epochMembers{}
		into = ev.members
	case "ended":
		ev.jobEnd = &jobEnd{}
		into = ev.jobEnd
	case "stop":
		ev.stop, into = true, &ev.worker
	case "end":
		ev.end = &nodeEnd{}
		into = ev.end
	case "interrupt":
		ev.interruption = &interruption{}
		into = ev.interruption
	case "kill":
		ev.kill = true
		return ev, true
	default:
		return event{}, false
	}
	if json.Unmarshal(entry.Value, into) != nil {
		return event{}, false
	}
	if ev.slot != nil {
		ev.slot.revision, ev.jobEnd = entry.Revision, ev.slot.JobEnd
	}
	ev.text = entry.Value
	return ev, ev.sound(p, numbers)
}

// sound reports whether another agent's event is valid.
func (ev *event) sound(p *peers, numbers [2]int) bool {
	switch {
	case ev.slot != nil:
		return ev.slot.Node == numbers[0] && len(ev.slot.Ports) == ev.slot.Workers && ev.slot.Workers > 0
	case ev.members != nil:
		return len(ev.members.Slots) > 0 && ev.members.Epoch == ev.epoch
	case ev.end != nil:
		return ev.end.Node == numbers[1] && ev.end.Node < p.nodes
	}
	return ev.interruption == nil || ev.interruption.Node != p.node
}

// before reports whether an event belongs to an earlier epoch, and so does not concern an agent that joined
// later.
func (ev *event) before(epoch uint32) bool {
	return ev.slot == nil && ev.jobEnd == nil && ev.epoch < epoch
}
