// Package mem connects ranks that live in one process.
//
// [New] makes a group whose ranks reach each other's memory: slots and marks, and frames as well. [NewPipes] makes one
// whose ranks exchange frames only: unbuffered pipes, in which the receiver copies straight from the sender's memory.
// Pipes behave as a network does, without one.
//
// A wait spins for some microseconds if no more ranks than processors are there, yielding to other goroutines now and
// then, and then blocks on a channel that was made with the group: a bubble of testing/synctest sees it as durably
// blocked if the group was made inside. No call starts a goroutine or allocates.
package mem

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// New returns the ends of a group of n ranks, by rank, that reach each other's memory; each is a [transport.Marker] and
// a [transport.Splitter]. It panics if n is not positive.
func New(n int) []transport.Endpoint {
	h := newHub(n, nil)
	out := make([]transport.Endpoint, n)
	for i := range out {
		out[i] = &sharer{endpoint: &h.ends[i]}
	}
	return out
}

// NewPipes returns the ends of a group of n ranks, by rank, that reach each other by messages only; each is a
// [transport.Splitter]. It panics if n is not positive.
func NewPipes(n int) []transport.Endpoint {
	h := newHub(n, nil)
	out := make([]transport.Endpoint, n)
	for i := range out {
		out[i] = &piper{endpoint: &h.ends[i]}
	}
	return out
}

// hub is what the ranks of one group share.
type hub struct {
	root  *hub // the group made by New or NewPipes, which knows those split from it
	n     int
	spins int   // looks at the condition before a wait blocks
	ranks []int // all of them
	ends  []endpoint
	pipes []pipe // by sender*n + receiver

	_      [64]byte
	starts atomic.Uint64 // mark 0: arrivals since the beginning, and stopBit
	_      [56]byte
	marks  [marksMax]counter // marks 1 and up: raised since the beginning

	mu     sync.Mutex // in the root only
	splits map[uint64]*split
}

// stageBytes is the length of a rank's stage.
const stageBytes = 64 << 10

// marksMax bounds the marks of a call.
const marksMax = 8

// stopBit in hub.starts says that no call starts any more. Arrivals are not counted once it stands, so whoever finds the
// count of its call complete knows that all ranks find it so.
const stopBit = 1 << 63

type counter struct {
	atomic.Uint64
	_ [56]byte
}

// split is a group that was split off and not yet taken by all its ranks.
type split struct {
	hub   *hub
	ranks []int
	taken []bool
}

// spinLooks is how often a wait looks before it blocks: some 10 to 20 microseconds, about what it costs to block and to
// be woken again.
const spinLooks = 4000

func newHub(n int, root *hub) *hub {
	if n < 1 {
		panic(fmt.Sprintf("mem: a group of %d ranks", n))
	}
	h := &hub{root: root, n: n, ends: make([]endpoint, n), pipes: make([]pipe, n*n)}
	if root == nil {
		h.root, h.splits = h, map[uint64]*split{}
	}
	if n <= runtime.GOMAXPROCS(0) {
		h.spins = spinLooks
	}
	for i := range h.ends {
		e := &h.ends[i]
		h.ranks = append(h.ranks, i)
		e.stage = make([]byte, stageBytes)
		e.hub, e.rank = h, i
		e.wake = make(chan struct{}, 1)
		e.down = make(chan transport.PeerDown, n)
	}
	return h
}

// endpoint is one rank's end.
type endpoint struct {
	// Used by the rank's goroutine only.
	hub   *hub
	rank  int
	calls uint64           // published so far
	uses  [marksMax]uint64 // how often each mark was raised so far
	judge func(peer int, h transport.Header) error
	stage []byte
	wake  chan struct{} // one token ends one wait; see wait
	down  chan transport.PeerDown

	_      [64]byte
	parked atomic.Bool // the rank waits on wake, or is about to
	closed atomic.Bool
	raised [marksMax]atomic.Uint64 // the uses, for peers to read
	slots  [2]transport.Slot       // of the odd and the even calls
	_      [64]byte
}

func (e *endpoint) Rank() int { return e.rank }

func (e *endpoint) Size() int { return e.hub.n }

func (e *endpoint) Transport() string { return "mem" }

func (e *endpoint) Inspect(judge func(peer int, h transport.Header) error) { e.judge = judge }

func (e *endpoint) Down() <-chan transport.PeerDown { return e.down }

// Retire has nothing to do: memory of this process stays what it is as long as somebody points to it, and no peer uses
// it after a call.
func (e *endpoint) Retire(tensor.Memory) {}

// Fail has nothing to say: the ranks of a process share their fate in what lies above.
func (e *endpoint) Fail([]byte) {}

func (e *endpoint) Close() error {
	if e.closed.Swap(true) {
		return nil
	}
	for i := range e.hub.ends {
		if peer := &e.hub.ends[i]; peer != e {
			peer.down <- transport.PeerDown{Rank: e.rank, Err: transport.ErrClosed}
			peer.unpark()
		}
	}
	return nil
}

// split returns the hub of the group split off under id, and this rank's number there.
func (e *endpoint) split(id uint64, ranks []int) (*endpoint, error) {
	at := slices.Index(ranks, e.rank)
	if at < 0 {
		return nil, fmt.Errorf("mem: rank %d is not among the ranks %v of the group", e.rank, ranks)
	}
	root := e.hub.root
	root.mu.Lock()
	defer root.mu.Unlock()
	s := root.splits[id]
	if s == nil {
		s = &split{hub: newHub(len(ranks), root), ranks: slices.Clone(ranks), taken: make([]bool, len(ranks))}
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

// event is what a rank waits for: a state of a pipe, or a count.
type event struct {
	pipe   *pipe
	state  uint32         // of the pipe: the state to wait for
	left   bool           // of the pipe: wait for any other state
	count  *atomic.Uint64 // if there is no pipe: the count that shall reach target
	target uint64
	mark   int
	peer   int  // the rank needed, or -1: all that have not raised the mark
	from   int  // of the exchange that waits: the rank whose frame will be judged when it is received, or -1
	firm   bool // nothing but the event ends the wait
}

func (v *event) happened() bool {
	if v.pipe != nil {
		return v.pipe.state.Load() == v.state != v.left
	}
	return v.count.Load()&^stopBit >= v.target
}

// wait blocks until v has happened, or cannot happen, or ctx ends it.
//
// No wake-up is lost: the waiter sets parked, then looks at the condition, then blocks on wake. The one who makes a
// condition true does that first and then looks at parked. Both are sequentially consistent, so either the waiter sees
// the condition, or the waker sees parked. Whoever turns parked from true to false owns the right to the one token: a
// waker then sends it (wake has room, for there is one token per turn), the waiter itself then sends none. A waiter that
// leaves and finds parked false already takes the token that is on its way.
func (e *endpoint) wait(ctx context.Context, v event) error {
	for i := range e.hub.spins {
		if v.happened() {
			return nil
		}
		if i&255 == 255 {
			if v.count == &e.hub.starts && v.count.Load()&stopBit != 0 {
				break
			}
			runtime.Gosched()
		}
	}
	for {
		e.parked.Store(true)
		err := e.verdict(&v)
		if err == nil && v.pipe != nil && !v.firm {
			err = e.unexpected(v.from)
		}
		if err == nil && !v.happened() {
			if err = transport.Park(ctx, e.wake); err == nil {
				continue
			}
		}
		if !e.parked.Swap(false) {
			<-e.wake
		}
		if v.happened() {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// verdict returns why v cannot happen any more, or nil.
func (e *endpoint) verdict(v *event) error {
	if v.firm {
		return nil
	}
	if v.count == &e.hub.starts && v.count.Load()&stopBit != 0 {
		return transport.ErrInterrupted
	}
	for i := range e.hub.ends {
		peer := &e.hub.ends[i]
		needed := i == v.peer || v.peer < 0 && peer.raised[v.mark].Load() < e.uses[v.mark]
		if needed && peer.closed.Load() {
			return &transport.PeerDown{Rank: i, Err: transport.ErrClosed}
		}
	}
	return nil
}

// unpark ends the wait of e's rank if it is in one.
func (e *endpoint) unpark() {
	if e.parked.Load() && e.parked.CompareAndSwap(true, false) {
		e.wake <- struct{}{}
	}
}
