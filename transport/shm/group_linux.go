package shm

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var errClosed = transport.ErrClosed

// group is what the local ranks of one group have in common.
type group struct {
	region
	world   *world
	offset  int64 // of the region in the control file
	worldly []int // by rank: its rank in the world
	process []int // by rank: the number of its process
	first   bool  // it was split from the world's own group
	domain  []int
	places  []transport.Place
	looks   int // at the condition before a wait gives its processor away between looks; 0: it blocks at once

	ends []atomic.Pointer[endpoint] // by rank, the local ones

	open int    // how many local ranks are not closed; guarded by world.mu
	seen uint32 // of head.news; guarded by world.mu
	home uint32 // of the head.news of the world's group; guarded by world.mu

	asked    uint32   // of head.asked, that was looked at; guarded by world.mu
	answered []uint64 // by rank: number of its last question that was looked at; guarded by world.mu

	life sync.RWMutex // held by those that may come at any time, against the end of the mapping
	gone bool
}

// newGroup maps the region of a group of the world's ranks listed.
func newGroup(w *world, offset int64, worldly []int) (*group, error) {
	r, err := mapRegion(w.control, offset, layoutOf(len(worldly)))
	if err != nil {
		return nil, err
	}
	g := &group{region: r, world: w, offset: offset, worldly: worldly, ends: make([]atomic.Pointer[endpoint], len(worldly)), answered: make([]uint64, len(worldly))}
	if err := g.provide(0, g.pipes); err != nil {
		g.unmap()
		return nil, err
	}
	for i, rank := range worldly {
		p := w.processOf[rank]
		g.process = append(g.process, p)
		g.domain = append(g.domain, i)
		g.places = append(g.places, transport.Place{Worker: p})
	}
	switch {
	case len(w.cfg.Ranks) > runtime.GOMAXPROCS(0): // the peer may need this very processor, and cannot get it by a thread
	case w.cfg.Size <= runtime.NumCPU():
		g.looks = looksFirst
	default:
		g.looks = looksEach
	}
	return g, nil
}

// join makes the end of a local rank.
func (g *group) join(rank int) *endpoint {
	n := g.ranks
	e := &endpoint{
		g: g, rank: rank, mine: g.block(rank), views: make([][2]view, n), names: map[string]string{},
		wake: make(chan struct{}, 1), down: make(chan transport.PeerDown, n), told: make([]bool, n), garbage: make([]error, n),
		reply: make(chan struct{}, 1), outgoing: make([]pipeEnd, n), incoming: make([]pipeEnd, n), staged: make([]bool, n),
	}
	for r := range n {
		e.blocks = append(e.blocks, g.block(r))
		e.outgoing[r].pipe, e.outgoing[r].ring = g.pipe(rank, r)
		e.incoming[r].pipe, e.incoming[r].ring = g.pipe(r, rank)
	}
	g.ends[rank].Store(e)
	return e
}

// lost returns why a rank will not come any more, or nil.
//
// A rank comes to the group, fails in it, closes its end here, then that of the world's group, and its process ends: in this order. This
// looks in the other one, so what comes last here was not before something that it has missed.
func (g *group) lost(rank int) error {
	ended := g.world.processes[g.process[rank]].lost()
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
		return errClosed // before it came here
	}
	return nil
}

// tellLocked delivers the ranks that are lost to the local ranks.
func (g *group) tellLocked() {
	g.seen, g.home = g.head.news.Load(), g.world.root.head.news.Load()
	for rank := range g.ranks {
		err := g.lost(rank)
		if err == nil {
			continue
		}
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil && r != rank && !e.told[rank] {
				e.told[rank] = true
				e.down <- transport.PeerDown{Rank: rank, Err: err}
			}
		}
	}
}

// announce lets all processes of the group know that the state of a local rank has changed, and wakes all its ranks.
func (g *group) announce() {
	g.head.news.Add(1)
	g.rouseAll()
	for p := range g.world.processes {
		if slices.Contains(g.process, p) {
			g.world.processes[p].ring()
		}
	}
	g.world.look()
}

// rouseAll wakes all ranks that are parked.
func (g *group) rouseAll() {
	for r := range g.ranks {
		g.wakeUp(r, g.block(r))
	}
}

// wakeUp wakes a rank if it is still parked: whoever clears the word rings.
func (g *group) wakeUp(rank int, b *block) {
	if !b.parked.CompareAndSwap(1, 0) {
		return
	}
	if p := g.process[rank]; p != g.world.me {
		g.world.processes[p].ring()
		return
	}
	if e := g.ends[rank].Load(); e != nil {
		e.token()
	}
}

// endpoint is one rank's end.
type endpoint struct {
	g      *group
	rank   int
	mine   *block
	blocks []*block

	// The rank's own goroutine only.
	calls    uint64            // published so far
	total    uint64            // marks raised so far
	base     uint64            // of them before the current call
	own      [2]transport.Slot // as published, by slot
	shapes   [2][]int          // their shapes, kept
	version  [2]uint32         // of their texts
	views    [][2]view         // by peer and slot
	names    map[string]string // texts seen so far
	garbage  []error           // by peer: what it wrote that cannot be
	want     want
	staged   []bool // by rank: its stage has memory
	unstaged error  // a stage has none
	judge    func(peer int, h transport.Header) error

	outgoing, incoming []pipeEnd // by peer
	x                  exchange

	answer atomic.Pointer[func(seq uint64) []byte]
	reply  chan struct{} // there is an answer

	wake    chan struct{}
	waiting atomic.Bool
	closed  atomic.Bool
	failed  atomic.Bool
	down    chan transport.PeerDown
	told    []bool // guarded by world.mu
}

var (
	_ transport.Marker    = (*endpoint)(nil)
	_ transport.Allocator = (*endpoint)(nil)
	_ transport.Splitter  = (*endpoint)(nil)
	_ transport.Placer    = (*endpoint)(nil)
	_ transport.Asker     = (*endpoint)(nil)
)

func (e *endpoint) Rank() int                                              { return e.rank }
func (e *endpoint) Size() int                                              { return e.g.ranks }
func (e *endpoint) Transport() string                                      { return "shm" }
func (e *endpoint) Reach(int) transport.Reach                              { return transport.Memory }
func (e *endpoint) Places() []transport.Place                              { return e.g.places }
func (e *endpoint) Inspect(judge func(peer int, h transport.Header) error) { e.judge = judge }
func (e *endpoint) Down() <-chan transport.PeerDown                        { return e.down }

func (e *endpoint) NewBuffer(bytes int) (tensor.Memory, error) {
	if e.closed.Load() {
		return tensor.Memory{}, errClosed
	}
	return e.g.world.arena.allocate(bytes)
}

// Retire keeps memory of this process's arena from being given out again. No other memory is reached by peers.
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
	last := g.head.left.Add(1) == uint32(g.ranks)
	w.mu.Lock()
	g.open--
	unmap := g.open == 0 && g != w.root
	if unmap {
		w.groups = slices.DeleteFunc(w.groups, func(other *group) bool { return other == g })
	}
	w.open--
	end := w.open == 0
	w.mu.Unlock()
	if last && g != w.root {
		// The words in front of the pipes stay: a rank that comes late must not take the group for a new one.
		unix.Fallocate(int(w.control.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, g.offset+int64(g.pipes), int64(g.bytes-g.pipes))
	}
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

// Split finds the place of the group in the control file: whoever comes first takes one, the others find it by its id.
func (e *endpoint) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if e.closed.Load() {
		return nil, errClosed
	}
	if err := checkList(ranks, e.rank, e.g.ranks); err != nil {
		return nil, err
	}
	return e.g.world.split(e, id, ranks)
}
