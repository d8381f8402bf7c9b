package tcp

import (
	"errors"
	"fmt"
	"slices"
)

// News are the loss of a process and the failure of a group. A process passes each on once, when it first learns of it,
// to its neighbours in the graph, except those that are linked with the process that the news began at: these get them
// from there, or see its end.

const (
	// newsTextMax bounds the text of the loss of a process, in bytes.
	newsTextMax = 512
	// hopsMax bounds the number of processes that news pass. It only matters if their number were not bounded otherwise.
	hopsMax = 255
)

// errLost is the error of a process whose control connection ended without msgBye.
var errLost = errors.New("its process is gone: the connection ended")

// lose handles the loss of a process that this one has noticed.
func (w *world) lose(proc int, err error) {
	w.mu.Lock()
	first := !w.lossKnown[proc]
	w.lossKnown[proc] = true
	w.mu.Unlock()
	w.leave(proc, err)
	if first {
		text := err.Error()
		w.spread(&message{
			kind: msgLost, from: uint32(w.procs[w.self].ranks[0]), to: uint32(w.procs[proc].ranks[0]),
			text: []byte(text[:min(len(text), newsTextMax)]),
		}, proc, -1)
	}
}

// receiveLost handles the news that a process is lost. If this process has a link with it, only the link's end counts.
func (w *world) receiveLost(m *message, from int) {
	rank := w.rankOf(m.to)
	if rank < 0 || w.rankOf(m.from) < 0 || w.proc[rank] == w.self || len(m.text) > newsTextMax {
		return
	}
	proc := w.proc[rank]
	w.mu.Lock()
	first := !w.lossKnown[proc]
	w.lossKnown[proc] = true
	linked := w.links[proc] != nil || w.graph.Linked(w.self, proc)
	w.mu.Unlock()
	if !first {
		return
	}
	if !linked {
		w.leave(proc, fmt.Errorf("%s (reported by rank %d)", m.text, m.from))
	}
	w.spread(m, proc, from)
}

// leave marks the ranks of a process as down in all groups, unless that is known.
func (w *world) leave(proc int, err error) {
	w.mu.Lock()
	if w.gone[proc] != nil {
		w.mu.Unlock()
		return
	}
	w.gone[proc] = err
	if w.joining != nil && !w.graph.Mesh() { // in a mesh each finds out by itself
		select {
		case w.joining.left <- proc:
		default:
		}
	}
	if o := w.opening[proc]; o != nil && o.cancel != nil {
		o.cancel()
	}
	ends := w.endpoints()
	w.mu.Unlock()
	for _, e := range ends {
		e.lose(proc, err)
	}
}

// fail reports the failure of a group: to all processes if it is the first, and to those with these ranks, which
// exchange frames with the rank that failed.
func (w *world) fail(g *group, m *message, ranks []int) {
	w.receive(m, w.self)
	direct := map[int]bool{}
	for _, r := range ranks {
		direct[g.proc(r)] = true
	}
	if w.firstFailure(g.id) {
		for _, p := range w.next {
			if !w.graph.Mesh() || g.has(p) {
				direct[p] = true
			}
		}
	}
	delete(direct, w.self)
	for p := range direct {
		w.news.Add(1)
		w.post(p, m)
	}
}

// firstFailure records that this process knows of the failure of a group, and reports whether that is new.
func (w *world) firstFailure(group uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Contains(w.failed, group) {
		return false
	}
	if w.failed = append(w.failed, group); len(w.failed) > pastMax {
		w.failed = w.failed[1:]
	}
	return true
}

// forwardFailure passes the failure of a group on, if it is the first. The group may have no member in this process. It
// returns false if the message is invalid.
func (w *world) forwardFailure(m *message, from int) bool {
	rank := w.rankOf(m.to)
	if rank < 0 || uint64(m.from) >= uint64(len(w.proc)) {
		return false
	}
	origin := w.proc[rank]
	w.mu.Lock()
	g := w.groups[m.group]
	w.mu.Unlock()
	if g != nil && (uint64(m.from) >= uint64(len(g.ranks)) || g.proc(int(m.from)) != origin) {
		return false
	}
	if from != w.self && origin != w.self && w.firstFailure(m.group) {
		w.spread(m, origin, from)
	}
	return true
}

// spread passes news that began at process origin on to the neighbours that do not get them from there.
func (w *world) spread(m *message, origin, from int) {
	if m.tag >= hopsMax {
		return
	}
	next := *m
	next.tag++
	for _, p := range w.next {
		if p == origin || p == from || w.graph.Linked(p, origin) {
			continue
		}
		w.news.Add(1)
		w.post(p, &next)
	}
}

// announce marks an endpoint as closed, and sends the message that its rank has left to the linked processes. Others
// get it when they need the rank. It returns false if the endpoint was closed before.
func (w *world) announce(e *endpoint) bool {
	g := e.group
	w.mu.Lock()
	m := e.leave()
	if m == nil {
		w.mu.Unlock()
		return false
	}
	if w.left[g.id] == nil {
		w.left[g.id] = map[uint32]*message{}
	}
	w.left[g.id][m.from] = m
	for p, l := range w.links {
		if g.has(p) {
			l.send(m)
		}
	}
	for p, o := range w.opening {
		if g.has(p) {
			o.queue = append(o.queue, m)
		}
	}
	w.mu.Unlock()
	w.receive(m, w.self)
	return true
}
