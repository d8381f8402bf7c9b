package simnet

import (
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// The workers are connected as the processes of package tcp are, see docs/wire.md: some from the start, others once
// their ranks exchange frames. News of a lost worker and of a failed group pass from one to the next along the first
// connections.

// linked reports whether two workers are connected.
func (n *Net) linked(a, b int) bool { return a == b || n.graph.Linked(a, b) || n.peers[a][b] }

// needs connects the worker of a rank with that of a peer. If the peer is down, the rank learns it.
func (e *end) needs(rank int) {
	n := e.net
	peer := e.group.ends[rank]
	a, b := n.worker[e.proc], n.worker[peer.proc]
	if !n.linked(a, b) {
		n.peers[a], n.peers[b] = insert(n.peers[a], b), insert(n.peers[b], a)
	}
	if peer.gone != nil && !e.knows(rank) && !e.notified[rank] {
		e.notified = insert(e.notified, rank)
		if peer.gone.Err != ErrReset {
			n.counts.Notices++
		}
		n.at(n.latency(e.proc, peer.proc)+n.latency(peer.proc, e.proc), func() {
			if !n.dead[pair(e.proc, peer.proc)] {
				e.lose(peer.gone)
			}
		})
	}
}

func insert(set map[int]bool, i int) map[int]bool {
	if set == nil {
		set = map[int]bool{}
	}
	set[i] = true
	return set
}

// leave notifies the peers that this rank is down, once: those that are connected or in its domain. The others learn of
// a failure or a loss by news, and of a closed endpoint when they need it.
func (e *end) leave(why error) {
	if e.gone != nil {
		return
	}
	e.gone = &transport.PeerDown{Rank: e.rank, Err: why}
	n, self := e.net, e.net.worker[e.proc]
	to := map[int]bool{self: true}
	_, failed := why.(*transport.Failure)
	first := failed && e.group.learnsFailure(self)
	for p := range n.peers[self] {
		to[p] = true
	}
	for _, p := range n.near[self] {
		to[p] = to[p] || !failed || first
	}
	for _, r := range e.domain {
		to[n.worker[e.group.ends[r].proc]] = true
	}
	e.tell(to)
	if first && !n.graph.Mesh() {
		n.pass(self, self, -1, func(p, from int) { n.failed(e, p, from) })
	}
}

// tell notifies the ranks of workers that this rank is down. Those that are notified at the same time share one event.
func (e *end) tell(workers map[int]bool) {
	n := e.net
	var peers []*end
	for p, ok := range workers {
		if !ok {
			continue
		}
		if p != n.worker[e.proc] && e.gone.Err != ErrReset { // the end of a connection needs none
			n.counts.Notices++
		}
		peers = append(peers, e.group.of(p)...)
	}
	for _, peer := range peers {
		peer.notified = insert(peer.notified, e.rank)
	}
	slices.SortFunc(peers, func(a, b *end) int { return a.rank - b.rank })
	first, at := 0, time.Time{}
	for i, peer := range peers {
		when := latest(time.Now().Add(n.latency(e.proc, peer.proc)), n.last[[2]int{e.proc, peer.proc}])
		if i > 0 && !when.Equal(at) {
			e.leaves(peers[first:i], at)
			first = i
		}
		at = when
	}
	e.leaves(peers[first:], at)
}

// leaves notifies peers at a time, unless the connection is cut by then. What this rank sends later arrives later.
func (e *end) leaves(peers []*end, at time.Time) {
	e.net.at(time.Until(at), func() {
		for _, peer := range peers {
			if peer != e && !e.net.dead[pair(e.proc, peer.proc)] {
				peer.lose(e.gone)
			}
		}
	})
}

// of returns the ends of the group in a worker.
func (g *group) of(worker int) []*end {
	var ends []*end
	for _, r := range g.net.workers[worker] {
		if at, ok := g.at[r]; ok {
			ends = append(ends, g.ends[at])
		}
	}
	return ends
}

// learnsFailure records that a worker knows of the failure of the group, and reports whether that is new.
func (g *group) learnsFailure(worker int) bool {
	if g.failureKnown == nil {
		g.failureKnown = make([]bool, len(g.net.workers))
	}
	first := !g.failureKnown[worker]
	g.failureKnown[worker] = true
	return first
}

// pass sends news that began at a worker from one to its neighbours that do not get them from there.
func (n *Net) pass(origin, from, source int, arrive func(to, from int)) {
	a := n.workers[from][0]
	for _, p := range n.near[from] {
		if p == source || p == origin || from != origin && n.graph.Linked(p, origin) {
			continue
		}
		b := n.workers[p][0]
		if from != origin {
			n.counts.Notices++
		}
		n.at(n.latency(a, b), func() {
			if !n.dead[pair(a, b)] && !n.procs[b].killed && n.procs[b].stopped == nil {
				arrive(p, from)
			}
		})
	}
}

// failed handles the news that a group has failed at e.
func (n *Net) failed(e *end, worker, from int) {
	if !e.group.learnsFailure(worker) {
		return
	}
	for _, peer := range e.group.of(worker) {
		peer.lose(e.gone)
	}
	n.pass(n.worker[e.proc], worker, from, func(p, from int) { n.failed(e, p, from) })
}

// killed makes the workers that are connected with a killed one pass on the news.
func (n *Net) killed(lost int) {
	a := n.workers[lost][0]
	direct := slices.Clone(n.near[lost])
	for p := range n.peers[lost] {
		direct = append(direct, p)
	}
	slices.Sort(direct)
	for _, p := range slices.Compact(direct) {
		b := n.workers[p][0]
		n.at(n.latency(a, b), func() {
			if !n.dead[pair(a, b)] && !n.procs[b].killed && n.procs[b].stopped == nil {
				n.detects(p, lost, ErrReset)
			}
		})
	}
}

// detects handles that a worker has noticed the loss of another one, or the cut of their connection.
func (n *Net) detects(worker, lost int, why error) {
	if !n.learnsLoss(worker, lost) {
		return
	}
	n.passLoss(worker, lost, -1, why)
}

// learnsLoss records that a worker knows of the loss of another one, and reports whether that is new.
func (n *Net) learnsLoss(worker, lost int) bool {
	if n.lossKnown[lost] == nil {
		n.lossKnown[lost] = make([]bool, len(n.workers))
	}
	first := !n.lossKnown[lost][worker]
	n.lossKnown[lost][worker] = true
	return first
}

func (n *Net) passLoss(worker, lost, from int, why error) {
	n.pass(lost, worker, from, func(p, from int) {
		if !n.learnsLoss(p, lost) {
			return
		}
		if !n.linked(p, lost) {
			for _, r := range n.workers[lost] {
				n.report(n.workers[p], r, why)
			}
		}
		n.passLoss(p, lost, from, why)
	})
}
