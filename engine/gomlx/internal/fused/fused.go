// Package fused has loops in Go for what takes the Go backend many operations, each of which reads and writes its
// operands once. With GOEXPERIMENT=simd, those of float32 use vector instructions where the processor has AVX2. The
// results have the same bits with and without them.
//
// Matrices are in row-major order. A destination must not overlap a source.
package fused

import "math"

// Float is the types of elements.
type Float interface{ float32 | float64 }

// lanes is the number of partial sums of a sum over a row: element i is added to sum i mod lanes.
const lanes = 8

// total adds partial sums.
func total[T Float](s *[lanes]T) T {
	return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
}

// Transpose writes the transpose of each of the matrices of the given rows and columns in src to dst.
func Transpose[T Float](dst, src []T, rows, columns int) {
	const tile = 16 // a cache line of float32
	for n := rows * columns; n > 0 && len(src) >= n; dst, src = dst[n:], src[n:] {
		for i := 0; i < rows; i += tile {
			high := min(i+tile, rows)
			for j := range columns {
				line := dst[j*rows+i : j*rows+high]
				at := i*columns + j
				for k := range line {
					line[k] = src[at]
					at += columns
				}
			}
		}
	}
}

// ColumnSums writes the sums of the columns of src, a matrix with as many columns as dst has elements.
func ColumnSums[T Float](dst, src []T) {
	clear(dst)
	for n := len(dst); n > 0 && len(src) >= n; src = src[n:] {
		add(dst, src[:n])
	}
}

// add adds src to dst.
func add[T Float](dst, src []T) {
	for i := addVector(dst, src); i < len(dst); i++ {
		dst[i] += src[i]
	}
}

// Split cuts the columns of src into as many parts as there are destinations, and each part into heads of the given
// width. src has the shape (rows, positions, parts, heads, width), a destination (rows, heads, positions, width).
func Split[T Float](dst [][]T, src []T, positions, heads, width int) {
	eachHead(len(dst), len(src), positions, heads, width, func(part, at, from int) {
		copy(dst[part][at:at+width], src[from:from+width])
	})
}

// Merge is the inverse of Split.
func Merge[T Float](dst []T, src [][]T, positions, heads, width int) {
	eachHead(len(src), len(dst), positions, heads, width, func(part, at, from int) {
		copy(dst[from:from+width], src[part][at:at+width])
	})
}

// eachHead calls f for each vector of Split with its part, its position in the part, and that in the whole.
func eachHead(parts, n, positions, heads, width int, f func(part, at, from int)) {
	from := 0
	for row := 0; from < n; row++ {
		for position := range positions {
			for part := range parts {
				for head := range heads {
					f(part, ((row*heads+head)*positions+position)*width, from)
					from += width
				}
			}
		}
	}
}

// Softmax writes the softmax of scale·scores to p, for each row of positions elements. If causal is set, row i of
// every positions rows has i+1 elements, and zeros after them. scale must be positive.
func Softmax[T Float](p, scores []T, positions int, scale T, causal bool) {
	eachRow(len(p), positions, causal, func(from, n int) {
		softmax(p[from:from+n], scores[from:from+n], scale)
		clear(p[from+n : from+positions])
	})
}

// SoftmaxGradient writes the gradient of Softmax with respect to scores to ds, for its output p with adjoint dp.
func SoftmaxGradient[T Float](ds, p, dp []T, positions int, scale T, causal bool) {
	eachRow(len(p), positions, causal, func(from, n int) {
		ds, p, dp := ds[from:from+positions], p[from:from+n], dp[from:from+n]
		var sums [lanes]T
		for i := dotVector(&sums, p, dp); i < n; i++ {
			sums[i%lanes] += T(p[i] * dp[i])
		}
		sum := total(&sums)
		for i := softmaxGradientVector(ds, p, dp, sum, scale); i < n; i++ {
			ds[i] = p[i] * (dp[i] - sum) * scale
		}
		clear(ds[n:])
	})
}

// eachRow calls f with the start and the number of elements of each row.
func eachRow(n, positions int, causal bool, f func(from, n int)) {
	for row := 0; row*positions < n; row++ {
		length := positions
		if causal {
			length = row%positions + 1
		}
		f(row*positions, length)
	}
}

func softmax[T Float](p, scores []T, scale T) {
	largest := scores[0]
	for i := maxVector(&largest, scores); i < len(scores); i++ {
		largest = max(largest, scores[i])
	}
	largest *= scale
	var sums [lanes]T
	for i := expVector(&sums, p, scores, scale, largest); i < len(p); i++ {
		p[i] = exp(T(scores[i]*scale) - largest)
		sums[i%lanes] += p[i]
	}
	inverse := 1 / total(&sums)
	for i := scaleVector(p, inverse); i < len(p); i++ {
		p[i] *= inverse
	}
}

// Coefficients of exp for float32: Cephes' expf.
const (
	lowestExp = -87
	log2E     = 1.44269504088896341
	ln2High   = 0.693359375
	ln2Low    = -2.12194440e-4
	exp7      = 1.9875691500e-4
	exp6      = 1.3981999507e-3
	exp5      = 8.3334519073e-3
	exp4      = 4.1665795894e-2
	exp3      = 1.6666665459e-1
	exp2      = 5.0000001201e-1
)

// exp is eˣ for x ≤ 0. For float32 it is at least e^lowestExp, about 1.6e-38.
func exp[T Float](x T) T {
	var y any = x
	if y, ok := y.(float32); ok {
		return T(exp32(y))
	}
	return T(math.Exp(float64(x)))
}

func exp32(x float32) float32 {
	x = max(x, lowestExp)
	n := float32(math.RoundToEven(float64(float32(x * log2E))))
	x = x - float32(n*ln2High) - float32(n*ln2Low)
	y := float32(float32(x*exp7)+exp6) * x
	y = float32(y+exp5) * x
	y = float32(y+exp4) * x
	y = float32(y+exp3) * x
	y = float32(y+exp2) * float32(x*x)
	y = float32(float32(y+x) + 1)
	return y * math.Float32frombits(uint32(int32(n)+127)<<23)
}

// LayerNorm normalises each row of x to mean 0 and variance 1, and applies gain and offset. moments receives the mean
// of each row and one over its standard deviation, with epsilon added to the variance.
func LayerNorm[T Float](y, moments, x, gain, offset []T, epsilon T) {
	n := len(gain)
	for row := 0; row*n < len(x); row++ {
		y, x := y[row*n:][:n], x[row*n:][:n]
		var sums [lanes]T
		for i := sumVector(&sums, x); i < n; i++ {
			sums[i%lanes] += x[i]
		}
		mean := total(&sums) / T(n)
		sums = [lanes]T{}
		for i := squaresVector(&sums, x, mean); i < n; i++ {
			d := x[i] - mean
			sums[i%lanes] += T(d * d)
		}
		inverse := 1 / T(math.Sqrt(float64(total(&sums)/T(n)+epsilon)))
		for i := normalizeVector(y, x, gain, offset, mean, inverse); i < n; i++ {
			y[i] = T(T(T(x[i]-mean)*inverse)*gain[i]) + offset[i]
		}
		moments[2*row], moments[2*row+1] = mean, inverse
	}
}

// LayerNormGradient writes the gradients of LayerNorm with respect to x, gain and offset, for the adjoint v of y.
func LayerNormGradient[T Float](dx, dgain, doffset, x, gain, moments, v []T) {
	n := len(gain)
	clear(dgain)
	clear(doffset)
	for row := 0; row*n < len(x); row++ {
		dx, x, v := dx[row*n:][:n], x[row*n:][:n], v[row*n:][:n]
		mean, inverse := moments[2*row], moments[2*row+1]
		var sums, along [lanes]T
		for i := normSumsVector(&sums, &along, dgain, doffset, x, gain, v, mean, inverse); i < n; i++ {
			normalized, scaled := T(T(x[i]-mean)*inverse), T(v[i]*gain[i])
			sums[i%lanes] += scaled
			along[i%lanes] += T(scaled * normalized)
			dgain[i] += T(v[i] * normalized)
			doffset[i] += v[i]
		}
		a, b := total(&sums)/T(n), total(&along)/T(n)
		for i := normGradientVector(dx, x, gain, v, mean, inverse, a, b); i < n; i++ {
			normalized, scaled := T(T(x[i]-mean)*inverse), T(v[i]*gain[i])
			dx[i] = T(T(scaled-a)-T(normalized*b)) * inverse
		}
	}
}

// Gelu is x·Φ(x), where Φ(x) - ½ is nearly x·P(x²)/Q(x²). P and Q have their coefficients in ascending order.
type Gelu struct {
	Limit float32 // below -Limit and above Limit, Φ is constant
	P     [5]float32
	Q     [6]float32

	// Slope are four coefficients of a polynomial R, for x·Φ'(x) = x/R(x²)³². If the first is 0, it is
	// x·(Slope[2] + Slope[3]·x²)·(Φ(x) - Φ(x)²).
	Slope [4]float32
}

// phi is Φ(x).
func (g *Gelu) phi(x float32) float32 {
	if x > g.Limit {
		x = g.Limit
	} else if x < -g.Limit {
		x = -g.Limit
	}
	s := x * x
	p := float32(s * g.P[4])
	p = float32(p+g.P[3]) * s
	p = float32(p+g.P[2]) * s
	p = float32(p+g.P[1]) * s
	p = float32(p + g.P[0])
	q := float32(s * g.Q[5])
	q = float32(q+g.Q[4]) * s
	q = float32(q+g.Q[3]) * s
	q = float32(q+g.Q[2]) * s
	q = float32(q+g.Q[1]) * s
	q = float32(q + g.Q[0])
	return float32(float32(x*p)/q) + 0.5
}

// Apply writes the function of x to y.
func (g *Gelu) Apply(y, x []float32) {
	for i := geluVector(g, y, x); i < len(x); i++ {
		y[i] = x[i] * g.phi(x[i])
	}
}

// Gradient writes the gradient with respect to x to dx, for the adjoint v of the output.
func (g *Gelu) Gradient(dx, x, v []float32) {
	for i := geluGradientVector(g, dx, x, v); i < len(x); i++ {
		phi, s := g.phi(x[i]), x[i]*x[i]
		var slope float32
		if g.Slope[0] == 0 {
			inner := float32(s*g.Slope[3]) + g.Slope[2]
			slope = float32(x[i]*inner) * float32(phi-float32(phi*phi))
		} else {
			r := float32(s * g.Slope[3])
			r = float32(r+g.Slope[2]) * s
			r = float32(r+g.Slope[1]) * s
			r = float32(r + g.Slope[0])
			for range 5 {
				r *= r
			}
			slope = x[i] / r
		}
		dx[i] = v[i] * float32(slope+phi)
	}
}
