package vector

import "math"

// addFunctions adds the functions of float32 and float64.
func addFunctions(m map[key]Loop) {
	for name, f := range map[string]func(a float64) float64{
		"Floor": math.Floor, "Ceil": math.Ceil, "Round": math.RoundToEven, "Sqrt": math.Sqrt, "Log1p": math.Log1p,
		"Expm1": math.Expm1, "Sin": math.Sin, "Cos": math.Cos, "Exp": math.Exp, "Log": math.Log, "Tanh": math.Tanh,
		"Erf":      math.Erf,
		"Rsqrt":    func(a float64) float64 { return 1 / math.Sqrt(a) },
		"Logistic": func(a float64) float64 { return 1 / (1 + math.Exp(-a)) },
	} {
		add1(m, name, Float64, f)
		add1(m, name, Float32, func(a float32) float32 { return float32(f(float64(a))) })
	}
	add2(m, "Pow", Float64, math.Pow)
	add2(m, "Pow", Float32, func(a, b float32) float32 { return float32(math.Pow(float64(a), float64(b))) })
	add1(m, "Exp", Float32, exp)
	add1(m, "Log", Float32, log)
	add1(m, "Tanh", Float32, tanh)
	add1(m, "Logistic", Float32, logistic)
	add1(m, "Erf", Float32, erf)
	add1(m, "Rsqrt", Float32, func(a float32) float32 { return 1 / float32(math.Sqrt(float64(a))) })
}

// mul rounds a product, so that the compiler does not fuse it with a sum.
func mul(a, b float32) float32 { return float32(a * b) }

// polynomial evaluates a polynomial by Horner's rule, coefficients from the highest power on.
func polynomial(x float32, coefficients ...float32) float32 {
	p := coefficients[0]
	for _, c := range coefficients[1:] {
		p = mul(p, x) + c
	}
	return p
}

func power(n int32) float32 { return math.Float32frombits(uint32(n+127) << 23) }

// clamp keeps NaN.
func clamp(x, least, most float32) float32 {
	if least > x {
		x = least
	}
	if most < x {
		x = most
	}
	return x
}

// exp is Cephes' expf, with results that are denormal or infinite.
func exp(x float32) float32 {
	switch {
	case x != x:
		return x
	case x < -104:
		return 0
	}
	c := min(x, 89)
	n := float32(math.RoundToEven(float64(mul(c, 1.44269504))))
	r := c - mul(n, 0.693359375) + mul(n, 2.12194440e-4)
	p := polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
		5.0000001201e-1)
	y := mul(mul(p, r), r) + r + 1
	i := int32(n)
	return mul(mul(y, power(i>>1)), power(i-i>>1))
}

// log is Cephes' logf.
func log(x float32) float32 {
	switch {
	case x != x || x < 0:
		return float32(math.NaN())
	case x == 0:
		return float32(math.Inf(-1))
	case math.IsInf(float64(x), 1):
		return x
	}
	s, e := x, float32(0)
	if x < 0x1p-126 {
		s, e = mul(x, 0x1p25), -25
	}
	bits := math.Float32bits(s)
	e += float32(int32(bits>>23) - 126)
	m := math.Float32frombits(bits&0x7fffff | 0x3f000000)
	if m < 0.70710678118654752440 {
		e, m = e-1, m+m
	}
	m--
	z := mul(m, m)
	y := mul(mul(polynomial(m, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
		-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1), m), z)
	y = y + mul(e, -2.12194440e-4) - mul(z, 0.5)
	return m + y + mul(e, 0.693359375)
}

// tanh is Cephes' tanhf.
func tanh(x float32) float32 {
	a := math.Float32frombits(math.Float32bits(x) & 0x7fffffff)
	if a >= 0.625 {
		y := 1 - 2/(exp(a+a)+1)
		return math.Float32frombits(math.Float32bits(y) | math.Float32bits(x)&0x80000000)
	}
	z := mul(x, x)
	p := polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
	return mul(mul(p, z), x) + x
}

func logistic(x float32) float32 { return 1 / (exp(-x) + 1) }

// erf is a rational function, with an absolute error below 4e-7, from -1 to 1: exactly so far from 0.
func erf(x float32) float32 {
	c := clamp(x, -3.832506856900711, 3.832506856900711)
	z := mul(c, c)
	p := polynomial(z, 0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145,
		1.128379143519084)
	q := polynomial(z, -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667,
		0.11098505178285362, 0.49746925110067538, 1)
	return clamp(mul(c, p)/q, -1, 1)
}
