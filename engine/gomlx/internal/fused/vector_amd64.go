//go:build goexperiment.simd

package fused

import "simd/archsimd"

type vector = archsimd.Float32x8

var hasVectors = archsimd.X86.AVX2()

// Each loop processes the elements up to a multiple of 8, and returns their number.

// whole returns the number of elements of dst that vectors process: none unless they are float32.
func whole[T Float](dst []T) (n int, slice []float32) {
	if x, ok := any(dst).([]float32); ok && hasVectors {
		return len(dst) &^ (lanes - 1), x
	}
	return 0, nil
}

// numbers is x, which is known to be of float32.
func numbers[T Float](x []T) []float32 { return any(x).([]float32) }

func broadcast[T Float](x T) vector { return archsimd.BroadcastFloat32x8(float32(x)) }

func load(x []float32, i int) vector { return archsimd.LoadFloat32x8Slice(x[i:]) }

// put stores partial sums.
func put[T Float](sums *[lanes]T, v vector) { v.StoreSlice(numbers(sums[:])) }

func addVector[T Float](dst, src []T) int {
	n, d := whole(dst)
	if n == 0 {
		return 0
	}
	s := numbers(src)
	for i := 0; i < n; i += lanes {
		load(d, i).Add(load(s, i)).StoreSlice(d[i:])
	}
	return n
}

func dotVector[T Float](sums *[lanes]T, a, b []T) int {
	n, x := whole(a)
	if n == 0 {
		return 0
	}
	y, sum := numbers(b), vector{}
	for i := 0; i < n; i += lanes {
		sum = sum.Add(load(x, i).Mul(load(y, i)))
	}
	put(sums, sum)
	return n
}

func softmaxGradientVector[T Float](ds, p, dp []T, sum, scale T) int {
	n, _ := whole(p)
	if n == 0 {
		return 0
	}
	d, x, y, s, c := numbers(ds), numbers(p), numbers(dp), broadcast(sum), broadcast(scale)
	for i := 0; i < n; i += lanes {
		load(x, i).Mul(load(y, i).Sub(s)).Mul(c).StoreSlice(d[i:])
	}
	return n
}

func maxVector[T Float](largest *T, x []T) int {
	n, s := whole(x)
	if n == 0 {
		return 0
	}
	top := load(s, 0)
	for i := lanes; i < n; i += lanes {
		top = top.Max(load(s, i))
	}
	var list [lanes]float32
	top.Store(&list)
	for _, y := range list {
		*largest = max(*largest, T(y))
	}
	return n
}

func expVector[T Float](sums *[lanes]T, p, scores []T, scale, largest T) int {
	if _, ok := any(p).([]float32); !ok || !hasVectors {
		return 0
	}
	d, s, c, top, sum := numbers(p), numbers(scores), broadcast(scale), broadcast(largest), vector{}
	lowest, toBits, high, low := broadcast[float32](lowestExp), broadcast[float32](log2E), broadcast[float32](ln2High),
		broadcast[float32](ln2Low)
	c7, c6, c5, c4 := broadcast[float32](exp7), broadcast[float32](exp6), broadcast[float32](exp5),
		broadcast[float32](exp4)
	c3, c2, one := broadcast[float32](exp3), broadcast[float32](exp2), broadcast[float32](1)
	bias := archsimd.BroadcastInt32x8(127)
	var rest [lanes]float32 // the last elements, less than a vector
	whole := len(d) &^ (lanes - 1)
	copy(rest[:], s[whole:])
	for i := 0; i < len(d); i += lanes {
		var x vector
		if i < whole {
			x = load(s, i)
		} else {
			x = archsimd.LoadFloat32x8(&rest)
		}
		x = lowest.Max(x.Mul(c).Sub(top)) // a NaN stays
		k := x.Mul(toBits).RoundToEven()
		x = x.Sub(k.Mul(high)).Sub(k.Mul(low))
		y := x.Mul(c7).Add(c6).Mul(x).Add(c5).Mul(x).Add(c4).Mul(x).Add(c3).Mul(x).Add(c2).Mul(x.Mul(x))
		y = y.Add(x).Add(one)
		y = y.Mul(k.ConvertToInt32().Add(bias).ShiftAllLeft(23).AsFloat32x8())
		if i < whole {
			y.StoreSlice(d[i:])
		} else {
			y.Store(&rest)
			clear(rest[copy(d[i:], rest[:]):])
			y = archsimd.LoadFloat32x8(&rest)
		}
		sum = sum.Add(y)
	}
	put(sums, sum)
	return len(d)
}

func scaleVector[T Float](x []T, factor T) int {
	n, d := whole(x)
	f := broadcast(factor)
	for i := 0; i < n; i += lanes {
		load(d, i).Mul(f).StoreSlice(d[i:])
	}
	return n
}

func sumVector[T Float](sums *[lanes]T, x []T) int {
	n, s := whole(x)
	if n == 0 {
		return 0
	}
	sum := vector{}
	for i := 0; i < n; i += lanes {
		sum = sum.Add(load(s, i))
	}
	put(sums, sum)
	return n
}

func squaresVector[T Float](sums *[lanes]T, x []T, mean T) int {
	n, s := whole(x)
	if n == 0 {
		return 0
	}
	sum, m := vector{}, broadcast(mean)
	for i := 0; i < n; i += lanes {
		d := load(s, i).Sub(m)
		sum = sum.Add(d.Mul(d))
	}
	put(sums, sum)
	return n
}

func normalizeVector[T Float](y, x, gain, offset []T, mean, inverse T) int {
	n, d := whole(y)
	if n == 0 {
		return 0
	}
	s, g, o, m, f := numbers(x), numbers(gain), numbers(offset), broadcast(mean), broadcast(inverse)
	for i := 0; i < n; i += lanes {
		load(s, i).Sub(m).Mul(f).Mul(load(g, i)).Add(load(o, i)).StoreSlice(d[i:])
	}
	return n
}

func normSumsVector[T Float](sums, along *[lanes]T, dgain, doffset, x, gain, v []T, mean, inverse T) int {
	n, dg := whole(dgain)
	if n == 0 {
		return 0
	}
	do, xs, gs, vs := numbers(doffset), numbers(x), numbers(gain), numbers(v)
	m, f, a, b := broadcast(mean), broadcast(inverse), vector{}, vector{}
	for i := 0; i < n; i += lanes {
		v := load(vs, i)
		normalized, scaled := load(xs, i).Sub(m).Mul(f), v.Mul(load(gs, i))
		a, b = a.Add(scaled), b.Add(scaled.Mul(normalized))
		load(dg, i).Add(v.Mul(normalized)).StoreSlice(dg[i:])
		load(do, i).Add(v).StoreSlice(do[i:])
	}
	put(sums, a)
	put(along, b)
	return n
}

func normGradientVector[T Float](dx, x, gain, v []T, mean, inverse, a, b T) int {
	n, d := whole(dx)
	if n == 0 {
		return 0
	}
	xs, gs, vs := numbers(x), numbers(gain), numbers(v)
	m, f, av, bv := broadcast(mean), broadcast(inverse), broadcast(a), broadcast(b)
	for i := 0; i < n; i += lanes {
		normalized, scaled := load(xs, i).Sub(m).Mul(f), load(vs, i).Mul(load(gs, i))
		scaled.Sub(av).Sub(normalized.Mul(bv)).Mul(f).StoreSlice(d[i:])
	}
	return n
}

// geluVectors are the coefficients of a Gelu.
type geluVectors struct {
	low, high, half        vector
	p0, p1, p2, p3, p4     vector
	q0, q1, q2, q3, q4, q5 vector
}

func (g *Gelu) vectors() geluVectors {
	return geluVectors{
		broadcast(-g.Limit), broadcast(g.Limit), broadcast[float32](0.5),
		broadcast(g.P[0]), broadcast(g.P[1]), broadcast(g.P[2]), broadcast(g.P[3]), broadcast(g.P[4]),
		broadcast(g.Q[0]), broadcast(g.Q[1]), broadcast(g.Q[2]), broadcast(g.Q[3]), broadcast(g.Q[4]), broadcast(g.Q[5]),
	}
}

// phi is Φ(x). A NaN stays.
func (c *geluVectors) phi(x vector) vector {
	x = c.low.Max(c.high.Min(x))
	s := x.Mul(x)
	p := s.Mul(c.p4).Add(c.p3).Mul(s).Add(c.p2).Mul(s).Add(c.p1).Mul(s).Add(c.p0)
	q := s.Mul(c.q5).Add(c.q4).Mul(s).Add(c.q3).Mul(s).Add(c.q2).Mul(s).Add(c.q1).Mul(s).Add(c.q0)
	return x.Mul(p).Div(q).Add(c.half)
}

func geluVector(g *Gelu, y, x []float32) int {
	n, d := whole(y)
	if n == 0 {
		return 0
	}
	c := g.vectors()
	for i := 0; i < n; i += lanes {
		v := load(x, i)
		v.Mul(c.phi(v)).StoreSlice(d[i:])
	}
	return n
}

func geluGradientVector(g *Gelu, dx, x, v []float32) int {
	n, d := whole(dx)
	if n == 0 {
		return 0
	}
	c := g.vectors()
	s0, s1, s2, s3 := broadcast(g.Slope[0]), broadcast(g.Slope[1]), broadcast(g.Slope[2]), broadcast(g.Slope[3])
	if g.Slope[0] == 0 {
		for i := 0; i < n; i += lanes {
			x := load(x, i)
			phi := c.phi(x)
			slope := x.Mul(x.Mul(x).Mul(s3).Add(s2)).Mul(phi.Sub(phi.Mul(phi)))
			load(v, i).Mul(slope.Add(phi)).StoreSlice(d[i:])
		}
		return n
	}
	for i := 0; i < n; i += lanes {
		x := load(x, i)
		s := x.Mul(x)
		r := s.Mul(s3).Add(s2).Mul(s).Add(s1).Mul(s).Add(s0)
		for range 5 {
			r = r.Mul(r)
		}
		load(v, i).Mul(x.Div(r).Add(c.phi(x))).StoreSlice(d[i:])
	}
	return n
}
