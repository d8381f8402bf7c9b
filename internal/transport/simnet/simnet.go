// Package simnet simulates a network: ranks on described hosts, whose frames take the time that they would on such a
// network, with faults at given times. It uses package time for all time. In a bubble of testing/synctest time is
// virtual, so minutes pass in milliseconds, and a run depends only on its seed.
//
// # Durations
//
// A frame waits until its links are free; each link carries one frame at a time. Inside a host this is the sender's
// link. Between hosts these are the network card of the sender's host, the switch, and the network card of the
// receiver's host. A frame occupies each link for its bytes divided by the link's bandwidth, and arrives one latency
// after it has left the slowest. Frames between two ranks keep their order. Simultaneous requests are ordered by rank,
// not by the scheduling of goroutines, so every run is the same. Memory accesses and flags inside a domain take no
// time, nor does computing.
//
// # Faults
//
// See [Fault]: a process is killed or stopped, a connection is cut, frames are late, damaged, or have a wrong header.
package simnet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
	"github.com/lockstep-ml/lockstep/transport"
)

// Why a rank is down, in its peers' errors.
var (
	ErrReset = errors.New("simnet: connection reset") // its process was killed
	ErrCut   = errors.New("simnet: connection timed out")
)

// ErrKilled is the error of all calls of a rank whose process was killed.
var ErrKilled = errors.New("simnet: this process was killed")

// Config describes the hosts, the network and the faults.
type Config struct {
	// Places holds the location of each rank. Ranks of one domain access each other's memory, those of one worker are
	// killed and stopped together, and frames between hosts take the network.
	Places  []transport.Place
	Host    Link            // frames inside a host; default 1 µs and 10 GB/s
	Network Link            // between hosts: latency, and bandwidth of a card in each direction; default 10 µs and 10 GB/s
	Switch  float64         // bytes per second of all hosts together through the switch; 0: unlimited
	Slow    map[int]float64 // stragglers: factor of the latency and the transfer times of a host
	Jitter  time.Duration   // a frame arrives up to this much later, by Seed
	Detect  time.Duration   // time until a cut connection is detected; default 100 ms
	Buffers bool            // a send completes when the frame has left the card; else when the receiver has it
	Seed    uint64          // of jitter and damage
	Faults  []Fault
}

// Link is a connection between ranks.
type Link struct {
	Latency   time.Duration
	Bandwidth float64 // bytes per second
}

// Uniform returns the places of ranks on hosts, each on every host, in order, one process per rank. With memory the
// ranks of a host are one domain.
func Uniform(hosts, each int, memory bool) []transport.Place {
	var places []transport.Place
	for r := range hosts * each {
		p := transport.Place{Worker: r, Domain: r, Host: r / each}
		if memory {
			p.Domain = p.Host
		}
		places = append(places, p)
	}
	return places
}

// frameBytes is the size of a frame without its data.
const frameBytes = 64

// Net is the simulated network.
type Net struct {
	cfg Config

	mu        sync.Mutex
	procs     []proc               // by rank
	worker    []int                // number of its worker, by rank
	workers   [][]int              // the ranks of each worker
	graph     overlay.Graph        // of the connections of workers from the start
	near      [][]int              // the neighbours in it, by worker
	peers     []map[int]bool       // the other workers that each has exchanged frames with
	lossKnown [][]bool             // the workers that know of its loss, by worker; nil: none
	cards     map[int]*card        // by host
	free      time.Time            // when the switch is free
	last      map[[2]int]time.Time // the latest arrival, by sender and receiver
	dead      map[[2]int]bool      // cut connections, the lower rank first
	next      map[[2]int]FaultKind // damage to the next frame, by sender and receiver
	random    *rand.Rand
	root      *group
	groups    []*group          // those with open endpoints
	splits    map[uint64]*group // not yet taken by all their ranks
	fresh     []*flight         // offered in this moment
	counts    Counts
	events    events
	timer     *time.Timer
}

// proc is the state of a rank's process.
type proc struct {
	killed  bool
	stopped chan struct{} // nil: it runs; closed when it runs again
	delay   time.Duration // of all its frames
	lane    time.Time     // when its link inside the host is free
}

// card is the network card of a host.
type card struct{ out, in time.Time } // when each direction is free

// New returns a network, whose time starts now.
func New(cfg Config) (*Net, error) {
	if cfg.Host == (Link{}) {
		cfg.Host = Link{Latency: time.Microsecond, Bandwidth: 10e9}
	}
	if cfg.Network == (Link{}) {
		cfg.Network = Link{Latency: 10 * time.Microsecond, Bandwidth: 10e9}
	}
	if cfg.Detect == 0 {
		cfg.Detect = 100 * time.Millisecond
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	n := &Net{
		cfg: cfg, procs: make([]proc, len(cfg.Places)), cards: map[int]*card{}, last: map[[2]int]time.Time{},
		dead: map[[2]int]bool{}, next: map[[2]int]FaultKind{}, random: rand.New(rand.NewPCG(cfg.Seed, 1)),
		splits: map[uint64]*group{},
	}
	for _, p := range cfg.Places {
		n.cards[p.Host] = &card{}
	}
	all := make([]int, len(cfg.Places))
	numbers := map[int]int{}
	for r, p := range cfg.Places {
		all[r] = r
		w, known := numbers[p.Worker]
		if !known {
			w = len(n.workers)
			numbers[p.Worker] = w
			n.workers = append(n.workers, nil)
		}
		n.worker = append(n.worker, w)
		n.workers[w] = append(n.workers[w], r)
	}
	n.graph = overlay.New(len(n.workers), overlay.MeshMax)
	n.peers, n.lossKnown = make([]map[int]bool, len(n.workers)), make([][]bool, len(n.workers))
	for w := range n.workers {
		n.near = append(n.near, n.graph.Neighbours(w))
	}
	n.root = n.group(all)
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range cfg.Faults {
		n.at(f.At, func() { n.happen(f) })
	}
	return n, nil
}

func (c *Config) check() error {
	if len(c.Places) == 0 {
		return errors.New("simnet: no ranks: Places is empty")
	}
	workers, domains := map[int]int{}, map[int]int{} // the first rank of each
	for r, p := range c.Places {
		q, known := workers[p.Worker]
		if !known {
			workers[p.Worker] = r
		}
		if !known || c.Places[q].Domain == p.Domain {
			if q, known = domains[p.Domain]; !known {
				domains[p.Domain] = r
			}
			if !known || c.Places[q].Host == p.Host {
				continue
			}
		}
		return fmt.Errorf("simnet: ranks %d and %d are at %+v and %+v: a worker is in one domain, a domain on one host", q, r,
			c.Places[q], p)
	}
	for _, l := range []Link{c.Host, c.Network} {
		if l.Latency < 0 || l.Bandwidth <= 0 {
			return fmt.Errorf("simnet: a link of %+v: want a latency, and a bandwidth of more than 0", l)
		}
	}
	for _, f := range c.Faults {
		if err := f.check(len(c.Places)); err != nil {
			return err
		}
	}
	return nil
}

// Ends returns the endpoints of the group of all ranks, by rank.
func (n *Net) Ends() []transport.Endpoint {
	out := make([]transport.Endpoint, len(n.root.ends))
	for i, e := range n.root.ends {
		out[i] = e
	}
	return out
}

// Counts are the messages that a network has carried.
type Counts struct {
	Frames  int // data frames
	Bytes   int // of the frames, without their headers
	Notices int // messages that a rank is down or has failed; the end of a connection is not one
	Queries int // about a rank's state, by Ask; each has an answer
}

// Counts returns what the network has carried so far.
func (n *Net) Counts() Counts {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts
}

// group is a group of ranks.
type group struct {
	net          *Net
	ranks        []int       // of the network, by rank of the group
	at           map[int]int // rank of the group, by rank of the network
	failureKnown []bool      // the workers that know of its failure; nil: none
	places       []transport.Place
	memory       bool // some ranks access each other's memory
	ends         []*end
	taken        int
	open         int
}

func (n *Net) group(ranks []int) *group {
	g := &group{net: n, ranks: ranks, open: len(ranks), at: map[int]int{}}
	domains := map[int][]int{}
	for i, r := range ranks {
		p := n.cfg.Places[r]
		g.at[r] = i
		g.places = append(g.places, p)
		domains[p.Domain] = append(domains[p.Domain], i)
	}
	g.memory = len(domains) < len(ranks) || len(ranks) == 1
	for i, r := range ranks {
		e := &end{
			group: g, net: n, rank: i, proc: r, domain: domains[g.places[i].Domain], wake: make(chan struct{}, 1),
			down: make(chan transport.PeerDown, min(len(ranks), downMax)), over: make(chan struct{}),
		}
		if g.memory {
			e.staging = make([]byte, stagingBytes)
		}
		g.ends = append(g.ends, e)
	}
	n.groups = append(n.groups, g)
	return g
}

// at schedules an action; simultaneous ones run in the order of the calls. The network is locked, now and then.
func (n *Net) at(after time.Duration, do func()) {
	n.events.push(event{at: time.Now().Add(after), do: do})
	n.arm()
}

// arm sets the timer to the next event.
func (n *Net) arm() {
	if len(n.events.heap) == 0 {
		return
	}
	after := time.Until(n.events.heap[0].at)
	if n.timer == nil {
		n.timer = time.AfterFunc(after, n.run)
	} else {
		n.timer.Reset(after)
	}
}

// run runs the actions that are due.
func (n *Net) run() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for now := time.Now(); len(n.events.heap) > 0 && !n.events.heap[0].at.After(now); {
		n.events.pop().do()
	}
	n.arm()
}

// closed removes a group whose endpoints are all closed; with the last group the simulation ends.
func (n *Net) closed(g *group) {
	if g.open--; g.open > 0 {
		return
	}
	n.groups = slices.DeleteFunc(n.groups, func(o *group) bool { return o == g })
	if len(n.groups) == 0 {
		n.events.heap = nil
		if n.timer != nil {
			n.timer.Stop()
		}
	}
}
