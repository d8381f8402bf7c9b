package collective

import (
	"slices"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/transport"
)

// signature is everything that describes a call except its number: what identifies it to other ranks, and its
// flight record. It is immutable, so it can be shared. A rank that repeats the same calls, as in the steps of
// a training, records only a reference to it.
type signature struct {
	call   fingerprint.Call // number 0; without Back
	sum    uint64           // of its header
	record flight.Call      // of the flight recorder
	next   *signature       // of the call that followed a call like this the last time; used by the call's goroutine only

	// The inputs it was made from, to recognise an equal call.
	key   signed
	shape []int // of the Manifest
	count int
}

// signed distinguishes signatures, except for shapes with the same hash, and the counts of calls of two
// ranks.
type signed struct {
	plan          *planned // one plan: one operation, one root, one count, the same Counts; nil: a call of two ranks
	op            Op
	peer          int // of a call of two ranks
	name          string
	named, shaped bool // there is a Manifest, and it has a Shape
	shape         uint64
	reduce        ReduceOp
	dtype         DType
	order         Order
	accumulate    Accumulate
}

// signaturesMax bounds the signatures that a member caches, as plansMax bounds plans.
const signaturesMax = 512

// signature returns the signature of a checked call: usually the one that followed the previous call's the
// last time.
func (m *member) signature(call *Call, count int, o *Options, p *planned) *signature {
	if last := m.sig; last != nil && last.next != nil && last.next.is(call, count, o, p) {
		return last.next
	}
	key := keyOf(call, o, p)
	s := m.signatures[key]
	if s == nil || !s.is(call, count, o, p) {
		s = m.sign(call, key, count, o)
	}
	if m.sig != nil {
		m.sig.next = s
	}
	return s
}

// sign makes a signature, and caches it.
func (m *member) sign(call *Call, key signed, count int, o *Options) *signature {
	s := &signature{key: key, count: count}
	if key.shaped {
		s.shape = slices.Clone(call.Manifest.Shape)
	}
	s.call = fingerprint.New(s.params(m.team, call, o))
	s.sum = s.call.Header.Sum()
	s.record = newRecord(call, count, o, s.call.Algorithm)
	if len(m.signatures) >= signaturesMax {
		for _, old := range m.signatures {
			old.next = nil // or each would keep another one alive
		}
		clear(m.signatures)
	}
	if old := m.signatures[key]; old != nil {
		old.next = nil
	}
	m.signatures[key] = s
	return s
}

// params returns what the header and the description of a checked call are made of.
func (s *signature) params(t *team, call *Call, o *Options) *fingerprint.Params {
	p := &fingerprint.Params{
		Epoch: t.cfg.Epoch, Comm: t.id, Op: call.Op, Reduce: call.Reduce, Type: call.Type,
		Count: s.count, Counts: call.Counts, Root: call.Root, Peer: call.Peer,
		Named: s.key.named, Name: s.key.name, Shape: s.shape, Order: o.Order, Accumulate: uint8(o.Accumulate),
	}
	if made := s.key.plan; made != nil {
		p.Algorithm, p.AlgorithmHash = made.row.Name, made.hash
	}
	return p
}

func keyOf(call *Call, o *Options, p *planned) signed {
	key := signed{plan: p, op: call.Op, reduce: call.Reduce, dtype: call.Type, order: o.Order, accumulate: o.Accumulate}
	if p == nil {
		key.peer = call.Peer
	}
	if m := call.Manifest; m != nil {
		key.named, key.name, key.shaped = true, m.Name, m.Shape != nil
		key.shape = fingerprint.HashInts(fingerprint.Seed, m.Shape)
	}
	return key
}

// is reports whether the signature is that of a call with this plan.
func (s *signature) is(call *Call, count int, o *Options, p *planned) bool {
	k, m := &s.key, call.Manifest
	switch {
	case k.plan != p || k.reduce != call.Reduce || k.dtype != call.Type || k.order != o.Order || k.accumulate != o.Accumulate:
		return false
	case p == nil && (k.op != call.Op || k.peer != call.Peer || s.count != count):
		return false
	case m == nil:
		return !k.named
	}
	return k.named && k.name == m.Name && k.shaped == (m.Shape != nil) && slices.Equal(s.shape, m.Shape)
}

// noted is a call of this rank: its signature, and what differs between calls with the same signature.
type noted struct {
	sig  *signature // nil: none so far
	seq  uint64
	back uint64 // Send, Recv: see fingerprint.Call
}

// call returns the call; the zero value if there was none so far.
func (n *noted) call() fingerprint.Call {
	if n.sig == nil {
		return fingerprint.Call{}
	}
	c := n.sig.call
	c.Header.Seq, c.Back = n.seq, n.back
	return c
}

// note records the call, for its frames, for errors, and for ranks that read its slot or probe this rank. The
// last two collectives are recorded, because there are two slots, and the last call of two ranks.
func (m *member) note(r *Running, p *planned) {
	call := r.Call
	s := m.signature(call, r.Count, &r.Options, p)
	slot := &m.call.Slot
	if m.sig != s {
		m.sig = s
		slot.Header, slot.Name, slot.Shape, slot.Algorithm = s.call.Header, s.call.Name, s.call.Shape, s.call.Algorithm
	}
	slot.Seq, slot.Sum = r.seq, s.sum+r.seq*transport.SumStep
	n, back := &m.notes[r.seq&1], uint64(0)
	if call.pairwise() {
		n, back = &m.notes[2], m.begun[opposite(call.Op)].of(call.Peer)
	}
	log := &m.front.c.log
	log.mu.Lock()
	log.keep(r, &s.record, false)
	n.sig, n.seq, n.back = s, r.seq, back
	m.current = n
	log.mu.Unlock()
}
