package collective

import (
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DType is the type of the elements that a collective moves.
type DType = tensor.DType

// Op is the operation of a collective call.
type Op = plan.Op

// The operations; see package plan for what each promises.
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

// ReduceOp says how elements are combined.
type ReduceOp = plan.ReduceOp

// The reductions.
const (
	Sum  = plan.Sum
	Mean = plan.Mean
	Min  = plan.Min
	Max  = plan.Max
	Prod = plan.Prod
)

// ParseReduceOp returns the reduction of that name, in any case.
func ParseReduceOp(name string) (ReduceOp, error) { return plan.ParseReduceOp(name) }

// Order says whether a reduction must keep the canonical tree.
type Order = plan.Order

// The orders.
const (
	OrderInherit = plan.OrderInherit
	Canonical    = plan.Canonical
	Any          = plan.Any
)

// Accumulate says in which type partial sums of half-width numbers travel.
type Accumulate uint8

// The accumulation types. The zero value inherits: the communicator's configuration, then AccumulateDType.
const (
	AccumulateInherit Accumulate = iota
	AccumulateDType              // every partial sum is rounded to the dtype
	AccumulateFloat32            // partial sums of float16 and bfloat16 stay float32; one rounding at the end
)

// Options tune one call; a zero field inherits from the communicator's [Config]. They must be equal on all ranks,
// Timeout excepted.
type Options struct {
	Timeout    time.Duration // how long the call may wait for its peers; negative: for ever; default 10 minutes
	Order      Order
	Accumulate Accumulate
	Algorithm  string // name of a row of [plan.Algorithms]; default: the chooser's
}

// Manifest describes the tensor behind a call's bytes, for error messages and for the check that all ranks mean the
// same one. It must not change while the call runs.
type Manifest struct {
	Name  string // the tensor's name, or empty
	Shape []int  // its shape; nil: a vector of the call's count
}

// Call is one rank's part in a collective operation. Src and Dst belong to the library until the call has returned
// (Do) or was awaited (Start); they may be the same memory, or disjoint, but must not overlap otherwise. After an
// error the contents of Dst are undefined, and Src is intact unless it is Dst.
type Call struct {
	Op       Op
	Reduce   ReduceOp      // for reductions
	Type     DType         // of the elements
	Src      tensor.Memory // what this rank gives
	Dst      tensor.Memory // where this rank's result goes
	Counts   []int         // elements by rank, for operations whose counts may differ; else nil: Src.Bytes / Type.Bytes()
	Root     int           // for rooted operations
	Manifest *Manifest     // nil: nothing is known of the tensor
	Options  *Options      // nil: everything inherited
}

// name returns the name of the call's tensor, or nothing.
func (c *Call) name() string {
	if c.Manifest == nil {
		return ""
	}
	return c.Manifest.Name
}

// check returns the number of elements, or what is wrong with the call by itself.
func (c *Call) check(rank, size int, o *Options) (count int, err error) {
	if err := o.check(); err != nil {
		return 0, err
	}
	if c.Counts != nil {
		return 0, fmt.Errorf("field Counts is set for %v, which has one count", c.Op)
	}
	switch c.Op {
	case AllReduce:
		if !c.Type.IsNumeric() {
			return 0, fmt.Errorf("a reduction of %v: want a numeric dtype", c.Type)
		}
		if c.Reduce > Prod {
			return 0, fmt.Errorf("%v is no reduction", c.Reduce)
		}
		if c.Reduce == Mean && !c.Type.IsFloat() {
			return 0, fmt.Errorf("a MEAN of %v: integers have no true mean; take the SUM and divide it, or convert to a floating-point dtype", c.Type)
		}
	case Broadcast:
		if c.Type.Bytes() == 0 {
			return 0, fmt.Errorf("a broadcast of %v, whose elements have no fixed size", c.Type)
		}
		if c.Root < 0 || c.Root >= size {
			return 0, fmt.Errorf("root %d of %d ranks", c.Root, size)
		}
	case Barrier:
		return 0, nil
	default:
		return 0, fmt.Errorf("%v is no operation", c.Op)
	}
	return c.checkMemory(c.Op == AllReduce || rank == c.Root)
}

// checkMemory does so for the memory; Src counts only if this rank gives something.
func (c *Call) checkMemory(gives bool) (count int, err error) {
	element := c.Type.Bytes()
	count = c.Dst.Bytes / element
	switch {
	case gives && c.Src.Kind == tensor.Device || c.Dst.Kind == tensor.Device:
		return 0, fmt.Errorf("memory of a device (Src %v, Dst %v): it must be readable by the processor", c.Src.Kind, c.Dst.Kind)
	case gives && c.Src.Bytes != c.Dst.Bytes:
		return 0, fmt.Errorf("%d bytes in Src and %d in Dst: want as many", c.Src.Bytes, c.Dst.Bytes)
	case c.Dst.Bytes%element != 0:
		return 0, fmt.Errorf("%d bytes in Dst, which are no whole number of %v elements", c.Dst.Bytes, c.Type)
	case c.Dst.Bytes > 0 && c.Dst.Ptr == nil || gives && c.Src.Bytes > 0 && c.Src.Ptr == nil:
		return 0, errors.New("a memory with bytes but without a pointer")
	case gives && overlap(c.Src, c.Dst):
		return 0, errors.New("memories Src and Dst overlap: want the same, or disjoint ones")
	}
	if m := c.Manifest; m != nil && m.Shape != nil {
		n := 1
		for _, d := range m.Shape {
			n *= d
		}
		if n != count {
			return 0, fmt.Errorf("shape %v of %q holds %d elements, Dst %d", m.Shape, m.Name, n, count)
		}
	}
	return count, nil
}

// overlap reports whether two memories share bytes without being the same.
func overlap(a, b tensor.Memory) bool {
	lo, hi := uintptr(a.Ptr), uintptr(b.Ptr)
	if lo == hi || a.Bytes == 0 || b.Bytes == 0 {
		return false
	}
	return lo < hi+uintptr(b.Bytes) && hi < lo+uintptr(a.Bytes)
}
