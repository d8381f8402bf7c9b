package bench

import (
	"bytes"
	"context"
	"fmt"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// part is one rank's part in a call: its source, its destination, and the expected result.
type part struct {
	idle bool // this rank takes no part: a send between other ranks
	call collective.Call
	want []byte
	free []tensor.Memory
}

// newPart makes rank's part in a call over a vector of count elements. count is divisible by the number of
// ranks where every rank has a part of the vector.
func newPart(c collective.Communicator, o *Options, count int) (*part, error) {
	n, rank := c.Size(), c.Rank()
	each := count / n
	p := &part{call: collective.Call{Op: o.Op, Reduce: o.Reduce, Type: o.Type, Root: o.Root}}
	give, get := count, count // elements
	first := 0                // index in the whole vector of the first element of Src
	value := func(i int) float64 { return 0 }
	sum := func(i int) float64 { return fold(o.Reduce, n, i) }
	whole := func(i int) float64 { return contribution(o.Reduce, i/max(1, each), n, i) }
	switch o.Op {
	case collective.AllReduce:
		value = sum
	case collective.Reduce:
		value = sum
		if rank != o.Root {
			get = 0
		}
	case collective.ReduceScatter:
		get = each
		value = func(i int) float64 { return sum(rank*each + i) }
	case collective.Broadcast:
		value = func(i int) float64 { return contribution(o.Reduce, o.Root, n, i) }
		if rank != o.Root {
			give = 0
		}
	case collective.AllGather:
		give, first, value = each, rank*each, whole
	case collective.Gather:
		give, first, value = each, rank*each, whole
		if rank != o.Root {
			get = 0
		}
	case collective.Scatter:
		get = each
		value = func(i int) float64 { return contribution(o.Reduce, o.Root, n, rank*each+i) }
		if rank != o.Root {
			give = 0
		}
	case collective.AllToAll:
		value = func(i int) float64 { return contribution(o.Reduce, i/max(1, each), n, rank*each+i%max(1, each)) }
	case collective.Barrier:
		give, get = 0, 0
	case collective.Send:
		value = func(i int) float64 { return contribution(o.Reduce, rank-1, n, i) }
		switch {
		case rank%2 == 0 && rank+1 == n:
			p.idle = true
		case rank%2 == 0:
			p.call.Peer, get = rank+1, 0
		default:
			p.call.Op, p.call.Peer, give = collective.Recv, rank-1, 0
		}
	default:
		return nil, fmt.Errorf("bench: %v cannot be measured", o.Op)
	}
	if p.idle {
		return p, nil
	}
	p.want = elements(o.Type, get, value)
	var err error
	if p.call.Src, err = p.memory(c, o, elements(o.Type, give,
		func(i int) float64 { return contribution(o.Reduce, rank, n, first+i) })); err != nil {
		return nil, err
	}
	p.call.Dst, err = p.memory(c, o, make([]byte, get*o.Type.Bytes()))
	return p, err
}

// contribution is the value that a rank contributes at an element: small whole numbers, whose sums and
// products are exact in every dtype.
func contribution(op collective.ReduceOp, rank, ranks, i int) float64 {
	if op == collective.Prod {
		if i%ranks == rank {
			return 2
		}
		return 1
	}
	return float64((rank + i) % 2)
}

// fold is the reduction of all ranks' contributions.
func fold(op collective.ReduceOp, ranks, i int) float64 {
	v := contribution(op, 0, ranks, i)
	for rank := 1; rank < ranks; rank++ {
		x := contribution(op, rank, ranks, i)
		switch op {
		case collective.Prod:
			v *= x
		case collective.Min:
			v = min(v, x)
		case collective.Max:
			v = max(v, x)
		default:
			v += x
		}
	}
	if op == collective.Mean {
		v /= float64(ranks)
	}
	return v
}

// elements makes n elements of a type.
func elements(t collective.DType, n int, value func(i int) float64) []byte {
	out := make([]byte, n*t.Bytes())
	if n == 0 {
		return out
	}
	p := unsafe.Pointer(&out[0])
	switch t {
	case tensor.Int8, tensor.Uint8:
		fill[uint8](p, n, value)
	case tensor.Int16, tensor.Uint16:
		fill[uint16](p, n, value)
	case tensor.Int32, tensor.Uint32:
		fill[uint32](p, n, value)
	case tensor.Int64, tensor.Uint64:
		fill[uint64](p, n, value)
	case tensor.Float64:
		fill[float64](p, n, value)
	case tensor.Float32:
		fill[float32](p, n, value)
	default: // half precision
		wide := make([]float32, n)
		fill[float32](unsafe.Pointer(&wide[0]), n, value)
		kernel.Convert(t, tensor.Float32, p, unsafe.Pointer(&wide[0]), n)
	}
	return out
}

// fill sets n elements. The values are whole numbers from 0 on where T is an integer.
func fill[T uint8 | uint16 | uint32 | uint64 | float32 | float64](p unsafe.Pointer, n int, value func(i int) float64) {
	out := unsafe.Slice((*T)(p), n)
	for i := range out {
		out[i] = T(value(i))
	}
}

// memory returns memory of the requested kind with this content.
func (p *part) memory(c collective.Communicator, o *Options, content []byte) (tensor.Memory, error) {
	if o.Buffers == "ordinary" || len(content) == 0 {
		return tensor.HostMemory(content), nil
	}
	a, ok := c.(interface {
		NewBuffer(int) (tensor.Memory, error)
	})
	if !ok {
		return tensor.HostMemory(content), nil
	}
	m, err := a.NewBuffer(len(content))
	if err != nil {
		return m, err
	}
	copy(unsafe.Slice((*byte)(m.Ptr), m.Bytes), content)
	p.free = append(p.free, m)
	return m, nil
}

func (p *part) close() {
	for _, m := range p.free {
		if m.Owner != nil {
			m.Owner.Release()
		}
	}
}

// check compares the result with the expected one.
func (p *part) check(rank int) error {
	if p.idle || len(p.want) == 0 {
		return nil
	}
	got := unsafe.Slice((*byte)(p.call.Dst.Ptr), p.call.Dst.Bytes)
	if bytes.Equal(got, p.want) {
		return nil
	}
	size := p.call.Type.Bytes()
	for i := 0; i < len(got); i += size {
		if !bytes.Equal(got[i:i+size], p.want[i:i+size]) {
			return fmt.Errorf("bench: %v: rank %d has the bytes %x at element %d of %d, want %x", p.call.Op, rank, got[i:i+size],
				i/size, len(got)/size, p.want[i:i+size])
		}
	}
	return nil
}

// measureGroup measures every size on the ranks of this process, and reports rank 0's results.
func measureGroup(ctx context.Context, group collective.Group, opts Options, report func(Result) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make(chan error)
	for _, c := range group.Local() {
		go func() {
			err := measureRank(ctx, c, opts, report)
			if err != nil {
				cancel(err) // the others would wait for this rank
			}
			errs <- err
		}()
	}
	var err error
	for range group.Local() {
		if e := <-errs; e != nil && err == nil {
			err = e
		}
	}
	if err != nil && context.Cause(ctx) != nil {
		return context.Cause(ctx)
	}
	return err
}

func measureRank(ctx context.Context, c collective.Communicator, opts Options, report func(Result) error) error {
	for _, size := range opts.Sizes {
		count := opts.count(size)
		times, err := measure(ctx, c, &opts, count)
		if err != nil {
			return err
		}
		if c.Rank() == 0 {
			if err := report(opts.result(count*opts.Type.Bytes(), times)); err != nil {
				return err
			}
		}
	}
	return nil
}

// parted reports whether every rank has a part of the vector, so that its length must be divisible.
func parted(op collective.Op) bool {
	switch op {
	case collective.ReduceScatter, collective.AllGather, collective.Gather, collective.Scatter, collective.AllToAll:
		return true
	}
	return false
}

// measure times the calls of one size on one rank.
func measure(ctx context.Context, c collective.Communicator, opts *Options, count int) ([]time.Duration, error) {
	p, err := newPart(c, opts, count)
	if err != nil {
		return nil, err
	}
	defer p.close()
	barrier := &collective.Call{Op: collective.Barrier}
	calls := opts.calls(count * opts.Type.Bytes())
	times := make([]time.Duration, 0) // of rank 0, the only one that reports them
	if c.Rank() == 0 {
		times = make([]time.Duration, calls)
	}
	for i := range calls/4 + calls {
		if err := c.Do(ctx, barrier); err != nil {
			return nil, err
		}
		start := time.Now()
		if !p.idle {
			if err := c.Do(ctx, &p.call); err != nil {
				return nil, err
			}
		}
		if timed := i - calls/4; timed >= 0 && c.Rank() == 0 {
			times[timed] = time.Since(start)
		}
	}
	if err := p.check(c.Rank()); err != nil {
		return nil, err
	}
	return times, c.Do(ctx, barrier) // no rank may release its memory while another is in the last call
}
