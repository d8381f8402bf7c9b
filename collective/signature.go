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
	long   bool             // it transfers at least timedBytes
	next   *signature       // of the call that followed a call like this the last time; used by the signer only

	// The inputs it was made from, to recognise an equal call.
	key    signed
	shape  []int // of the Manifest
	counts []int // of the ranks
	count  int
}

// signed distinguishes signatures, except for shapes with the same hash, and the counts of calls of two
// ranks.
type signed struct {
	plan          *planned // one plan: one operation, one root, one count, the same Counts; nil: a call of two ranks
	op            Op
	other         int    // the peer of a call of two ranks, or the root
	algorithm     string // that the call names
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
	last  *signature // of the last call; before the first, one of no call
}

// repeated returns the signature that followed the previous call's the last time, if it is that of a checked call: it
// usually is. It returns nil if not; then sign returns the signature.
func (x *signer) repeated(r *Running) *signature {
	s := x.last.next
	if s == nil || !s.is(r) {
		return nil
	}
	x.last = s
	return s
}

// sign returns the signature of a checked call, with its plan.
func (x *signer) sign(r *Running, p *planned) *signature {
	key := keyOf(r, p)
	s := x.made[key]
	if s == nil || !s.is(r) {
		s = x.make(r, key)
	}
	x.last.next = s
	x.last = s
	return s
}

// make makes a signature, and caches it.
func (x *signer) make(r *Running, key signed) *signature {
	call, o := r.Call, &r.Options
	s := &signature{key: key, count: r.Count}
	if key.plan != nil {
		s.counts = key.plan.plan.Problem.Counts
	}
	if key.shaped {
		s.shape = slices.Clone(call.Manifest.Shape)
	}
	p := s.params(call, o)
	p.Epoch, p.Comm = x.epoch, x.comm
	s.call = fingerprint.New(p)
	s.sum = s.call.Header.Sum()
	s.long = max(r.Count, r.Count*call.Type.Bytes()) >= timedBytes
	s.record = newRecord(call, r.Count, o, s.call.Algorithm)
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

func keyOf(r *Running, p *planned) signed {
	call, o := r.Call, &r.Options
	key := signed{
		plan: p, op: call.Op, other: call.other(), algorithm: o.Algorithm,
		reduce: call.Reduce, dtype: call.Type, order: o.Order, accumulate: o.Accumulate,
	}
	if m := call.Manifest; m != nil {
		key.named, key.name, key.shaped = true, m.Name, m.Shape != nil
		key.shape = fingerprint.HashInts(fingerprint.Seed, m.Shape)
	}
	return key
}

// is reports whether the signature is that of a call. The plan follows from what it compares.
func (s *signature) is(r *Running) bool {
	call, o, k, m := r.Call, &r.Options, &s.key, r.Call.Manifest
	switch {
	case k.op != call.Op || s.count != r.Count || k.reduce != call.Reduce || k.dtype != call.Type ||
		k.other != call.other() || k.order != o.Order || k.accumulate != o.Accumulate || k.algorithm != o.Algorithm:
		return false
	case !slices.Equal(s.counts, call.Counts):
		return false
	case m == nil:
		return !k.named
	}
	return k.named && k.name == m.Name && k.shaped == (m.Shape != nil) && slices.Equal(s.shape, m.Shape)
}
