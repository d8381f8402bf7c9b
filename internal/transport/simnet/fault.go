package simnet

import (
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// FaultKind is a kind of fault.
type FaultKind uint8

// The faults.
const (
	// Kill ends the rank's process (kill -9): its peers' connections are reset, its own calls return ErrKilled.
	Kill FaultKind = iota + 1
	// Stop stops the rank's process (kill -STOP), until Resume or Kill: its calls do not return.
	Stop
	// Resume continues a stopped process.
	Resume
	// Cut cuts the connection of Rank and Peer; both detect it after Config.Detect.
	Cut
	// Delay makes all later frames from and to the rank's process take By longer.
	Delay
	// Corrupt damages the next frame from Rank to Peer: its checksum is wrong, so Peer closes the connection.
	Corrupt
	// Forge flips one bit in the header of the next frame from Rank to Peer; the checksum is correct.
	Forge
)

// String returns the kind in lower case: "kill".
func (k FaultKind) String() string {
	names := [...]string{
		Kill: "kill", Stop: "stop", Resume: "resume", Cut: "cut", Delay: "delay", Corrupt: "corrupt",
		Forge: "forge",
	}
	if k > 0 && int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("FaultKind(%d)", uint8(k))
}

// Fault is a fault at a given time.
type Fault struct {
	At   time.Duration // after New, or Happen
	Kind FaultKind
	Rank int           // the rank, with all ranks of its worker; Cut, Corrupt, Forge: the sender
	Peer int           // Cut, Corrupt, Forge: the receiver
	By   time.Duration // Delay
}

func (f *Fault) check(n int) error {
	two := f.Kind == Cut || f.Kind == Corrupt || f.Kind == Forge
	switch {
	case f.Kind == 0 || f.Kind > Forge:
		return fmt.Errorf("simnet: no fault %v", f.Kind)
	case f.Rank < 0 || f.Rank >= n || two && (f.Peer < 0 || f.Peer >= n || f.Peer == f.Rank):
		return fmt.Errorf("simnet: %v of rank %d and peer %d, of %d ranks", f.Kind, f.Rank, f.Peer, n)
	}
	return nil
}

// Happen injects a fault, f.At from now. It panics for an invalid fault.
func (n *Net) Happen(f Fault) {
	if err := f.check(len(n.procs)); err != nil {
		panic(err.Error())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if f.At <= 0 {
		n.happen(f)
		return
	}
	n.at(f.At, func() { n.happen(f) })
}

func (n *Net) happen(f Fault) {
	switch f.Kind {
	case Cut:
		n.sever(f.Rank, f.Peer, nil, nil)
	case Corrupt, Forge:
		n.next[[2]int{f.Rank, f.Peer}] = f.Kind
	default:
		killed := n.procs[f.Rank].killed
		for _, r := range n.workers[n.worker[f.Rank]] {
			n.strike(&f, r)
		}
		if f.Kind == Kill && !killed {
			n.killed(n.worker[f.Rank])
		}
	}
}

// strike applies a fault to one rank of the process that it hits.
func (n *Net) strike(f *Fault, rank int) {
	p := &n.procs[rank]
	switch {
	case p.killed:
		return
	case f.Kind == Kill:
		p.killed = true
	case f.Kind == Delay:
		p.delay += f.By
		return
	}
	if f.Kind == Stop {
		if p.stopped == nil {
			p.stopped = make(chan struct{})
		}
		return
	}
	if p.stopped != nil {
		close(p.stopped)
		p.stopped = nil
	}
	for _, g := range n.groups {
		for _, e := range g.ends {
			if e.proc != rank {
				continue
			}
			if e.notify(); f.Kind == Kill {
				e.leave(ErrReset)
			}
		}
	}
}

// sever cuts a connection. The ranks at its two ends are notified of the reasons; without reasons they detect the cut
// after Config.Detect.
func (n *Net) sever(a, b int, whyA, whyB error) {
	if n.dead[pair(a, b)] {
		return
	}
	n.dead[pair(a, b)] = true
	after := n.latency(b, a)
	if whyA == nil {
		whyA, whyB, after = ErrCut, ErrCut, n.cfg.Detect
		n.at(after, func() { n.report([]int{b}, a, whyB); n.detects(n.worker[b], n.worker[a], whyB) })
		defer n.at(after, func() { n.detects(n.worker[a], n.worker[b], whyA) })
	} else {
		n.report([]int{b}, a, whyB)
	}
	n.at(after, func() { n.report([]int{a}, b, whyA) })
}

// report notifies ranks that another one is down, in all their groups.
func (n *Net) report(ranks []int, lost int, why error) {
	for _, g := range n.groups {
		peer, ok := g.at[lost]
		if !ok {
			continue
		}
		down := g.ends[peer].gone
		if down == nil || down.Err != why {
			down = &transport.PeerDown{Rank: peer, Err: why}
		}
		for _, r := range ranks {
			if at, ok := g.at[r]; ok {
				g.ends[at].lose(down)
			}
		}
	}
}

// downMax is the room of an endpoint's channel of peers that are down. Room for every peer would need memory for every
// pair of ranks.
const downMax = 64

// lose records that a peer is down, unless that is known. It keeps a bit for each peer, not the reason, if the reason
// is the end of the peer: the peers of a rank that has left would keep it for every pair of ranks.
func (e *end) lose(d *transport.PeerDown) {
	if e.closed || e.knows(d.Rank) {
		return
	}
	e.lost.add(d.Rank, len(e.group.ends))
	if d != e.group.ends[d.Rank].gone {
		if e.reasons == nil {
			e.reasons = map[int]*transport.PeerDown{}
		}
		e.reasons[d.Rank] = d
	}
	e.notify()
	if e.telling {
		return
	}
	select {
	case e.down <- *d:
		e.reported.add(d.Rank, len(e.group.ends))
	default:
		e.telling = true
		go e.forward()
	}
}

// forward sends what down had no room for, by rank, until nothing is left or the endpoint is closed.
func (e *end) forward() {
	for {
		e.net.mu.Lock()
		peer := e.lost.without(e.reported)
		if peer < 0 {
			e.telling = false
			e.net.mu.Unlock()
			return
		}
		e.reported.add(peer, len(e.group.ends))
		d := e.reason(peer)
		e.net.mu.Unlock()
		select {
		case e.down <- d:
		case <-e.over:
			return
		}
	}
}
