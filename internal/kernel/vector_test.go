package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// vectorCounts are lengths around those at which the loops end.
var vectorCounts = []int{
	0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 300, 1000,
}

// TestVectorLoops compares the loops of compressed gradients with the plain ones, which it compares with the
// definition.
func TestVectorLoops(t *testing.T) {
	for _, n := range vectorCounts {
		for misalign := range 4 {
			r := rand.New(rand.NewPCG(uint64(n), uint64(misalign)))
			a, b := newVector(tensor.Float32, n, misalign), newVector(tensor.Float32, n, 3*misalign)
			a.fill(r)
			b.fill(r)
			testAddLargest(t, a, b)
			testAddScaled(t, a, b)
			testDot(t, a, b)
			a.fillNumbers(r)
			b.fillNumbers(r)
			testDot(t, a, b)
			testQuantize(t, n, misalign, r)
			testDequantize(t, n, misalign, r)
		}
	}
}

// same compares two vectors, and the second one's guards.
func same(t *testing.T, what string, want, got vector) {
	t.Helper()
	got.intact(t, what)
	for i := range want.n {
		if want.get(i) != got.get(i) {
			t.Fatalf("%s of %d elements: element %d is %#x, want %#x", what, want.n, i, got.get(i), want.get(i))
		}
	}
}

func testAddLargest(t *testing.T, a, b vector) {
	t.Helper()
	want, got := newVector(tensor.Float32, a.n, 1), newVector(tensor.Float32, a.n, 2)
	largest := uint32(0)
	for i := range a.n {
		sum := slowReduce(Sum, tensor.Float32, a.get(i), b.get(i))
		want.set(i, sum)
		largest = max(largest, uint32(sum)&0x7fffffff)
	}
	if plain := addLargestPlain(got.pointer(), a.pointer(), b.pointer(), a.n); plain != largest {
		t.Fatalf("the largest of %d is %#x, want %#x", a.n, plain, largest)
	}
	same(t, "the plain sum", want, got)
	inPlace := a.clone()
	if fast := AddLargest(inPlace.pointer(), inPlace.pointer(), b.pointer(), a.n); fast != largest {
		t.Fatalf("the largest of %d is %#x, want %#x", a.n, fast, largest)
	}
	same(t, "the sum in place", want, inPlace)
}

func testAddScaled(t *testing.T, a, x vector) {
	t.Helper()
	for _, by := range []float32{0, 1, -0.37, float32(math.Inf(1)), math.Float32frombits(0x7fa12345)} {
		want, plain, fast := newVector(tensor.Float32, a.n, 1), newVector(tensor.Float32, a.n, 2), a.clone()
		for i := range a.n {
			product := slowReduce(Prod, tensor.Float32, uint64(math.Float32bits(by)), x.get(i))
			want.set(i, slowReduce(Sum, tensor.Float32, a.get(i), product))
		}
		addScaledPlain(plain.pointer(), a.pointer(), x.pointer(), a.n, by)
		AddScaled(fast.pointer(), fast.pointer(), x.pointer(), a.n, by)
		same(t, fmt.Sprintf("plain + %v x", by), want, plain)
		same(t, fmt.Sprintf("+ %v x", by), want, fast)
	}
}

func testDot(t *testing.T, a, b vector) {
	t.Helper()
	sums := make([]uint64, dotLanes)
	m := a.n / dotLanes * dotLanes
	product := func(i int) uint64 { return slowReduce(Prod, tensor.Float32, a.get(i), b.get(i)) }
	for i := range m {
		sums[i%dotLanes] = slowReduce(Sum, tensor.Float32, sums[i%dotLanes], product(i))
	}
	for len(sums) > 1 {
		half := len(sums) / 2
		for i := range half {
			sums[i] = slowReduce(Sum, tensor.Float32, sums[i], sums[i+half])
		}
		sums = sums[:half]
	}
	want := sums[0]
	if plain := math.Float32bits(dotPlain(a.pointer(), b.pointer(), m)); plain != uint32(want) {
		t.Fatalf("the plain dot product of %d is %#x, want %#x", m, plain, want)
	}
	for i := m; i < a.n; i++ {
		want = slowReduce(Sum, tensor.Float32, want, product(i))
	}
	if got := math.Float32bits(Dot(a.pointer(), b.pointer(), a.n)); got != uint32(want) {
		t.Fatalf("the dot product of %d is %#x, want %#x", a.n, got, want)
	}
}

func testQuantize(t *testing.T, n, misalign int, r *rand.Rand) {
	t.Helper()
	const scale = float32(0.013)
	e := newVector(tensor.Float32, n, misalign)
	for i := range n {
		x := float32(r.NormFloat64()) / 3
		if r.IntN(4) == 0 {
			x = float32(r.IntN(255)-127) + 0.5 // rounds to even
		}
		e.set(i, uint64(math.Float32bits(max(-127, min(127, x))*scale)))
	}
	inverse := 1 / scale
	want, wantRest := newVector(tensor.Int8, n, 1), newVector(tensor.Float32, n, 1)
	for i := range n {
		x := math.Float32frombits(uint32(e.get(i)))
		rounded := float32(math.RoundToEven(float64(x * inverse)))
		want.set(i, uint64(uint8(int8(rounded))))
		wantRest.set(i, uint64(math.Float32bits(x-float32(rounded*scale))))
	}
	plain, plainRest := newVector(tensor.Int8, n, 2), e.clone()
	quantizePlain(plain.pointer(), plainRest.pointer(), n, inverse, scale)
	same(t, "plain integers", want, plain)
	same(t, "their plain rest", wantRest, plainRest)
	fast := newVector(tensor.Int8, n, misalign)
	Quantize(fast.pointer(), e.pointer(), n, inverse, scale)
	same(t, "integers", want, fast)
	same(t, "their rest", wantRest, e)
}

func testDequantize(t *testing.T, n, misalign int, r *rand.Rand) {
	t.Helper()
	q := newVector(tensor.Int8, n, misalign)
	dst := newVector(tensor.Float32, n, misalign)
	q.fill(r)
	dst.fill(r)
	for _, scale := range []float32{0, 0.25, -3e38, float32(math.Inf(-1)), math.Float32frombits(0xffa00001)} {
		want, sum := newVector(tensor.Float32, n, 0), newVector(tensor.Float32, n, 0)
		for i := range n {
			x := uint64(math.Float32bits(float32(int8(q.get(i)))))
			want.set(i, slowReduce(Prod, tensor.Float32, x, uint64(math.Float32bits(scale))))
			sum.set(i, slowReduce(Sum, tensor.Float32, dst.get(i), want.get(i)))
		}
		plain, fast := newVector(tensor.Float32, n, 3), newVector(tensor.Float32, n, misalign)
		dequantizePlain(plain.pointer(), q.pointer(), n, scale)
		Dequantize(fast.pointer(), q.pointer(), n, scale)
		same(t, "plain values", want, plain)
		same(t, "values", want, fast)
		plain, fast = dst.clone(), dst.clone()
		addDequantizedPlain(plain.pointer(), q.pointer(), n, scale)
		AddDequantized(fast.pointer(), q.pointer(), n, scale)
		same(t, "the plain sum of values", sum, plain)
		same(t, "the sum of values", sum, fast)
	}
}

func BenchmarkVectorLoops(b *testing.B) {
	for _, n := range []int{256, 4096} {
		p := vectors(3, 4*n)
		for name, f := range map[string]func(){
			"add_largest":     func() { AddLargest(p[0], p[1], p[2], n) },
			"quantize":        func() { Quantize(p[0], p[1], n, 1, 0) },
			"dequantize":      func() { Dequantize(p[0], p[1], n, 1) },
			"add_dequantized": func() { AddDequantized(p[0], p[1], n, 1) },
			"add_scaled":      func() { AddScaled(p[0], p[1], p[2], n, 0) },
			"dot":             func() { Dot(p[0], p[1], n) },
		} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.SetBytes(int64(4 * n))
				for b.Loop() {
					f()
				}
			})
		}
	}
}
