package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The oracle: one element at a time, as bits in a uint64, as the package documentation specifies.

func slowReduce(op Op, t tensor.DType, a, b uint64) uint64 {
	if t.IsFloat() {
		if isNaN(t, a) {
			return a | quietBit(t)
		}
		if isNaN(t, b) {
			return b | quietBit(t)
		}
		var r uint64
		if t == tensor.Float64 {
			r = math.Float64bits(slowFloat(op, math.Float64frombits(a), math.Float64frombits(b)))
		} else {
			r = toBits(t, slowFloat32(op, number32(t, a), number32(t, b)))
		}
		if isNaN(t, r) {
			return invalid(t)
		}
		return r
	}
	width := uint(8 * t.Bytes())
	mask := uint64(1)<<(width-1)<<1 - 1
	signed := t <= tensor.Int64
	less := a < b
	if signed {
		less = int64(a<<(64-width)) < int64(b<<(64-width))
	}
	switch op {
	case Sum:
		return (a + b) & mask
	case Prod:
		return a * b & mask
	case Min:
		if less {
			return a
		}
		return b
	}
	if less {
		return b
	}
	return a
}

func slowFloat32(op Op, a, b float32) float32 {
	switch op {
	case Sum:
		return a + b
	case Prod:
		return a * b
	}
	return float32(slowFloat(op, float64(a), float64(b)))
}

func slowFloat(op Op, a, b float64) float64 {
	switch op {
	case Sum:
		return a + b
	case Prod:
		return a * b
	}
	less := a < b || a == b && math.Signbit(a) && !math.Signbit(b)
	if less == (op == Min) {
		return a
	}
	return b
}

// slowTree adds level by level, as the definition specifies.
func slowTree(tree Tree, v []uint64) uint64 {
	t := tree.Type
	if tree.Float32 && t.Bytes() == 2 && t.IsFloat() {
		for i := range v {
			v[i] = toBits(tensor.Float32, number32(t, v[i]))
		}
		t = tensor.Float32
	}
	for len(v) > 1 {
		var next []uint64
		for i := 0; i < len(v); i += 2 {
			if i+1 < len(v) {
				next = append(next, slowReduce(tree.Op, t, v[i], v[i+1]))
			} else {
				next = append(next, v[i])
			}
		}
		v = next
	}
	out := v[0]
	if tree.Divide > 1 {
		out = slowDivide(t, out, tree.Divide)
	}
	if t != tree.Type {
		out = toBits(tree.Type, number32(t, out))
	}
	return out
}

func slowDivide(t tensor.DType, x uint64, divisor int) uint64 {
	if isNaN(t, x) {
		return x | quietBit(t)
	}
	if t == tensor.Float64 {
		return math.Float64bits(math.Float64frombits(x) / float64(divisor))
	}
	return toBits(t, number32(t, x)/float32(divisor))
}

func number32(t tensor.DType, x uint64) float32 {
	switch t {
	case tensor.Float16:
		return tensor.F16(x).Float32()
	case tensor.BFloat16:
		return tensor.BF16(x).Float32()
	}
	return math.Float32frombits(uint32(x))
}

func toBits(t tensor.DType, x float32) uint64 {
	switch t {
	case tensor.Float16:
		return uint64(tensor.F16From(x))
	case tensor.BFloat16:
		return uint64(tensor.BF16From(x))
	}
	return uint64(math.Float32bits(x))
}

// isNaN reports whether the bits are a NaN: the exponent has all its bits set, the fraction not none.
func isNaN(t tensor.DType, x uint64) bool {
	return x&^(1<<(8*t.Bytes()-1)) > infinity(t)
}

func infinity(t tensor.DType) uint64 { return 1<<(8*t.Bytes()-1) - 1<<fractionBits(t) }

// quietBit is the highest bit of the fraction.
func quietBit(t tensor.DType) uint64 { return 1 << (fractionBits(t) - 1) }

func fractionBits(t tensor.DType) int {
	switch t {
	case tensor.Float16:
		return 10
	case tensor.BFloat16:
		return 7
	case tensor.Float32:
		return 23
	}
	return 52
}

// invalid is the result of an invalid operation.
func invalid(t tensor.DType) uint64 {
	return 1<<(8*t.Bytes()-1) | infinity(t) | quietBit(t)
}

// vector is n elements inside a larger memory, with guard bytes on both sides.
type vector struct {
	t      tensor.DType
	memory []byte
	start  int
	n      int
}

const guard = 0xA5

func newVector(t tensor.DType, n, misalign int) vector {
	v := vector{t: t, memory: make([]byte, 64+misalign+n*t.Bytes()+64), start: 64 + misalign, n: n}
	for i := range v.memory {
		v.memory[i] = guard
	}
	return v
}

func (v vector) pointer() unsafe.Pointer { return unsafe.Pointer(&v.memory[v.start]) }

func (v vector) clone() vector {
	v.memory = slices.Clone(v.memory)
	return v
}

func (v vector) get(i int) uint64 {
	var b [8]byte
	copy(b[:], v.memory[v.start+i*v.t.Bytes():][:v.t.Bytes()])
	return binary.LittleEndian.Uint64(b[:])
}

func (v vector) set(i int, x uint64) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], x)
	copy(v.memory[v.start+i*v.t.Bytes():][:v.t.Bytes()], b[:])
}

// fill sets all elements to numbers, among them many zeros, infinities, NaNs, extremes and subnormals. Stretches of 64
// elements with and without NaNs take turns, at the same places in all vectors of a length: loops may treat them in
// different ways.
func (v vector) fill(r *rand.Rand) {
	for i := range v.n {
		x := element(v.t, r)
		for v.t.IsFloat() && (i/64+v.n)%2 == 0 && isNaN(v.t, x) {
			x = element(v.t, r)
		}
		v.set(i, x)
	}
}

// fillNumbers sets all elements to numbers of similar size.
func (v vector) fillNumbers(r *rand.Rand) {
	for i := range v.n {
		v.set(i, toBits(v.t, float32(r.NormFloat64())))
	}
}

func element(t tensor.DType, r *rand.Rand) uint64 {
	width := 8 * t.Bytes()
	if !t.IsFloat() {
		return []uint64{
			0, 1, 1 << (width - 1), 1<<(width-1) - 1, ^uint64(0), r.Uint64(),
			r.Uint64(),
		}[r.IntN(7)] & (1<<(width-1)<<1 - 1)
	}
	special := []float64{
		0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), 1, -1, 65504, -65520, 3e38,
		0x1p-24, 0x1p-140, -0x1p-15,
	}
	x := r.NormFloat64()
	switch r.IntN(8) {
	case 0:
		x = special[r.IntN(len(special))]
	case 1:
		return r.Uint64() & (1<<(width-1)<<1 - 1)
	case 2: // a NaN, quiet or not, of either sign
		return (infinity(t) | r.Uint64()) & (1<<(width-1)<<1 - 1)
	}
	if t == tensor.Float64 {
		return math.Float64bits(x)
	}
	return toBits(t, float32(x))
}

// intact fails the test if a byte around the vector changed.
func (v vector) intact(t *testing.T, what string) {
	t.Helper()
	for i, b := range v.memory {
		if (i < v.start || i >= v.start+v.n*v.t.Bytes()) && b != guard {
			t.Fatalf("%s: byte %d outside of [%d, %d) is %#x", what, i, v.start, v.start+v.n*v.t.Bytes(), b)
		}
	}
}

func numeric() []tensor.DType {
	return slices.DeleteFunc(slices.Clone(tensor.DTypes[:]), func(t tensor.DType) bool { return !t.IsNumeric() })
}

var ops = []Op{Sum, Prod, Min, Max}

// counts are lengths around the widths of the loops.
var counts = []int{0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 63, 65, 255, 256, 257, 513, 1000}

func TestReduce(t *testing.T) {
	for _, dtype := range numeric() {
		for _, op := range ops {
			t.Run(fmt.Sprintf("%v/%v", dtype, op), func(t *testing.T) {
				r := rand.New(rand.NewPCG(uint64(dtype), uint64(op)))
				for _, n := range counts {
					for misalign := range 4 {
						a, b := newVector(dtype, n, misalign), newVector(dtype, n, 2*misalign)
						a.fill(r)
						b.fill(r)
						checkReduce(t, op, a, b, newVector(dtype, n, 3*misalign))
					}
				}
			})
		}
	}
}

// checkReduce reduces a and b into dst, into a and into b; also by the generic loop, whichever the table has.
func checkReduce(t *testing.T, op Op, a, b, dst vector) {
	t.Helper()
	x, y, plain := a.clone(), b.clone(), a.clone()
	genericLoops(op)[a.t].two(plain.pointer(), a.pointer(), b.pointer(), a.n)
	Reduce(op, a.t, dst.pointer(), a.pointer(), b.pointer(), a.n)
	Reduce(op, a.t, x.pointer(), x.pointer(), b.pointer(), a.n)
	Reduce(op, a.t, y.pointer(), a.pointer(), y.pointer(), a.n)
	for into, got := range map[string]vector{"apart": dst, "into a": x, "into b": y, "generic": plain} {
		for i := range a.n {
			if want := slowReduce(op, a.t, a.get(i), b.get(i)); got.get(i) != want {
				t.Fatalf("%v of %v %s, element %d of %d: %#x and %#x give %#x, want %#x", op, a.t, into, i, a.n, a.get(i), b.get(i),
					got.get(i), want)
			}
		}
		got.intact(t, into)
	}
	a.intact(t, "a")
	b.intact(t, "b")
}

// TestFastest compares the loops of every level of instructions over two, three and four sources with the generic ones.
func TestFastest(t *testing.T) {
	for level, table := range levels() {
		if testing.Short() && level != "the table" {
			continue // what the table has is tested; a run without -short tests all
		}
		t.Run(level, func(t *testing.T) { testFastest(t, table) })
	}
}

func testFastest(t *testing.T, table loopTable) {
	for _, op := range ops {
		for _, dtype := range numeric() {
			t.Run(fmt.Sprintf("%v/%v", op, dtype), func(t *testing.T) {
				r := rand.New(rand.NewPCG(uint64(op), uint64(dtype)))
				fast, plain := &table[op][dtype], genericLoops(op)[dtype]
				for _, n := range counts {
					var v [6]vector
					for i := range v {
						v[i] = newVector(dtype, n, r.IntN(40))
						v[i].fill(r)
					}
					got, want := v[4], v[5]
					p := pointers(v[:])
					for sources, run := range map[int]func(l *loops, dst unsafe.Pointer){
						2: func(l *loops, dst unsafe.Pointer) { l.two(dst, p[0], p[1], n) },
						3: func(l *loops, dst unsafe.Pointer) { l.three(dst, p[0], p[1], p[2], n) },
						4: func(l *loops, dst unsafe.Pointer) { l.four(dst, p[0], p[1], p[2], p[3], n) },
					} {
						run(fast, p[4])
						run(&plain, p[5])
						for i := range n {
							if got.get(i) != want.get(i) {
								t.Fatalf("%d sources, element %d of %d: %#x, by the generic loop %#x", sources, i, n, got.get(i), want.get(i))
							}
						}
						got.intact(t, "fast")
						want.intact(t, "generic")
					}
				}
			})
		}
	}
}

func FuzzReduce(f *testing.F) {
	f.Add(uint8(0), uint8(0), uint8(0), []byte("0123456789abcdef"))
	f.Add(uint8(3), uint8(9), uint8(1), []byte{0, 0x80, 0, 0, 0, 0xfc, 1, 0x7c, 0xff, 0xff, 0xff, 0x7f})
	f.Fuzz(func(t *testing.T, o, d, misalign uint8, data []byte) {
		dtype := numeric()[int(d)%len(numeric())]
		n := len(data) / 2 / dtype.Bytes()
		a, b := newVector(dtype, n, int(misalign%8)), newVector(dtype, n, int(misalign/8%8))
		copy(a.memory[a.start:], data[:n*dtype.Bytes()])
		copy(b.memory[b.start:], data[n*dtype.Bytes():][:n*dtype.Bytes()])
		checkReduce(t, ops[int(o)%len(ops)], a, b, newVector(dtype, n, 1))
	})
}

func TestTree(t *testing.T) {
	for _, dtype := range numeric() {
		for _, op := range ops {
			for _, tree := range []Tree{
				{Op: op, Type: dtype},
				{Op: op, Type: dtype, Divide: 1, Float32: true},
				{Op: op, Type: dtype, Divide: 3},
				{Op: op, Type: dtype, Divide: 8, Float32: true},
				{Op: op, Type: dtype, Stream: true},
				{Op: op, Type: dtype, Divide: 3, Float32: true, Stream: true},
			} {
				if tree.Divide > 1 && !dtype.IsFloat() {
					continue
				}
				t.Run(fmt.Sprintf("%v/%v/divide=%d/wide=%v/stream=%v", dtype, op, tree.Divide, tree.Float32, tree.Stream),
					func(t *testing.T) {
						r := rand.New(rand.NewPCG(uint64(dtype), uint64(op)))
						step := 1
						if race.Enabled { // no goroutines: only the checks of pointers are of interest
							step = 8
						}
						for n := 1; n <= 33; n += step {
							checkTree(t, tree, n, 1+r.IntN(40), r)
						}
						many := []int{1, 2, 3, 5, 7, 13}
						if testing.Short() {
							many = []int{5}
						}
						for _, n := range many { // of more than one block
							checkTree(t, tree, n, blockBytes/dtype.Bytes()+r.IntN(blockBytes/dtype.Bytes()), r)
						}
						checkTree(t, tree, 200, 3, r)
					})
			}
		}
	}
}

// checkTree reduces the middle part of n vectors into separate vectors, in place, and into one vector only.
func checkTree(t *testing.T, tree Tree, n, count int, r *rand.Rand) {
	t.Helper()
	src := make([]vector, n)
	for i := range src {
		src[i] = newVector(tree.Type, count, r.IntN(8))
		src[i].fill(r)
	}
	lo := r.IntN(count + 1)
	hi := lo + r.IntN(count-lo+1)
	want := make([]uint64, hi-lo)
	for i := range want {
		operands := make([]uint64, n)
		for j := range src {
			operands[j] = src[j].get(lo + i)
		}
		want[i] = slowTree(tree, operands)
	}
	apart := make([]vector, n)
	for i := range apart {
		apart[i] = newVector(tree.Type, count, r.IntN(8))
	}
	last := slices.Clone(src)
	last[n-1] = src[n-1].clone()
	within := slices.Clone(src)
	for i := range within {
		within[i] = src[i].clone()
	}
	scratch := NewScratch(n)
	for _, c := range []struct {
		name     string
		dst, src []vector
	}{
		{"apart", apart, src},
		{"into the last source", last[n-1:], last},
		{"in place", within, within},
	} {
		before := make([]vector, len(c.dst))
		for i := range before {
			before[i] = c.dst[i].clone()
		}
		tree.Reduce(scratch, pointers(c.dst), pointers(c.src), lo, hi)
		for j, dst := range c.dst {
			for i := range count {
				if i < lo || i >= hi {
					if dst.get(i) != before[j].get(i) {
						t.Fatalf("%+v of %d vectors %s: element %d outside of [%d, %d) changed", tree, n, c.name, i, lo, hi)
					}
				} else if got := dst.get(i); got != want[i-lo] {
					t.Fatalf("%+v of %d vectors %s: destination %d, element %d of [%d, %d): got %#x, want %#x", tree, n, c.name, j, i,
						lo, hi, got, want[i-lo])
				}
			}
			dst.intact(t, c.name)
		}
	}
}

func pointers(v []vector) []unsafe.Pointer {
	p := make([]unsafe.Pointer, len(v))
	for i := range v {
		p[i] = v[i].pointer()
	}
	return p
}

func TestScale(t *testing.T) {
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		t.Run(dtype.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, uint64(dtype)))
			for _, divisor := range []int{1, 2, 3, 5, 7, 8, 10, 100, 256, 1 << 20} {
				for _, n := range counts {
					src, dst := newVector(dtype, n, 1), newVector(dtype, n, 3)
					src.fill(r)
					within := src.clone()
					Scale(dtype, dst.pointer(), src.pointer(), n, divisor)
					Scale(dtype, within.pointer(), within.pointer(), n, divisor)
					for i := range n {
						want := slowDivide(dtype, src.get(i), divisor)
						if dst.get(i) != want || within.get(i) != want {
							t.Fatalf("%#x / %d = %#x, in place %#x, want %#x", src.get(i), divisor, dst.get(i), within.get(i), want)
						}
					}
					dst.intact(t, "dst")
					within.intact(t, "within")
				}
			}
		})
	}
}

// TestConvertAll widens every number of half width, and narrows every upper half of a float32 with the lower halves at
// which rounding turns.
func TestConvertAll(t *testing.T) {
	for _, half := range []tensor.DType{tensor.Float16, tensor.BFloat16} {
		t.Run(half.String(), func(t *testing.T) {
			src, dst := newVector(half, 1<<16, 1), newVector(tensor.Float32, 1<<16, 2)
			for i := range src.n {
				src.set(i, uint64(i))
			}
			plain := newVector(tensor.Float32, 1<<16, 2)
			Convert(tensor.Float32, half, dst.pointer(), src.pointer(), src.n)
			widenPlain(half, plain.pointer(), src.pointer(), src.n)
			for i := range src.n {
				if want := toBits(tensor.Float32, number32(half, uint64(i))); dst.get(i) != want || plain.get(i) != want {
					t.Fatalf("widened %#x is %#x, by the generic loop %#x, want %#x", i, dst.get(i), plain.get(i), want)
				}
			}
			dst.intact(t, "wide")
			r := rand.New(rand.NewPCG(3, 3))
			for _, low := range []uint64{
				0, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xf000,
				0xffff, r.Uint64N(1 << 16),
			} {
				wide, narrow, plain := newVector(tensor.Float32, 1<<16, 3), newVector(half, 1<<16, 5), newVector(half, 1<<16, 1)
				for i := range wide.n {
					wide.set(i, uint64(i)<<16|low)
				}
				Convert(half, tensor.Float32, narrow.pointer(), wide.pointer(), wide.n)
				narrowPlain(half, plain.pointer(), wide.pointer(), wide.n)
				for i := range wide.n {
					if want := toBits(half, number32(tensor.Float32, wide.get(i))); narrow.get(i) != want || plain.get(i) != want {
						t.Fatalf("narrowed %#x is %#x, by the generic loop %#x, want %#x", wide.get(i), narrow.get(i), plain.get(i), want)
					}
				}
				narrow.intact(t, "narrow")
			}
		})
	}
}

func TestConvertSame(t *testing.T) {
	for _, dtype := range numeric() {
		src, dst := newVector(dtype, 77, 1), newVector(dtype, 77, 2)
		src.fill(rand.New(rand.NewPCG(1, 2)))
		Convert(dtype, dtype, dst.pointer(), src.pointer(), src.n)
		for i := range src.n {
			if dst.get(i) != src.get(i) {
				t.Fatalf("%v: copied %#x is %#x", dtype, src.get(i), dst.get(i))
			}
		}
		dst.intact(t, dtype.String())
	}
}

// TestKnown compares results that were computed by hand.
func TestKnown(t *testing.T) {
	inf, negZero := float32(math.Inf(1)), float32(math.Copysign(0, -1))
	nan, other := math.Float32frombits(0x7fc40000), math.Float32frombits(0xffe80000)
	wrong := math.Float32frombits(0xffc00000)
	for _, c := range []struct {
		op         Op
		a, b, want float32
	}{
		{Sum, 1, 2, 3},
		{Sum, inf, -inf, wrong},
		{Prod, 0, inf, wrong},
		{Sum, nan, other, nan},
		{Sum, other, nan, other},
		{Prod, 1, other, other},
		{Min, nan, other, nan},
		{Max, other, nan, other},
		{Sum, negZero, negZero, negZero},
		{Sum, negZero, 0, 0},
		{Prod, -2, 0, negZero},
		{Min, negZero, 0, negZero},
		{Min, 0, negZero, negZero},
		{Max, negZero, 0, 0},
		{Max, 0, negZero, 0},
		{Min, nan, 1, nan},
		{Min, -inf, nan, nan},
		{Max, nan, 1, nan},
		{Max, inf, nan, nan},
	} {
		for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32} {
			for _, n := range []int{1, 16} { // the tail, and a whole turn of a loop
				a, b := newVector(dtype, n, 0), newVector(dtype, n, 0)
				for i := range n {
					a.set(i, toBits(dtype, c.a))
					b.set(i, toBits(dtype, c.b))
				}
				Reduce(c.op, dtype, a.pointer(), a.pointer(), b.pointer(), n)
				if got := a.get(n - 1); got != toBits(dtype, c.want) {
					t.Errorf("%v of %v: %v and %v give %#x, want %#x", c.op, dtype, c.a, c.b, got, toBits(dtype, c.want))
				}
			}
		}
	}
}

// TestFloat32Accumulation shows what Float32 is for: 256 and 2048 lose small numbers at each node if it is rounded.
func TestFloat32Accumulation(t *testing.T) {
	for _, c := range []struct {
		dtype tensor.DType
		big   float32
	}{{tensor.BFloat16, 256}, {tensor.Float16, 2048}} {
		for _, wide := range []bool{false, true} {
			src := make([]vector, 4)
			for i, x := range []float32{c.big, 1, 1, 0} {
				src[i] = newVector(c.dtype, 1, 0)
				src[i].set(0, toBits(c.dtype, x))
			}
			Tree{Type: c.dtype, Float32: wide}.Reduce(NewScratch(4), pointers(src[:1]), pointers(src), 0, 1)
			want := c.big // big+1 ties to even
			if wide {
				want = c.big + 2
			}
			if got := number32(c.dtype, src[0].get(0)); got != want {
				t.Errorf("%v, Float32 %v: %v+1+1+0 = %v, want %v", c.dtype, wide, c.big, got, want)
			}
		}
	}
}

// TestStream copies with streaming stores from and to any address, any length.
func TestStream(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 700 {
		src, dst := newVector(tensor.Uint8, n, r.IntN(64)), newVector(tensor.Uint8, n, r.IntN(64))
		src.fill(r)
		Stream(pointers([]vector{dst})[0], pointers([]vector{src})[0], n)
		for i := range n {
			if got, want := dst.get(i), src.get(i); got != want {
				t.Fatalf("byte %d of %d is %#x, want %#x", i, n, got, want)
			}
		}
		dst.intact(t, "the copy")
		Stream(pointers([]vector{dst})[0], pointers([]vector{dst})[0], n) // in place
		if n > 0 && dst.get(0) != src.get(0) {
			t.Fatalf("a copy onto itself changed it")
		}
	}
}

func TestNoAllocation(t *testing.T) {
	const n, count = 11, 5000
	scratch := NewScratch(n)
	for _, dtype := range numeric() {
		p := vectors(n+1, 8*count)
		for _, op := range ops {
			if got := testing.AllocsPerRun(10, func() {
				Reduce(op, dtype, p[0], p[0], p[1], count)
				Tree{Op: op, Type: dtype}.Reduce(scratch, p[:2], p[:n], 3, count)
				Tree{Op: op, Type: dtype, Float32: true}.Reduce(scratch, p[:2], p[:n], 3, count)
				Tree{Op: op, Type: dtype, Stream: true}.Reduce(scratch, p[:2], p[:n], 3, count)
				Stream(p[0], p[1], count)
				Convert(dtype, dtype, p[0], p[1], count)
				if dtype.IsFloat() {
					Scale(dtype, p[0], p[0], count, 3)
					Squares(dtype, p[0], count)
				}
				if dtype.IsFloat() && dtype.Bytes() == 2 {
					Convert(tensor.Float32, dtype, p[0], p[1], count)
					Convert(dtype, tensor.Float32, p[0], p[1], count)
				}
			}); got != 0 {
				t.Errorf("%v of %v: %v allocations", op, dtype, got)
			}
		}
	}
}

func TestVectorLoopsDoNotAllocate(t *testing.T) {
	p := vectors(3, 4*1000)
	if got := testing.AllocsPerRun(10, func() {
		AddLargest(p[0], p[1], p[2], 1000)
		Quantize(p[0], p[1], 1000, 0, 0)
		Dequantize(p[0], p[1], 1000, 0)
		AddDequantized(p[0], p[1], 1000, 0)
		AddScaled(p[0], p[1], p[2], 1000, 0)
		Dot(p[0], p[1], 1000)
	}); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func TestMisuse(t *testing.T) {
	for name, f := range map[string]func(){
		"sum of bool":        func() { Reduce(Sum, tensor.Bool, nil, nil, nil, 0) },
		"sum of string":      func() { Reduce(Sum, tensor.String, nil, nil, nil, 0) },
		"sum of invalid":     func() { Reduce(Sum, tensor.DType(99), nil, nil, nil, 0) },
		"no operation":       func() { Reduce(99, tensor.Int8, nil, nil, nil, 0) },
		"division of int32":  func() { Scale(tensor.Int32, nil, nil, 0, 2) },
		"int32 to float32":   func() { Convert(tensor.Float32, tensor.Int32, nil, nil, 0) },
		"string to string":   func() { Convert(tensor.String, tensor.String, nil, nil, 0) },
		"float16 to float64": func() { Convert(tensor.Float64, tensor.Float16, nil, nil, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("did not panic")
				}
			}()
			f()
		})
	}
}
