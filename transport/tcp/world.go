package tcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

// GroupConfig says who is in a group.
type GroupConfig struct {
	// ID tells groups of one epoch apart, also those that were closed. All processes use the same.
	ID uint64
	// Epoch is the membership of the job. Connections of older epochs than the node's latest group are refused.
	Epoch uint32
	// Addrs are the addresses of the ranks' nodes, by rank, as the others dial them. Ranks of one process have the same.
	Addrs []string
	// Local are the ranks of this process: all those that have its address.
	Local []int
	// SameHost are ranks whose processes are known, not only said, to be on this host. Connections with them are not
	// encrypted although there is [Config.TLS]; [Config.Authenticate] has to be given for that. Those processes name this
	// one's ranks, too.
	SameHost []int
}

// world is a group that Node.Group made, with all that are split from it.
type world struct {
	node  *Node
	key   worldKey
	procs []process // by lowest rank
	proc  []int     // of each rank: index in procs
	host  []int     // of each process: a number that tells the hosts apart
	near  []bool    // of each process: connections with it are not encrypted
	self  int
	spin  bool // no more ranks than processors are on this host
	hash  uint64
	up    chan struct{} // a token per link that is up

	mu     sync.Mutex
	links  []*link // by process; nil: none yet, or this one
	groups map[uint64]*group
	early  []*arrival // for groups that nobody here has made yet
	notes  []note     // what was said about them
	past   []uint64   // ids of groups that were closed, the latest pastMax
	open   int        // endpoints
	closed bool
}

// process is where some ranks live.
type process struct {
	addr  string
	ranks []int
}

// note is a message for ends that are not there yet.
type note struct {
	message
	proc int // who said it
}

const (
	earlyMax = 4096 // connections, and notes, for groups that nobody here has made yet
	pastMax  = 4096
	rootID   = 0 // of the whole world, among its groups
)

// Group joins the ranks at the given addresses and returns the ends of those of this process, by their order in Local, each
// a [transport.Splitter], a [transport.Poster] and a [transport.Asker]. It waits until every two processes are connected, or
// ctx ends.
func (n *Node) Group(ctx context.Context, g GroupConfig) ([]transport.Endpoint, error) {
	w, err := newWorld(n, g)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	switch {
	case n.closed:
		err = transport.ErrClosed
	case n.worlds[w.key] != nil || slices.Contains(n.past, w.key):
		err = fmt.Errorf("tcp: group %#x of epoch %d exists already, or has existed", g.ID, g.Epoch)
	default:
		n.worlds[w.key] = w
		n.latest = max(n.latest, g.Epoch)
		close(n.changed)
		n.changed = make(chan struct{})
	}
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := w.connect(ctx); err != nil {
		w.closeAll()
		return nil, err
	}
	var out []transport.Endpoint
	all := make([]int, len(w.proc))
	for i := range all {
		all[i] = i
	}
	for _, r := range g.Local {
		e, err := w.take(rootID, all, r)
		if err != nil {
			w.closeAll()
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

func newWorld(n *Node, g GroupConfig) (*world, error) {
	w := &world{
		node: n, key: worldKey{g.Epoch, g.ID}, proc: make([]int, len(g.Addrs)), groups: map[uint64]*group{},
		up: make(chan struct{}, len(g.Addrs)), hash: hashMembers(strings.Join(g.Addrs, " "), nil),
	}
	for r, addr := range g.Addrs {
		at := slices.IndexFunc(w.procs, func(p process) bool { return p.addr == addr })
		if at < 0 {
			if _, _, err := net.SplitHostPort(addr); err != nil {
				return nil, fmt.Errorf("tcp: address of rank %d: %w", r, err)
			}
			at = len(w.procs)
			w.procs = append(w.procs, process{addr: addr})
		}
		w.procs[at].ranks = append(w.procs[at].ranks, r)
		w.proc[r] = at
	}
	w.links = make([]*link, len(w.procs))
	if len(g.Local) == 0 || g.Local[0] < 0 || g.Local[0] >= len(g.Addrs) {
		return nil, fmt.Errorf("tcp: local ranks %v in a group of %d", g.Local, len(g.Addrs))
	}
	w.self = w.proc[g.Local[0]]
	if own := w.procs[w.self]; !slices.Equal(own.ranks, slices.Sorted(slices.Values(g.Local))) {
		return nil, fmt.Errorf("tcp: local ranks %v, but ranks %v have this process's address %s", g.Local, own.ranks, own.addr)
	}
	w.near = make([]bool, len(w.procs))
	for _, r := range g.SameHost {
		switch {
		case r < 0 || r >= len(g.Addrs):
			return nil, fmt.Errorf("tcp: rank %d on the same host, in a group of %d", r, len(g.Addrs))
		case n.cfg.TLS != nil && n.cfg.Authenticate == nil:
			return nil, errors.New("tcp: ranks on the same host, but no Config.Authenticate: they could not prove anything")
		}
		w.near[w.proc[r]] = true
	}
	w.host = hosts(w.procs)
	w.spin = w.sharers() <= runtime.NumCPU() && len(g.Local) <= runtime.GOMAXPROCS(0)
	return w, nil
}

// hosts numbers the hosts of processes, as far as their addresses tell them apart.
func hosts(procs []process) []int {
	out := make([]int, len(procs))
	first := map[string]int{}
	for i, p := range procs {
		host, _, _ := net.SplitHostPort(p.addr)
		if _, ok := first[host]; !ok {
			first[host] = i
		}
		out[i] = first[host]
	}
	return out
}

// sharers returns how many ranks share this host's processors.
func (w *world) sharers() int {
	n := 0
	for i, p := range w.procs {
		if w.host[i] == w.host[w.self] {
			n += len(p.ranks)
		}
	}
	return n
}

// hashMembers hashes who is in a group, so that ends with other lists do not meet.
func hashMembers(addrs string, ranks []int) uint64 {
	h := fnv.New64a()
	h.Write([]byte(addrs))
	for _, r := range ranks {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(r)))
	}
	return h.Sum64()
}

// connect makes the links: this process dials those of lower ranks, and is dialed by the others.
func (w *world) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(w.node.ctx, func() { cancel(transport.ErrClosed) })
	defer stop()
	var dialing sync.WaitGroup
	defer dialing.Wait()
	defer cancel(nil)
	for p := range w.self {
		dialing.Go(func() {
			a, err := w.node.dial(ctx, w.target(p), w.greeting(p), 0)
			if err == nil {
				err = w.join(a, p, nil)
			}
			if err != nil {
				cancel(err)
			}
		})
	}
	for range len(w.procs) - 1 {
		select {
		case <-w.up:
		case <-ctx.Done():
			return fmt.Errorf("tcp: group %#x of epoch %d: %s: %w", w.key.id, w.key.epoch, w.missing(), context.Cause(ctx))
		}
	}
	return nil
}

// target is where a process is dialed.
func (w *world) target(proc int) target { return target{w.procs[proc].addr, w.near[proc]} }

// exposed returns the refusal of a connection with a process that should be encrypted, and is not.
func (w *world) exposed(a *arrival, proc int) error {
	if w.node.cfg.TLS == nil || a.shim != nil || w.near[proc] {
		return nil
	}
	return errExposed
}

// greeting returns how this process greets another one.
func (w *world) greeting(proc int) hello {
	return hello{
		purpose: listener.Control, streams: uint8(w.node.cfg.Streams), job: w.node.job, world: w.key.id, members: w.hash, epoch: w.key.epoch,
		from: uint32(w.procs[w.self].ranks[0]), to: uint32(w.procs[proc].ranks[0]),
	}
}

// missing says which processes are not connected.
func (w *world) missing() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var who []string
	for i, l := range w.links {
		if l == nil && i != w.self {
			who = append(who, fmt.Sprintf("%v at %s", w.procs[i].ranks, w.procs[i].addr))
		}
	}
	text := "not connected with ranks " + strings.Join(who, ", ")
	if last := w.node.acceptor.Last(); last != "" {
		text += " (" + last + ")"
	}
	return text
}

// join makes a connection the link with a process. answer, if given, accepts the connection.
func (w *world) join(a *arrival, proc int, answer func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.closed:
		a.raw.Close()
		return listener.Refuse(listener.Group, "the group is closed")
	case w.links[proc] != nil:
		return listener.Refuse(listener.Duplicate, "ranks %v are connected already", w.procs[proc].ranks)
	}
	if answer != nil {
		if err := answer(); err != nil {
			return err
		}
	}
	w.links[proc] = newLink(w, proc, a)
	w.up <- struct{}{}
	return nil
}

// welcome takes a connection that has greeted this world, answers it, and hands it to whom it is for; or returns why it is
// refused.
func (w *world) welcome(a *arrival) error {
	if a.purpose == listener.Data {
		return w.welcomeStream(a)
	}
	proc := slices.IndexFunc(w.procs, func(p process) bool { return p.ranks[0] == int(a.from) })
	switch {
	case a.members != w.hash:
		return listener.Refuse(listener.Group, "it has other addresses for the ranks of group %#x", w.key.id)
	case int(a.streams) != w.node.cfg.Streams:
		return listener.Refuse(listener.Group, "it wants %d streams between two ranks, this end %d", a.streams, w.node.cfg.Streams)
	case proc < 0 || proc <= w.self || int(a.to) != w.procs[w.self].ranks[0]:
		return listener.Refuse(listener.Rank, "the process of rank %d does not dial that of rank %d", a.from, a.to)
	}
	if err := w.exposed(a, proc); err != nil {
		return err
	}
	return w.join(a, proc, func() error { return a.answer(nil) })
}

func (w *world) welcomeStream(a *arrival) error {
	w.mu.Lock()
	g := w.groups[a.group]
	switch {
	case w.closed || slices.Contains(w.past, a.group):
		w.mu.Unlock()
		return listener.Refuse(listener.Group, "the group is closed")
	case int(a.streams) != w.node.cfg.Streams:
		w.mu.Unlock()
		return listener.Refuse(listener.Group, "it wants %d streams between two ranks, this end %d", a.streams, w.node.cfg.Streams)
	case g == nil && len(w.early) >= earlyMax:
		w.mu.Unlock()
		return listener.Refuse(listener.Crowded, "%d connections wait already for groups that have not begun here", earlyMax)
	case g == nil:
		w.early = append(w.early, a)
		w.mu.Unlock()
		return nil
	}
	e, err := g.whom(a)
	if err == nil && e == nil {
		w.early = append(w.early, a)
	}
	w.mu.Unlock()
	if e == nil {
		return err
	}
	return e.welcome(a)
}

// say sends a message about a group to every process that has ranks in it, this one too, or to one process.
func (w *world) say(g *group, m *message, proc int) {
	m.group = g.id
	for p := range w.procs {
		if proc >= 0 && p != proc || !g.inProc[p] {
			continue
		}
		if p == w.self {
			w.hear(m, p)
		} else if l := w.link(p); l != nil {
			l.send(m)
		}
	}
}

func (w *world) link(proc int) *link {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.links[proc]
}

// hear takes a message that a process has sent.
func (w *world) hear(m *message, proc int) {
	w.mu.Lock()
	g := w.groups[m.group]
	if (g == nil || g.taken < g.local) && m.kind < msgAsk && !slices.Contains(w.past, m.group) && len(w.notes) < earlyMax {
		w.notes = append(w.notes, note{*m, proc})
	}
	var ends []*endpoint
	if g != nil {
		ends = slices.Clone(g.ends)
	}
	w.mu.Unlock()
	if m.kind == msgAsk && len(ends) == 0 {
		if l := w.link(proc); l != nil {
			l.send(&message{kind: msgAnswer, group: m.group, from: m.to, to: m.from, tag: m.tag, seq: m.seq})
		}
	}
	for _, e := range ends {
		e.hear(m, proc)
	}
}

// lose tells all ends that a process is gone.
func (w *world) lose(proc int, err error) {
	w.mu.Lock()
	var ends []*endpoint
	for _, g := range w.groups {
		ends = append(ends, g.ends...)
	}
	w.mu.Unlock()
	for _, e := range ends {
		e.lose(proc, err)
	}
}

// drop forgets an end that was closed, and the group and the world with their last.
func (w *world) drop(e *endpoint) {
	g := e.group
	w.mu.Lock()
	g.ends = slices.DeleteFunc(g.ends, func(other *endpoint) bool { return other == e })
	g.gone++
	w.open--
	if g.gone == g.local {
		delete(w.groups, g.id)
		if w.past = append(w.past, g.id); len(w.past) > pastMax {
			w.past = w.past[1:]
		}
		w.notes = slices.DeleteFunc(w.notes, func(n note) bool { return n.group == g.id })
	}
	last := w.open == 0
	w.mu.Unlock()
	if last {
		w.end()
	}
}

// closeAll closes all ends.
func (w *world) closeAll() {
	w.mu.Lock()
	var ends []*endpoint
	for _, g := range w.groups {
		ends = append(ends, g.ends...)
	}
	w.mu.Unlock()
	for _, e := range ends {
		e.Close()
	}
	w.end()
}

// end closes the links.
func (w *world) end() {
	w.mu.Lock()
	closed := w.closed
	w.closed = true
	links, early := slices.Clone(w.links), w.early
	w.early = nil
	w.mu.Unlock()
	if closed {
		return
	}
	for _, a := range early {
		a.answer(listener.Refuse(listener.Group, "the group is closed"))
	}
	var closing sync.WaitGroup
	for _, l := range links {
		if l != nil {
			closing.Go(l.close)
		}
	}
	closing.Wait()
	w.node.mu.Lock()
	if w.node.worlds[w.key] == w {
		delete(w.node.worlds, w.key)
		if w.node.past = append(w.node.past, w.key); len(w.node.past) > pastMax {
			w.node.past = w.node.past[1:]
		}
	}
	w.node.mu.Unlock()
	w.node.closeIfEmpty()
}

// errLost is that a process's connection ended without a word.
var errLost = errors.New("its process is gone: the connection ended")
