package collective

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/internal/executor"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DType is the type of the elements that a collective transfers.
type DType = tensor.DType

// Op is the operation of a collective call.
type Op = plan.Op

// The operations; package plan documents each of them.
const (
	AllReduce     = plan.AllReduce
	Broadcast     = plan.Broadcast
	Barrier       = plan.Barrier
	Reduce        = plan.Reduce
	ReduceScatter = plan.ReduceScatter
	AllGather     = plan.AllGather
	Gather        = plan.Gather
	Scatter       = plan.Scatter
	AllToAll      = plan.AllToAll
	Send          = plan.Send
	Recv          = plan.Recv
)

// ReduceOp is the function that combines elements.
type ReduceOp = plan.ReduceOp

// The reductions.
const (
	Sum  = plan.Sum
	Mean = plan.Mean
	Min  = plan.Min
	Max  = plan.Max
	Prod = plan.Prod
)

// ParseReduceOp returns the reduction with this name, in upper or lower case.
func ParseReduceOp(name string) (ReduceOp, error) { return plan.ParseReduceOp(name) }

// Order states whether a reduction must follow the canonical tree.
type Order = plan.Order

// The orders.
const (
	OrderInherit = plan.OrderInherit
	Canonical    = plan.Canonical
	Any          = plan.Any
)

// Accumulate is the type in which partial sums of half-precision numbers are kept.
type Accumulate uint8

// The accumulation types. The zero value inherits: the communicator's configuration, then AccumulateDType.
const (
	AccumulateInherit Accumulate = iota
	AccumulateDType              // every partial sum is rounded to the dtype
	AccumulateFloat32            // partial sums of float16 and bfloat16 stay float32; one rounding at the end
)

// Options tune one call; a zero field inherits the communicator's [Config]. All fields but Timeout must be
// equal on all ranks.
type Options struct {
	Timeout    time.Duration // how long the call may wait for its peers; negative: no limit; default 10 minutes
	Order      Order
	Accumulate Accumulate
	Algorithm  string // name of one of [plan.Algorithms]; default: chosen by the chooser
}

// check validates the options by themselves.
func (o *Options) check() error {
	if o.Order > Any {
		return fmt.Errorf("unknown order %d: want Canonical or Any", o.Order)
	}
	if o.Accumulate > AccumulateFloat32 {
		return fmt.Errorf("unknown accumulation type %d: want AccumulateDType or AccumulateFloat32", o.Accumulate)
	}
	if o.Algorithm != "" {
		_, err := chooser.Find(o.Algorithm)
		return err
	}
	return nil
}

// Manifest describes the tensor that a call transfers, for error messages and for the check that all ranks
// pass the same tensor. It must not change while the call runs.
type Manifest struct {
	Name string // the tensor's name, or empty
	// shape of Src, or of Dst if the rank has no Src; nil: a vector. It is compared where it is the same on
	// all ranks
	Shape []int
	// Purpose describes, for errors, the call of the user for which this one exchanges something first: "all_gather of
	// float32 (2,)". It is not compared.
	Purpose string
}

// Call is one rank's part in an operation. Package plan documents which elements a rank reads from Src and
// receives in Dst; a memory that the operation does not use on this rank is ignored. Src and Dst belong to
// the library until the call has returned (Do) or was awaited (Start). After an error the contents of Dst are
// undefined, and Src is unchanged unless it is Dst.
//
// Src and Dst must be disjoint, or in place as NCCL defines it: the same elements of the whole vector are the
// same memory. So Src equals Dst for AllReduce, Broadcast and Reduce; the Src of an AllGather or Gather is
// the rank's part of Dst; the Dst of a ReduceScatter or Scatter is the rank's part of Src. An AllToAll cannot
// be in place. Local ranks may share one Dst in an AllReduce, a Broadcast or an AllGather; of a DstList they may share
// all memories or none. The lists, too, belong to the library until then. Ranks may cut one vector in different places.
type Call struct {
	Op     Op
	Reduce ReduceOp      // for reductions
	Type   DType         // of the elements
	Src    tensor.Memory // what this rank contributes
	Dst    tensor.Memory // where this rank's result is stored
	// SrcList and DstList, unless they are nil, are memories that together, in their order, are Src or Dst: a bucket of
	// tensors is one call. Src or Dst is then ignored.
	SrcList, DstList []tensor.Memory
	// ReduceScatter, AllGather, Gather, Scatter: elements of each rank's part, the same on all ranks; nil:
	// equal parts
	Counts   []int
	Root     int       // Broadcast, Reduce, Gather, Scatter: the root rank
	Peer     int       // Send: the receiver; Recv: the sender
	Manifest *Manifest // nil: the tensor is not described
	Options  *Options  // nil: everything inherited

	// Before, unless it is nil, is called when it is the call's turn, on the goroutine that executes the call. It may
	// wait for a call of another communicator that all ranks have entered, and computes what is in Src. An error of it
	// fails the communicator. It must return when ctx ends.
	Before func(ctx context.Context) error
	// After, unless it is nil, is called on that goroutine when the call has ended without an error, before Wait or Do
	// returns. It must not block.
	After func()
}

// name returns the name of the call's tensor, or "".
func (c *Call) name() string {
	if c.Manifest == nil {
		return ""
	}
	return c.Manifest.Name
}

// before calls Before.
func (c *Call) before(ctx context.Context) error {
	if c.Before == nil {
		return nil
	}
	return c.Before(ctx)
}

// other returns the peer of a call of two ranks, the root of one that has a root, or -1.
func (c *Call) other() int {
	switch {
	case c.Op.Pairwise():
		return c.Peer
	case c.Op.Rooted():
		return c.Root
	}
	return -1
}

// mean reports whether the call ends with a division.
func (c *Call) mean() bool { return c.Op.Reduces() && c.Reduce == Mean }

// check validates the call and returns the number of elements of the whole vector.
func (c *Call) check(rank, size int, o *Options) (count int, err error) {
	if c.Options != nil { // those of the configuration were checked
		if err := o.check(); err != nil {
			return 0, err
		}
	}
	if !c.Op.Valid() {
		return 0, fmt.Errorf("%v is not an operation", c.Op)
	}
	if c.Op == Barrier {
		return 0, c.checkCounts(size)
	}
	kind, ranks, counts := c.checkType(), c.checkRanks(rank, size), c.checkCounts(size)
	if kind != nil || ranks != nil || counts != nil {
		return 0, errors.Join(kind, ranks, counts)
	}
	role := c.role(rank)
	src, err := c.elements("Src", &c.Src, c.SrcList, role.Gives)
	if err != nil {
		return 0, err
	}
	dst, err := c.elements("Dst", &c.Dst, c.DstList, role.Gets)
	if err != nil {
		return 0, err
	}
	if count, err = c.measure(rank, size, src, dst, role); err != nil || c.Manifest == nil {
		return count, err
	}
	if role.Gives != plan.Nothing {
		return count, c.checkShape("Src", src)
	}
	return count, c.checkShape("Dst", dst)
}

func (c *Call) checkType() error {
	if !c.Op.Reduces() {
		if c.Type.Bytes() == 0 {
			return fmt.Errorf("%s %v of %v, whose elements have no fixed size", article(c.Op.String()), c.Op, c.Type)
		}
		return nil
	}
	switch {
	case !c.Type.IsNumeric():
		return fmt.Errorf("a reduction of %v: want a numeric dtype", c.Type)
	case c.Reduce > Prod:
		return fmt.Errorf("%v is not a reduction", c.Reduce)
	case c.Reduce == Mean && !c.Type.IsFloat():
		return fmt.Errorf("a MEAN of %v: integers have no true mean; "+
			"take the SUM and divide it, or convert to a floating-point dtype", c.Type)
	}
	return nil
}

func article(noun string) string {
	if noun[0] == 'a' {
		return "an"
	}
	return "a"
}

func (c *Call) checkRanks(rank, size int) error {
	switch {
	case c.Op.Pairwise() && (c.Peer < 0 || c.Peer >= size):
		return fmt.Errorf("peer %d of %d ranks", c.Peer, size)
	case c.Op.Pairwise() && c.Peer == rank:
		return fmt.Errorf("%v of rank %d with itself", c.Op, rank)
	case c.Op.Rooted() && !c.Op.Pairwise() && (c.Root < 0 || c.Root >= size):
		return fmt.Errorf("root %d of %d ranks", c.Root, size)
	}
	return nil
}

func (c *Call) checkCounts(size int) error {
	switch {
	case c.Counts == nil:
		return nil
	case !c.Op.Parted():
		return fmt.Errorf("field Counts is set for %v, which has one count", c.Op)
	case len(c.Counts) != size:
		return fmt.Errorf("%d Counts for %d ranks", len(c.Counts), size)
	}
	for r, n := range c.Counts {
		if n < 0 {
			return fmt.Errorf("%d elements for rank %d in Counts", n, r)
		}
	}
	return nil
}

// role returns what this rank contributes and receives.
func (c *Call) role(rank int) plan.Role { return c.Op.Role(rank == c.Root) }

// sides sets the memories of x that have a part in the call on this rank. It does not return them: the copies would
// cost as much as the rest of a small call's preparation.
func (c *Call) sides(rank int, x *executor.Call) {
	role := c.role(rank)
	x.SrcList, x.DstList = nil, nil
	if role.Gives != plan.Nothing {
		x.Src, x.SrcList = c.Src, c.SrcList
	} else {
		x.Src = tensor.Memory{}
	}
	if role.Gets != plan.Nothing {
		x.Dst, x.DstList = c.Dst, c.DstList
	} else {
		x.Dst = tensor.Memory{}
	}
}

// elements validates a memory of the call, or the list in its place, and returns how many elements it holds: 0 if the
// call does not use it.
func (c *Call) elements(name string, m *tensor.Memory, list []tensor.Memory, p plan.Portion) (n int, err error) {
	switch {
	case p == plan.Nothing:
		return 0, nil
	case list == nil:
		return c.elementsOf(name, m)
	}
	for i := range list {
		more, err := c.elementsOf(name, &list[i])
		if err != nil {
			return 0, fmt.Errorf("memory %d of a list: %w", i, err)
		}
		n += more
	}
	return n, nil
}

func (c *Call) elementsOf(name string, m *tensor.Memory) (int, error) {
	n := m.Bytes / c.Type.Bytes()
	switch {
	case m.Kind == tensor.Device:
		return 0, fmt.Errorf("memory of a device in %s: it must be readable by the processor", name)
	case m.Bytes < 0 || n*c.Type.Bytes() != m.Bytes:
		return 0, fmt.Errorf("%d bytes in %s, which is not a whole number of %v elements", m.Bytes, name, c.Type)
	case n > 0 && m.Ptr == nil:
		return 0, fmt.Errorf("%d bytes in %s without a pointer", m.Bytes, name)
	}
	return n, nil
}

// measure returns the elements of the whole vector, as the elements of both memories and Counts say, and holds them
// against each other.
func (c *Call) measure(rank, size, src, dst int, role plan.Role) (count int, err error) {
	from, to := dst, role.Gets // what count follows from
	if to == plan.Nothing {
		from, to = src, role.Gives
	}
	own := from
	switch {
	case c.Counts != nil:
		own = c.Counts[rank]
		for _, n := range c.Counts {
			if count += n; count < 0 {
				return 0, errors.New("the Counts add up to more than an int holds")
			}
		}
	case to == plan.Part:
		count = from * size
	default:
		count = from
	}
	if c.Counts == nil && (c.Op.Parted() || c.Op == AllToAll) {
		if count%size != 0 {
			return 0, fmt.Errorf("%d elements are not divisible among %d ranks%s", count, size, c.hint())
		}
		own = count / size
	}
	name, has, want := "Src", src, role.Gives.Of(count, own)
	if has == want {
		name, has, want = "Dst", dst, role.Gets.Of(count, own)
	}
	if has != want {
		if role == (plan.Role{Gives: plan.Whole, Gets: plan.Whole}) {
			size := c.Type.Bytes()
			return 0, fmt.Errorf("%d bytes in Src and %d in Dst: want as many", src*size, dst*size)
		}
		return 0, fmt.Errorf("%d elements in %s of rank %d: want %d", has, name, rank, want)
	}
	if role.Gives != plan.Nothing && role.Gets != plan.Nothing {
		return count, c.checkPlace(rank, size, role)
	}
	return count, nil
}

func (c *Call) hint() string {
	if c.Op.Parted() {
		return "; parts of other lengths need Counts"
	}
	return ""
}

// checkPlace holds Src and Dst against the in-place rule.
func (c *Call) checkPlace(rank, size int, role plan.Role) error {
	if c.SrcList != nil || c.DstList != nil {
		return c.checkLists(role)
	}
	longer, shorter := &c.Src, &c.Dst
	if !overlap(longer, shorter) {
		return nil
	}
	if role.Gives == plan.Part {
		longer, shorter = shorter, longer
	}
	at := 0
	if role.Gives != role.Gets {
		lo, _ := Problem{Size: size, Count: longer.Bytes / c.Type.Bytes(), Counts: c.Counts}.Part(rank)
		at = lo * c.Type.Bytes()
	}
	switch {
	case c.Op == AllToAll:
		return fmt.Errorf("memories Src and Dst overlap: want disjoint ones, %v cannot be in place", c.Op)
	case uintptr(shorter.Ptr) == uintptr(longer.Ptr)+uintptr(at):
		return nil
	case role.Gives != role.Gets:
		return fmt.Errorf("memories Src and Dst overlap: "+
			"want disjoint ones, or the shorter one %d bytes after the start of the other", at)
	}
	return errors.New("memories Src and Dst overlap: want the same, or disjoint ones")
}

// checkLists holds lists that are cut in the same places against the in-place rule. Other overlaps are not found.
func (c *Call) checkLists(role plan.Role) error {
	if role.Gives != role.Gets || len(c.SrcList) != len(c.DstList) {
		return nil
	}
	for i := range c.SrcList {
		src, dst := &c.SrcList[i], &c.DstList[i]
		if same := src.Ptr == dst.Ptr && src.Bytes == dst.Bytes; overlap(src, dst) && (!same || c.Op == AllToAll) {
			return fmt.Errorf("memories %d of SrcList and DstList overlap: want the same, or disjoint ones", i)
		}
	}
	return nil
}

// checkShape holds the shape of the tensor against the memory that it describes, and its elements.
func (c *Call) checkShape(name string, elements int) error {
	m := c.Manifest
	if m.Shape == nil {
		return nil
	}
	n := 1
	for _, d := range m.Shape {
		n *= d
	}
	if n != elements {
		return fmt.Errorf("shape %v of %q holds %d elements, %s %d", m.Shape, m.Name, n, name, elements)
	}
	return nil
}

// overlap reports whether two memories share bytes.
func overlap(a, b *tensor.Memory) bool {
	lo, hi := uintptr(a.Ptr), uintptr(b.Ptr)
	return a.Bytes > 0 && b.Bytes > 0 && lo < hi+uintptr(b.Bytes) && hi < lo+uintptr(a.Bytes)
}
