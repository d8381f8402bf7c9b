package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// valueMax bounds the values that ranks contribute. They are whole numbers, exact in every dtype.
const valueMax = 100

// exactMax is the largest sum that is exact in a type, whatever the order of the additions: all whole numbers up to it
// can be represented.
func exactMax(t collective.DType) int {
	switch t {
	case tensor.Int8, tensor.Uint8:
		return 1<<7 - 1
	case tensor.BFloat16:
		return 1 << 8
	case tensor.Float16:
		return 1 << 11
	}
	return 1 << 15
}

// oracle computes what the ranks of a group contribute, and the reduction of it.
type oracle struct {
	reduce collective.ReduceOp
	plain  bool // the contributions are not added or multiplied
	ranks  int  // of the group
	group  int
	most   uint64 // the largest contribution, where they are added
	givers int    // the ranks that contribute more than 0, where they are added
}

// newOracle returns the oracle of a call in a group of so many ranks.
func (o *Options) newOracle(ranks int) *oracle {
	exact := exactMax(o.Type)
	return &oracle{
		reduce: o.Reduce, plain: !o.Op.Reduces() || o.Reduce == collective.Min || o.Reduce == collective.Max,
		ranks: ranks, group: o.group, most: uint64(min(max(exact/ranks, 1), valueMax)), givers: exact,
	}
}

// contribution is the value that a rank contributes at an element: pseudo-random small whole numbers, whose sums and
// products are exact in the type of the elements.
func (o *oracle) contribution(rank, i int) float64 {
	switch {
	case o.plain:
		return float64(o.below(valueMax+1, rank, i))
	case o.reduce == collective.Prod: // the product is 8 at most
		v := 1
		for k := range 3 {
			if o.below(uint64(o.ranks), k, i) == uint64(rank) {
				v++
			}
		}
		return float64(v)
	case rank >= o.givers:
		return 0
	}
	return float64(o.below(o.most+1, rank, i))
}

// below returns a pseudo-random number from 0 to n-1 for a rank of the group and an element (the finalizer of
// SplitMix64).
func (o *oracle) below(n uint64, rank, i int) uint64 {
	x := uint64(i)*0x9e3779b97f4a7c15 + uint64(o.group<<16+rank)*0xd1b54a32d192ed03
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return (x >> 32) * n >> 32
}

// fold is the reduction of all ranks' contributions, one rank after the other.
func (o *oracle) fold(i int) float64 {
	v := o.contribution(0, i)
	for rank := 1; rank < o.ranks; rank++ {
		x := o.contribution(rank, i)
		switch o.reduce {
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
	if o.reduce == collective.Mean {
		v /= float64(o.ranks)
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

// poison makes every element of the destination wrong.
func (p *part) poison() {
	got := unsafe.Slice((*byte)(p.call.Dst.Ptr), p.call.Dst.Bytes)
	for i, b := range p.want {
		got[i] = ^b
	}
}

// mismatch describes the wrong elements of one rank.
type mismatch struct {
	count     int64  // wrong elements
	first     int64  // the index of the first of them
	got, want uint64 // the first bytes of that element, in memory order
}

// fields is how many numbers encode a mismatch.
const fields = 4

func (m *mismatch) encode(to []int64) {
	to[0], to[1], to[2], to[3] = m.count, m.first, int64(m.got), int64(m.want)
}

func decodeMismatch(from []int64) mismatch {
	return mismatch{from[0], from[1], uint64(from[2]), uint64(from[3])}
}

// compare adds the elements of the destination that differ from the expected ones to m.
func (p *part) compare(m *mismatch) {
	got := unsafe.Slice((*byte)(p.call.Dst.Ptr), len(p.want))
	if bytes.Equal(got, p.want) {
		return
	}
	size := p.call.Type.Bytes()
	for i := 0; i < len(got); i += size {
		g, w := got[i:i+size], p.want[i:i+size]
		if bytes.Equal(g, w) {
			continue
		}
		if m.count == 0 {
			var text [2][8]byte
			copy(text[0][:], g)
			copy(text[1][:], w)
			m.first = int64(i / size)
			m.got, m.want = binary.LittleEndian.Uint64(text[0][:]), binary.LittleEndian.Uint64(text[1][:])
		}
		m.count++
	}
}

// check makes calls whose results are compared with the oracle, and returns what was wrong on every rank.
func (m *member) check(ctx context.Context, p *part) ([]mismatch, error) {
	var own mismatch
	for range m.opts.checks() {
		if len(p.want) > 0 {
			p.poison()
		}
		if err := m.barrier(ctx); err != nil { // peers may write to the destination as soon as they have begun
			return nil, err
		}
		if err := m.do(ctx, p); err != nil {
			return nil, err
		}
		if len(p.want) > 0 {
			p.compare(&own)
		}
	}
	all := make([]int64, fields*m.world.Size())
	own.encode(all[fields*m.world.Rank():])
	memory := tensor.HostMemory(all)
	if err := m.world.Do(ctx, &collective.Call{
		Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Int64, Src: memory, Dst: memory,
	}); err != nil {
		return nil, err
	}
	list := make([]mismatch, m.world.Size())
	for r := range list {
		list[r] = decodeMismatch(all[fields*r:])
	}
	return list, nil
}

// judge returns the number of wrong elements, and describes those of the first rank that has some.
func (o *Options) judge(list []mismatch) (wrong int64, text string) {
	for r, m := range list {
		if wrong += m.count; m.count == 0 || text != "" {
			continue
		}
		var got, want [8]byte
		binary.LittleEndian.PutUint64(got[:], m.got)
		binary.LittleEndian.PutUint64(want[:], m.want)
		n := o.Type.Bytes()
		text = fmt.Sprintf("rank %d has %d wrong %s, the first is element %d of its result: it has the bytes %x, want %x",
			r, m.count, plural("element", "elements", int(m.count)), m.first, got[:n], want[:n])
	}
	return wrong, text
}
