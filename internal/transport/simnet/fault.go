package simnet

import (
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// FaultKind is what happens.
type FaultKind uint8

// The faults.
const (
	Kill    FaultKind = iota + 1 // the rank's process is gone (kill -9): its peers' connections are reset, its own calls return ErrKilled
	Stop                         // the rank's process does nothing any more (kill -STOP), until Resume or Kill: its calls do not return
	Resume                       // a stopped process goes on
	Cut                          // the connection of Rank and Peer carries nothing any more; both notice it after Config.Detect
	Delay                        // all frames from and to the rank's process take By longer from now on
	Corrupt                      // the next frame from Rank to Peer is damaged: its checksum is found wrong, and the connection is given up
	Forge                        // the next frame from Rank to Peer has one bit of its header wrong, and a right checksum
)

// String returns the kind in lower case: "kill".
func (k FaultKind) String() string {
	names := [...]string{Kill: "kill", Stop: "stop", Resume: "resume", Cut: "cut", Delay: "delay", Corrupt: "corrupt", Forge: "forge"}
	if k > 0 && int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("FaultKind(%d)", uint8(k))
}

// Fault is something that happens.
type Fault struct {
	At   time.Duration // after New, or Happen
	Kind FaultKind
	Rank int           // to whom, and to all ranks of its worker; of Cut, Corrupt, Forge: the sender
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

// Happen has a fault happen, f.At from now. It panics for a fault that cannot be.
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
		for r, p := range n.cfg.Places {
			if p.Worker == n.cfg.Places[f.Rank].Worker {
				n.strike(&f, r)
			}
		}
	}
}

// strike has a fault happen to one rank of the process that it happens to.
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

// sever ends a connection: from now on it carries nothing. The ranks at its two ends are told why; without reasons they
// notice it after a while.
func (n *Net) sever(a, b int, tellA, tellB error) {
	if n.dead[pair(a, b)] {
		return
	}
	n.dead[pair(a, b)] = true
	after := n.latency(b, a)
	if tellA == nil {
		tellA, tellB, after = ErrCut, ErrCut, n.cfg.Detect
		n.at(after, func() { n.tell(b, a, tellB) })
	} else {
		n.tell(b, a, tellB)
	}
	n.at(after, func() { n.tell(a, b, tellA) })
}

// tell has a process find that another is down, in all their groups.
func (n *Net) tell(proc, lost int, why error) {
	for _, g := range n.groups {
		for _, e := range g.ends {
			for _, peer := range g.ends {
				if e.proc == proc && peer.proc == lost {
					e.lose(peer.rank, why)
				}
			}
		}
	}
}

// lose notes that a peer is down, unless it is known already.
func (e *end) lose(rank int, why error) {
	if e.lost[rank] != nil || e.closed {
		return
	}
	e.lost[rank] = &transport.PeerDown{Rank: rank, Err: why}
	e.down <- *e.lost[rank] // there is room for one of each
	e.notify()
}

// leave tells the peers that this rank is down, unless it has told them already.
func (e *end) leave(why error) {
	if e.left {
		return
	}
	e.left = true
	for _, peer := range e.group.ends {
		if peer != e {
			e.net.arrival(e.proc, peer.proc, e.net.latency(e.proc, peer.proc), func() { peer.lose(e.rank, why) })
		}
	}
}
