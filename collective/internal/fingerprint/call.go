package fingerprint

import (
	"fmt"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Params are the properties of a call from which its header and its description are made.
type Params struct {
	Epoch      uint32 // of the job
	Comm       uint64 // id of the communicator
	Op         plan.Op
	Reduce     plan.ReduceOp
	Type       tensor.DType
	Count      int   // elements of the whole vector
	Counts     []int // elements of each rank's part; nil: equal parts
	Root       int
	Peer       int    // Send, Recv: the other rank
	Named      bool   // the tensor is described: Name and Shape are valid
	Name       string // of the tensor
	Shape      []int  // of the tensor; nil: a vector
	Order      plan.Order
	Accumulate uint8 // accumulation type: 1 the dtype, 2 float32

	Algorithm     string
	AlgorithmHash uint32
}

// Call is a call as other ranks identify it: its header without the number of a frame, and its description.
// The zero value describes no call.
type Call struct {
	Header transport.Header

	// Pair is Send or Recv, whichever half of a message this rank executes; 0: a collective. A header does not
	// distinguish the two halves.
	Pair plan.Op
	Peer int    // Send, Recv: the other rank
	Back uint64 // Send, Recv: how many calls of the opposite kind this rank has begun with Peer

	Name      string // of the tensor
	Shape     []int  // of the tensor; the counts by rank where they must agree
	Algorithm string

	HeaderOnly bool // everything but the header is unknown
}

// New returns the call with these properties, as number 0 of its communicator. It keeps Shape.
func New(p *Params) Call {
	must := Agreed(p.Op)
	c := Call{
		Header: transport.Header{Epoch: p.Epoch, Comm: p.Comm, Op: uint8(p.Op), Names: p.namesHash(must)},
		Name:   p.Name, Shape: p.Shape, Algorithm: p.Algorithm,
	}
	h := &c.Header
	switch p.Op {
	case plan.Recv:
		h.Op = uint8(plan.Send)
		fallthrough
	case plan.Send:
		c.Pair, c.Peer = p.Op, p.Peer
	}
	switch {
	case must.Has(Counts):
		c.Shape = append([]int{}, p.Counts...)
	case p.Shape == nil:
		c.Shape = []int{p.Count}
	}
	if must.Has(Reduce) {
		h.Reduce = uint8(p.Reduce) + 1
	}
	if must.Has(Type) {
		h.Type = uint8(p.Type)
	}
	if must.Has(Root) {
		h.Root = int32(p.Root)
	}
	if must.Has(Count) {
		h.Count = uint64(p.Count)
	}
	if must.Has(Order) {
		h.Order = uint8(p.Order)<<4 | p.Accumulate
	}
	if must.Has(Algorithm) {
		h.Plan = p.AlgorithmHash
	}
	return c
}

// namesHash returns the hash of the name and the shape of a call's tensor, and of its counts by rank.
func (p *Params) namesHash(must Fields) uint64 {
	var h uint64
	if p.Named {
		h = HashString(Seed, p.Name)
		switch {
		case !must.Has(Shape):
		case p.Shape == nil:
			h = Hash(Hash(h, 1), uint64(p.Count))
		default:
			h = HashInts(h, p.Shape)
		}
	}
	if must.Has(Counts) && p.Counts != nil {
		h = HashInts(h+1, p.Counts)
	}
	return h
}

// Numbered is a call that a rank has made: what it has in common with calls like it, and what differs between them.
// The zero value describes no call.
type Numbered struct {
	Like *Call // as call 0 and without Back; it is shared, so it must not be changed
	Seq  uint64
	Back uint64 // see [Call]
}

// Call returns the call; of nil, no call.
func (n *Numbered) Call() Call {
	if n == nil || n.Like == nil {
		return Call{}
	}
	c := *n.Like
	c.Header.Seq, c.Back = n.Seq, n.Back
	return c
}

// Of returns the call that a slot describes.
func Of(s *transport.Slot) Call {
	return Call{Header: s.Header, Name: s.Name, Shape: s.Shape, Algorithm: s.Algorithm}
}

// WithoutFrame returns a header without the number of its frame.
func WithoutFrame(h transport.Header) transport.Header {
	h.Frame = 0
	return h
}

// None reports whether c describes no call.
func (c *Call) None() bool { return c.Header.Op == 0 }

// Collective reports whether c is a call of all ranks.
func (c *Call) Collective() bool { return !c.None() && c.Pair == 0 }

// Op returns the operation. Of a Recv of which only the header is known, it is Send.
func (c *Call) Op() plan.Op {
	if c.Pair != 0 {
		return c.Pair
	}
	return plan.Op(c.Header.Op)
}

// String describes the call for errors: all_reduce SUM float32 [3] of "w".
func (c *Call) String() string {
	h, op := &c.Header, c.Op()
	out := flight.Call{
		Op: op.String(), Count: int(h.Count), Name: c.Name, Rooted: Agreed(op).Has(Root), Root: int(h.Root),
		Pair: c.Pair != 0, Peer: c.Peer,
	}
	if h.Reduce != 0 {
		out.Reduce = plan.ReduceOp(h.Reduce - 1).String()
	}
	if h.Type != 0 {
		out.DType = tensor.DType(h.Type).String()
	}
	if Agreed(op).Has(Counts) {
		out.Counts = c.Shape
	} else {
		out.Shape = c.Shape
	}
	return out.String()
}

// Differ describes the first difference of two calls at the same position; texts name the other call's value
// first.
func Differ(own, other *Call) string {
	known := !own.HeaderOnly && !other.HeaderOnly
	h, o := &own.Header, &other.Header
	switch {
	case h.Epoch != o.Epoch:
		return fmt.Sprintf("the epochs differ: %d and %d", o.Epoch, h.Epoch)
	case h.Comm != o.Comm:
		return fmt.Sprintf("the communicators differ: %#x and %#x", o.Comm, h.Comm)
	case h.Seq != o.Seq:
		return fmt.Sprintf("the numbers of the calls differ: %d and %d", o.Seq, h.Seq)
	case h.Op != o.Op:
		return "the operations differ"
	case h.Reduce != o.Reduce:
		return "the reductions differ"
	case h.Type != o.Type:
		return "the dtypes differ"
	case h.Root != o.Root:
		return "the roots differ"
	case h.Names != o.Names && known && own.Name != other.Name:
		return "the names differ"
	case h.Names != o.Names && known && Agreed(plan.Op(h.Op)).Has(Counts):
		return "the counts by rank differ"
	case h.Names != o.Names && known:
		return "the shapes differ"
	case h.Count != o.Count:
		return "the counts differ"
	case h.Names != o.Names:
		return "the names, shapes or counts by rank differ"
	case h.Order>>4 != o.Order>>4:
		return "the orders of reduction differ: " + orderText(o) + " and " + orderText(h)
	case h.Order != o.Order:
		return "the accumulation types differ: " + accumulateText(o) + " and " + accumulateText(h)
	case h.Plan != o.Plan && known:
		return fmt.Sprintf("the algorithms differ: %q and %q", other.Algorithm, own.Algorithm)
	case h.Plan != o.Plan:
		return "the algorithms differ"
	}
	return fmt.Sprintf("the frames differ: got number %d, want %d", o.Frame, h.Frame)
}

func orderText(h *transport.Header) string {
	if plan.Order(h.Order>>4) == plan.Any {
		return "any"
	}
	return "canonical"
}

func accumulateText(h *transport.Header) string {
	if h.Order&15 == 2 {
		return "float32"
	}
	return "the dtype"
}
