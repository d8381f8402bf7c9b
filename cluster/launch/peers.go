package launch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// card is what agents tell each other when an epoch begins.
type card struct {
	Node        int    `json:"node"`
	Nodes       int    `json:"nodes,omitempty"`
	Host        string `json:"host,omitempty"`
	PID         int    `json:"pid,omitempty"`
	Nonce       string `json:"nonce,omitempty"` // tells two agents of one process number apart
	Workers     int    `json:"workers,omitempty"`
	Address     string `json:"address,omitempty"`
	MasterPort  int    `json:"master_port,omitempty"`
	Ports       []int  `json:"ports,omitempty"`
	RestartsMax int    `json:"restarts_max,omitempty"`
	Command     string `json:"command,omitempty"`
}

func (c *card) workerAddresses() (out []string) {
	for _, p := range c.Ports {
		out = append(out, net.JoinHostPort(c.Address, strconv.Itoa(p)))
	}
	return out
}

// interruption is a user's wish, told to the other agents.
type interruption struct {
	Node      int  `json:"node"`
	Terminate bool `json:"terminate,omitempty"` // SIGTERM, else Ctrl-C
	Kill      bool `json:"kill,omitempty"`      // the second time
}

// event is what was heard from the other agents.
type event struct {
	epoch        uint32
	stop         bool
	end          *nodeEnd
	interruption *interruption
	lost         error // an agent does not show any more that it lives
	err          error // the store cannot be reached
}

// peers are the agents of the other nodes. With one node there are none, and all methods do next to nothing.
//
// They share these keys under launch/<job>/: node/<epoch>/<node> holds an agent's card, stop/<epoch> ends an epoch, end/<epoch>/<node>
// says how a node's workers ended, interrupt holds the user's wish, alive/<node> a counter that goes on, and bye/<node> says
// that an agent needs the store no more.
type peers struct {
	store  rendezvous.Store
	prefix string
	node   int
	nodes  int
	nonce  string
	beat   time.Duration
	wait   time.Duration
	events chan event
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
}

func newPeers(a *Agent) *peers {
	p := &peers{
		store: a.cfg.Store, prefix: "launch/" + a.cfg.ID + "/", node: a.cfg.Node, nodes: a.cfg.Nodes, nonce: rand.Text(), beat: a.cfg.Heartbeat, wait: a.cfg.RendezvousTimeout,
		events: make(chan event),
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

func (p *peers) stopKey(epoch uint32) string { return fmt.Sprintf("%sstop/%d", p.prefix, epoch) }
func (p *peers) interruptKey() string        { return p.prefix + "interrupt" }

func (p *peers) endKey(epoch uint32, node int) string {
	return fmt.Sprintf("%send/%d/%d", p.prefix, epoch, node)
}

func (p *peers) nodeKey(epoch uint32, node int) string {
	return fmt.Sprintf("%snode/%d/%d", p.prefix, epoch, node)
}

// storeTime bounds a single call to the store.
const storeTime = 20 * time.Second

// publish sets a key, in its own time: what cannot be said is found out by the others' own clocks.
func (p *peers) publish(key string, value any) {
	if p.nodes == 1 {
		return
	}
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // our own types
	}
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), storeTime)
		defer cancel()
		_ = p.store.Set(ctx, key, text)
	})
}

// close says goodbye, and waits until the others have done so too, or are gone: the store may live in this process.
func (p *peers) close() {
	if p.nodes > 1 {
		p.publish(p.prefix+"bye/"+strconv.Itoa(p.node), p.nonce)
		p.farewell()
	}
	p.cancel()
	p.work.Wait()
}

// farewellTime is how long an agent waits for the others' goodbyes.
const farewellTime = 5 * time.Second

func (p *peers) farewell() {
	ctx, cancel := context.WithTimeout(p.ctx, farewellTime)
	defer cancel()
	var after uint64
	for gone := 0; gone < p.nodes; {
		entries, revision, err := p.store.List(ctx, p.prefix+"bye/")
		if gone = len(entries); err != nil || gone == p.nodes {
			return
		}
		after = revision
		if _, _, err = p.store.Changes(ctx, p.prefix+"bye/", after); err != nil {
			return
		}
	}
}

// bounded leaves out what makes a message too long for the store.
func (n nodeEnd) bounded() nodeEnd {
	size := func() int { b, _ := json.Marshal(n); return len(b) }
	n.Failures = slices.Clone(n.Failures)
	for i := len(n.Failures) - 1; i >= 0 && size() > rendezvous.ValueMax/2; i-- {
		n.Failures[i].Stack, n.Failures[i].Stderr = "", nil
	}
	return n
}

// meet returns the cards of all nodes, once all are there. From the first meeting on the others are listened to.
func (p *peers) meet(ctx context.Context, epoch uint32, mine card) ([]card, error) {
	if p.nodes == 1 {
		return []card{mine}, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, p.wait, errors.New("timed out"))
	defer cancel()
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	current, created, err := p.store.Create(ctx, p.nodeKey(epoch, p.node), text)
	if err != nil {
		return nil, fmt.Errorf("meeting the other nodes: %w", err)
	}
	if !created {
		var there card
		if err := json.Unmarshal(current, &there); err != nil || there.Nonce != p.nonce {
			return nil, fmt.Errorf("node %d is there already: host %s, pid %d; this is host %s, pid %d: give each node its own --node-rank, and each job its own --rdzv-id",
				p.node, there.Host, there.PID, mine.Host, mine.PID)
		}
	}
	cards, err := p.gather(ctx, epoch)
	if err != nil {
		return nil, err
	}
	if err := agree(cards, mine); err != nil {
		return nil, err
	}
	if epoch == 0 {
		p.listen(cards)
	}
	return cards, nil
}

// gather waits for the cards of all nodes.
func (p *peers) gather(ctx context.Context, epoch uint32) ([]card, error) {
	prefix := fmt.Sprintf("%snode/%d/", p.prefix, epoch)
	for {
		entries, revision, err := p.store.List(ctx, prefix)
		if err != nil {
			return nil, fmt.Errorf("meeting the other nodes: %w", err)
		}
		cards := map[int]card{}
		for _, entry := range entries {
			var c card
			if err := json.Unmarshal(entry.Value, &c); err != nil {
				return nil, fmt.Errorf("meeting the other nodes: %s holds no card: %w", entry.Key, err)
			}
			if c.Nodes != p.nodes {
				return nil, fmt.Errorf("node %d (host %s, pid %d) was started with --nnodes %d, this one with %d", c.Node, c.Host, c.PID, c.Nodes, p.nodes)
			}
			cards[c.Node] = c
		}
		if len(cards) == p.nodes {
			out := make([]card, p.nodes)
			for node, c := range cards {
				out[node] = c
			}
			return out, nil
		}
		if _, _, err = p.store.Changes(ctx, prefix, revision); err != nil {
			return nil, p.missing(ctx, cards, err)
		}
	}
}

// missing says which nodes have not come.
func (p *peers) missing(ctx context.Context, cards map[int]card, err error) error {
	if ctx.Err() == nil {
		return fmt.Errorf("meeting the other nodes: %w", err)
	}
	var there, absent []string
	for node := range p.nodes {
		if c, ok := cards[node]; ok {
			there = append(there, fmt.Sprintf("%d (host %s, pid %d)", node, c.Host, c.PID))
		} else {
			absent = append(absent, strconv.Itoa(node))
		}
	}
	return fmt.Errorf("not all nodes came within %v: missing %s; there are %s: %w", p.wait, strings.Join(absent, ", "), strings.Join(there, ", "), context.Cause(ctx))
}

// agree refuses agents that would not do the same.
func agree(cards []card, mine card) error {
	for _, c := range cards {
		switch {
		case c.RestartsMax != mine.RestartsMax:
			return fmt.Errorf("node %d (host %s) was started with --max-restarts %d, this one with %d", c.Node, c.Host, c.RestartsMax, mine.RestartsMax)
		case len(c.Ports) != c.Workers || c.Workers < 1:
			return fmt.Errorf("node %d (host %s, pid %d) told of %d workers and %d ports", c.Node, c.Host, c.PID, c.Workers, len(c.Ports))
		}
	}
	return nil
}

// listen starts to hear and to show life, until close.
func (p *peers) listen(cards []card) {
	p.work.Go(p.hear)
	p.work.Go(p.show)
	p.work.Go(func() { p.judge(cards) })
}

func (p *peers) send(ev event) {
	select {
	case p.events <- ev:
	case <-p.ctx.Done():
	}
}

// hear turns changes in the store into events.
func (p *peers) hear() {
	var after uint64
	for {
		entries, revision, err := p.store.Changes(p.ctx, p.prefix, after)
		if err != nil {
			p.send(event{err: fmt.Errorf("the store, which lives in the agent of node 0, cannot be reached any more: %w", err)})
			return
		}
		after = revision
		for _, entry := range entries {
			if ev, ok := p.read(entry); ok {
				p.send(ev)
			}
		}
	}
}

// read reads an entry that another agent has set.
func (p *peers) read(entry rendezvous.Entry) (ev event, ok bool) {
	parts := strings.Split(strings.TrimPrefix(entry.Key, p.prefix), "/")
	number := func(i int) uint32 {
		n, err := strconv.ParseUint(parts[min(i, len(parts)-1)], 10, 32)
		ok = ok && err == nil
		return uint32(n)
	}
	ok = !entry.Deleted
	switch {
	case parts[0] == "stop" && len(parts) == 2:
		ev = event{epoch: number(1), stop: true}
	case parts[0] == "end" && len(parts) == 3:
		ev = event{epoch: number(1), end: &nodeEnd{}}
		ok = ok && json.Unmarshal(entry.Value, ev.end) == nil && ev.end.Node == int(number(2)) && ev.end.Node < p.nodes
	case parts[0] == "interrupt":
		ev = event{interruption: &interruption{}}
		ok = ok && json.Unmarshal(entry.Value, ev.interruption) == nil && ev.interruption.Node != p.node
	default:
		ok = false
	}
	return ev, ok
}

func (p *peers) aliveKey(node int) string { return p.prefix + "alive/" + strconv.Itoa(node) }

// show shows that this agent lives.
func (p *peers) show() {
	tick := time.NewTicker(p.beat)
	defer tick.Stop()
	for n := 0; ; n++ {
		_ = p.store.Set(p.ctx, p.aliveKey(p.node), []byte(strconv.Itoa(n))) // if it cannot, hear says so
		select {
		case <-tick.C:
		case <-p.ctx.Done():
			return
		}
	}
}

// judge tells of an agent that has not shown for ten beats, by this one's clock, that it lives.
func (p *peers) judge(cards []card) {
	type sign struct {
		revision uint64
		at       time.Time
	}
	seen := make([]sign, p.nodes)
	for i := range seen {
		seen[i].at = time.Now()
	}
	tick := time.NewTicker(p.beat)
	defer tick.Stop()
	for {
		entries, _, err := p.store.List(p.ctx, p.prefix+"alive/")
		if err != nil {
			return // hear says so
		}
		for _, entry := range entries {
			node, err := strconv.Atoi(strings.TrimPrefix(entry.Key, p.prefix+"alive/"))
			if err == nil && node >= 0 && node < p.nodes && entry.Revision != seen[node].revision {
				seen[node] = sign{entry.Revision, time.Now()}
			}
		}
		for node, s := range seen {
			if silent := time.Since(s.at); node != p.node && silent > 10*p.beat {
				c := cards[node]
				p.send(event{lost: fmt.Errorf("the agent of node %d (host %s, pid %d) has not shown for %v that it lives", node, c.Host, c.PID, silent.Round(time.Second))})
				return
			}
		}
		select {
		case <-tick.C:
		case <-p.ctx.Done():
			return
		}
	}
}
