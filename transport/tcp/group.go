package tcp

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

// group is a subset of a world's ranks. The world's mu guards the fields that change.
type group struct {
	world   *world
	id      uint64
	ranks   []int  // rank in the world, by rank in the group
	members uint64 // hash of ranks
	inProc  []bool // by process: whether it has ranks of the group; nil: each has
	local   int    // number of ranks in this process
	places  []transport.Place
	// encrypted reports, by rank, whether the connections with it are encrypted; nil without TLS.
	encrypted []bool

	ends  []*endpoint // created and not closed
	took  []bool      // by rank: its endpoint was created
	taken int
	gone  int // number of closed endpoints
}

// take creates the endpoint of a rank in a group, and the group with its first endpoint.
func (w *world) take(id uint64, ranks []int, rank int) (*endpoint, error) {
	at := slices.Index(ranks, rank)
	if at < 0 {
		return nil, fmt.Errorf("tcp: rank %d is not among the ranks %v of the group", rank, ranks)
	}
	w.mu.Lock()
	g := w.groups[id]
	if g == nil && !slices.Contains(w.past, id) {
		g = w.newGroup(id, ranks)
	}
	var err error
	switch {
	case w.closed || w.closing:
		err = transport.ErrClosed
	case g == nil || !slices.Equal(g.ranks, ranks) || g.took[at]:
		err = fmt.Errorf("tcp: group %#x of ranks %v exists already", id, ranks)
	}
	if err != nil {
		w.mu.Unlock()
		return nil, err
	}
	w.groups[id] = g
	e := newEndpoint(g, at)
	g.ends = append(g.ends, e)
	g.took[at] = true
	g.taken++
	w.open++
	requests := w.deliver(e)
	pending := map[*connection]error{} // with the refusal, or nil
	w.pending = slices.DeleteFunc(w.pending, func(a *connection) bool {
		mine := a.group == id && int(a.to) == at
		if mine {
			_, pending[a] = g.endpointFor(a)
		}
		return mine
	})
	w.mu.Unlock()

	for i := range requests {
		e.receive(&requests[i].message, requests[i].proc)
	}
	for a, err := range pending {
		if err == nil {
			err = e.accept(a)
		}
		if err != nil {
			w.node.acceptor.Refuse(a.raw.RemoteAddr(), err)
			a.answer(err)
		}
	}
	return e, nil
}

// deliver passes what is known about the other ranks to a new endpoint, before any later message. It returns the
// pending requests for connections. The caller holds mu.
func (w *world) deliver(e *endpoint) (requests []pendingMessage) {
	g := e.group
	for _, pending := range []*[]pendingMessage{&w.failures, &w.messages} { // no rank fails after it has closed
		for i := range *pending {
			switch m := &(*pending)[i]; {
			case m.group != g.id:
			case m.kind == msgConnect:
				requests = append(requests, *m)
			default:
				e.receive(&m.message, m.proc)
			}
		}
	}
	if g.taken == g.local {
		w.forget(g.id)
	}
	for p, err := range w.gone {
		e.lose(p, err)
	}
	return requests
}

// keep keeps a message for endpoints that were not created yet. The caller holds mu.
func (w *world) keep(m *message, proc int) {
	kept := &w.messages
	if m.kind == msgFailed {
		kept = &w.failures
		if slices.ContainsFunc(*kept, func(n pendingMessage) bool { return n.group == m.group && n.from == m.from }) {
			return // the same news arrive from several processes
		}
	}
	if len(*kept) == pendingMax {
		*kept = (*kept)[1:]
	}
	*kept = append(*kept, pendingMessage{*m, proc})
}

// forget drops the messages that are kept for a group. The caller holds mu.
func (w *world) forget(group uint64) {
	for _, pending := range []*[]pendingMessage{&w.failures, &w.messages} {
		*pending = slices.DeleteFunc(*pending, func(n pendingMessage) bool { return n.group == group })
	}
}

func (w *world) newGroup(id uint64, ranks []int) *group {
	g := &group{
		world: w, id: id, ranks: slices.Clone(ranks), members: hashMembers("", ranks),
		places: make([]transport.Place, len(ranks)), took: make([]bool, len(ranks)),
	}
	if len(ranks) < len(w.proc) {
		g.inProc = make([]bool, len(w.procs))
	}
	if w.node.cfg.TLS != nil {
		g.encrypted = make([]bool, len(ranks))
	}
	for at, r := range ranks {
		p := w.proc[r]
		g.places[at] = transport.Place{Worker: at, Domain: at, Host: w.host[p]}
		if g.encrypted != nil {
			g.encrypted[at] = p != w.self && !w.near[p]
		}
		if g.inProc != nil {
			g.inProc[p] = true
		}
		if p == w.self {
			g.local++
		}
	}
	return g
}

// has reports whether a process has ranks of the group.
func (g *group) has(proc int) bool { return g.inProc == nil || g.inProc[proc] }

// proc returns the process of a rank of the group.
func (g *group) proc(rank int) int { return g.world.proc[g.ranks[rank]] }

// dials reports whether rank a of the group dials rank b; otherwise b dials a.
func (g *group) dials(a, b int) bool {
	if pa, pb := g.proc(a), g.proc(b); pa != pb {
		return pa > pb
	}
	return a > b
}

// endpointFor returns the endpoint that a data connection is for, or nil if it was not created yet. The caller holds
// the world's mu.
func (g *group) endpointFor(a *connection) (*endpoint, error) {
	n := len(g.ranks)
	switch {
	case a.members != g.members:
		return nil, listener.Refuse(listener.Group, "group %#x has other ranks here", a.group)
	case uint64(a.from) >= uint64(n) || uint64(a.to) >= uint64(n) || a.from == a.to || g.proc(int(a.to)) != g.world.self ||
		!g.dials(int(a.from), int(a.to)):
		return nil, listener.Refuse(listener.Rank, "rank %d of group %#x does not dial rank %d here", a.from, a.group, a.to)
	}
	if err := g.world.exposed(a, g.proc(int(a.from))); err != nil {
		return nil, err
	}
	for _, e := range g.ends {
		if e.rank == int(a.to) {
			return e, nil
		}
	}
	if g.took[a.to] {
		return nil, listener.Refuse(listener.Closed, "rank %d has closed its end", a.to)
	}
	return nil, nil
}
