package shm

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var errClosed = transport.ErrClosed

// group is the state that the local ranks of one group share.
type group struct {
	region
	world   *world
	offset  int64 // of the region in the control file
	worldly []int // rank in the world, by rank
	process []int // number of the process, by rank
	first   bool  // it was split from the world's group
	places  []transport.Place
	crowded bool // Go's scheduler has fewer processors than local ranks: the awaited rank may need this one

	ends []atomic.Pointer[endpoint] // by rank; nil unless local and open

	open int    // number of open local ranks; guarded by world.mu
	seen uint32 // last value of head.news; guarded by world.mu
	home uint32 // last value of head.news of the world's group; guarded by world.mu

	asked    uint32   // last value of head.asked; guarded by world.mu
	answered []uint64 // number of the last handled query, by rank; guarded by world.mu

	life sync.RWMutex // read-locked by calls that may run at any time, so that the mapping stays
	gone bool
}

// newGroup maps the region of a group of the listed ranks of the world.
func newGroup(w *world, offset int64, worldly []int) (*group, error) {
	r, err := mapRegion(w.control, offset, layoutOf(len(worldly)))
	if err != nil {
		return nil, err
	}
	g := &group{
		region: r, world: w, offset: offset, worldly: worldly,
		ends: make([]atomic.Pointer[endpoint], len(worldly)), answered: make([]uint64, len(worldly)),
	}
	if err := g.provide(0, g.pipes); err != nil {
		g.unmap()
		return nil, err
	}
	for _, rank := range worldly {
		p := w.processOf[rank]
		g.process = append(g.process, p)
		g.places = append(g.places, transport.Place{Worker: p})
	}
	g.crowded = len(w.cfg.Ranks) > runtime.GOMAXPROCS(0)
	return g, nil
}

// join creates the endpoint of a local rank.
func (g *group) join(rank int) *endpoint {
	n := g.ranks
	e := &endpoint{
		g: g, rank: rank, mine: g.block(rank), views: make([][2]view, n), names: map[string]string{},
		wake: make(chan struct{}, 1), down: make(chan transport.PeerDown, n), reported: make([]bool, n),
		garbage: make([]error, n), reply: make(chan struct{}, 1), outgoing: make([]pipeEnd, n),
		incoming: make([]pipeEnd, n), staged: make([]bool, n),
	}
	for r := range n {
		e.blocks = append(e.blocks, g.block(r))
		e.outgoing[r].pipe, e.outgoing[r].ring = g.pipe(rank, r)
		e.incoming[r].pipe, e.incoming[r].ring = g.pipe(r, rank)
	}
	e.waiter = waiting.New(waiting.Config{Rank: rank, Room: e.room, Batch: pollsBatch, Nap: waiting.NapMost})
	g.ends[rank].Store(e)
	return e
}

// lost returns why a rank is down, or nil.
//
// A rank joins the group, fails in it, closes its endpoint here, then that of the world's group, and then its process
// ends, in this order. lost reads these states in the reverse order, so it cannot miss an earlier one.
func (g *group) lost(rank int) error {
	ended := g.world.lost(g.worldly[rank])
	left := g.first && g.world.root.block(g.worldly[rank]).state.Load()&stateClosed != 0
	b := g.block(rank)
	switch state := b.state.Load(); {
	case state&stateFailed != 0:
		n := min(b.reasonLen.Load(), reasonBytes)
		return &transport.Failure{Reason: slices.Clone(b.reason[:n])}
	case state&stateClosed != 0:
		return errClosed
	case ended != nil:
		return ended
	case left && state&stateOpen == 0:
		return errClosed // it never joined this group
	}
	return nil
}

// reportLocked reports the lost ranks to the local ranks. The caller holds world.mu.
func (g *group) reportLocked() {
	g.seen, g.home = g.head.news.Load(), g.world.root.head.news.Load()
	for rank := range g.ranks {
		err := g.lost(rank)
		if err == nil {
			continue
		}
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil && r != rank && !e.reported[rank] {
				e.reported[rank] = true
				e.down <- transport.PeerDown{Rank: rank, Err: err}
			}
		}
	}
}

// announce notifies all processes of the group of a change of the state of a local rank, and wakes all its ranks.
func (g *group) announce() {
	g.head.news.Add(1)
	g.wakeAll()
	for p := range g.world.processes {
		if slices.Contains(g.process, p) {
			g.world.ring(p)
		}
	}
	g.world.look()
}

// wakeAll wakes all ranks that are parked.
func (g *group) wakeAll() {
	for r := range g.ranks {
		g.wakeUp(r, g.block(r))
	}
}

// wakeUp wakes a rank if it is still parked: the caller that changes the word does it.
func (g *group) wakeUp(rank int, b *block) {
	if b.parked.CompareAndSwap(parkedNap, parkedNot) {
		futexWake(&b.parked)
		return
	}
	if !b.parked.CompareAndSwap(parkedLong, parkedNot) {
		return
	}
	if p := g.process[rank]; p != g.world.me {
		g.world.ring(p)
		return
	}
	if e := g.ends[rank].Load(); e != nil {
		e.token()
	}
}

// endpoint is one rank's end of the group.
type endpoint struct {
	g      *group
	rank   int
	mine   *block
	blocks []*block

	// Used by the rank's goroutine only.
	calls    uint64            // number of calls published
	late     bool              // Publish was called after Close: the call has no slot
	total    uint64            // number of flags set
	base     uint64            // number of flags set before the current call
	own      [2]transport.Slot // as published, by slot
	shapes   [2][]int          // their shapes, kept
	quick    [2]bool           // they have no memories
	version  [2]uint32         // of their texts
	views    [][2]view         // by peer and slot
	names    map[string]string // texts seen so far
	garbage  []error           // invalid data of a peer, by peer
	want     want
	waiter   waiting.Waiter
	counted  time.Time    // when the CPUs of the ranks were last compared
	counts   waiting.Room // by that
	staged   []bool       // by rank: its staging buffer is backed by memory
	unstaged error        // why a staging buffer has no memory
	inspect  func(peer int, h transport.Header) error

	outgoing, incoming []pipeEnd // by peer
	x                  exchange

	answer atomic.Pointer[func(seq uint64) []byte]
	reply  chan struct{} // a token: an answer arrived

	wake     chan struct{}
	waiting  atomic.Bool
	closed   atomic.Bool
	failed   atomic.Bool
	down     chan transport.PeerDown
	reported []bool // guarded by world.mu
}

func (e *endpoint) Rank() int                                                { return e.rank }
func (e *endpoint) Size() int                                                { return e.g.ranks }
func (e *endpoint) Transport() string                                        { return "shm" }
func (e *endpoint) Inspect(inspect func(peer int, h transport.Header) error) { e.inspect = inspect }
func (e *endpoint) Down() <-chan transport.PeerDown                          { return e.down }
func (e *endpoint) Posts() transport.Poster                                  { return nil }
func (e *endpoint) Memory() transport.SharedMemory                           { return e }

func (e *endpoint) Capabilities() transport.Capabilities {
	return transport.Capabilities{Places: e.g.places, StagingBytes: stagingBytes, InlineBytes: inlineBytes}
}

func (e *endpoint) NewBuffer(bytes int) (tensor.Memory, error) {
	if e.closed.Load() {
		return tensor.Memory{}, errClosed
	}
	return e.g.world.arena.allocate(bytes)
}

// Retire prevents the reuse of memory of this process's arena. Peers reach no other memory.
func (e *endpoint) Retire(m tensor.Memory) { e.g.world.arena.retire(m) }

func (e *endpoint) Fail(reason []byte) {
	g := e.g
	g.life.RLock()
	defer g.life.RUnlock()
	if g.gone || e.closed.Load() || e.failed.Swap(true) {
		return
	}
	n := copy(e.mine.reason[:], reason)
	e.mine.reasonLen.Store(uint32(n))
	e.mine.state.Or(stateFailed)
	g.announce()
}

func (e *endpoint) Close() error {
	if e.closed.Swap(true) {
		return nil
	}
	g, w := e.g, e.g.world
	e.mine.state.Or(stateClosed)
	g.announce()
	if g.head.left.Add(1) == uint32(g.ranks) && g != w.root {
		// The head and the blocks stay: a rank that joins late must not treat the group as a new one. This precedes the
		// count of open endpoints, whose last one closes the file.
		unix.Fallocate(int(w.control.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, g.offset+int64(g.pipes),
			int64(g.bytes-g.pipes))
	}
	w.mu.Lock()
	g.open--
	unmap := g.open == 0 && g != w.root
	if unmap {
		w.groups = slices.DeleteFunc(w.groups, func(other *group) bool { return other == g })
	}
	w.open--
	end := w.open == 0
	w.mu.Unlock()
	if unmap {
		g.unmap()
	}
	if end {
		w.close()
	}
	return nil
}

func (g *group) unmap() {
	g.life.Lock()
	defer g.life.Unlock()
	g.gone = true
	unix.Munmap(g.mem)
}

// Split finds the region of the group in the control file: the first rank allocates it, the others find it by the
// group's id.
func (e *endpoint) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if e.closed.Load() {
		return nil, errClosed
	}
	if _, err := transport.RankIn(ranks, e.rank, e.g.ranks); err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	return e.g.world.split(e, id, ranks)
}
