// This program writes the loops of package vector, and their declarations: for amd64 with AVX2, and with -neon for
// arm64. Run it with go generate in backend.
package main

import (
	"flag"
	"log"
	"math"
)

// vec is a vector of float32 or of integers of 32 bits, or a mask.
type vec any

// target writes instructions of a processor.
type target interface {
	// loop writes a loop over operands.
	loop(name, doc string, operands []string, f func(in []vec) vec)
	// reductions writes loops that combine the elements of rows.
	reductions()
	addRows(name string, doc ...string)
	spread(name string, doc ...string)
	scatterLargest(name string, doc ...string)
	generate() error

	bits(x uint32) vec // a vector of equal numbers
	add(a, b vec) vec
	sub(a, b vec) vec
	mul(a, b vec) vec
	div(a, b vec) vec
	and(a, b vec) vec
	or(a, b vec) vec
	xor(a, b vec) vec
	sqrt(a vec) vec
	round(a vec) vec     // to nearest even
	larger(a, b vec) vec // or NaN, or b if both are 0
	smaller(a, b vec) vec
	atMost(a, b vec) vec  // the smaller one of a and b, which are not 0; a if that is NaN
	atLeast(a, b vec) vec // the larger one
	compare(r relation, a, b vec) vec
	blend(mask, a, b vec) vec // a where the mask is set, and b elsewhere
	integer(a vec) vec        // of a float32 that is an integer
	float(a vec) vec
	equalIntegers(a, b vec) vec
	lessIntegers(a, b vec) vec
	addIntegers(a, b vec) vec
	subIntegers(a, b vec) vec
	shiftLeft(a vec, by int) vec
	shiftRight(a vec, by int) vec
	shiftRightSigned(a vec, by int) vec
}

// relation is a comparison. Those that are not named so are false if an operand is NaN.
type relation uint8

const (
	equal relation = iota
	less
	lessOrEqual
	greaterOrEqual
	different
	notEqual          // or NaN
	notLess           // or NaN
	notGreaterOrEqual // or NaN
)

func main() {
	neon := flag.String("neon", "", "write the loops for arm64, in this folder")
	flag.Parse()
	w := writer{avx2{}}
	if *neon != "" {
		w = writer{&neonTarget{folder: *neon}}
	}
	w.write()
	if err := w.generate(); err != nil {
		log.Fatal(err)
	}
}

// writer writes all loops for a target.
type writer struct{ target }

func (w writer) write() {
	w.two("add", "is a + b", w.add)
	w.two("sub", "is a - b", w.sub)
	w.two("mul", "is a · b", w.mul)
	w.two("div", "is a / b", w.div)
	w.two("larger", "is the larger one of a and b, or NaN", w.larger)
	w.two("smaller", "is the smaller one of a and b, or NaN", w.smaller)
	for _, c := range []struct {
		name string
		is   relation
	}{{"equal", equal}, {"less", less}, {"lessOrEqual", lessOrEqual}, {"notEqual", notEqual}} {
		w.two(c.name, "has all bits set where a and b compare so", func(a, b vec) vec { return w.compare(c.is, a, b) })
	}
	w.one("negate", "is -a", func(a vec) vec { return w.xor(a, w.bits(0x80000000)) })
	w.one("absolute", "is |a|", func(a vec) vec { return w.and(a, w.bits(0x7fffffff)) })
	w.one("oneWhere", "is 1 where the mask a is set, and 0 elsewhere", func(a vec) vec { return w.and(a, w.number(1)) })
	w.one("sign", "is 1 or -1 with the sign of a, or a if it is 0 or NaN", func(a vec) vec {
		return w.blend(w.compare(different, a, w.bits(0)), w.or(w.and(a, w.bits(0x80000000)), w.number(1)), a)
	})
	w.one("sqrt", "is the square root of a", w.sqrt)
	w.one("exp", "is e to the power of a", w.exp)
	w.one("log", "is the natural logarithm of a", w.log)
	w.one("tanh", "is the hyperbolic tangent of a", w.tanh)
	w.one("logistic", "is 1/(1 + exp(-a))", w.logistic)
	w.one("erf", "is the error function of a", w.erf)
	w.loop("chooseVectors", documentation("choose", "is a where the mask c is set, and b elsewhere"),
		[]string{"c", "a", "b"}, func(in []vec) vec { return w.blend(in[0], in[1], in[2]) })
	w.scatterLargest("scatterLargestVectors",
		"scatterLargestVectors adds each of n float32 to the row of to where the rows of from have the first largest",
		"element, or the last NaN. places are the first elements of the rows, in bytes. n is a multiple of 8. Neither",
		"number is 0.")
	w.reductions()
	w.two("equalIntegers", "has all bits set where the int32 a and b are equal", w.equalIntegers)
	w.two("lessIntegers", "has all bits set where the int32 a and b compare so", w.lessIntegers)
	w.addRows("addRowsVectors",
		"addRowsVectors adds rows of n float32, step bytes apart, to dst, one after another. n is a multiple of 8.",
		"Neither number is 0.")
	w.spread("spreadVectors",
		"spreadVectors repeats each of the elements of 4 bytes of a in a row of dst. columns are at least 8, and rows not",
		"0.")
}

func documentation(name, doc string) string {
	return name + "Vectors: dst " + doc + ", for n float32. n is a multiple of 8 and not 0."
}

// one writes a loop over one operand.
func (w writer) one(name, doc string, f func(a vec) vec) {
	w.loop(name+"Vectors", documentation(name, doc), []string{"a"}, func(in []vec) vec { return f(in[0]) })
}

// two writes a loop over two operands.
func (w writer) two(name, doc string, f func(a, b vec) vec) {
	w.loop(name+"Vectors", documentation(name, doc), []string{"a", "b"}, func(in []vec) vec { return f(in[0], in[1]) })
}

func (w writer) number(x float64) vec { return w.bits(math.Float32bits(float32(x))) }

// polynomial evaluates a polynomial by Horner's rule, coefficients from the highest power on.
func (w writer) polynomial(x vec, coefficients ...float64) vec {
	p := w.number(coefficients[0])
	for _, c := range coefficients[1:] {
		p = w.add(w.mul(p, x), w.number(c))
	}
	return p
}

// power is 2 to the power of an integer.
func (w writer) power(n vec) vec { return w.shiftLeft(w.addIntegers(n, w.bits(127)), 23) }

func (w writer) exp(x vec) vec {
	// Where the result is 0, it is made of another number, since products that underflow are slow. NaN stays.
	kept := w.compare(notLess, x, w.number(-104))
	c := w.atMost(w.and(x, kept), w.number(89))
	n := w.round(w.mul(c, w.number(1.44269504)))
	r := w.add(w.sub(c, w.mul(n, w.number(0.693359375))), w.mul(n, w.number(2.12194440e-4)))
	p := w.polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
		5.0000001201e-1)
	y := w.add(w.add(w.mul(w.mul(p, r), r), r), w.number(1))
	i := w.integer(n)
	half := w.shiftRightSigned(i, 1)
	rest := w.subIntegers(i, half)
	return w.and(w.mul(w.mul(y, w.power(half)), w.power(rest)), kept)
}

func (w writer) log(x vec) vec {
	tiny := w.compare(less, x, w.number(0x1p-126))
	s := w.blend(tiny, w.mul(x, w.number(0x1p25)), x)
	e := w.float(w.subIntegers(w.shiftRight(s, 23), w.bits(126)))
	e = w.sub(e, w.and(tiny, w.number(25)))
	m := w.or(w.and(s, w.bits(0x7fffff)), w.bits(0x3f000000))
	low := w.compare(less, m, w.number(0.70710678118654752440))
	e = w.sub(e, w.and(low, w.number(1)))
	m = w.sub(w.add(m, w.and(low, m)), w.number(1))
	z := w.mul(m, m)
	y := w.mul(w.mul(w.polynomial(m, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1,
		1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1), m), z)
	y = w.add(y, w.mul(e, w.number(-2.12194440e-4)))
	y = w.sub(y, w.mul(z, w.number(0.5)))
	r := w.add(w.add(m, y), w.mul(e, w.number(0.693359375)))
	r = w.blend(w.compare(equal, x, w.number(math.Inf(1))), w.number(math.Inf(1)), r)
	r = w.blend(w.compare(equal, x, w.number(0)), w.number(math.Inf(-1)), r)
	return w.or(r, w.compare(notGreaterOrEqual, x, w.number(0))) // NaN
}

func (w writer) tanh(x vec) vec {
	a := w.and(x, w.bits(0x7fffffff))
	large := w.sub(w.number(1), w.div(w.number(2), w.add(w.exp(w.add(a, a)), w.number(1))))
	large = w.or(large, w.and(x, w.bits(0x80000000)))
	z := w.mul(x, x)
	p := w.polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
	small := w.add(w.mul(w.mul(p, z), x), x)
	return w.blend(w.compare(greaterOrEqual, a, w.number(0.625)), large, small)
}

func (w writer) logistic(x vec) vec {
	return w.div(w.number(1), w.add(w.exp(w.xor(x, w.bits(0x80000000))), w.number(1)))
}

func (w writer) erf(x vec) vec {
	c := w.atMost(w.atLeast(x, w.number(-3.832506856900711)), w.number(3.832506856900711))
	z := w.mul(c, c)
	p := w.polynomial(z, 0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145,
		1.128379143519084)
	q := w.polynomial(z, -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667,
		0.11098505178285362, 0.49746925110067538, 1)
	return w.atMost(w.atLeast(w.div(w.mul(c, p), q), w.number(-1)), w.number(1))
}
