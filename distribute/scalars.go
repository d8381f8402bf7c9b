package distribute

import (
	"math"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scalarSum combines a few float64 numbers of every replica, in the same call as float32 tensors if it can.
//
// A call has one dtype, and a sum in float32 would round. So each replica writes its numbers as 16-bit digits, which
// float32 represents exactly, into its row of a matrix that is 0 elsewhere. The sum of the matrices holds the numbers
// of all replicas, and every replica adds them along the canonical tree: the bits of a float64 all-reduce. If that
// would transfer more than digitBytesMax, or the bucket has no float32, the numbers are a float64 tensor, which has a
// separate call.
type scalarSum struct {
	n, rank, size int
	digits        []float32 // by rank, number and digit; nil: the numbers are in values
	values        []float64 // digits: by rank and number; else those of this replica, and their sums
	memory        tensor.Memory

	scratch *kernel.Scratch
	rows    []unsafe.Pointer // the ranks' rows of values
}

// digitsPerScalar is how many 16-bit digits make a float64.
const digitsPerScalar = 4

// digitBytesMax bounds the bytes that the digits of all replicas take: more than that takes longer than a second call.
const digitBytesMax = 4096

// newScalarSum returns the sum of n numbers of each rank, reduced with these tensors. If they have owners, call is set.
func newScalarSum(
	n int, comm collective.Communicator, op ReduceOp, call collective.Op, tensors []packing.Tensor,
) *scalarSum {
	s := &scalarSum{n: n, rank: comm.Rank(), size: comm.Size()}
	count := digitsPerScalar * n * s.size
	float32s := slices.ContainsFunc(tensors, func(t packing.Tensor) bool { return t.Type == tensor.Float32 })
	if op != Sum || call != 0 || !float32s || count*tensor.Float32.Bytes() > digitBytesMax {
		s.values = make([]float64, n)
		s.memory = tensor.HostMemory(s.values)
		return s
	}
	s.digits, s.values = make([]float32, count), make([]float64, n*s.size)
	s.memory = tensor.HostMemory(s.digits)
	s.scratch = kernel.NewScratch(s.size)
	for rank := range s.size {
		s.rows = append(s.rows, unsafe.Pointer(&s.values[rank*n]))
	}
	return s
}

// len returns the number of scalars; s may be nil.
func (s *scalarSum) len() int {
	if s == nil {
		return 0
	}
	return s.n
}

// tensor describes what is reduced.
func (s *scalarSum) tensor() packing.Tensor {
	if s.digits != nil {
		return packing.Tensor{
			Name: "scalars", Type: tensor.Float32, Shape: []int{s.size, s.n, digitsPerScalar},
			Count: len(s.digits),
		}
	}
	return packing.Tensor{Name: "scalars", Type: tensor.Float64, Shape: []int{s.n}, Count: s.n}
}

// put stores this replica's numbers before the reduction.
func (s *scalarSum) put(values []float64) {
	if s.digits == nil {
		copy(s.values, values)
		return
	}
	clear(s.digits)
	for i, v := range values {
		bits := math.Float64bits(v)
		at := s.digits[(s.rank*s.n+i)*digitsPerScalar:]
		for d := range digitsPerScalar {
			at[d] = float32(uint16(bits >> (16 * d)))
		}
	}
}

// result stores the sums in out after the reduction.
func (s *scalarSum) result(out []float64) {
	if s.digits == nil {
		copy(out, s.values)
		return
	}
	for i := range s.values {
		bits := uint64(0)
		for d, digit := range s.digits[i*digitsPerScalar:][:digitsPerScalar] {
			bits |= uint64(digit) << (16 * d)
		}
		s.values[i] = math.Float64frombits(bits)
	}
	tree := kernel.Tree{Op: kernel.Sum, Type: tensor.Float64}
	tree.Reduce(s.scratch, s.rows[:1], s.rows, 0, s.n)
	copy(out, s.values)
}
