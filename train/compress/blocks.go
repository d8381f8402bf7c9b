package compress

import (
	"encoding/binary"
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// A block is encoded as a float32 scale and 256 integers of 8 bits. The part of the gradients that belongs to one
// replica (a chunk) is encoded as the scales of its blocks, little-endian, and then their integers. Blocks do not cross
// the borders of tensors, so the last one of a tensor may have fewer elements; the integers behind those mean nothing.
const (
	blockElements = 256
	scaleBytes    = 4
)

// blocks exchanges float32 as blocks of 8-bit integers.
type blocks struct {
	parameters        []Parameter
	replica, replicas int
	list              []block
	perChunk          int // blocks
	residual          residual

	encoded, received *tensor.Tensor // one chunk of each replica, or for each
	exchange, gather  Call
	others            Call  // gradients of other types
	otherParameters   []int // their indices
	calls             [2]Call
	rounds            [2][]Call
	gathering         bool

	gradients []*tensor.Tensor
	sum, zero [blockElements]float32
}

// block is a block's place.
type block struct {
	parameter int
	from, n   int // elements of the parameter
	at        int // its first element among the elements of all
}

func newBlocks(parameters []Parameter, replica, replicas int) *blocks {
	b := &blocks{parameters: parameters, replica: replica, replicas: replicas}
	count := 0
	for i, p := range parameters {
		if p.DType != tensor.Float32 {
			b.otherParameters = append(b.otherParameters, i)
			b.others.Names = append(b.others.Names, p.Name)
			continue
		}
		n := length(p.Shape)
		for from := 0; from < n; from += blockElements {
			b.list = append(b.list, block{parameter: i, from: from, n: min(blockElements, n-from), at: count + from})
		}
		count += n
	}
	b.others.Op = AllReduce
	b.others.Src = make([]*tensor.Tensor, len(b.otherParameters))
	b.others.Dst = b.others.Src
	b.residual = newResidual(count)
	b.perChunk = (len(b.list) + replicas - 1) / replicas
	size := b.chunkBytes()
	b.encoded = tensor.New(tensor.Uint8, replicas*size)
	b.received = tensor.New(tensor.Uint8, replicas*size)
	names := []string{callName("gradients in blocks of int8", parameters)}
	own := tensor.Of(tensor.Data[uint8](b.encoded)[replica*size : (replica+1)*size])
	b.exchange = Call{
		Op: AllToAll, Dst: []*tensor.Tensor{b.received}, Src: []*tensor.Tensor{b.encoded}, Names: names,
	}
	b.gather = Call{Op: AllGather, Dst: []*tensor.Tensor{b.encoded}, Src: []*tensor.Tensor{own}, Names: names}
	b.rounds[1] = []Call{b.gather}
	return b
}

func (b *blocks) chunkBytes() int { return b.perChunk * (scaleBytes + blockElements) }

// places returns where the scale and the integers of block i are encoded, as offsets in the chunks of all replicas.
func (b *blocks) places(i int) (scale, integers int) {
	chunk, k := i/b.perChunk, i%b.perChunk
	start := chunk * b.chunkBytes()
	return start + k*scaleBytes, start + b.perChunk*scaleBytes + k*blockElements
}

func (b *blocks) Start(gradients []*tensor.Tensor, _ int64) [][]Call {
	b.gradients, b.gathering, b.residual.whole = gradients, false, false
	encoded := tensor.Data[uint8](b.encoded)
	for i, x := range b.list {
		g := unsafe.Add(gradients[x.parameter].Memory().Ptr, 4*x.from)
		rest := unsafe.Pointer(&b.residual.pending[x.at])
		largest := kernel.AddLargest(rest, g, unsafe.Pointer(&b.residual.committed[x.at]), x.n)
		b.encode(encoded, i, rest, x.n, largest)
	}
	calls := b.calls[:0]
	if len(b.list) > 0 {
		calls = append(calls, b.exchange)
	}
	if len(b.otherParameters) > 0 {
		for k, i := range b.otherParameters {
			b.others.Src[k] = gradients[i]
		}
		calls = append(calls, b.others)
	}
	b.rounds[0] = calls
	if len(b.list) == 0 {
		return b.rounds[:1]
	}
	return b.rounds[:]
}

// tiny is the magnitude below which a block is encoded as zeros: its scale would lose bits, or its inverse overflow.
const tiny = 0x1p-110

// encode encodes n elements as block i, and leaves in them what this has rounded away. largest are the bits of their
// largest magnitude. A block that is not finite is encoded as NaNs, so that all replicas find it, and leaves nothing.
func (b *blocks) encode(encoded []uint8, i int, elements unsafe.Pointer, n int, largest uint32) {
	at, integers := b.places(i)
	magnitude := math.Float32frombits(largest)
	scale := magnitude / 127
	q := encoded[integers : integers+n]
	switch {
	case largest >= infinity:
		scale = math.Float32frombits(quietNaN)
		clear(q)
		clear(unsafe.Slice((*float32)(elements), n))
	case magnitude < tiny:
		scale = 0
		clear(q)
	default:
		kernel.Quantize(unsafe.Pointer(&q[0]), elements, n, 127/magnitude, scale)
	}
	binary.LittleEndian.PutUint32(encoded[at:], math.Float32bits(scale))
}

// Bits of float32.
const (
	infinity = 0x7f800000
	quietNaN = 0x7fc00000
)

func (b *blocks) Next() {
	if !b.gathering && len(b.list) > 0 {
		b.gathering = true
		b.reduce()
		return
	}
	encoded := tensor.Data[uint8](b.encoded)
	for i, x := range b.list {
		scale, q := b.decode(encoded, i)
		kernel.Dequantize(unsafe.Add(b.gradients[x.parameter].Memory().Ptr, 4*x.from), q, x.n, scale)
	}
	b.gradients, b.residual.whole = nil, true
}

// reduce decodes and adds the blocks of this replica's chunk that all replicas have sent, encodes the sums, and adds
// what this has rounded away to the replica's own residual.
func (b *blocks) reduce() {
	received, encoded := tensor.Data[uint8](b.received), tensor.Data[uint8](b.encoded)
	sum, zero := unsafe.Pointer(&b.sum), unsafe.Pointer(&b.zero)
	first := b.replica * b.perChunk
	for i := first; i < min(first+b.perChunk, len(b.list)); i++ {
		x := &b.list[i]
		for sender := range b.replicas {
			scale, q := b.decode(received, sender*b.perChunk+i-first)
			if sender == 0 {
				kernel.Dequantize(sum, q, x.n, scale)
			} else {
				kernel.AddDequantized(sum, q, x.n, scale)
			}
		}
		largest := kernel.AddLargest(sum, sum, zero, x.n)
		b.encode(encoded, i, sum, x.n, largest)
		rest := unsafe.Pointer(&b.residual.pending[x.at])
		kernel.Reduce(kernel.Sum, tensor.Float32, rest, rest, sum, x.n)
	}
}

// decode returns the scale and the integers of encoded block i. Any bytes are a valid encoding.
func (b *blocks) decode(encoded []uint8, i int) (scale float32, q unsafe.Pointer) {
	at, integers := b.places(i)
	return math.Float32frombits(binary.LittleEndian.Uint32(encoded[at:])), unsafe.Pointer(&encoded[integers])
}

func (b *blocks) Commit() { b.residual.commit() }

func (b *blocks) Discard() { b.residual.whole = false }

func (b *blocks) State() (list []State) {
	for _, x := range b.list {
		if x.from == 0 {
			list = append(list, b.residual.state(b.parameters[x.parameter], x.at))
		}
	}
	return list
}
