package launch

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// registration is an agent's registration for an epoch.
type registration struct {
	Node        int    `json:"node"`
	Host        string `json:"host"`
	PID         int    `json:"pid"`
	Workers     int    `json:"workers"`
	Address     string `json:"address"`
	MasterPort  int    `json:"master_port"`
	Ports       []int  `json:"ports"`
	RestartsMax int    `json:"restarts_max"`
	// Heartbeat is the agent's heartbeat timeout, as its user has set it.
	Heartbeat time.Duration `json:"heartbeat_timeout_ns"`
}

// String identifies the node: "node 1 (host b, pid 17)".
func (c *registration) String() string { return fmt.Sprintf("node %d (%s)", c.Node, c.process()) }

func (c *registration) process() string { return fmt.Sprintf("host %s, pid %d", c.Host, c.PID) }

func (c *registration) workerAddresses() (out []string) {
	for _, p := range c.Ports {
		out = append(out, net.JoinHostPort(c.Address, strconv.Itoa(p)))
	}
	return out
}

// nodeSlot is a node's place in the job, and the agent that has it. An agent takes its node's slot
// when it joins, and another may take it when that agent is lost. Every change is made by Swap, so that all
// agents see the same changes in the same order.
type nodeSlot struct {
	registration

	Nodes int `json:"nodes"` // the number of nodes that it expects
	// Nonce distinguishes this agent from others that register as the same node.
	Nonce string    `json:"nonce"`
	State slotState `json:"state"`
	// Epoch is the one that the agent is in, or waits to begin. Ready reports that it is ready to begin it.
	Epoch uint32 `json:"epoch"`
	Ready bool   `json:"ready,omitempty"`
	// JobEnd is how the job has ended, if this agent has ended it. It is part of the slot so that an agent that
	// was declared lost cannot end the job, however late its write arrives: the slot has another revision by
	// then.
	JobEnd *jobEnd `json:"job_end,omitempty"`
	// Why and Since describe a lost agent: the evidence, and the time of its last heartbeat, by the clock of
	// the agent that detected the loss.
	Why   string    `json:"why,omitempty"`
	Since time.Time `json:"since,omitzero"`

	revision uint64
}

type slotState string

const (
	present slotState = "present"
	lost    slotState = "lost" // it has no heartbeat
	gone    slotState = "gone" // it has left
)

// epochMembers is the start of an epoch: the agents in it. The first one written for an epoch is valid.
type epochMembers struct {
	Epoch uint32     `json:"epoch"`
	Slots []nodeSlot `json:"slots"` // by node
}

// has reports whether an agent takes part.
func (m *epochMembers) has(nonce string) bool {
	for i := range m.Slots {
		if m.Slots[i].Nonce == nonce {
			return true
		}
	}
	return false
}

// jobEnd is how the job ended: the first one that an agent writes.
type jobEnd struct {
	Node int       `json:"node"` // of the agent that wrote it
	Host string    `json:"host"`
	PID  int       `json:"pid"`
	Time time.Time `json:"time"`
	Code int       `json:"code"`
	Text string    `json:"text,omitempty"`
}

func (o *jobEnd) String() string {
	text := fmt.Sprintf("the job has ended with code %d at %s", o.Code, o.Time.Local().Format("2006-01-02 15:04:05"))
	if o.Text != "" {
		text += fmt.Sprintf(", as reported by node %d (host %s, pid %d): %s", o.Node, o.Host, o.PID, o.Text)
	}
	return text
}

// jobEndedError is the error of an agent that waits for a job which the others have ended.
type jobEndedError struct{ jobEnd }

func (e *jobEndedError) Error() string { return e.String() }

// errReplaced is the error of an agent that was declared lost and whose slot another agent has taken.
var errReplaced = errors.New("its node slot was taken")

// takeSlot takes this node's slot and determines the epoch. Only one agent can have it: another agent that is
// alive keeps it, and one without a heartbeat for the heartbeat timeout is replaced.
func (p *peers) takeSlot(ctx context.Context, mine registration, report func(string)) error {
	if err := p.ended(ctx, report); err != nil {
		return err
	}
	if err := rendezvous.AnnounceJob(ctx, p.store, p.job); err != nil {
		return err
	}
	s := nodeSlot{registration: mine, Nodes: p.nodes, Nonce: p.nonce, State: present}
	holder := livenessCheck{polls: 2 * missedMax}
	for {
		slots, begun, _, err := p.read(ctx)
		if err != nil {
			return err
		}
		if err := s.incompatible(slots, begun); err != nil {
			return p.endIncompatible(ctx, err, len(begun) > 0)
		}
		s.Epoch = uint32(len(begun))
		old := slots[p.node]
		if old != nil && old.Nonce != s.Nonce && old.State == present {
			heartbeat, _, err := p.store.Get(ctx, p.reporter.KeyOf(p.node))
			if err != nil && !errors.Is(err, rendezvous.ErrNotFound) {
				return err
			}
			switch holder.observe(old, heartbeat) {
			case alive:
				return fmt.Errorf("node %d of job %q joined twice: its agent is on host %s as pid %d, and is alive; this one is "+
					"on host %s as pid %d", p.node, p.job, old.Host, old.PID, s.Host, s.PID)
			case unknown:
				if holder.seen == 1 {
					report(fmt.Sprintf("lockstep run: %v has this node slot: checking its heartbeat for up to %v\n", &old.registration,
						missedMax*p.interval))
				}
				if err := pause.For(ctx, p.interval/2); err != nil {
					return err
				}
				continue
			}
		}
		if len(begun) > 0 {
			if err := p.mayReplace(&s, old, &begun[len(begun)-1]); err != nil {
				return err
			}
		}
		done, err := p.writeSlot(ctx, &s, old)
		if err != nil {
			return err
		}
		if done {
			p.first = s.Epoch
			if err := p.takeReports(ctx); err != nil {
				return err
			}
			if err := p.reporter.First(ctx); err != nil {
				return err
			}
			return p.checkOthers(ctx, &s)
		}
	}
}

// takeReports makes this agent the one that may report for its node: from now on the store refuses the reports of an
// agent that had the slot before, however late they arrive. The agents of several nodes have slots: one that was
// suspended here for so long that another has taken its slot does not take the reports from that one.
func (p *peers) takeReports(ctx context.Context) error {
	key := p.key("reporter", p.node)
	for attempt := 1; ; attempt++ {
		before, revision, err := p.store.Get(ctx, key)
		none := errors.Is(err, rendezvous.ErrNotFound)
		if err == nil && string(before) == p.nonce {
			return nil
		}
		if err == nil || none {
			err = p.stillMine(ctx)
		}
		if err != nil {
			return err
		}
		if none {
			_, _, err = p.store.Create(ctx, key, []byte(p.nonce))
		} else {
			_, err = p.store.Swap(ctx, key, revision, []byte(p.nonce))
		}
		if err == nil {
			continue // read it: another agent may have written it too
		}
		if final(err) || attempt >= takeAttempts || pause.For(ctx, min(p.interval, createPause)) != nil {
			return fmt.Errorf("writing the key %q into the rendezvous store: %w", key, err)
		}
	}
}

// takeAttempts bounds the attempts of a write that fails, as its result may be unknown.
const takeAttempts = 20

// stillMine returns an error if another agent has taken this one's slot.
func (p *peers) stillMine(ctx context.Context) error {
	if p.nodes == 1 {
		return nil
	}
	text, _, err := p.store.Get(ctx, p.key("event", "slot", p.node))
	if err != nil {
		return err
	}
	var now nodeSlot
	if err := json.Unmarshal(text, &now); err != nil {
		return err
	}
	if now.Nonce != p.nonce {
		return p.replaced(&now)
	}
	return nil
}

// replaced returns the error of an agent whose slot another one has taken.
func (p *peers) replaced(by *nodeSlot) error {
	return fmt.Errorf("%v was declared lost, and %w by the agent on host %s with pid %d", &p.mine.registration,
		errReplaced, by.Host, by.PID)
}

// checkOthers compares a slot that was taken with those that others have taken at the same time: of two, at
// least the later one sees both.
func (p *peers) checkOthers(ctx context.Context, s *nodeSlot) error {
	slots, begun, _, err := p.read(ctx)
	if err != nil {
		return err
	}
	if err := s.incompatible(slots, begun); err != nil {
		return p.endIncompatible(ctx, err, len(begun) > 0)
	}
	return nil
}

// writeSlot writes the slot, in place of old. It returns false if another agent was faster. A store that does not
// know whether it has written, such as one between two leaders, is read, and written again if necessary.
func (p *peers) writeSlot(ctx context.Context, s, old *nodeSlot) (bool, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return false, err
	}
	key := p.key("event", "slot", p.node)
	var done bool
	if old == nil {
		_, done, err = p.store.Create(ctx, key, text)
	} else {
		done, err = p.store.Swap(ctx, key, old.revision, text)
	}
	for err != nil && !final(err) && pause.For(ctx, min(p.interval, createPause)) == nil {
		now, revision, e := p.store.Get(ctx, key)
		switch {
		case e == nil && bytes.Equal(now, text):
			done, err = true, nil
		case errors.Is(e, rendezvous.ErrNotFound) && old == nil:
			_, done, err = p.store.Create(ctx, key, text)
		case e != nil && !errors.Is(e, rendezvous.ErrNotFound):
			err = e
		case e == nil && old != nil && revision == old.revision:
			done, err = p.store.Swap(ctx, key, old.revision, text)
		default:
			err = nil
		}
	}
	if done {
		p.mine, p.slots[p.node] = *s, s
	}
	return done, err
}

// final reports whether the store would return this error again.
func final(err error) bool {
	return errors.Is(err, rendezvous.ErrLost) || errors.Is(err, rendezvous.ErrClosed) || errors.Is(err, rendezvous.ErrFull)
}

// mayReplace returns the error of an agent that cannot join a job that has begun.
func (p *peers) mayReplace(s, old *nodeSlot, last *epochMembers) error {
	was := &last.Slots[s.Node].registration
	again := "; if that run of the job is over, choose another --rdzv-id"
	switch {
	case s.RestartsMax == 0:
		return fmt.Errorf("job %q has started with %v, which cannot be replaced with --max-restarts 0%s", p.job, was, again)
	case s.Epoch > uint32(s.RestartsMax):
		return fmt.Errorf("job %q has started with %v, which cannot be replaced any more: the job has used its %d "+
			"restarts (--max-restarts)%s", p.job, was, s.RestartsMax, again)
	case was.Workers != s.Workers:
		return fmt.Errorf("%v has %d workers, but %v, which it would replace, had %d: the number must stay the same, "+
			"since results depend on it", &s.registration, s.Workers, was, was.Workers)
	}
	return nil
}

// incompatible returns an error if an agent cannot be in the same job as others.
func (s *nodeSlot) incompatible(slots []*nodeSlot, begun []epochMembers) error {
	for _, o := range slots {
		switch {
		case o == nil || o.State != present || o.Nonce == s.Nonce:
		case o.Nodes != s.Nodes:
			return fmt.Errorf("%v expects %d nodes, but %v expects %d", &o.registration, o.Nodes, &s.registration, s.Nodes)
		case o.RestartsMax != s.RestartsMax:
			return fmt.Errorf("%v was started with --max-restarts %d, %v with %d", &o.registration, o.RestartsMax,
				&s.registration, s.RestartsMax)
		case o.Heartbeat != s.Heartbeat:
			return fmt.Errorf("%v was started with --heartbeat-timeout %v, %v with %v", &o.registration, o.Heartbeat,
				&s.registration, s.Heartbeat)
		}
	}
	for _, m := range begun {
		if len(m.Slots) != s.Nodes {
			return fmt.Errorf("%v expects %d nodes, but the job has started with %d", &s.registration, s.Nodes, len(m.Slots))
		}
	}
	return nil
}

// endIncompatible ends a job that has not begun for all, since it is unknown which agent is right.
func (p *peers) endIncompatible(ctx context.Context, why error, begun bool) error {
	if !begun {
		p.endJob(ctx, 1, why.Error())
	}
	return why
}

// ended returns the error of a job that is over. A store that outlives jobs may still have the end of an
// earlier job of this name.
func (p *peers) ended(ctx context.Context, report func(string)) error {
	events, err := p.readEvents(ctx)
	if err != nil {
		return err
	}
	o, held := endOf(events)
	switch {
	case o == nil:
		return nil
	case !p.lasts:
		return &jobEndedError{*o}
	}
	p.earlier = fmt.Sprintf("an earlier run of job %q is over: %v", p.job, o)
	report("lockstep run: " + p.earlier + "; starting a new run\n")
	earlier := runOf(events)
	for len(held) > 0 {
		for _, ev := range held {
			if err := p.clear(ctx, ev); err != nil {
				return err
			}
		}
		// An agent of the earlier run may have written its slot, with the end of the job, at the same time.
		if events, err = p.readEvents(ctx); err != nil {
			return err
		}
		if _, held = endOf(events); len(held) > 0 {
			if o := earlier.notEnded(held); o != nil { // the new run has ended meanwhile
				return &jobEndedError{*o}
			}
		}
	}
	return nil
}

// runOf returns the run of a job whose events were read.
func runOf(events []event) *run {
	r := &run{agents: map[string]bool{}}
	for _, ev := range events {
		if ev.slot != nil {
			r.agents[ev.slot.Nonce] = true
		}
		if ev.jobEnd != nil {
			r.ends = append(r.ends, *ev.jobEnd)
		}
	}
	return r
}

// run identifies a run of a job on a lasting store.
type run struct {
	agents map[string]bool // the nonces of those that had slots
	ends   []jobEnd
}

// notEnded returns the first end that is not this run's, nil if there is none.
func (r *run) notEnded(held []event) *jobEnd {
	for _, ev := range held { // an agent writes its slot first, and then the same end once more
		if ev.slot != nil && r.agents[ev.slot.Nonce] {
			r.ends = append(r.ends, *ev.jobEnd)
		}
	}
	for _, ev := range held {
		if !slices.ContainsFunc(r.ends, ev.jobEnd.equal) {
			return ev.jobEnd
		}
	}
	return nil
}

// equal reports whether two ends are the same one.
func (o *jobEnd) equal(other jobEnd) bool {
	return o.Node == other.Node && o.Host == other.Host && o.PID == other.PID && o.Time.Equal(other.Time)
}

// clear removes a conclusion of an earlier run. An agent of this run may have taken the slot, or ended this run, since
// it was read: then that stays as it is. Without the nonce, the agent that had the slot cannot write to it again.
func (p *peers) clear(ctx context.Context, ev event) error {
	if ev.slot == nil {
		return rendezvous.DeleteValue(ctx, p.store, p.key("event", "ended"), ev.text)
	}
	s := *ev.slot
	s.Nonce, s.State, s.JobEnd = "", gone, nil
	text, err := json.Marshal(&s)
	if err != nil {
		return err
	}
	_, err = p.store.Swap(ctx, p.key("event", "slot", s.Node), s.revision, text)
	return err
}

// cleared reports whether a later run cleared the slot and no agent has taken it since.
func (s *nodeSlot) cleared() bool { return s.Nonce == "" }

// endOf returns the first end among events, nil if there is none, and the events with one.
func endOf(events []event) (o *jobEnd, held []event) {
	for _, ev := range events {
		if ev.jobEnd == nil {
			continue
		}
		held = append(held, ev)
		if o == nil {
			o = ev.jobEnd
		}
	}
	return o, held
}

// readEvents returns all events in the store, in the order in which they were written.
func (p *peers) readEvents(ctx context.Context) (events []event, err error) {
	entries, _, err := p.store.List(ctx, p.key("event")+"/")
	if err != nil {
		return nil, err
	}
	slices.SortFunc(entries, func(a, b rendezvous.Entry) int { return cmp.Compare(a.Revision, b.Revision) })
	for _, entry := range entries {
		ev, ok := p.decode(entry)
		if entry.Key == p.key("event", "ended") && !ok {
			return nil, fmt.Errorf("key %s holds %.100q", entry.Key, entry.Value)
		}
		if ok {
			events = append(events, ev)
		}
	}
	return events, nil
}

// read returns the current slots, nil for those that are free, and the epochs that have begun.
func (p *peers) read(ctx context.Context) (slots []*nodeSlot, begun []epochMembers, revision uint64, err error) {
	entries, revision, err := p.store.List(ctx, p.key("event")+"/")
	if err != nil {
		return nil, nil, 0, err
	}
	slots = make([]*nodeSlot, p.nodes)
	met := map[uint32]epochMembers{}
	for _, entry := range entries {
		switch ev, ok := p.decode(entry); {
		case !ok:
		case ev.slot != nil && ev.slot.Node < p.nodes:
			slots[ev.slot.Node] = ev.slot
		case ev.members != nil:
			met[ev.epoch] = *ev.members
		}
	}
	for m, ok := met[0]; ok; m, ok = met[uint32(len(begun))] {
		begun = append(begun, m)
	}
	return slots, begun, revision, nil
}

// livenessCheck determines whether an agent is alive, by its heartbeat. It counts polls, not time: an agent that was
// stopped itself knows nothing about the others.
type livenessCheck struct {
	polls     int // number of polls without a change after which it is dead
	nonce     string
	heartbeat []byte
	seen      int
}

type liveness int

const (
	unknown liveness = iota
	alive
	dead
)

// observe records the heartbeat of the agent in a slot.
func (v *livenessCheck) observe(s *nodeSlot, heartbeat []byte) liveness {
	changed := v.seen > 0 && v.nonce == s.Nonce && !bytes.Equal(v.heartbeat, heartbeat)
	if v.nonce != s.Nonce {
		v.seen = 0
	}
	v.nonce, v.heartbeat = s.Nonce, heartbeat
	v.seen++
	switch {
	case changed:
		return alive
	case v.seen > v.polls:
		return dead
	}
	return unknown
}

// renew publishes the epoch that this agent wants to join, and its ports. An agent that was declared lost but
// is alive is back with this, unless another has taken its slot.
func (p *peers) renew(ctx context.Context, epoch uint32, mine registration) error {
	for {
		text, revision, err := p.store.Get(ctx, p.key("event", "slot", p.node))
		if err != nil {
			return err
		}
		var old nodeSlot
		if err := json.Unmarshal(text, &old); err != nil {
			return err
		}
		if old.Nonce != p.nonce {
			return p.replaced(&old)
		}
		old.revision = revision
		s := p.mine
		s.registration, s.Epoch, s.State, s.Ready = mine, epoch, present, true
		if done, err := p.writeSlot(ctx, &s, &old); done || err != nil {
			return err
		}
	}
}

// lose records that an agent has no heartbeat, unless another has its slot already.
func (p *peers) lose(ctx context.Context, node int, nonce string, silent time.Duration) error {
	key := p.key("event", "slot", node)
	text, revision, err := p.store.Get(ctx, key)
	var s nodeSlot
	switch {
	case errors.Is(err, rendezvous.ErrNotFound):
		return nil
	case err != nil:
		return err
	case json.Unmarshal(text, &s) != nil || s.State != present || s.Nonce != nonce:
		return nil
	}
	s.State, s.Since = lost, time.Now().Add(-silent)
	s.Why = fmt.Sprintf("no heartbeat for %v", silent.Round(time.Second/10))
	if text, err = json.Marshal(&s); err != nil {
		return err
	}
	_, err = p.store.Swap(ctx, key, revision, text) // if not swapped: it is alive, or another agent has recorded it
	return err
}

// key returns a key of the agents.
func (p *peers) key(parts ...any) string {
	key := p.prefix
	for i, part := range parts {
		if i > 0 {
			key += "/"
		}
		switch part := part.(type) {
		case string:
			key += part
		case int:
			key += strconv.Itoa(part)
		case uint32:
			key += strconv.FormatUint(uint64(part), 10)
		}
	}
	return key
}
