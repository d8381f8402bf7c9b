package executor

import (
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Group is the local ranks of one communicator, and what they share.
type Group struct {
	local       int                         // number of local ranks
	torn        atomic.Bool                 // a rank left out part of a call that all ranks had entered
	withdrawing atomic.Int32                // ranks that try to withdraw from a call, or have withdrawn
	ranks       atomic.Pointer[[]*Executor] // in the order in which they joined; for ranks that must not wait

	_       [64]byte // ranks lock mu in every call, and read what precedes it
	mu      sync.Mutex
	changed sync.Cond // signalled when a rank has left a call of a failed group
	written []result  // by local rank: the last result stored in memory that ranks may share
}

// localRank is what the other local ranks read of a rank.
type localRank struct {
	inside atomic.Bool // in a call in which local ranks may access each other's memory; see Group.depart
	_      [63]byte    // others read what follows in every call, and it seldom changes

	rank  int
	local int                     // index in the group
	dsts  [2]atomic.Pointer[byte] // Dst of the even and the odd calls; read once all ranks have entered
	cut   [2]atomic.Bool          // Src or Dst of the even and the odd calls lies in several regions; read like dsts
	// srcLayout and dstLayout are the regions of Src and Dst. Only ranks that access that memory read them.
	srcLayout, dstLayout regions
}

// result records that a result of call seq is being stored at dst, or has been.
type result struct {
	seq uint64
	dst unsafe.Pointer
}

// NewGroup makes the group of this many local ranks.
func NewGroup(local int) *Group {
	g := &Group{local: local}
	g.changed.L = &g.mu
	g.ranks.Store(&[]*Executor{})
	return g
}

// Ranks returns the executors of the local ranks, in the order in which they joined. The caller must not change it.
func (g *Group) Ranks() []*Executor { return *g.ranks.Load() }

func (g *Group) join(x *Executor) {
	g.mu.Lock()
	defer g.mu.Unlock()
	ranks := append(slices.Clone(*g.ranks.Load()), x)
	x.local = len(ranks) - 1
	g.ranks.Store(&ranks)
	g.written = append(g.written, result{seq: ^uint64(0)})
}

// Withdrawing reports whether a local rank has withdrawn from a call that has not started, or tries to.
func (g *Group) Withdrawing() bool { return g.withdrawing.Load() > 0 }

// depart takes a rank out of a call of a failed group. It returns when no local rank is in a call any more: until
// then they may access each other's memory. The wait is short, because the failure ends what they wait for. A rank
// first marks itself as inside and then checks whether the group has failed; depart runs after the failure and
// then reads who is inside. So no rank enters unnoticed.
func (g *Group) depart(x *Executor) {
	x.inside.Store(false)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.changed.Broadcast()
	for slices.ContainsFunc(g.Ranks(), func(x *Executor) bool { return x.inside.Load() }) {
		g.changed.Wait()
	}
}

// left notifies departing ranks that a rank has left a call that succeeded.
func (g *Group) left() {
	g.mu.Lock()
	g.changed.Broadcast()
	g.mu.Unlock()
}

// sharesDst reports whether another local rank of the domain has the same Dst, in an even or an odd call. All ranks
// of the domain have entered the call.
func (g *Group) sharesDst(x *Executor, half int, domain []int) bool {
	own := x.dsts[half].Load()
	if own == nil {
		return false
	}
	for _, other := range g.Ranks() {
		if other != x && other.dsts[half].Load() == own && slices.Contains(domain, other.rank) {
			return true
		}
	}
	return false
}

// writeOnce calls write unless a local rank has already stored the result of call seq at dst. Ranks that exchange
// only messages may share a destination without knowing it in advance.
func (g *Group) writeOnce(local int, seq uint64, dst unsafe.Pointer, write func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	own := result{seq, dst}
	if slices.Contains(g.written, own) {
		return
	}
	if write != nil {
		write()
	}
	g.written[local] = own
}
