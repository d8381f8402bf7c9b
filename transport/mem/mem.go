// Package mem is a transport between ranks of one process.
//
// [New] creates a group whose ranks reach each other's memory: slots, marks, staging buffers, and also frames.
// [NewPipes] creates one whose ranks only exchange frames, by unbuffered pipes: the receiver copies directly from the
// sender's memory. Pipes behave like a network, without using one. [NewDomains] creates a group in which some ranks
// reach each other's memory and others do not, like the processes of a job.
//
// A wait spins for some microseconds if the ranks do not outnumber the processors, and yields to other goroutines now
// and then. Then it blocks on a channel that was created with the group: in a bubble of testing/synctest it is durably
// blocked if the group was created inside. No call starts a goroutine or allocates.
package mem

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/transport"
)

// New returns the endpoints of a group of n ranks, by rank, that reach each other's memory. It panics if n is not
// positive.
func New(n int) []transport.Endpoint { return newHub(n, make([]int, max(0, n))).all() }

// NewPipes returns the endpoints of a group of n ranks, by rank, that only exchange frames. It panics if n is not
// positive.
func NewPipes(n int) []transport.Endpoint { return newHub(n, nil).all() }

// NewDomains returns the ends of a group of len(domains) ranks, by rank. Ranks of one domain, whose numbers are equal,
// reach each other's memory; others by messages. Each end is what those of New and NewPipes are. It panics without
// ranks.
func NewDomains(domains []int) []transport.Endpoint {
	return newHub(len(domains), slices.Clone(domains)).all()
}

// hub is the state that the ranks of one group share.
type hub struct {
	root    *hub // the group made first, which knows those split from it
	n       int
	domains []int             // by rank; nil: all by messages
	places  []transport.Place // a separate process and host for each domain, and for each rank without a domain
	ends    []endpoint
	pipes   []atomic.Pointer[pipe] // by sender*n + receiver; nil until it is used

	allocated sync.Once
	staging   []byte // the staging buffers, by rank

	mu     sync.Mutex // in the root only
	splits map[uint64]*split
}

// stagingBytes is the size of a rank's staging buffer.
const stagingBytes = 64 << 10

// split is a group that was split off and not yet taken by all its ranks.
type split struct {
	hub   *hub
	ranks []int
	taken []bool
}

func newHub(n int, domains []int) *hub {
	if n < 1 {
		panic(fmt.Sprintf("mem: a group of %d ranks", n))
	}
	h := &hub{n: n, domains: domains, ends: make([]endpoint, n), pipes: make([]atomic.Pointer[pipe], n*n), splits: map[uint64]*split{}}
	h.root = h
	members := map[int][]int{}
	for i, d := range domains {
		members[d] = append(members[d], i)
	}
	words := (n + 63) / 64
	for i := range h.ends {
		e := &h.ends[i]
		e.hub, e.rank = h, i
		e.slots = new([2]slotLines) // by itself: memory of 512 bytes is aligned
		e.look()
		at := i
		if domains != nil {
			e.domain = members[domains[i]]
			e.at = slices.Index(e.domain, i)
			e.waiters = make([]atomic.Uint64, words+16)[8:][:words] // on cache lines of their own
			at = e.domain[0]
		}
		h.places = append(h.places, transport.Place{Worker: at, Domain: at, Host: at})
		e.wake = make(chan struct{}, 1)
		e.down = make(chan transport.PeerDown, n)
	}
	return h
}

// all returns the ends by rank.
func (h *hub) all() []transport.Endpoint {
	out := make([]transport.Endpoint, h.n)
	for i := range out {
		out[i] = h.ends[i].as()
	}
	return out
}

// endpoint is one rank's end.
type endpoint struct {
	// Used by the rank's goroutine only.
	hub     *hub
	rank    int
	domain  []int  // the ranks whose memory this one reaches, this one among them; nil: none
	at      int    // where in domain this one is
	calls   uint64 // published so far
	raised  uint64 // marks raised so far
	base    uint64 // of them before the current call
	version uint64 // of park
	procs   int    // processors, as last looked at
	blocks  int    // waits that have blocked
	under   [transport.PostsMax]exchange
	posted  int   // how many of them are under way
	broken  error // why the exchanges that are under way have failed
	judge   func(peer int, h transport.Header) error
	waiters []atomic.Uint64 // a bit for every rank that may be parked on this one's marks
	granted uint64          // the version of park whose wait was woken because all is there; goes with the token
	wake    chan struct{}   // one token ends one wait; see wait.go
	down    chan transport.PeerDown

	_     [64]byte
	marks atomic.Uint64 // marks raised so far, and stopBit: what peers wait for
	_     [56]byte
	park  atomic.Uint64 // what the rank waits for on wake, or is about to; see wait.go
	need  atomic.Uint64 // the count of marks that it waits for, times two; plus 1: of all ranks of its domain
	_     [48]byte

	closed atomic.Bool
	gone   atomic.Pointer[transport.PeerDown] // why peers cannot count on this rank any more; nil: they can
	answer atomic.Pointer[func(seq uint64) []byte]
	slots  *[2]slotLines // of the odd and the even calls
}

// slotLines is a slot on cache lines of its own, if what it is in begins on one: what peers read of it in every call is
// on two then.
type slotLines struct {
	transport.Slot
	_ [(64 - unsafe.Sizeof(transport.Slot{})%64) % 64]byte
}

// as returns the endpoint, with or without memory.
func (e *endpoint) as() transport.Endpoint {
	if e.domain == nil {
		return &piper{endpoint: e}
	}
	return &sharer{e}
}

func (e *endpoint) Rank() int { return e.rank }

func (e *endpoint) Size() int { return e.hub.n }

func (e *endpoint) Transport() string { return "mem" }

// shares reports whether a rank is in the domain of this rank.
func (e *endpoint) shares(rank int) bool {
	d := e.hub.domains
	return d != nil && d[rank] == d[e.rank]
}

func (e *endpoint) Inspect(judge func(peer int, h transport.Header) error) { e.judge = judge }

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
			peer.down <- *why // there is room for one of each rank
			peer.unpark()
		}
	}
}

// lost returns the error of needing a rank that is gone, or nil.
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
	sorted := slices.Sorted(slices.Values(ranks))
	at := slices.Index(ranks, e.rank)
	switch {
	case at < 0:
		return nil, fmt.Errorf("mem: rank %d is not among the ranks %v of the group", e.rank, ranks)
	case sorted[0] < 0 || sorted[len(sorted)-1] >= e.hub.n:
		return nil, fmt.Errorf("mem: ranks %v are not all among the %d of the group", ranks, e.hub.n)
	case len(slices.Compact(sorted)) < len(ranks):
		return nil, fmt.Errorf("mem: ranks %v name one twice", ranks)
	}
	root := e.hub.root
	root.mu.Lock()
	defer root.mu.Unlock()
	s := root.splits[id]
	if s == nil {
		s = &split{hub: e.hub.part(ranks), ranks: slices.Clone(ranks), taken: make([]bool, len(ranks))}
		root.splits[id] = s
	}
	if !slices.Equal(s.ranks, ranks) || s.taken[at] {
		return nil, fmt.Errorf("mem: group %#x of ranks %v exists already with ranks %v", id, ranks, s.ranks)
	}
	s.taken[at] = true
	if !slices.Contains(s.taken, false) {
		delete(root.splits, id)
	}
	return s.hub.ends[at].as(), nil
}

// part returns a new group of some of the ranks.
func (h *hub) part(ranks []int) *hub {
	var domains []int
	if h.domains != nil {
		for _, r := range ranks {
			domains = append(domains, h.domains[r])
		}
	}
	p := newHub(len(ranks), domains)
	p.root = h.root
	return p
}

// stagingBuffer returns the staging buffer of a rank. The first call allocates those of all ranks.
func (h *hub) stagingBuffer(rank int) []byte {
	h.allocated.Do(func() { h.staging = aligned(h.n * stagingBytes) })
	return h.staging[rank*stagingBytes:][:stagingBytes:stagingBytes]
}

// aligned returns zeroed memory that begins on a cache line.
func aligned(bytes int) []byte { return alignedTo(bytes, 64) }

func alignedTo(bytes, align int) []byte {
	b := make([]byte, bytes+align-1)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (align - 1)
	return b[skip:][:bytes:bytes]
}
