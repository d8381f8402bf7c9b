// Package mem is a transport between ranks of one process.
//
// [New] creates a group whose ranks access each other's memory: slots, flags, staging buffers, and also frames.
// [NewPipes] creates one whose ranks only exchange frames, by unbuffered pipes: the receiver copies directly from the
// sender's memory. Pipes behave like a network, without using one.
//
// A wait polls for some microseconds if the ranks do not outnumber the processors, and yields to other goroutines
// now and then (package internal/transport/waiting). Then it blocks on a channel that was created with the group:
// in a bubble of testing/synctest it is durably blocked if the group was created inside. No call starts a goroutine
// or allocates.
package mem

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// New returns the endpoints of a group of n ranks, by rank, that access each other's memory. It panics if n is not
// positive.
func New(n int) []transport.Endpoint { return newHub(n, true).all() }

// NewPipes returns the endpoints of a group of n ranks, by rank, that only exchange frames. It panics if n is not
// positive.
func NewPipes(n int) []transport.Endpoint { return newHub(n, false).all() }

// hub is the state that the ranks of one group share.
type hub struct {
	root   *hub // the group that was created first, which knows those split from it
	n      int
	memory bool              // the ranks access each other's memory
	places []transport.Place // without memory, each rank counts as a separate process and host
	ends   []endpoint
	pipes  []atomic.Pointer[pipe] // by sender*n + receiver; nil until it is used

	allocated sync.Once
	staging   []byte // the staging buffers, by rank

	mu     sync.Mutex // in the root only
	splits map[uint64]*split
}

// stagingBytes is the size of a rank's staging buffer.
const stagingBytes = 64 << 10

// split is a split group that not all its ranks have taken yet.
type split struct {
	hub   *hub
	ranks []int
	taken []bool
}

func newHub(n int, memory bool) *hub {
	if n < 1 {
		panic(fmt.Sprintf("mem: a group of %d ranks", n))
	}
	h := &hub{
		n: n, memory: memory, places: make([]transport.Place, n), ends: make([]endpoint, n),
		pipes: make([]atomic.Pointer[pipe], n*n), splits: map[uint64]*split{},
	}
	h.root = h
	words := (n + 63) / 64
	for i := range h.ends {
		e := &h.ends[i]
		e.hub, e.rank = h, i
		for i := range e.slots {
			e.slots[i] = new(slotLines) // separate allocations: those of this size are aligned (beyond 512 bytes they are not)
		}
		e.waiter = waiting.New(waiting.Config{Rank: i, Room: h.room, Batch: 32, Goroutines: true})
		if memory {
			e.waiters = make([]atomic.Uint64, words+16)[8:][:words] // on separate cache lines
		} else {
			h.places[i] = transport.Place{Worker: i, Domain: i, Host: i}
		}
		e.wake = make(chan struct{}, 1)
		e.down = make(chan transport.PeerDown, n)
	}
	return h
}

// room returns whether the ranks have a processor each. If not, a rank that polls would keep the others from running.
func (h *hub) room(time.Time) waiting.Room {
	if h.n <= min(runtime.GOMAXPROCS(0), runtime.NumCPU()) {
		return waiting.Own
	}
	return waiting.None
}

// all returns the endpoints by rank.
func (h *hub) all() []transport.Endpoint {
	out := make([]transport.Endpoint, h.n)
	for i := range out {
		out[i] = &h.ends[i]
	}
	return out
}

// endpoint is one rank's end.
type endpoint struct {
	// Used by the rank's goroutine only.
	hub     *hub
	rank    int
	calls   uint64 // number of calls published
	set     uint64 // number of flags set
	base    uint64 // number of flags set before the current call
	version uint64 // of park
	waiter  waiting.Waiter
	flags   flagWait // the wait in progress, or the last one
	frame   frameWait
	posts   [transport.PostsMax]exchange
	posted  int   // number of posts in progress
	broken  error // why the posts in progress have failed
	inspect func(peer int, h transport.Header) error
	waiters []atomic.Uint64 // a bit for every rank that may be parked on this one's flags
	granted uint64          // version of park whose wait was woken since its condition is true; set before the token
	wake    chan struct{}   // one token ends one wait; see wait.go
	down    chan transport.PeerDown

	_    [64]byte
	park atomic.Uint64 // what the rank waits for on wake, or is about to; see wait.go
	need atomic.Uint64 // the number of flags that it waits for, times 4; plus 2: in an odd call; plus 1: of all ranks
	_    [48]byte

	closed atomic.Bool
	gone   atomic.Pointer[transport.PeerDown] // why this rank is down for its peers; nil: it is not
	answer atomic.Pointer[func(seq uint64) []byte]
	slots  [2]*slotLines // of the odd and the even calls
	_      [64]byte      // what the rank behind it writes in every call is on another cache line than what all read
}

// slotLines is a slot on separate cache lines, if the memory around it begins on one. What peers read in every call is
// the first of them: the flags, the data of small calls, the sum and Src. Dst is on the second.
type slotLines struct {
	flags atomic.Uint64 // number of flags set, up to the last call of this slot, and stopBit: what peers wait for
	data  [inlineBytes / 8]uint64
	transport.Slot
	_ [64 - (8+inlineBytes+unsafe.Sizeof(transport.Slot{}))%64]byte // not empty: that would add to the size
}

// inlineBytes is the length of the data on the cache line of the flags.
const inlineBytes = 32

// inline returns the data as bytes.
func (s *slotLines) inline() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(&s.data)), inlineBytes)
}

func (e *endpoint) Rank() int { return e.rank }

func (e *endpoint) Size() int { return e.hub.n }

func (e *endpoint) Transport() string { return "mem" }

func (e *endpoint) Capabilities() transport.Capabilities {
	if !e.hub.memory {
		return transport.Capabilities{Places: e.hub.places}
	}
	return transport.Capabilities{Places: e.hub.places, StagingBytes: stagingBytes, InlineBytes: inlineBytes}
}

func (e *endpoint) Posts() transport.Poster { return e }

func (e *endpoint) Memory() transport.SharedMemory {
	if !e.hub.memory {
		return nil
	}
	return e
}

func (e *endpoint) Inspect(inspect func(peer int, h transport.Header) error) { e.inspect = inspect }

func (e *endpoint) Down() <-chan transport.PeerDown { return e.down }

func (e *endpoint) Fail(reason []byte) {
	reason = slices.Clone(reason[:min(len(reason), transport.ReasonMax)])
	e.leave(&transport.PeerDown{Rank: e.rank, Err: &transport.Failure{Reason: reason}})
}

func (e *endpoint) Close() error {
	if !e.closed.Swap(true) {
		e.leave(&transport.PeerDown{Rank: e.rank, Err: transport.ErrClosed})
	}
	return nil
}

// leave reports to the peers that this rank is down, once.
func (e *endpoint) leave(why *transport.PeerDown) {
	if !e.gone.CompareAndSwap(nil, why) {
		return
	}
	for i := range e.hub.ends {
		if peer := &e.hub.ends[i]; peer != e {
			peer.down <- *why // it has room for one of each rank
			peer.unpark()
		}
	}
}

// lost returns the error of a wait that needs a rank, if that rank is down, or nil.
func (h *hub) lost(rank int) error {
	if d := h.ends[rank].gone.Load(); d != nil {
		return &transport.PeerDown{Rank: d.Rank, Err: d.Err}
	}
	return nil
}

func (e *endpoint) Answer(text func(seq uint64) []byte) { e.answer.Store(&text) }

func (e *endpoint) Ask(peer int, seq uint64) []byte {
	p := &e.hub.ends[peer]
	text := p.answer.Load()
	if text == nil || *text == nil || p.closed.Load() {
		return nil
	}
	answer := (*text)(seq)
	return slices.Clone(answer[:min(len(answer), transport.ReasonMax)])
}

func (e *endpoint) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	at, err := transport.RankIn(ranks, e.rank, e.hub.n)
	if err != nil {
		return nil, fmt.Errorf("mem: %w", err)
	}
	root := e.hub.root
	root.mu.Lock()
	defer root.mu.Unlock()
	s := root.splits[id]
	if s == nil {
		s = &split{hub: e.hub.part(len(ranks)), ranks: slices.Clone(ranks), taken: make([]bool, len(ranks))}
		root.splits[id] = s
	}
	if !slices.Equal(s.ranks, ranks) || s.taken[at] {
		return nil, fmt.Errorf("mem: group %#x of ranks %v exists already with ranks %v", id, ranks, s.ranks)
	}
	s.taken[at] = true
	if !slices.Contains(s.taken, false) {
		delete(root.splits, id)
	}
	return &s.hub.ends[at], nil
}

// part returns a new group of n of the ranks.
func (h *hub) part(n int) *hub {
	p := newHub(n, h.memory)
	p.root = h.root
	return p
}

// stagingBuffer returns the staging buffer of a rank. The first call allocates those of all ranks.
func (h *hub) stagingBuffer(rank int) []byte {
	h.allocated.Do(func() { h.staging = tensor.AlignedBytes(h.n*stagingBytes, tensor.CacheLine) })
	return h.staging[rank*stagingBytes:][:stagingBytes:stagingBytes]
}
