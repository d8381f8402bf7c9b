package launch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// card is what agents tell each other when an epoch begins.
type card struct {
	Node        int    `json:"node"`
	Host        string `json:"host"`
	PID         int    `json:"pid"`
	Workers     int    `json:"workers"`
	Address     string `json:"address"`
	MasterPort  int    `json:"master_port"`
	Ports       []int  `json:"ports"`
	RestartsMax int    `json:"restarts_max"`
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
}

// event is what was heard from the other agents.
type event struct {
	epoch        uint32
	stop         bool
	worker       int // that failed
	end          *nodeEnd
	interruption *interruption // the first time
	kill         bool          // the second
	lost         error         // an agent does not show any more that it lives
	err          error         // the store cannot be reached
}

// peers are the agents of the other nodes. With one node there are none, and all methods do next to nothing.
//
// The agents meet as nodes of the job and epoch (see [rendezvous.Meet]). Besides they share these keys under =launch/<job>/:
// event/stop/<epoch> ends an epoch, event/end/<epoch>/<node> says how a node's workers ended, event/interrupt and event/kill hold
// the user's wish, pulse/<node> shows that an agent lives, and bye/<node> says that it needs the store no more.
type peers struct {
	store  rendezvous.Store // nil: none
	job    string
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
	leave  int // how many nodes will say goodbye: none before all have met
}

func newPeers(a *Agent) *peers {
	p := &peers{
		store: a.cfg.Store, job: a.cfg.ID, prefix: "=launch/" + url.PathEscape(a.cfg.ID) + "/", node: a.cfg.Node, nodes: a.cfg.Nodes, nonce: rand.Text(),
		beat: a.cfg.Heartbeat, wait: a.cfg.RendezvousTimeout, events: make(chan event),
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// storeTime bounds a single call to the store.
const storeTime = 20 * time.Second

// publish tells the other agents something, in its own time: what cannot be said is found out by their own clocks.
func (p *peers) publish(value any, key ...string) {
	if p.nodes == 1 {
		return
	}
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // our own types
	}
	p.set(p.prefix+strings.Join(key, "/"), text)
}

func (p *peers) set(key string, value []byte) {
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), storeTime)
		defer cancel()
		_ = p.store.Set(ctx, key, value)
	})
}

// record puts a worker's failure where the other workers look for the reason why they lost it.
func (p *peers) record(r failure.Record) {
	if p.store == nil {
		return
	}
	if text, err := failure.Encode(&r); err == nil {
		p.set(rendezvous.Key(r.Job, r.Epoch, "failure", strconv.Itoa(r.Worker)), text)
	}
}

// lastSeen is the end of a sentence about a worker that cannot tell any more what it was doing: what its last pulse tells, "" if it had none.
func (p *peers) lastSeen(epoch uint32, worker int) string {
	if p.store == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), time.Second)
	defer cancel()
	text, _, err := p.store.Get(ctx, rendezvous.Key(p.job, epoch, "alive", strconv.Itoa(worker)))
	var pulse rendezvous.Pulse
	if err != nil || json.Unmarshal(text, &pulse) != nil {
		return ""
	}
	var parts []string
	if pulse.Step >= 0 {
		parts = append(parts, fmt.Sprintf("in step %d", pulse.Step))
	}
	switch {
	case pulse.Phase != "" && len(parts) == 0:
		parts = append(parts, "in "+pulse.Phase)
	case pulse.Phase != "":
		parts = append(parts, pulse.Phase)
	}
	if pulse.Text != "" {
		parts = append(parts, pulse.Text)
	}
	if len(parts) == 0 {
		return ""
	}
	return "; last seen " + strings.Join(parts, ", ")
}

// close says goodbye. Node 0, in whose agent the store may live, waits until the others have done so too, or for a while.
func (p *peers) close() {
	last := p.node == 0 && p.store != nil
	if p.nodes > 1 {
		p.publish(p.nonce, "bye", strconv.Itoa(p.node))
		last = last && p.farewell()
	}
	p.cancel()
	p.work.Wait()
	if last {
		p.clean()
	}
}

// clean takes out of the store what the job has left there: not every store ends with the job.
func (p *peers) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), farewellTime)
	defer cancel()
	entries, _, err := p.store.List(ctx, p.prefix)
	for i := 0; i < len(entries) && err == nil; i++ {
		err = p.store.Delete(ctx, entries[i].Key)
	}
	if err == nil {
		_ = rendezvous.Forget(ctx, p.store, p.job) // a store that is gone keeps nothing
	}
}

// farewellTime is how long node 0 waits for the others' goodbyes.
const farewellTime = 5 * time.Second

// farewell reports whether all are gone.
func (p *peers) farewell() bool {
	ctx, cancel := context.WithTimeout(p.ctx, farewellTime)
	defer cancel()
	for {
		entries, revision, err := p.store.List(ctx, p.prefix+"bye/")
		if err != nil || len(entries) >= p.leave {
			return err == nil && len(entries) == p.nodes
		}
		if _, _, err = p.store.Changes(ctx, p.prefix+"bye/", revision); err != nil {
			return false
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
	ctx, cancel := context.WithTimeout(ctx, p.wait)
	defer cancel()
	data, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	met, err := rendezvous.Meet(ctx, p.store, rendezvous.Card{
		Job: p.job, Epoch: epoch, Role: "node", Worker: p.node, Workers: p.nodes, Host: mine.Host, PID: mine.PID, Nonce: p.nonce, Data: data,
	})
	if err != nil {
		return nil, err
	}
	cards := make([]card, len(met))
	for i := range met {
		if err := readCard(&met[i], mine, &cards[i]); err != nil {
			return nil, err
		}
	}
	if epoch == 0 {
		p.listen(cards)
	}
	return cards, nil
}

// readCard reads what another agent told, and refuses one that would not do the same as this.
func readCard(from *rendezvous.Card, mine card, c *card) error {
	if err := json.Unmarshal(from.Data, c); err != nil {
		return fmt.Errorf("%v tells nothing that can be read: %w", from, err)
	}
	switch {
	case c.RestartsMax != mine.RestartsMax:
		return fmt.Errorf("%v was started with --max-restarts %d, this one with %d", from, c.RestartsMax, mine.RestartsMax)
	case len(c.Ports) != c.Workers || c.Workers < 1 || c.Node != from.Worker:
		return fmt.Errorf("%v tells of node %d with %d workers and %d ports", from, c.Node, c.Workers, len(c.Ports))
	}
	return nil
}

// listen starts to hear the others and to show that this agent lives, until close.
func (p *peers) listen(cards []card) {
	key := p.prefix + "pulse"
	p.leave = p.nodes
	p.work.Go(p.hear)
	p.work.Go(func() {
		_ = rendezvous.Publish(p.ctx, p.store, key, p.node, rendezvous.Beats{Every: p.beat}, func() rendezvous.Pulse { return rendezvous.Pulse{} }) // hear tells of a lost store
	})
	watch := rendezvous.NewWatch(p.store, key, p.nodes)
	p.work.Go(func() { _ = watch.Follow(p.ctx, p.beat) })
	p.work.Go(func() {
		silent, err := watch.Silence(p.ctx, p.node, silentBeats*p.beat)
		if err == nil && silent.Worker >= 0 && silent.Worker < len(cards) {
			c := cards[silent.Worker]
			p.send(event{lost: fmt.Errorf("the agent of node %d (host %s, pid %d) has not shown for %v that it lives", c.Node, c.Host, c.PID, silentBeats*p.beat)})
		}
	})
}

// silentBeats is after how many beats without a sign of life an agent is lost.
const silentBeats = 10

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
		entries, revision, err := p.store.Changes(p.ctx, p.prefix+"event/", after)
		if err != nil {
			p.send(event{err: fmt.Errorf("the store, which ends with the agent of node 0, cannot be reached any more: %w", err)})
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

// read reads what another agent has told.
func (p *peers) read(entry rendezvous.Entry) (ev event, ok bool) {
	parts := strings.Split(strings.TrimPrefix(entry.Key, p.prefix+"event/"), "/")
	var numbers []int
	for _, part := range parts[1:] {
		n, err := strconv.ParseUint(part, 10, 31)
		if err != nil {
			return event{}, false
		}
		numbers = append(numbers, int(n))
	}
	switch what := parts[0]; {
	case entry.Deleted:
		return event{}, false
	case what == "stop" && len(numbers) == 1:
		ev = event{epoch: uint32(numbers[0]), stop: true}
		return ev, json.Unmarshal(entry.Value, &ev.worker) == nil
	case what == "end" && len(numbers) == 2:
		ev = event{epoch: uint32(numbers[0]), end: &nodeEnd{}}
		return ev, json.Unmarshal(entry.Value, ev.end) == nil && ev.end.Node == numbers[1] && ev.end.Node < p.nodes
	case what == "interrupt":
		ev = event{interruption: &interruption{}}
		return ev, json.Unmarshal(entry.Value, ev.interruption) == nil && ev.interruption.Node != p.node
	case what == "kill":
		return event{kill: true}, true
	}
	return event{}, false
}
