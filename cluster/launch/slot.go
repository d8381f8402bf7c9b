package launch

import (
	"cmp"
	"context"
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

func (s *nodeSlot) path() string { return fmt.Sprintf("slot/%d", s.Node) }

func (s *nodeSlot) valid() bool { return s.Node >= 0 && s.Workers > 0 && len(s.Ports) == s.Workers }

type slotState string

const (
	present slotState = "present"
	lost    slotState = "lost" // it has no heartbeat
	gone    slotState = "gone" // it has left
)

// jobEnd is how the job ended: the first one that an agent writes.
type jobEnd struct {
	Node int `json:"node"` // of the agent that wrote it
	// Nonce is that agent's: it tells the end of an earlier run from that of this one.
	Nonce string    `json:"nonce"`
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Time  time.Time `json:"time"`
	Code  int       `json:"code"`
	Text  string    `json:"text,omitempty"`

	text []byte // in the store
}

func (o *jobEnd) String() string {
	text := fmt.Sprintf("the job has ended with code %d at %s", o.Code, o.Time.Local().Format("2006-01-02 15:04:05"))
	if o.Text != "" {
		text += fmt.Sprintf(", as reported by node %d (host %s, pid %d): %s", o.Node, o.Host, o.PID, o.Text)
	}
	return text
}

func (o *jobEnd) path() string { return "ended" }
func (o *jobEnd) valid() bool  { return true }

// jobEndedError is the error of an agent that waits for a job which the others have ended.
type jobEndedError struct{ jobEnd }

func (e *jobEndedError) Error() string { return e.String() }

// errReplaced is the error of an agent that was declared lost and whose slot another agent has taken.
var errReplaced = errors.New("its node slot was taken")

// takeReports makes this agent the one that may report for its node: from now on the store refuses the reports of an
// agent that had the slot before, however late they arrive. The agents of several nodes have slots: one that was
// suspended here for so long that another has taken its slot does not take the reports from that one.
// It sends the first report of a node of several.
func (p *peers) takeReports(ctx context.Context) error {
	key := p.reporterKey()
	for p.store != nil {
		before, revision, err := p.store.Get(ctx, key)
		if err == nil && string(before) == p.nonce {
			if p.nodes == 1 {
				return nil
			}
			return p.reporter.First(ctx)
		}
		if errors.Is(err, rendezvous.ErrNotFound) {
			revision, err = 0, nil
		}
		if p.nodes > 1 && err == nil {
			_, err = p.mySlot(ctx)
		}
		if err != nil {
			return err
		}
		writing, cancel := context.WithTimeout(ctx, takeTime)
		_, err = rendezvous.Replace(writing, p.store, key, revision, []byte(p.nonce), p.retry())
		if cancel(); err != nil {
			return fmt.Errorf("writing the key %q into the rendezvous store: %w", key, err)
		}
	}
	return nil
}

// takeTime bounds the attempts to write a key that the store may not let this agent write.
const takeTime = 15 * time.Second

// retry is the pause after a write whose result is unknown.
func (p *peers) retry() time.Duration { return min(p.interval, createPause) }

// replaced returns the error of an agent whose slot another one has taken.
func (s *nodeSlot) replaced(by *nodeSlot) error {
	return fmt.Errorf("%v was declared lost, and %w by the agent on host %s with pid %d", &s.registration, errReplaced,
		by.Host, by.PID)
}

// writeSlot writes the slot, in place of old. It returns false if another agent was faster.
func (p *peers) writeSlot(ctx context.Context, s, old *nodeSlot) (bool, error) {
	revision := uint64(0)
	if old != nil {
		revision = old.revision
	}
	done, err := rendezvous.Replace(ctx, p.store, p.slotKey(), revision, encode(s), p.retry())
	if done {
		p.mine = *s
	}
	return done, err
}

// changeSlot changes this agent's slot. It returns false if change does, given the slot in the store and the new one,
// and an error if another agent has the slot.
func (p *peers) changeSlot(ctx context.Context, change func(old, s *nodeSlot) bool) (done bool, err error) {
	for !done && err == nil {
		var old *nodeSlot
		if old, err = p.mySlot(ctx); err != nil {
			return false, err
		}
		s := p.mine
		if !change(old, &s) {
			return false, nil
		}
		done, err = p.writeSlot(ctx, &s, old)
	}
	return done, err
}

// mayReplace returns the error of an agent that cannot join a job that has begun; last is its last epoch.
func (s *nodeSlot) mayReplace(last *epochMembers, job string) error {
	was := &last.Slots[s.Node].registration
	again := "; if that run of the job is over, choose another --rdzv-id"
	switch {
	case s.RestartsMax == 0:
		return fmt.Errorf("job %q has started with %v, which cannot be replaced with --max-restarts 0%s", job, was, again)
	case s.Epoch > uint32(s.RestartsMax):
		return fmt.Errorf("job %q has started with %v, which cannot be replaced any more: the job has used its %d "+
			"restarts (--max-restarts)%s", job, was, s.RestartsMax, again)
	case was.Workers != s.Workers:
		return fmt.Errorf("%v has %d workers, but %v, which it would replace, had %d: the number must stay the same, "+
			"since results depend on it", &s.registration, s.Workers, was, was.Workers)
	}
	return nil
}

// incompatible returns an error if an agent cannot be in the same job as others.
func (s *nodeSlot) incompatible(slots []*nodeSlot, begun []*epochMembers) error {
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

// agentsIn returns the nonces of the agents that have written messages.
func agentsIn(messages []message) map[string]bool {
	agents := map[string]bool{}
	for _, m := range messages {
		if s, is := m.(*nodeSlot); is {
			agents[s.Nonce] = true
		}
		if o := endIn(m); o != nil {
			agents[o.Nonce] = true
		}
	}
	return agents
}

// clear removes a conclusion of an earlier run. An agent of this run may have taken the slot, or ended this run, since
// it was read: then that stays as it is. Without the nonce, the agent that had the slot cannot write to it again.
func (p *peers) clear(ctx context.Context, m message) error {
	if o, is := m.(*jobEnd); is {
		return rendezvous.DeleteValue(ctx, p.store, p.keyOf(o), o.text)
	}
	s := *m.(*nodeSlot)
	s.Nonce, s.State, s.JobEnd = "", gone, nil
	_, err := p.store.Swap(ctx, p.keyOf(&s), s.revision, encode(&s))
	return err
}

// cleared reports whether a later run cleared the slot and no agent has taken it since.
func (s *nodeSlot) cleared() bool { return s.Nonce == "" }

// endIn returns the end of the job in a message; nil: it has none.
func endIn(m message) *jobEnd {
	switch m := m.(type) {
	case *jobEnd:
		return m
	case *nodeSlot:
		return m.JobEnd
	}
	return nil
}

// endOf returns the first end among messages, nil if there is none, and the messages with one.
func endOf(messages []message) (o *jobEnd, held []message) {
	for _, m := range messages {
		if end := endIn(m); end != nil {
			o, held = cmp.Or(o, end), append(held, m)
		}
	}
	return o, held
}

// readMessages returns all messages in the store, in the order in which they were written, and its revision.
func (p *peers) readMessages(ctx context.Context) (messages []message, revision uint64, err error) {
	entries, revision, err := p.store.List(ctx, p.events())
	slices.SortFunc(entries, func(a, b rendezvous.Entry) int { return cmp.Compare(a.Revision, b.Revision) })
	for _, entry := range entries {
		if m, ok := p.decode(entry); ok {
			messages = append(messages, m)
		} else if entry.Key == p.keyOf(&jobEnd{}) {
			err = fmt.Errorf("key %s holds %.100q", entry.Key, entry.Value)
		}
	}
	return messages, revision, err
}

// slotsIn returns the slots in the messages, nil for those that are free, and the epochs that have begun.
func slotsIn(messages []message, nodes int) (slots []*nodeSlot, begun []*epochMembers) {
	slots = make([]*nodeSlot, nodes)
	epochs := map[uint32]*epochMembers{}
	for _, m := range messages {
		switch m := m.(type) {
		case *nodeSlot:
			if m.Node < nodes {
				slots[m.Node] = m
			}
		case *epochMembers:
			epochs[m.Epoch] = m
		}
	}
	for m, ok := epochs[0]; ok; m, ok = epochs[uint32(len(begun))] {
		begun = append(begun, m)
	}
	return slots, begun
}

// read returns the current slots, nil for those that are free, and the epochs that have begun.
func (p *peers) read(ctx context.Context) (slots []*nodeSlot, begun []*epochMembers, revision uint64, err error) {
	messages, revision, err := p.readMessages(ctx)
	if err != nil {
		return nil, nil, 0, err
	}
	slots, begun = slotsIn(messages, p.nodes)
	return slots, begun, revision, nil
}

// readSlot returns a node's slot, or [rendezvous.ErrNotFound].
func (p *peers) readSlot(ctx context.Context, node int) (*nodeSlot, error) {
	key := p.keyOf(&nodeSlot{registration: registration{Node: node}})
	text, revision, err := p.store.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	s, ok := p.decode(rendezvous.Entry{Key: key, Value: text, Revision: revision})
	if !ok {
		return nil, rendezvous.ErrNotFound
	}
	return s.(*nodeSlot), nil
}

// renew publishes the epoch that this agent wants to join, and its ports. An agent that was declared lost but
// is alive is back with this, unless another has taken its slot.
func (p *peers) renew(ctx context.Context, epoch uint32, mine registration) error {
	_, err := p.changeSlot(ctx, func(_, s *nodeSlot) bool {
		s.registration, s.Epoch, s.State, s.Ready = mine, epoch, present, true
		return true
	})
	return err
}

// renewed calls renew repeatedly while the store cannot be reached.
func (p *peers) renewed(ctx context.Context, epoch uint32, mine registration) error {
	for {
		err := p.renew(ctx, epoch, mine)
		if !errors.Is(err, rendezvous.ErrLost) || p.gone(err) || pause.For(ctx, p.interval) != nil {
			return err
		}
	}
}

// mySlot returns this agent's slot, or an error if another agent has taken it.
func (p *peers) mySlot(ctx context.Context) (*nodeSlot, error) {
	s, err := p.readSlot(ctx, p.node)
	if err == nil && s.Nonce != p.nonce {
		err = p.mine.replaced(s)
	}
	return s, err
}

// lose records that an agent has no heartbeat, unless another has its slot already.
func (p *peers) lose(ctx context.Context, node int, nonce string, silent time.Duration) error {
	s, err := p.readSlot(ctx, node)
	switch {
	case errors.Is(err, rendezvous.ErrNotFound):
		return nil
	case err != nil:
		return err
	case s.State != present || s.Nonce != nonce:
		return nil
	}
	s.State, s.Since = lost, time.Now().Add(-silent)
	s.Why = fmt.Sprintf("no heartbeat for %v", silent.Round(time.Second/10))
	_, err = p.store.Swap(ctx, p.keyOf(s), s.revision, encode(s)) // if not: it is alive, or another agent has recorded it
	return err
}
