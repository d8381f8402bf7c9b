package tcp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/transport"
)

// GroupConfig describes the members of a group.
type GroupConfig struct {
	// ID distinguishes the groups of one epoch, closed ones included. It is the same in all processes.
	ID uint64
	// Epoch is the epoch of the communicator: the number of restarts of the job, increased by each rebuild. The
	// node refuses connections of an epoch older than that of its latest group.
	Epoch uint32
	// Addrs holds the address of each rank's node, by rank, as the others dial it. Ranks of one process have the same
	// address.
	Addrs []string
	// Local holds the ranks of this process: all ranks that have its address.
	Local []int
	// SameHost holds ranks whose processes are verified to be on this host. Connections with them are not encrypted,
	// even with [Config.TLS]; with TLS, this requires [Config.Authenticate]. Those processes must list the ranks of
	// this one too.
	SameHost []int
	// Processors is declared in [transport.Capabilities]. It is the same in all processes; 0: unknown.
	Processors int
}

// world is a group that Node.Group created, with all groups split from it.
type world struct {
	node  *Node
	key   worldKey
	procs []process // by lowest rank
	proc  []int     // index in procs, by rank
	host  []int     // number of the host, by process
	near  []bool    // by process: connections with it are not encrypted
	self  int
	block bool           // Go's scheduler has a processor for each rank of this process: ranks may wait in system calls
	room  *affinity.Room // of the ranks of this host
	// this host had more ranks than processors, or Go's scheduler in this process, when the group was made
	crowded    bool
	processors int // of GroupConfig
	hash       uint64
	graph      overlay.Graph // of the links that exist from the start
	next       []int         // this process's neighbours in it
	ctx        context.Context
	end        context.CancelFunc // ends ctx, and the dials of links
	work       sync.WaitGroup     // dials of links, after the start
	news       atomic.Int64       // number of messages sent about failures

	mu        sync.Mutex
	links     map[int]*link    // by process, ended ones included
	opening   map[int]*opening // links that are not usable yet, by process
	gone      map[int]error    // why each process is down that has ended or has closed all its endpoints
	lossKnown map[int]bool     // processes whose loss was reported on
	failed    []uint64         // ids of the latest pastMax groups whose failure was reported on
	joining   *joining         // until all processes have joined
	groups    map[uint64]*group
	pending   []*connection    // for endpoints that were not created here yet
	messages  []pendingMessage // for them, except:
	failures  []pendingMessage // of groups; also of those that will have no rank here: they leave the room of the others
	past      []uint64         // ids of the latest pastMax closed groups
	// the messages that ranks of this process have left with, by group and rank; of the closed groups, those in past
	left    map[uint64]map[uint32]*message
	open    int  // number of open endpoints
	closing bool // no more endpoints are created
	closed  bool
}

// process is a process of the group.
type process struct {
	addr  string
	ranks []int
}

// pendingMessage is a message for endpoints that were not created yet.
type pendingMessage struct {
	message
	proc int // the sender
}

const (
	pendingMax = 4096 // bounds the pending connections, the pending messages, and the pending failures
	pastMax    = 4096
	rootID     = 0 // of the whole world, among its groups
)

// Group joins the ranks at the given addresses into a group. It returns the endpoints of this process, in the order of
// Local. The caller must close each. Group waits until every other process has called it and all are connected, or ctx
// ends.
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
		err = fmt.Errorf("tcp: group %#x of epoch %d was created already", g.ID, g.Epoch)
	default:
		n.worlds[w.key] = w
		n.latest = max(n.latest, g.Epoch)
		close(n.changed)
		n.changed = make(chan struct{})
	}
	n.mu.Unlock()
	if err != nil {
		w.end()
		return nil, err
	}
	if err := w.join(ctx); err != nil {
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
		links: map[int]*link{}, opening: map[int]*opening{}, gone: map[int]error{}, lossKnown: map[int]bool{},
		left: map[uint64]map[uint32]*message{}, hash: hashMembers(strings.Join(g.Addrs, " "), nil),
	}
	number := map[string]int{} // of the process, by its address
	for r, addr := range g.Addrs {
		at, known := number[addr]
		if !known {
			if _, _, err := net.SplitHostPort(addr); err != nil {
				return nil, fmt.Errorf("tcp: address of rank %d: %w", r, err)
			}
			at = len(w.procs)
			number[addr] = at
			w.procs = append(w.procs, process{addr: addr})
		}
		w.procs[at].ranks = append(w.procs[at].ranks, r)
		w.proc[r] = at
	}
	if len(g.Local) == 0 || g.Local[0] < 0 || g.Local[0] >= len(g.Addrs) {
		return nil, fmt.Errorf("tcp: local ranks %v in a group of %d", g.Local, len(g.Addrs))
	}
	w.self = w.proc[g.Local[0]]
	if own := w.procs[w.self]; !slices.Equal(own.ranks, slices.Sorted(slices.Values(g.Local))) {
		return nil, fmt.Errorf("tcp: local ranks %v, but ranks %v have this process's address %s", g.Local, own.ranks,
			own.addr)
	}
	w.near = make([]bool, len(w.procs))
	for _, r := range g.SameHost {
		switch {
		case r < 0 || r >= len(g.Addrs):
			return nil, fmt.Errorf("tcp: rank %d on the same host, in a group of %d", r, len(g.Addrs))
		case n.cfg.TLS != nil && n.cfg.Authenticate == nil:
			return nil, errors.New("tcp: GroupConfig.SameHost with TLS needs Config.Authenticate, " +
				"to authenticate connections without TLS")
		}
		w.near[w.proc[r]] = true
	}
	w.host, w.processors = hosts(w.procs), g.Processors
	w.block = len(g.Local) <= runtime.GOMAXPROCS(0)
	w.room = affinity.NewRoom(w.ranksHere())
	w.crowded = w.roomNow(time.Now()) != waiting.Own
	w.graph = overlay.New(len(w.procs), n.meshMax)
	w.next = w.graph.Neighbours(w.self)
	w.joining = newJoining(w)
	w.ctx, w.end = context.WithCancel(n.ctx)
	return w, nil
}

// roomNow returns the room of the ranks of this process.
func (w *world) roomNow(now time.Time) waiting.Room {
	switch {
	case !w.block:
		return waiting.None
	case !w.room.Enough(now):
		return waiting.Shared
	}
	return waiting.Own
}

// hosts numbers the hosts of the processes: processes of different addresses are on different hosts.
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

// ranksHere returns the number of ranks on this host.
func (w *world) ranksHere() int {
	n := 0
	for i, p := range w.procs {
		if w.host[i] == w.host[w.self] {
			n += len(p.ranks)
		}
	}
	return n
}

// hashMembers hashes the member list of a group, so that endpoints with different lists do not connect.
func hashMembers(addrs string, ranks []int) uint64 {
	h := fnv.New64a()
	h.Write([]byte(addrs))
	for _, r := range ranks {
		h.Write(binary.LittleEndian.AppendUint32(nil, uint32(r)))
	}
	return h.Sum64()
}

// target returns how a process is dialed.
func (w *world) target(proc int) target { return target{w.procs[proc].addr, w.near[proc]} }

// exposed returns an error if a connection with a process should be encrypted and is not.
func (w *world) exposed(a *connection, proc int) error {
	if w.node.cfg.TLS == nil || a.shim != nil || w.near[proc] {
		return nil
	}
	return errExposed
}

// hello returns the hello of a control connection with a process.
func (w *world) hello(proc int) hello {
	return hello{
		purpose: listener.Control, job: w.node.job, world: w.key.id, members: w.hash, epoch: w.key.epoch,
		from: uint32(w.procs[w.self].ranks[0]), to: uint32(w.procs[proc].ranks[0]),
	}
}

// accept answers a connection for this world and passes it to its link or endpoint, or returns the refusal.
func (w *world) accept(a *connection) error {
	if a.purpose == listener.Data {
		return w.acceptStream(a)
	}
	proc := -1
	if r := w.rankOf(a.from); r >= 0 && w.procs[w.proc[r]].ranks[0] == r {
		proc = w.proc[r]
	}
	switch {
	case a.members != w.hash:
		return listener.Refuse(listener.Group, "it has other addresses for the ranks of group %#x", w.key.id)
	case proc < 0 || proc == w.self || int(a.to) != w.procs[w.self].ranks[0] ||
		proc < w.self && w.graph.Linked(proc, w.self):
		return listener.Refuse(listener.Rank, "the process of rank %d does not dial that of rank %d", a.from, a.to)
	}
	if err := w.exposed(a, proc); err != nil {
		return err
	}
	return w.acceptLink(a, proc)
}

func (w *world) acceptStream(a *connection) error {
	w.mu.Lock()
	g := w.groups[a.group]
	switch {
	case w.closed || slices.Contains(w.past, a.group):
		w.mu.Unlock()
		return listener.Refuse(listener.Closed, "the group is closed")
	case g == nil && len(w.pending) >= pendingMax:
		w.mu.Unlock()
		return listener.Refuse(listener.Crowded, "%d connections already wait for groups that were not started here",
			pendingMax)
	case g == nil:
		w.pending = append(w.pending, a)
		w.mu.Unlock()
		return nil
	}
	e, err := g.endpointFor(a)
	if err == nil && e == nil {
		w.pending = append(w.pending, a)
	}
	w.mu.Unlock()
	if e == nil {
		return err
	}
	return e.accept(a)
}

// receive handles a message from a process.
func (w *world) receive(m *message, proc int) {
	switch m.kind {
	case msgReady:
		w.receiveReady(proc)
		return
	case msgLost:
		w.receiveLost(m, proc)
		return
	case msgFailed:
		if !w.forwardFailure(m, proc) {
			return
		}
	}
	w.mu.Lock()
	g := w.groups[m.group]
	if (g == nil || g.taken < g.local) && m.kind < msgAsk && !slices.Contains(w.past, m.group) {
		w.keep(m, proc)
	}
	left := w.left[m.group][m.to]
	var ends []*endpoint
	if g != nil {
		ends = slices.Clone(g.ends)
	}
	w.mu.Unlock()
	taken := slices.ContainsFunc(ends, func(e *endpoint) bool { return e.rank == int(m.to) })
	if m.kind == msgConnect && left != nil || m.kind == msgAsk && (left != nil || !taken) {
		w.refuse(m, proc, left)
	}
	for _, e := range ends {
		e.receive(m, proc)
	}
}

// refuse answers a request for a rank that has no endpoint here: it has closed it, with the message left, or has not
// created it yet.
func (w *world) refuse(m *message, proc int, left *message) {
	if left != nil {
		w.post(proc, left)
	}
	if m.kind == msgAsk {
		w.post(proc, &message{kind: msgAnswer, group: m.group, from: m.to, to: m.from, tag: m.tag, seq: m.seq})
	}
}

// endpoints returns all open endpoints. The caller holds mu.
func (w *world) endpoints() []*endpoint {
	var ends []*endpoint
	for _, g := range w.groups {
		ends = append(ends, g.ends...)
	}
	return ends
}

// drop removes a closed endpoint, the group with its last endpoint, and the world with its last group.
func (w *world) drop(e *endpoint) {
	g := e.group
	w.mu.Lock()
	g.ends = slices.DeleteFunc(g.ends, func(other *endpoint) bool { return other == e })
	g.gone++
	w.open--
	if g.gone == g.local {
		delete(w.groups, g.id)
		if w.past = append(w.past, g.id); len(w.past) > pastMax {
			delete(w.left, w.past[0])
			w.past = w.past[1:]
		}
		w.forget(g.id)
	}
	last := w.open == 0
	w.mu.Unlock()
	if last {
		w.close()
	}
}

// closeAll closes all endpoints and the links.
func (w *world) closeAll() {
	w.mu.Lock()
	w.closing = true
	ends := w.endpoints()
	w.mu.Unlock()
	for _, e := range ends {
		e.Close()
	}
	w.close()
}

// close refuses the pending connections and closes the links.
func (w *world) close() {
	w.mu.Lock()
	closed := w.closed
	w.closed = true
	links, pending := slices.Collect(maps.Values(w.links)), w.pending
	for _, o := range w.opening {
		if o.accepted != nil {
			links = append(links, o.accepted)
		}
	}
	w.pending = nil
	w.mu.Unlock()
	if closed {
		return
	}
	for _, a := range pending {
		a.answer(listener.Refuse(listener.Closed, "the group is closed"))
	}
	w.end()
	w.work.Wait()
	var closing sync.WaitGroup
	for _, l := range links {
		closing.Go(l.close)
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
