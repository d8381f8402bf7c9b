package tcp

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

// group is some of a world's ranks. Its fields are guarded by the world's mu, but for those that never change.
type group struct {
	world   *world
	id      uint64
	ranks   []int  // in the world, by rank in the group
	members uint64 // hash of ranks
	inProc  []bool // by process: some of the ranks are there
	local   int    // ranks that are here
	places  []transport.Place

	ends  []*endpoint // taken and not closed
	took  []bool      // by rank: its end was taken
	taken int
	gone  int // closed
}

// take makes the end of a rank of the world in a group, and the group if it is the first end.
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
	case w.closed:
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
	var notes []note
	for _, n := range w.notes {
		if n.group == id {
			notes = append(notes, n)
		}
	}
	if g.taken == g.local {
		w.notes = slices.DeleteFunc(w.notes, func(n note) bool { return n.group == id })
	}
	early := map[*arrival]error{} // and why they are refused
	w.early = slices.DeleteFunc(w.early, func(a *arrival) bool {
		mine := a.group == id && int(a.to) == at
		if mine {
			_, early[a] = g.whom(a)
		}
		return mine
	})
	links := slices.Clone(w.links)
	w.mu.Unlock()

	for i := range notes {
		e.hear(&notes[i].message, notes[i].proc)
	}
	for p, l := range links {
		if l != nil {
			select {
			case <-l.read:
				e.lose(p, errLost)
			default:
			}
		}
	}
	for a, err := range early {
		if err == nil {
			err = e.welcome(a)
		}
		if err != nil {
			w.node.acceptor.Refuse(a.raw.RemoteAddr(), err)
			a.answer(err)
		}
	}
	return e, nil
}

func (w *world) newGroup(id uint64, ranks []int) *group {
	g := &group{world: w, id: id, ranks: slices.Clone(ranks), members: hashMembers("", ranks), inProc: make([]bool, len(w.procs)), took: make([]bool, len(ranks))}
	for at, r := range ranks {
		p := w.proc[r]
		g.places = append(g.places, transport.Place{Worker: at, Domain: at, Host: w.host[p]})
		g.inProc[p] = true
		if p == w.self {
			g.local++
		}
	}
	return g
}

// proc returns the process of a rank of the group.
func (g *group) proc(rank int) int { return g.world.proc[g.ranks[rank]] }

// dials reports whether rank a of the group dials rank b, and not the other way round.
func (g *group) dials(a, b int) bool {
	if pa, pb := g.proc(a), g.proc(b); pa != pb {
		return pa > pb
	}
	return a > b
}

// whom returns the end that a data connection is for; nil: it is not there yet. The world's mu is held.
func (g *group) whom(a *arrival) (*endpoint, error) {
	n := len(g.ranks)
	switch {
	case a.members != g.members:
		return nil, listener.Refuse(listener.Group, "group %#x has other ranks here", a.group)
	case int(a.from) >= n || int(a.to) >= n || a.from == a.to || g.proc(int(a.to)) != g.world.self || !g.dials(int(a.from), int(a.to)):
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
	if g.taken == g.local {
		return nil, listener.Refuse(listener.Group, "rank %d has closed its end", a.to)
	}
	return nil, nil
}
