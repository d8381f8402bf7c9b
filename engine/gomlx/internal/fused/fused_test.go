package fused

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// random returns n numbers of a normal distribution.
func random[T Float](seed uint64, n int) []T {
	r, x := rand.New(rand.NewPCG(seed, 1)), make([]T, n)
	for i := range x {
		x[i] = T(r.NormFloat64() * 2)
	}
	return x
}

// near fails the test if a number of got differs by more than tolerance from want.
func near[T Float](t *testing.T, what string, got []T, tolerance float64, want func(i int) float64) {
	t.Helper()
	for i, x := range got {
		if w := want(i); !(math.Abs(float64(x)-w) <= tolerance*max(1, math.Abs(w))) {
			t.Fatalf("%s[%d] is %v, want %v", what, i, x, w)
		}
	}
}

func both(t *testing.T, f32, f64 func(t *testing.T)) {
	t.Run("float32", f32)
	t.Run("float64", f64)
}

func TestTranspose(t *testing.T) {
	for _, size := range [][3]int{{1, 1, 1}, {2, 3, 5}, {3, 16, 16}, {1, 17, 33}, {2, 40, 7}, {0, 4, 4}} {
		matrices, rows, columns := size[0], size[1], size[2]
		src, dst := random[float32](1, matrices*rows*columns), make([]float32, matrices*rows*columns)
		Transpose(dst, src, rows, columns)
		near(t, fmt.Sprint(size), dst, 0, func(at int) float64 {
			m, j, i := at/(rows*columns), at/rows%columns, at%rows
			return float64(src[(m*rows+i)*columns+j])
		})
	}
}

func TestColumnSums(t *testing.T) { both(t, testColumnSums[float32], testColumnSums[float64]) }

func testColumnSums[T Float](t *testing.T) {
	for _, columns := range []int{1, 7, 8, 19} {
		src, sums := random[T](2, 5*columns), random[T](3, columns)
		ColumnSums(sums, src)
		near(t, "sums", sums, 1e-6, func(j int) (sum float64) {
			for i := range 5 {
				sum += float64(src[i*columns+j])
			}
			return sum
		})
	}
}

func TestSplitAndMerge(t *testing.T) {
	const rows, positions, parts, heads, width = 2, 3, 3, 2, 5
	src := random[float32](4, rows*positions*parts*heads*width)
	var dst [][]float32
	for range parts {
		dst = append(dst, make([]float32, rows*heads*positions*width))
	}
	Split(dst, src, positions, heads, width)
	for part := range dst {
		near(t, "part", dst[part], 0, func(at int) float64 {
			k, position, head, row := at%width, at/width%positions, at/(width*positions)%heads, at/(width*positions*heads)
			return float64(src[(((row*positions+position)*parts+part)*heads+head)*width+k])
		})
	}
	back := make([]float32, len(src))
	Merge(back, dst, positions, heads, width)
	near(t, "merged", back, 0, func(i int) float64 { return float64(src[i]) })
}

func TestSoftmax(t *testing.T) { both(t, testSoftmax[float32], testSoftmax[float64]) }

func testSoftmax[T Float](t *testing.T) {
	const scale = 0.3
	for _, causal := range []bool{false, true} {
		for _, positions := range []int{1, 5, 8, 21} {
			n := 2 * positions * positions
			scores, dp := random[T](5, n), random[T](6, n)
			for i := range scores {
				scores[i] *= 10
			}
			length := func(row int) int {
				if causal {
					return row%positions + 1
				}
				return positions
			}
			exact := make([]float64, n)
			gradient := make([]float64, n)
			for row := range 2 * positions {
				at, sum, along := row*positions, 0.0, 0.0
				for i := range length(row) {
					exact[at+i] = math.Exp(float64(scores[at+i]) * scale)
					sum += exact[at+i]
				}
				for i := range length(row) {
					exact[at+i] /= sum
					along += exact[at+i] * float64(dp[at+i])
				}
				for i := range length(row) {
					gradient[at+i] = scale * exact[at+i] * (float64(dp[at+i]) - along)
				}
			}
			p, ds := random[T](7, n), random[T](8, n)
			Softmax(p, scores, positions, scale, causal)
			near(t, "p", p, 1e-6, func(i int) float64 { return exact[i] })
			SoftmaxGradient(ds, p, dp, positions, scale, causal)
			near(t, "ds", ds, 2e-6, func(i int) float64 { return gradient[i] })
		}
	}
}

// TestSoftmaxOfExtremes checks rows with scores that are far apart, infinite or no number.
func TestSoftmaxOfExtremes(t *testing.T) {
	for _, n := range []int{3, 16} {
		scores, p := make([]float32, n), make([]float32, n)
		scores[1], scores[2] = 3e38, -3e38
		Softmax(p, scores, n, 0.5, false)
		near(t, "far apart", p, 1e-37, func(i int) float64 {
			if i == 1 {
				return 1
			}
			return 0
		})
		scores[2] = float32(math.Inf(-1))
		Softmax(p, scores, n, 0.5, false)
		near(t, "an infinite one", p, 1e-37, func(i int) float64 {
			if i == 1 {
				return 1
			}
			return 0
		})
		scores[0] = float32(math.NaN())
		Softmax(p, scores, n, 0.5, false)
		for i, x := range p {
			if x == x {
				t.Errorf("with a NaN, p[%d] is %v", i, x)
			}
		}
	}
}

func TestLayerNorm(t *testing.T) { both(t, testLayerNorm[float32], testLayerNorm[float64]) }

func testLayerNorm[T Float](t *testing.T) {
	const rows, epsilon = 4, 1e-3
	for _, n := range []int{1, 6, 8, 27} {
		x, v, gain, offset := random[T](1, rows*n), random[T](2, rows*n), random[T](3, n), random[T](4, n)
		y, dx, moments := make([]T, rows*n), make([]T, rows*n), make([]T, 2*rows)
		dgain, doffset := random[T](5, n), random[T](6, n)
		LayerNorm(y, moments, x, gain, offset, epsilon)
		LayerNormGradient(dx, dgain, doffset, x, gain, moments, v)
		// The derivative of Σ v·y with respect to x, from differences in float64.
		loss := func(change int, by float64) (sum float64) {
			for row := range rows {
				at := func(i int) float64 {
					if i += row * n; i == change {
						return float64(x[i]) + by
					}
					return float64(x[row*n:][i%n])
				}
				mean, variance := 0.0, 0.0
				for i := range n {
					mean += at(i) / float64(n)
				}
				for i := range n {
					variance += (at(i) - mean) * (at(i) - mean) / float64(n)
				}
				for i := range n {
					sum += float64(v[row*n+i]) * ((at(i)-mean)/math.Sqrt(variance+epsilon)*float64(gain[i]) + float64(offset[i]))
				}
			}
			return sum
		}
		sum := 0.0
		for i := range y {
			sum += float64(y[i]) * float64(v[i])
		}
		if want := loss(-1, 0); math.Abs(sum-want) > 1e-4 {
			t.Errorf("%d columns: Σ v·y is %v, want %v", n, sum, want)
		}
		near(t, "dx", dx, 2e-4, func(i int) float64 { return (loss(i, 1e-5) - loss(i, -1e-5)) / 2e-5 })
		near(t, "dgain", dgain, 1e-4, func(j int) (sum float64) {
			for i := j; i < rows*n; i += n {
				sum += float64(v[i]) * float64(y[i]-offset[j]) / float64(gain[j])
			}
			return sum
		})
		near(t, "doffset", doffset, 1e-5, func(j int) (sum float64) {
			for i := j; i < rows*n; i += n {
				sum += float64(v[i])
			}
			return sum
		})
	}
}
