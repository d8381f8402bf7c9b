package collective

import (
	"slices"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
)

// signature is everything that describes a call except its number: what identifies it to other ranks, and its
// flight record. It is immutable, so it can be shared. A rank that repeats the same calls, as in the steps of
// a training, records only a reference to it.
type signature struct {
	call   fingerprint.Call // number 0; without Back
	sum    uint64           // of its header
	record flight.Call      // of the flight recorder
	next   *signature       // of the call that followed a call like this the last time; used by the signer only

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

// signaturesMax bounds the signatures that a signer caches, as plansMax bounds plans.
const signaturesMax = 512

// signer makes the signatures of a rank's calls, and caches them.
type signer struct {
	epoch uint32
	comm  uint64 // id of the communicator
	made  map[signed]*signature
	last  *signature // of the last call
}

// sign returns the signature of a checked call: usually the one that followed the previous call's the last time.
func (x *signer) sign(call *Call, count int, o *Options, p *planned) *signature {
	if last := x.last; last != nil && last.next != nil && last.next.is(call, count, o, p) {
		x.last = last.next
		return x.last
	}
	key := keyOf(call, o, p)
	s := x.made[key]
	if s == nil || !s.is(call, count, o, p) {
		s = x.make(call, key, count, o)
	}
	if x.last != nil {
		x.last.next = s
	}
	x.last = s
	return s
}

// make makes a signature, and caches it.
func (x *signer) make(call *Call, key signed, count int, o *Options) *signature {
	s := &signature{key: key, count: count}
	if key.shaped {
		s.shape = slices.Clone(call.Manifest.Shape)
	}
	p := s.params(call, o)
	p.Epoch, p.Comm = x.epoch, x.comm
	s.call = fingerprint.New(p)
	s.sum = s.call.Header.Sum()
	s.record = newRecord(call, count, o, s.call.Algorithm)
	if len(x.made) >= signaturesMax {
		for _, old := range x.made {
			old.next = nil // or each would keep another one alive
		}
		clear(x.made)
	}
	if old := x.made[key]; old != nil {
		old.next = nil
	}
	if x.made == nil {
		x.made = map[signed]*signature{}
	}
	x.made[key] = s
	return s
}

// params returns what the header and the description of a checked call are made of, except for the communicator.
func (s *signature) params(call *Call, o *Options) *fingerprint.Params {
	p := &fingerprint.Params{
		Op: call.Op, Reduce: call.Reduce, Type: call.Type,
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
	case k.plan != p || k.reduce != call.Reduce || k.dtype != call.Type || k.order != o.Order ||
		k.accumulate != o.Accumulate:
		return false
	case p == nil && (k.op != call.Op || k.peer != call.Peer || s.count != count):
		return false
	case m == nil:
		return !k.named
	}
	return k.named && k.name == m.Name && k.shaped == (m.Shape != nil) && slices.Equal(s.shape, m.Shape)
}
