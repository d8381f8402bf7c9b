package shm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// view is a peer's slot as read by this rank.
type view struct {
	transport.Slot
	places bool   // Src and Dst may be set
	call   uint64 // number of this rank's call in which it was read
	text   uint32 // version of the text that was read last
}

func (e *endpoint) Reachable(m tensor.Memory) bool {
	if m.Bytes == 0 {
		return true
	}
	_, ok := e.g.world.arena.offset(m)
	return ok
}

// Publish writes the slot of this call. Two slots are enough: a rank can begin the call after next only when all ranks
// have begun the next one, and so have read the slots of this one. The text is written only if it has changed.
func (e *endpoint) Publish(s *transport.Slot) {
	if e.closed.Load() {
		e.late = true // the next Signal returns the error
		return
	}
	e.calls++
	e.base = e.total
	i := e.calls & 1
	to, own := &e.mine.slots[i], &e.own[i]
	if e.quick[i] && s.Sum != 0 && s.Src.Bytes == 0 && s.Dst.Bytes == 0 && own.Name == s.Name &&
		own.Algorithm == s.Algorithm && slices.Equal(own.Shape, s.Shape) &&
		own.Sum-own.Seq*transport.SumStep == s.Sum-s.Seq*transport.SumStep {
		own.Sum, own.Seq = s.Sum, s.Seq
		to.sum, to.seq = s.Sum, s.Seq
		return
	}
	if own.Name != s.Name || own.Algorithm != s.Algorithm || !slices.Equal(e.shapes[i], s.Shape) {
		encodeText(&to.textBytes, s.Name, s.Algorithm, s.Shape)
		e.shapes[i] = append(e.shapes[i][:0], s.Shape...)
		e.version[i]++
	}
	*own = *s
	own.Shape = e.shapes[i]
	e.quick[i] = s.Src.Bytes == 0 && s.Dst.Bytes == 0
	to.set(&s.Header)
	to.sum = s.Sum
	to.text = e.version[i] << 1
	if !e.quick[i] {
		to.text |= 1
		to.src, to.dst = e.g.world.place(s.Src), e.g.world.place(s.Dst)
	}
}

func (e *endpoint) Peer(peer int) *transport.Slot {
	i := e.calls & 1
	if peer == e.rank {
		return &e.own[i]
	}
	v := &e.views[peer][i]
	if v.call != e.calls && e.blocks[peer].slots[i].progress.Load() > e.base {
		e.read(peer, v)
	}
	return &v.Slot
}

// read reads a peer's slot of this call.
func (e *endpoint) read(peer int, v *view) {
	s, own := &e.blocks[peer].slots[e.calls&1], &e.own[e.calls&1]
	v.call = e.calls
	switch sum := s.sum; {
	case sum == 0 || sum != own.Sum:
		s.get(&v.Header)
		v.Sum = v.Header.Sum()
	case v.Sum-v.Seq*transport.SumStep != sum-own.Seq*transport.SumStep:
		v.Header, v.Sum = own.Header, sum
	default:
		v.Seq, v.Sum = own.Seq, sum
	}
	text := s.text
	if v.places {
		v.places, v.Src, v.Dst = false, tensor.Memory{}, tensor.Memory{}
	}
	if text&1 != 0 {
		v.places = true
		w := e.g.world
		src, dst := s.src, s.dst
		var ok bool
		if v.Src, ok = w.memory(&src); !ok {
			e.garbage[peer] = errPlace
		}
		if v.Dst, ok = w.memory(&dst); !ok {
			e.garbage[peer] = errPlace
		}
	}
	if text>>1 == v.text {
		return
	}
	v.text = text >> 1
	bytes := s.textBytes
	name, algorithm, shape, err := decodeText(&bytes, v.Shape[:0])
	if err != nil {
		e.garbage[peer] = err
	}
	v.Name, v.Algorithm, v.Shape = e.intern(name), e.intern(algorithm), shape
}

var errPlace = errors.New("its slot claims memory outside of what it shares")

// namesMax bounds the texts that a rank keeps, so that a repeated text is not allocated again.
const namesMax = 1 << 12

func (e *endpoint) intern(b []byte) string {
	if s, ok := e.names[string(b)]; ok {
		return s
	}
	if len(e.names) >= namesMax {
		clear(e.names)
	}
	s := string(b)
	e.names[s] = s
	return s
}

// # When a call starts
//
// Each rank counts the flags that it has set, in the slot of its current call, and no other rank writes there: so the
// usual call needs no atomic operation that two ranks contend for. That all ranks have set flag 0 can then be observed,
// but not decided by one atomic variable; where that matters, a second step decides.
//
// A rank that observes that all have set flag 0 of call c reads head.contest (of that slot) and head.stop afterwards.
// If neither puts c in doubt, c has started. A rank that wants to leave c first puts c in doubt (Withdraw: contest = c;
// Interrupt: stop), and reads the flags afterwards. A rank that finds c in doubt proposes what it observes, "started"
// if all flags are set and "never" if not, to head.verdict, where the first proposal remains.
//
// All these words are sequentially consistent. If a rank has taken c for started without a proposal, it checked for
// doubts after all flags were set, and found none; so every doubt is later, and every check that follows a doubt finds
// all flags set, and proposes "started". Otherwise all ranks follow the one verdict.
//
// Two verdicts are kept, by slot: a rank in call c+2 knows that c+1 has started, and so that all ranks have begun c+1,
// after they observed that c has started.

// A verdict on call c is 2c, which means that it has started, or 2c + verdictNever.
const verdictNever = 1

// doubted reports whether the current call may never start.
func (e *endpoint) doubted() bool {
	h := e.g.head
	return h.stop.Load() != 0 || h.contest[e.calls&1].Load() == e.calls
}

// decide reports whether the current call, which is in doubt, has started; if not, it never starts.
func (e *endpoint) decide() bool {
	proposal := e.calls << 1
	if !e.isSet(-1, e.base+1) {
		proposal |= verdictNever
	}
	word := &e.g.head.verdict[e.calls&1]
	for {
		was := word.Load()
		switch at := was >> 1; {
		case at == e.calls:
			return was&verdictNever == 0
		case at > e.calls:
			return true
		case word.CompareAndSwap(was, proposal):
			return proposal&verdictNever == 0
		}
	}
}

func (e *endpoint) Signal(flag int) error {
	if e.closed.Load() {
		return errClosed
	}
	if e.unstaged != nil {
		return e.unstaged
	}
	h := e.g.head
	if e.total != e.base+uint64(flag) {
		panic(fmt.Sprintf("shm: Signal(%d) after %d flags of this call", flag, e.total-e.base))
	}
	if flag == 0 && h.stop.Load() != 0 {
		return transport.ErrInterrupted
	}
	e.total++
	e.mine.slots[e.calls&1].progress.Store(e.total)
	if h.parkers.Load() != 0 {
		e.wakeReady()
	}
	return nil
}

// wakeReady wakes the ranks that wait for the flag that this rank has set last.
func (e *endpoint) wakeReady() {
	for r, b := range e.blocks {
		if b.parked.Load() == parkedNot {
			continue
		}
		whose, target := int(b.whose.Load()), b.target.Load()
		if whose == e.rank && e.total >= target || whose == whoseAll && e.allAt(uint64(b.slot.Load()&1), target) {
			e.g.wakeUp(r, b)
		}
	}
}

// isSet reports whether the rank, or with -1 every rank, has set as many flags in the current call.
func (e *endpoint) isSet(rank int, target uint64) bool {
	if rank >= 0 {
		return e.blocks[rank].slots[e.calls&1].progress.Load() >= target
	}
	return e.allAt(e.calls&1, target)
}

func (e *endpoint) allAt(slot, target uint64) bool {
	for _, b := range e.blocks {
		if b.slots[slot].progress.Load() < target {
			return false
		}
	}
	return true
}

func (e *endpoint) Await(ctx context.Context, rank, flag int) error {
	if e.closed.Load() {
		return errClosed
	}
	if e.unstaged != nil {
		return e.unstaged
	}
	target := e.base + uint64(flag) + 1
	if !e.isSet(rank, target) {
		e.want = want{rank: rank, flag: flag, target: target}
		if err := e.waiter.Wait(ctx, e); err != nil {
			return err
		}
	}
	if flag == 0 && rank < 0 {
		return e.begin()
	}
	return nil
}

// begin checks whether the call, whose flag 0 all ranks have set, has started, and reads the slots.
func (e *endpoint) begin() error {
	if e.doubted() && !e.decide() {
		return transport.ErrInterrupted
	}
	if e.calls == 1 {
		e.counted = time.Time{} // now the CPUs of all ranks are known
		e.waiter.Look(time.Now())
	}
	for peer := range e.blocks {
		if peer == e.rank {
			continue
		}
		e.Peer(peer)
		if err := e.garbage[peer]; err != nil {
			return &transport.PeerDown{Rank: peer, Err: err}
		}
	}
	return nil
}

func (e *endpoint) Behind(flag int, ranks []int) []int {
	for r := range e.blocks {
		if !e.isSet(r, e.base+uint64(flag)+1) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

func (e *endpoint) Withdraw() bool {
	h := e.g.head
	h.contest[e.calls&1].Store(e.calls)
	if e.decide() {
		return false
	}
	h.stop.Store(1)
	return true
}

func (e *endpoint) Interrupt() {
	g := e.g
	g.life.RLock()
	defer g.life.RUnlock()
	if g.gone {
		return
	}
	g.head.stop.Store(1)
	g.wakeAll()
}
