//go:build goexperiment.simd && amd64

package fused

import (
	"fmt"
	"math"
	"slices"
	"testing"
)

// TestVectorsKeepBits checks that the vector loops give the bits of the plain ones.
func TestVectorsKeepBits(t *testing.T) {
	if !hasVectors {
		t.Skip("this processor has no AVX2")
	}
	gelus := []*Gelu{
		{
			Limit: 4.76, P: [5]float32{0.4, 0.03, 0.004}, Q: [6]float32{1, 0.24, 0.025, 0.0013},
			Slope: [4]float32{1, 0.02, 1e-4},
		},
		{
			Limit: 5, P: [5]float32{0.4, 0.04, 0.004, 2e-4, 5e-6}, Q: [6]float32{1, 0.26, 0.03, 1e-3, 7e-5, 4e-7},
			Slope: [4]float32{0, 0, 1.6, 0.2},
		},
	}
	const rows = 3
	for _, n := range []int{1, 7, 8, 9, 31, 64} {
		x, v, gain, offset := random[float32](1, rows*n), random[float32](2, rows*n), random[float32](3, n),
			random[float32](4, n)
		results := func() []float32 {
			var list []float32
			out := func(n int) []float32 { return slices.Repeat([]float32{7}, n) }
			keep := func(parts ...[]float32) { list = append(list, slices.Concat(parts...)...) }
			for _, causal := range []bool{false, true} {
				p, ds := out(rows*n), out(rows*n)
				Softmax(p, x, n, 3, causal)
				SoftmaxGradient(ds, p, v, n, 3, causal)
				keep(p, ds)
			}
			y, moments, dx, dgain, doffset := out(rows*n), out(2*rows), out(rows*n), out(n), out(n)
			LayerNorm(y, moments, x, gain, offset, 1e-5)
			LayerNormGradient(dx, dgain, doffset, x, gain, moments, v)
			sums := out(n)
			ColumnSums(sums, x)
			keep(y, moments, dx, dgain, doffset, sums)
			for _, g := range gelus {
				wide := append(slices.Clone(x), 0, -100, 100, 1e30, 3, 2, 1, -1)
				y, dx := out(len(wide)), out(len(wide))
				g.Apply(y, wide)
				g.Gradient(dx, wide, append(slices.Clone(v), 1, 2, 3, 4, 5, 6, 7, 8))
				keep(y, dx)
			}
			return list
		}
		got := results()
		hasVectors = false
		want := results()
		hasVectors = true
		for i := range want {
			if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
				t.Fatalf("with %d columns, number %d is %v by vectors, want %v", n, i, got[i], want[i])
			}
		}
	}
}

// TestVectorsKeepNaN checks that a NaN in the input of GELU is one in the output.
func TestVectorsKeepNaN(t *testing.T) {
	g := &Gelu{Limit: 4.76, P: [5]float32{0.4}, Q: [6]float32{1}, Slope: [4]float32{1}}
	x, y := slices.Repeat([]float32{float32(math.NaN())}, lanes), make([]float32, lanes)
	for _, f := range []func(){func() { g.Apply(y, x) }, func() { g.Gradient(y, x, x) }} {
		if f(); y[0] == y[0] {
			t.Errorf("%v, want NaN", y)
		}
	}
}

func BenchmarkVectors(b *testing.B) {
	const rows, columns = 1024, 512
	x, v, y := random[float32](1, rows*columns), random[float32](2, rows*columns), make([]float32, rows*columns)
	gain, offset, moments := random[float32](3, columns), random[float32](4, columns), make([]float32, 2*rows)
	g := &Gelu{Limit: 4.76, P: [5]float32{0.4}, Q: [6]float32{1}, Slope: [4]float32{1}}
	for _, f := range []struct {
		name string
		run  func()
	}{
		{"gelu", func() { g.Apply(y, x) }},
		{"gelu's gradient", func() { g.Gradient(y, x, v) }},
		{"softmax", func() { Softmax(y, x, 64, 1, true) }},
		{"softmax's gradient", func() { SoftmaxGradient(y, x, v, 64, 1, true) }},
		{"norm", func() { LayerNorm(y, moments, x, gain, offset, 1e-5) }},
		{"norm's gradient", func() { LayerNormGradient(y, gain, offset, x, gain, moments, v) }},
		{"transpose", func() { Transpose(y, x, rows, columns) }},
		{"column sums", func() { ColumnSums(gain, x) }},
		{"merge", func() { Merge(y, [][]float32{x}, 64, 16, 32) }},
	} {
		for _, vectors := range []bool{true, false} {
			b.Run(fmt.Sprintf("%s/vectors=%v", f.name, vectors), func(b *testing.B) {
				was := hasVectors
				hasVectors = hasVectors && vectors
				defer func() { hasVectors = was }()
				for b.Loop() {
					f.run()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/rows/columns, "ns/element")
			})
		}
	}
}
