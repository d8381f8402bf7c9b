package product

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"
)

// numbers returns n random numbers; special ones are among them if asked for.
func numbers[T Float](r *rand.Rand, n int, special bool) []T {
	list := make([]T, n)
	for i := range list {
		list[i] = T(r.NormFloat64())
		if special && r.IntN(12) == 0 {
			hard := []float64{
				0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), 1e-40, -3e-45, 1e-310, 3e38,
				-3e38, 1e308, 1.1754944e-38,
			}
			list[i] = T(hard[r.IntN(len(hard))])
		}
	}
	return list
}

// same reports whether two numbers have the same bits, or are both NaN.
func same[T Float](a, b T) bool {
	return math.Float64bits(float64(a)) == math.Float64bits(float64(b)) || a != a && b != b
}

// reference is the definition: chains of fused multiply-adds over pieces of 256.
func reference[T Float](p *Product, c, a, b []T) {
	fma := func(x, y, z T) T { return T(math.FMA(float64(x), float64(y), float64(z))) }
	if unsafe.Sizeof(*new(T)) == 4 {
		fma = func(x, y, z T) T { return T(fma32(float32(x), float32(y), float32(z))) }
	}
	for i := range p.Rows {
		for j := range p.Columns {
			total := T(0)
			for from := 0; from < p.Depth; from += 256 {
				sum := T(0)
				for k := from; k < min(from+256, p.Depth); k++ {
					sum = fma(a[i*p.A.Row+k*p.A.Column], b[k*p.B.Row+j*p.B.Column], sum)
				}
				if from == 0 {
					total = sum
				} else {
					total += sum
				}
			}
			c[i*p.C+j] = total
		}
	}
}

// layouts are the ways in which a matrix can lie in memory.
var layouts = []string{"rows", "columns", "rows apart", "columns apart", "both apart", "one row", "one column"}

func layOut(layout string, rows, columns int) (s Strides, size int) {
	switch layout {
	case "rows":
		s = Strides{columns, 1}
	case "columns":
		s = Strides{1, rows}
	case "rows apart":
		s = Strides{columns + 5, 1}
	case "columns apart":
		s = Strides{1, rows + 3}
	case "both apart":
		s = Strides{2*columns + 1, 2}
	case "one row":
		s = Strides{0, 1}
	case "one column":
		s = Strides{1, 0}
	}
	return s, max(0, rows-1)*s.Row + max(0, columns-1)*s.Column + 1
}

// check compares a product at every level, in one part and cut in parts, with the reference. The result lies between
// guards, and the matrices do not start at multiples of a vector.
func check[T Float](t *testing.T, r *rand.Rand, m, k, n int, la, lb string, special bool) {
	t.Helper()
	sa, na := layOut(la, m, k)
	sb, nb := layOut(lb, k, n)
	p := &Product{Rows: m, Columns: n, Depth: k, A: sa, B: sb, C: n + r.IntN(3)}
	a, b := numbers[T](r, na+1, special)[1:], numbers[T](r, nb+3, special)[3:]
	size := m*p.C + 2
	want := make([]T, size)
	guard := T(12345)
	for i := range want {
		want[i] = guard
	}
	reference(p, want[1:], a, b)
	scratch := unsafe.Pointer(&make([]byte, ScratchBytes)[0])
	for _, l := range levels() {
		for _, parts := range []int{1, 3} {
			got := make([]T, size)
			for i := range got {
				got[i] = guard
			}
			for i := range parts {
				run(p, l, got[1:size-1], a, b, m*i/parts, m*(i+1)/parts, 0, n/2, scratch)
				run(p, l, got[1:size-1], a, b, m*i/parts, m*(i+1)/parts, n/2, n, scratch)
			}
			for i := range want {
				if !same(got[i], want[i]) {
					t.Fatalf("%v, %d × %d × %d, a in %s, b in %s, %d parts: element %d is %v, want %v (%T)", l, m, k, n, la, lb, parts,
						i-1, got[i], want[i], want[i])
				}
			}
		}
	}
}

func TestLikeTheDefinition(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	sizes := [][3]int{
		{1, 1, 1},
		{1, 300, 1},
		{3, 0, 4},
		{1, 7, 40},
		{1, 300, 145}, // the kernel of one row
		{5, 257, 10},
		{64, 33, 10},
		{7, 256, 33},
		{13, 255, 31},
		{14, 8, 32},
		{15, 9, 65},
		{29, 513, 17},
		{40, 64, 8},
		{600, 16, 48},
		{29, 512, 260},
	}
	for rows := 2; rows <= 15; rows++ {
		sizes = append(sizes, [3]int{rows, 9, 37})
	}
	for rows := 13; rows <= 60; rows++ { // which kernels that pack compute
		sizes = append(sizes, [3]int{rows, 9, 64})
	}
	for _, s := range sizes {
		for i, la := range layouts {
			lb := layouts[r.IntN(len(layouts))]
			check[float32](t, r, s[0], s[1], s[2], la, lb, i%2 == 1)
			check[float64](t, r, s[0], s[1], s[2], la, lb, i%2 == 1)
		}
	}
	for _, la := range []string{"columns", "columns apart"} { // several blocks are copied
		check[float32](t, r, 270, 256, 130, la, "rows", false)
		check[float64](t, r, 140, 256, 130, la, "rows", false)
	}
	for range 100 {
		la, lb := layouts[r.IntN(len(layouts))], layouts[r.IntN(len(layouts))]
		check[float32](t, r, r.IntN(40), r.IntN(300), r.IntN(70), la, lb, r.IntN(2) == 0)
		check[float64](t, r, r.IntN(40), r.IntN(300), r.IntN(70), la, lb, r.IntN(2) == 0)
	}
}

// TestBounds compares with float64.
func TestBounds(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	m, k, n := 33, 1000, 47
	p := &Product{Rows: m, Columns: n, Depth: k, A: Strides{k, 1}, B: Strides{n, 1}, C: n}
	a, b, c := numbers[float32](r, m*k, false), numbers[float32](r, k*n, false), make([]float32, m*n)
	scratch := unsafe.Pointer(&make([]byte, ScratchBytes)[0])
	Run(p, c, a, b, 0, m, 0, n, scratch)
	for i := range m {
		for j := range n {
			sum, absolute := 0.0, 0.0
			for l := range k {
				x := float64(a[i*k+l]) * float64(b[l*n+j])
				sum, absolute = sum+x, absolute+math.Abs(x)
			}
			if e := math.Abs(float64(c[i*n+j]) - sum); e > absolute*float64(k)*0x1p-24 {
				t.Fatalf("element %d, %d is %v, want %v", i, j, c[i*n+j], sum)
			}
		}
	}
}

// TestFusedMultiplyAdd compares fma32 with exact arithmetic.
func TestFusedMultiplyAdd(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	exact := func(v float32) *big.Float { return new(big.Float).SetPrec(2000).SetFloat64(float64(v)) }
	for range 300_000 {
		x, y := math.Float32frombits(r.Uint32()), math.Float32frombits(r.Uint32())
		z := math.Float32frombits(r.Uint32())
		if r.IntN(2) == 0 { // a sum that nearly lies between two float32
			z = x * y
			z = math.Float32frombits(math.Float32bits(z) ^ r.Uint32()&(1<<r.IntN(28)-1))
		}
		if s := float64(x) + float64(y) + float64(z); math.IsNaN(s) || math.IsInf(s, 0) {
			continue
		}
		want, _ := new(big.Float).SetPrec(2000).Add(new(big.Float).SetPrec(2000).Mul(exact(x), exact(y)), exact(z)).Float32()
		if got := fma32(x, y, z); got != want {
			t.Fatalf("fma32(%b, %b, %b) = %b, want %b", x, y, z, got, want)
		}
	}
}

// TestTogether computes parts of a product concurrently.
func TestTogether(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	m, k, n := 70, 520, 200
	p := &Product{Rows: m, Columns: n, Depth: k, A: Strides{k, 1}, B: Strides{1, k}, C: n}
	a, b := numbers[float32](r, m*k, false), numbers[float32](r, k*n, false)
	want := make([]float32, m*n)
	reference(p, want, a, b)
	for _, threads := range []int{1, 2, 3, 8} {
		got := make([]float32, m*n)
		var all sync.WaitGroup
		for i := range threads {
			all.Go(func() {
				scratch := unsafe.Pointer(&make([]byte, ScratchBytes)[0])
				Run(p, got, a, b, 0, m, n*i/threads, n*(i+1)/threads, scratch)
			})
		}
		all.Wait()
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("%d goroutines: element %d is %v, want %v", threads, i, got[i], want[i])
			}
		}
	}
}

func BenchmarkRun(b *testing.B) {
	for _, s := range []struct {
		m, k, n int
		la, lb  string
	}{
		{64, 784, 512, "rows", "rows"},
		{64, 512, 512, "rows", "rows"},
		{64, 512, 10, "rows", "rows"},
		{64, 512, 512, "rows", "columns"},
		{784, 64, 512, "columns", "rows"},
		{512, 64, 512, "columns", "rows"},
		{512, 64, 10, "columns", "rows"},
		{64, 10, 512, "rows", "columns"},
		{1024, 128, 512, "rows", "rows"},
		{1024, 512, 128, "rows", "columns"},
		{128, 1024, 512, "columns", "rows"},
		{64, 32, 64, "rows", "columns"},
		{64, 64, 32, "columns", "rows"},
		{1024, 1024, 1024, "rows", "rows"},
	} {
		for _, l := range levels()[1:] {
			b.Run(fmt.Sprintf("%dx%dx%d/%s/%s/%v", s.m, s.k, s.n, s.la, s.lb, l), func(b *testing.B) {
				sa, na := layOut(s.la, s.m, s.k)
				sb, nb := layOut(s.lb, s.k, s.n)
				p := &Product{Rows: s.m, Columns: s.n, Depth: s.k, A: sa, B: sb, C: s.n}
				x, y, z := make([]float32, na), make([]float32, nb), make([]float32, s.m*s.n)
				scratch := unsafe.Pointer(&make([]byte, ScratchBytes)[0])
				for b.Loop() {
					run(p, l, z, x, y, 0, s.m, 0, s.n, scratch)
				}
				b.ReportMetric(2*float64(s.m)*float64(s.k)*float64(s.n)*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GFLOP/s")
			})
		}
	}
}
