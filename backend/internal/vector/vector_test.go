package vector

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
)

// plainLoops has the loops without assembly.
func plainLoops() map[key]Loop {
	m := map[key]Loop{}
	addNumbers[float32](m, Float32)
	addNumbers[int32](m, Int32)
	addFloats[float32](m, Float32)
	addFunctions(m)
	return m
}

func sample(r *rand.Rand) float32 {
	switch r.IntN(4) {
	case 0:
		return math.Float32frombits(r.Uint32())
	case 1:
		return []float32{
			0, float32(math.Copysign(0, -1)), float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN()), 1, -1, 1e-40,
			88.8, -103.5, 0.625, 3.9,
		}[r.IntN(12)]
	}
	return float32(r.NormFloat64() * 10)
}

// TestAssembly compares every loop with its plain form, at every length and alignment.
func TestAssembly(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for k, plain := range plainLoops() {
		fast := loops[k]
		for n := range 60 {
			var in [3]unsafe.Pointer
			memory := make([][]float32, 3)
			for i := range in {
				memory[i] = make([]float32, n+4)
				for j := range memory[i] {
					memory[i][j] = sample(r)
				}
				in[i] = unsafe.Pointer(&memory[i][i+1])
			}
			for i := range memory {
				for j := range memory[i] {
					if k.in != Bool && (k.name != "Where" || i > 0) {
						break
					}
					memory[i][j] = math.Float32frombits(mask(r.IntN(2) == 0))
				}
			}
			if k.in.Bytes() != 4 {
				continue
			}
			want, got := make([]uint64, n+2), make([]uint64, n+2)
			for i := range want {
				want[i], got[i] = 7, 7
			}
			plain(unsafe.Pointer(&want[1]), &in, n)
			fast(unsafe.Pointer(&got[1]), &in, n)
			for i := range want {
				a, b := *(*[2]float32)(unsafe.Pointer(&want[i])), *(*[2]float32)(unsafe.Pointer(&got[i]))
				for j := range a {
					if math.Float32bits(a[j]) != math.Float32bits(b[j]) && !(a[j] != a[j] && b[j] != b[j]) && k.out != Float64 {
						t.Fatalf("%v of %d elements: got %v (%08x), want %v (%08x), of %v, %v", k, n, b[j], math.Float32bits(b[j]), a[j],
							math.Float32bits(a[j]), memory[0], memory[1])
					}
				}
			}
		}
	}
}

// TestFunctions compares the functions of float32 with those of float64.
func TestFunctions(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, f := range []struct {
		name               string
		exact              func(float64) float64
		relative, absolute float64
	}{
		{"Exp", math.Exp, 3e-7, 1e-44},
		{"Log", math.Log, 3e-7, 1e-7},
		{"Tanh", math.Tanh, 4e-7, 0},
		{"Logistic", func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }, 5e-7, 1e-38},
		{"Erf", math.Erf, 0, 4e-7},
	} {
		for range 200_000 {
			x := sample(r)
			var got float32
			in := [3]unsafe.Pointer{unsafe.Pointer(&x)}
			Lookup(f.name, Float32, Float32)(unsafe.Pointer(&got), &in, 1)
			want := f.exact(float64(x))
			if math.IsNaN(want) != (got != got) {
				t.Fatalf("%s(%v) = %v, want %v", f.name, x, got, want)
			}
			if math.IsInf(float64(float32(want)), 0) || want > math.MaxFloat32 {
				if float64(got) != float64(float32(want)) {
					t.Fatalf("%s(%v) = %v, want %v", f.name, x, got, want)
				}
				continue
			}
			if e := math.Abs(float64(got) - want); e > f.absolute+f.relative*math.Abs(want) {
				t.Fatalf("%s(%v) = %v, want %v", f.name, x, got, want)
			}
		}
	}
}

func TestReduce(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, columns := range []int{1, 2, 3, 10, 31, 32, 33, 63, 64, 100, 1000} {
		rows := 3
		src, dst := make([]float32, rows*columns), make([]float32, rows)
		for i := range src {
			src[i] = float32(r.NormFloat64())
		}
		for _, kind := range []Reduction{Sum, Largest, Smallest} {
			Reduce(kind, Float32, unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), rows, columns)
			for i, got := range dst {
				row := src[i*columns : (i+1)*columns]
				sum, least, most := 0.0, row[0], row[0]
				for _, v := range row {
					sum, least, most = sum+float64(v), min(least, v), max(most, v)
				}
				if want := []float64{sum, float64(most), float64(least)}[kind]; math.Abs(float64(got)-want) > 1e-3 ||
					kind != Sum && float64(got) != want {
					t.Fatalf("reduction %d of %d columns is %v, want %v", kind, columns, got, want)
				}
			}
		}
		// The definition, without assembly.
		Reduce(Sum, Float32, unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), rows, columns)
		for i, got := range dst {
			var part [32]float32
			for j, v := range src[i*columns : (i+1)*columns] {
				part[j%32] += v
			}
			for half := 16; half > 0; half /= 2 {
				for j := range half {
					part[j] += part[j+half]
				}
			}
			if got != part[0] {
				t.Fatalf("the sum of %d columns is %v, want %v", columns, got, part[0])
			}
		}
	}
}

// TestReduceAssembly compares reductions with the definition, of any numbers.
func TestReduceAssembly(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	for n := range 300 {
		row := make([]float32, n+1)[1:]
		for i := range row {
			row[i] = sample(r)
		}
		for _, kind := range []Reduction{Sum, Largest, Smallest} {
			if n == 0 {
				continue
			}
			part := make([]float32, lanes)
			first := 0
			if kind != Sum {
				first = copy(part, row)
			}
			for i, v := range row[first:] {
				combine(kind, part[i%lanes:], []float32{v})
			}
			live := min(n, lanes)
			if kind == Sum {
				live = lanes
			}
			for half := lanes / 2; half > 0; half /= 2 {
				for i := half; i < live; i++ {
					combine(kind, part[i-half:], part[i:i+1])
				}
				live = min(live, half)
			}
			got := float32(0)
			Reduce(kind, Float32, unsafe.Pointer(&got), unsafe.Pointer(&row[0]), 1, n)
			if want := part[0]; math.Float32bits(got) != math.Float32bits(want) && (got == got || want == want) {
				t.Fatalf("reduction %d of %d numbers is %v, want %v: %v", kind, n, got, want, row)
			}
		}
	}
}

// TestRows compares reductions of rows and of columns, and repeated elements, with the plain forms: all numbers, with
// guards around the results.
func TestRows(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	same := func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b }
	for columns := range 140 {
		for _, rows := range []int{1, 2, 5} {
			src := make([]float32, rows*columns+1)[1:]
			for i := range src {
				src[i] = sample(r)
			}
			for _, kind := range []Reduction{Sum, Largest, Smallest} {
				dst, from := make([]float32, columns+2), unsafe.Pointer(unsafe.SliceData(src))
				for i := range dst {
					dst[i] = sample(r)
				}
				want := slices.Clone(dst)
				for i := range rows {
					combine(kind, want[1:columns+1], src[i*columns:(i+1)*columns])
				}
				ReduceRows(kind, Float32, unsafe.Pointer(&dst[1]), from, rows, 4*columns, columns)
				if !slices.EqualFunc(dst, want, same) {
					t.Fatalf("reduction %d of %d rows of %d columns to a row is %v, want %v", kind, rows, columns, dst, want)
				}
				if columns == 0 {
					continue
				}
				dst = make([]float32, rows+2)
				want = slices.Clone(dst)
				for i := range rows {
					want[i+1] = reduceRow(kind, src[i*columns:(i+1)*columns])
				}
				Reduce(kind, Float32, unsafe.Pointer(&dst[1]), from, rows, columns)
				if !slices.EqualFunc(dst, want, same) {
					t.Fatalf("reduction %d of %d rows of %d columns is %v, want %v", kind, rows, columns, dst, want)
				}
			}
			dst := make([]float32, rows*columns+2)
			want := slices.Clone(dst)
			for i := range rows * columns {
				want[i+1] = src[i/columns]
			}
			Spread(unsafe.Pointer(&dst[1]), unsafe.Pointer(unsafe.SliceData(src)), rows, columns, 4)
			if !slices.EqualFunc(dst, want, same) {
				t.Fatalf("%d elements repeated in %d columns are %v, want %v", rows, columns, dst, want)
			}
		}
	}
}

// TestScatterExtreme compares with the definition, with ties and NaNs.
func TestScatterExtreme(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for n := range 40 {
		for _, smallest := range []bool{false, true} {
			const rows = 5
			from, add := make([]float32, rows*n+1), make([]float32, n+1)
			places := []int{3 * n * 4, 0, 4 * n * 4}
			for i := range from {
				from[i] = []float32{1, 2, 3, float32(math.NaN()), float32(math.Inf(1)), -1}[r.IntN(6)]
			}
			for i := range add {
				add[i] = sample(r)
			}
			want, got := make([]float32, len(from)), make([]float32, len(from))
			for i := range n {
				best := places[0]/4 + i
				for _, p := range places[1:] {
					x, y := from[p/4+i], from[best]
					if x != x || smallest && x < y || !smallest && x > y {
						best = p/4 + i
					}
				}
				want[best] += add[i]
			}
			ScatterExtreme[float32](smallest, unsafe.Pointer(&got[0]), unsafe.Pointer(&from[0]), places,
				unsafe.Pointer(&add[0]), n)
			for i := range want {
				if want[i] != got[i] && (want[i] == want[i] || got[i] == got[i]) {
					t.Fatalf("%d numbers, smallest %v: element %d is %v, want %v", n, smallest, i, got[i], want[i])
				}
			}
		}
	}
}
