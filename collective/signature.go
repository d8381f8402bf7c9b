package collective

import (
	"slices"

	"github.com/lockstep-ml/lockstep/transport"
)

// signature is what a call is, but for its number: what its header, its text in errors and the record of flights say of it. It
// never changes, so that whoever has come to it may keep it, and a rank that makes the same calls again and again, as the steps
// of a training do, writes down no more than which of them it is.
type signature struct {
	header transport.Header // of call 0
	sum    uint64           // of that header
	label  label            // but for back
	next   *signature       // of the call that came after one like this the last time; the executor's

	// What it was made from, to know a call like it.
	key       signed
	shape     []int // of the Manifest
	count     int
	byteCount int // of the whole vector
}

// signed tells signatures apart, but for the lengths of a shape that have the same hash, and the counts of calls of two ranks.
type signed struct {
	plan          *planned // one plan: one operation, one root, one count, the same Counts; nil: of a call of two ranks
	op            Op
	peer          int // of a call of two ranks
	name          string
	named, shaped bool // there is a Manifest, and a Shape in it
	shape         uint64
	reduce        ReduceOp
	dtype         DType
	order         Order
	accumulate    Accumulate
}

// signaturesMax bounds the signatures that a member remembers, as plansMax does plans.
const signaturesMax = 512

// signature returns the signature of a checked call: as a rule the one that came after the last call's before.
func (x *executor) signature(call *Call, count int, o *Options, p *planned) *signature {
	if last := x.sig; last != nil && last.next != nil && last.next.is(call, count, o, p) {
		return last.next
	}
	key := keyOf(call, o, p)
	s := x.signatures[key]
	if s == nil || !s.is(call, count, o, p) {
		s = x.sign(call, key, count, o)
	}
	if x.sig != nil {
		x.sig.next = s
	}
	return s
}

// sign makes a signature, and remembers it.
func (x *executor) sign(call *Call, key signed, count int, o *Options) *signature {
	s := unsigned(call, key, count)
	row := uint32(0)
	if p := key.plan; p != nil {
		row, s.label.algo = p.hash, p.row.Name
	}
	s.header = fingerprint(x.m.team, 0, call, count, o, row)
	s.sum = s.header.Sum()
	if len(x.signatures) >= signaturesMax {
		for _, old := range x.signatures {
			old.next = nil // or each would keep another
		}
		clear(x.signatures)
	}
	if old := x.signatures[key]; old != nil {
		old.next = nil
	}
	x.signatures[key] = s
	return s
}

// unsigned returns a signature without a header: all that there is to say of a call that is wrong by itself.
func unsigned(call *Call, key signed, count int) *signature {
	s := &signature{key: key, count: count, byteCount: count * call.Type.Bytes(), label: label{name: key.name}}
	if call.pairwise() {
		s.label.op, s.label.peer = call.Op, call.Peer
	}
	if key.shaped {
		s.shape = slices.Clone(call.Manifest.Shape)
	}
	switch {
	case countsByRank(call.Op):
		s.label.shape = append([]int{}, call.Counts...)
	case key.shaped:
		s.label.shape = s.shape
	default:
		s.label.shape = []int{count}
	}
	return s
}

func keyOf(call *Call, o *Options, p *planned) signed {
	key := signed{plan: p, op: call.Op, reduce: call.Reduce, dtype: call.Type, order: o.Order, accumulate: o.Accumulate}
	if p == nil {
		key.peer = call.Peer
	}
	if m := call.Manifest; m != nil {
		key.named, key.name, key.shaped = true, m.Name, m.Shape != nil
		key.shape = hashInts(hashSeed, m.Shape)
	}
	return key
}

// is reports whether the signature is that of a call with that plan.
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

// noted is a call of this rank: its signature, and what its like does not have in common.
type noted struct {
	sig  *signature // nil: none so far
	seq  uint64
	back uint64 // of the label
}

// text is what a call is called: its header without the number of a frame, and what that stands for.
type text struct {
	header transport.Header
	label  label
}

func (n *noted) text() text {
	if n.sig == nil {
		return text{}
	}
	t := text{n.sig.header, n.sig.label}
	t.header.Seq, t.label.back = n.seq, n.back
	return t
}

// note remembers what the call is, for frames, for errors, and for ranks that see its slot or ask. The last two collectives
// are remembered, as there are two slots, and the last call of two ranks.
func (x *executor) note(call *Call, at ticket, count int, o *Options, p *planned) {
	s := x.signature(call, count, o, p)
	if x.sig != s {
		x.sig, x.header = s, s.header
	}
	x.header.Seq = at.seq
	x.sum = s.sum + at.seq*transport.SumStep
	n, back := &x.notes[at.seq&1], uint64(0)
	if call.pairwise() {
		n, back = &x.notes[2], x.begun[opposite(call.Op)].of(call.Peer)
	}
	x.textMu.Lock()
	x.diary.keep(at, s)
	if !call.pairwise() {
		x.diary.come = at.seq + 1
	}
	n.sig, n.seq, n.back = s, at.seq, back
	x.current = n
	x.textMu.Unlock()
}
