package collective_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the random tests; 0: a new one")

// treeOf combines values in the slow and obvious way: level by level, it combines neighbours, the lower one on the
// left; a value without a neighbour moves up unchanged.
func treeOf[T any](values []T, combine func(a, b T) T) T {
	for len(values) > 1 {
		var up []T
		for i := 0; i < len(values); i += 2 {
			if i+1 < len(values) {
				up = append(up, combine(values[i], values[i+1]))
			} else {
				up = append(up, values[i])
			}
		}
		values = up
	}
	return values[0]
}

type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

func combine[T number](op collective.ReduceOp) func(a, b T) T {
	return func(a, b T) T {
		switch {
		case a != a:
			return quiet(a)
		case b != b:
			return quiet(b)
		}
		var r T
		switch op {
		case collective.Min:
			r = min(a, b)
		case collective.Max:
			r = max(a, b)
		case collective.Prod:
			r = a * b
		default:
			r = a + b
		}
		if r != r { // of an invalid operation
			switch p := any(&r).(type) {
			case *float32:
				*p = math.Float32frombits(0xffc00000)
			case *float64:
				*p = math.Float64frombits(0xfff80000_00000000)
			}
		}
		return r
	}
}

// quiet returns a NaN with the bit set that distinguishes quiet NaNs from signalling ones.
func quiet[T number](x T) T {
	switch p := any(&x).(type) {
	case *float32:
		*p = math.Float32frombits(math.Float32bits(*p) | 1<<22)
	case *float64:
		*p = math.Float64frombits(math.Float64bits(*p) | 1<<51)
	}
	return x
}

// reduced returns the result that an all-reduce of the ranks' vectors must have, bit for bit.
func reduced(op collective.ReduceOp, t tensor.DType, wide bool, srcs [][]byte) []byte {
	switch t {
	case tensor.Int8:
		return reducedAs[int8](op, srcs)
	case tensor.Int16:
		return reducedAs[int16](op, srcs)
	case tensor.Int32:
		return reducedAs[int32](op, srcs)
	case tensor.Int64:
		return reducedAs[int64](op, srcs)
	case tensor.Uint8:
		return reducedAs[uint8](op, srcs)
	case tensor.Uint16:
		return reducedAs[uint16](op, srcs)
	case tensor.Uint32:
		return reducedAs[uint32](op, srcs)
	case tensor.Uint64:
		return reducedAs[uint64](op, srcs)
	case tensor.Float32:
		return reducedAs[float32](op, srcs)
	case tensor.Float64:
		return reducedAs[float64](op, srcs)
	case tensor.Float16:
		return reducedHalf(op, wide, srcs, func(b uint16) float32 { return tensor.F16(b).Float32() },
			func(f float32) uint16 { return uint16(tensor.F16From(f)) })
	case tensor.BFloat16:
		return reducedHalf(op, wide, srcs, func(b uint16) float32 { return tensor.BF16(b).Float32() },
			func(f float32) uint16 { return uint16(tensor.BF16From(f)) })
	}
	panic(t)
}

func reducedAs[T number](op collective.ReduceOp, srcs [][]byte) []byte {
	out := make([]byte, len(srcs[0]))
	for i := range as[T](out) {
		var values []T
		for _, s := range srcs {
			values = append(values, as[T](s)[i])
		}
		v := treeOf(values, combine[T](op))
		if op == collective.Mean && len(srcs) > 1 {
			v /= T(len(srcs))
		}
		as[T](out)[i] = v
	}
	return out
}

func reducedHalf(
	op collective.ReduceOp, wide bool, srcs [][]byte, widen func(uint16) float32, narrow func(float32) uint16,
) []byte {
	if len(srcs) == 1 && !wide {
		return srcs[0]
	}
	round := func(f float32) float32 {
		if wide {
			return f
		}
		return widen(narrow(f))
	}
	out := make([]byte, len(srcs[0]))
	for i := range as[uint16](out) {
		var values []float32
		for _, s := range srcs {
			values = append(values, widen(as[uint16](s)[i]))
		}
		v := treeOf(values, func(a, b float32) float32 { return round(combine[float32](op)(a, b)) })
		if op == collective.Mean {
			v = round(v / float32(len(srcs)))
		}
		as[uint16](out)[i] = narrow(v)
	}
	return out
}

// as returns bytes as elements.
func as[T any](b []byte) []T {
	var zero T
	if len(b) == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/int(unsafe.Sizeof(zero)))
}

// aligned returns bytes that are aligned for every type of elements.
func aligned(n int) []byte {
	words := make([]uint64, n/8+1)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), n)
}

// fill writes random elements: numbers of like size, with some zeros and infinities of both signs and NaNs of any
// payload among the floats.
func fill(random *rand.Rand, t tensor.DType, b []byte) {
	special := []float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), 1e-40}
	nan := func() uint64 { return random.Uint64() | 0x7ff00000_7f807c00 } // in every type, or infinity
	one := func() bool { return random.IntN(20) == 0 }
	pick := func() float64 {
		if random.IntN(20) == 0 {
			return special[random.IntN(len(special))]
		}
		return random.NormFloat64()
	}
	switch t {
	case tensor.Float32:
		for i := range as[float32](b) {
			as[float32](b)[i] = float32(pick())
			if one() {
				as[uint32](b)[i] = uint32(nan())
			}
		}
	case tensor.Float64:
		for i := range as[float64](b) {
			as[float64](b)[i] = pick()
			if one() {
				as[uint64](b)[i] = nan()
			}
		}
	case tensor.Float16:
		for i := range as[uint16](b) {
			as[uint16](b)[i] = uint16(tensor.F16From(float32(pick())))
			if one() {
				as[uint16](b)[i] = uint16(nan())
			}
		}
	case tensor.BFloat16:
		for i := range as[uint16](b) {
			as[uint16](b)[i] = uint16(tensor.BF16From(float32(pick())))
			if one() {
				as[uint16](b)[i] = uint16(nan()) | 0x7f80
			}
		}
	default:
		for i := range b {
			b[i] = byte(random.Uint32())
		}
	}
}

var numeric = []tensor.DType{
	tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64, tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64,
	tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64,
}

// layout is the placement of the ranks' destinations.
type layout string

const (
	apart   layout = "apart"
	inPlace layout = "in place"
	shared  layout = "one destination for all"
	crossed layout = "rank 0's source is the destination of all"
)

var layouts = []layout{apart, inPlace, shared, crossed}

// buffers returns each rank's destination for its source.
func (l layout) buffers(srcs [][]byte) [][]byte {
	dsts := make([][]byte, len(srcs))
	one := aligned(len(srcs[0]))
	for r := range srcs {
		switch l {
		case apart:
			dsts[r] = aligned(len(srcs[r]))
		case inPlace:
			dsts[r] = srcs[r]
		case shared:
			dsts[r] = one
		case crossed:
			dsts[r] = srcs[0]
		}
	}
	return dsts
}

func TestAllReduceEqualsOracle(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		random := seeded(t)
		for n := 1; n <= 9; n++ {
			g := m.opened(t, n, collective.Config{})
			for i := range 40 {
				op := collective.ReduceOp(random.IntN(int(collective.Prod) + 1))
				dtype := numeric[random.IntN(len(numeric))]
				if op == collective.Mean && !dtype.IsFloat() {
					op = collective.Sum
				}
				count := random.IntN(300)
				if i == 0 && n <= 5 {
					count = (256<<10)/dtype.Bytes() + random.IntN(999) // more than one segment
				}
				accumulate := []collective.Accumulate{collective.AccumulateDType, collective.AccumulateFloat32}[random.IntN(2)]
				l := layouts[random.IntN(len(layouts))]

				srcs := make([][]byte, n)
				for r := range srcs {
					srcs[r] = aligned(count * dtype.Bytes())
					fill(random, dtype, srcs[r])
				}
				want := reduced(op, dtype, accumulate == collective.AccumulateFloat32, srcs)
				dsts := l.buffers(srcs)
				before := make([][]byte, n)
				for r := range srcs {
					before[r] = bytes.Clone(srcs[r])
				}
				what := fmt.Sprintf("%d ranks, %v %v [%d], %s, accumulate %d", n, op, dtype, count, l, accumulate)
				mustEach(t, g, func(c collective.Communicator) error {
					return c.Do(background, &collective.Call{
						Op: collective.AllReduce, Reduce: op, Type: dtype,
						Src: tensor.HostMemory(srcs[c.Rank()]), Dst: tensor.HostMemory(dsts[c.Rank()]),
						Options: &collective.Options{Accumulate: accumulate},
					})
				})
				for r := range dsts {
					if !bytes.Equal(dsts[r], want) {
						t.Fatalf("%s: rank %d has other bits than the oracle: %s", what, r, firstDifference(dtype, dsts[r], want))
					}
					if l != inPlace && !(l == crossed && r == 0) && !bytes.Equal(srcs[r], before[r]) {
						t.Fatalf("%s: rank %d's source was changed", what, r)
					}
				}
			}
		}
	})
}

func firstDifference(t tensor.DType, got, want []byte) string {
	size := t.Bytes()
	for i := 0; i < len(got); i += size {
		if !bytes.Equal(got[i:i+size], want[i:i+size]) {
			return fmt.Sprintf("element %d: got % x, want % x", i/size, got[i:i+size], want[i:i+size])
		}
	}
	return "none"
}

func TestBroadcastEqualsOracle(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		random := seeded(t)
		types := append([]tensor.DType{tensor.Bool}, numeric...)
		for n := 1; n <= 9; n++ {
			g := m.opened(t, n, collective.Config{})
			for round := range 3 * n {
				root := round % n
				dtype := types[random.IntN(len(types))]
				count := random.IntN(300)
				if round == n {
					count = (256<<10)/dtype.Bytes() + random.IntN(999) // more than one segment
				}
				l := layouts[random.IntN(len(layouts)-1)]
				srcs := make([][]byte, n)
				for r := range srcs {
					srcs[r] = aligned(count * dtype.Bytes())
					fill(random, dtype, srcs[r])
				}
				want := bytes.Clone(srcs[root])
				dsts := l.buffers(srcs)
				if l == shared && round%2 == 0 {
					srcs[root] = dsts[root] // the root's source is what all write to
					copy(srcs[root], want)
				}
				mustEach(t, g, func(c collective.Communicator) error {
					call := &collective.Call{Op: collective.Broadcast, Type: dtype, Root: root, Dst: tensor.HostMemory(dsts[c.Rank()])}
					if c.Rank() == root || l == inPlace {
						call.Src = tensor.HostMemory(srcs[c.Rank()])
					}
					return c.Do(background, call)
				})
				for r := range dsts {
					if !bytes.Equal(dsts[r], want) {
						t.Fatalf("%d ranks, root %d, %v [%d], %s: rank %d has other bytes", n, root, dtype, count, l, r)
					}
				}
			}
		}
	})
}

// TestBarrier checks that a rank leaves barrier i only after all ranks have entered it.
func TestBarrier(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		for n := 1; n <= 9; n++ {
			g := m.opened(t, n, collective.Config{})
			rounds := make([]paddedCounter, n)
			mustEach(t, g, func(c collective.Communicator) error {
				for i := range 50 {
					rounds[c.Rank()].Store(int64(i + 1))
					if err := c.Do(background, barrier()); err != nil {
						return err
					}
					for r := range rounds {
						if at := rounds[r].Load(); at < int64(i+1) {
							return fmt.Errorf("left barrier %d before rank %d entered it", i, r)
						}
					}
				}
				return nil
			})
		}
	})
}

// TestMeanOfIntegers checks that a MEAN of integers is invalid.
func TestMeanOfIntegers(t *testing.T) {
	g := modes[0].opened(t, 2, collective.Config{})
	x := []int32{1, 2}
	errs := each(g, func(c collective.Communicator) error {
		return c.Do(background, &collective.Call{
			Op: collective.AllReduce, Reduce: collective.Mean, Type: tensor.Int32,
			Src: tensor.HostMemory(x), Dst: tensor.HostMemory(x),
		})
	})
	for _, err := range errs {
		if !errors.Is(err, collective.ErrInvalid) {
			t.Errorf("got %v, want ErrInvalid", err)
		}
	}
}
