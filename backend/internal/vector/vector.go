// Package vector has loops that apply an operation to every element of short vectors, and sums of rows, with the same
// bits with and without assembly. Exponentials, logarithms and error functions of float32 are polynomials.
//
// Booleans are masks of 32 bits, all set for true, so that they have the width of float32. [Expand] and [Shrink]
// convert them from and to bytes.
package vector

import (
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Type is a type of elements.
type Type uint8

// The types.
const (
	Float32 Type = iota
	Float64
	Int32
	Int64
	Uint8
	Uint32
	Uint64
	Bool    // a mask of 32 bits
	Float16 // has conversions from and to Float32 only
	BFloat16
)

// Bytes returns the size of an element.
func (t Type) Bytes() int { return [...]int{4, 8, 4, 8, 1, 4, 8, 4, 2, 2}[t] }

// Loop computes n elements of dst from those of the operands. It may write dst while it reads an operand that starts
// there.
type Loop func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int)

// key identifies a loop: the operation, the type of its operands (of the last one for Where), and that of its result.
type key struct {
	name    string
	in, out Type
}

var loops = func() map[key]Loop {
	m := map[key]Loop{}
	addNumbers[float32](m, Float32)
	addNumbers[float64](m, Float64)
	addNumbers[int32](m, Int32)
	addNumbers[int64](m, Int64)
	addNumbers[uint8](m, Uint8)
	addNumbers[uint32](m, Uint32)
	addNumbers[uint64](m, Uint64)
	addFloats[float32](m, Float32)
	addFloats[float64](m, Float64)
	add1(m, "Neg", Int32, func(a int32) int32 { return -a })
	add1(m, "Neg", Int64, func(a int64) int64 { return -a })
	addMasks(m)
	addHalves(m)
	addFunctions(m)
	addFast(m)
	return m
}()

// Lookup returns the loop of an operation that is named as in GoMLX, or nil. in is the type of the operands: that of
// the last one for Where, whose first operand is Bool.
func Lookup(name string, in, out Type) Loop { return loops[key{name, in, out}] }

type number interface {
	float32 | float64 | int32 | int64 | uint8 | uint32 | uint64
}

func slice[T any](p unsafe.Pointer, n int) []T { return unsafe.Slice((*T)(p), n) }

func loop1[A, R any](f func(a A) R) Loop {
	return func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
		r, a := slice[R](dst, n), slice[A](in[0], n)
		for i, x := range a {
			r[i] = f(x)
		}
	}
}

func loop2[A, R any](f func(a, b A) R) Loop {
	return func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
		r, a, b := slice[R](dst, n), slice[A](in[0], n), slice[A](in[1], n)
		for i, x := range a {
			r[i] = f(x, b[i])
		}
	}
}

func add1[T any](m map[key]Loop, name string, t Type, f func(a T) T) { m[key{name, t, t}] = loop1(f) }

func add2[T any](m map[key]Loop, name string, t Type, f func(a, b T) T) {
	m[key{name, t, t}] = loop2(f)
}

func mask(b bool) uint32 {
	if b {
		return ^uint32(0)
	}
	return 0
}

// addNumbers adds what all numbers have.
func addNumbers[T number](m map[key]Loop, t Type) {
	add2(m, "Add", t, func(a, b T) T { return a + b })
	add2(m, "Sub", t, func(a, b T) T { return a - b })
	add2(m, "Mul", t, func(a, b T) T { return T(a * b) })
	add2(m, "Max", t, larger[T])
	add2(m, "Min", t, smaller[T])
	compare := func(name string, f func(a, b T) uint32) { m[key{name, t, Bool}] = loop2(f) }
	compare("Equal", func(a, b T) uint32 { return mask(a == b) })
	compare("NotEqual", func(a, b T) uint32 { return mask(a != b) })
	compare("LessThan", func(a, b T) uint32 { return mask(a < b) })
	compare("LessOrEqual", func(a, b T) uint32 { return mask(a <= b) })
	compare("GreaterThan", func(a, b T) uint32 { return mask(a > b) })
	compare("GreaterOrEqual", func(a, b T) uint32 { return mask(a >= b) })
	m[key{"Where", t, t}] = func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
		r, c, a, b := slice[T](dst, n), slice[uint32](in[0], n), slice[T](in[1], n), slice[T](in[2], n)
		for i, yes := range c {
			if yes != 0 {
				r[i] = a[i]
			} else {
				r[i] = b[i]
			}
		}
	}
	m[key{"ConvertDType", Bool, t}] = loop1(func(a uint32) T { return T(a & 1) })
	m[key{"ConvertDType", t, Bool}] = loop1(func(a T) uint32 { return mask(a != 0) })
	convert[T, float32](m, t, Float32)
	convert[T, float64](m, t, Float64)
	convert[T, int32](m, t, Int32)
	convert[T, int64](m, t, Int64)
	convert[T, uint32](m, t, Uint32)
	convert[T, uint64](m, t, Uint64)
}

// convert adds a conversion, unless it is from a floating-point type to an integer.
func convert[A, R number](m map[key]Loop, in, out Type) {
	if in > Float64 || out <= Float64 {
		m[key{"ConvertDType", in, out}] = loop1(func(a A) R { return R(a) })
	}
}

// truncate adds a conversion from a floating-point type to an integer: the integer part, or the nearest integer of the
// type if that is outside, and 0 for NaN. Go's conversion of a number outside differs between processors.
func truncate[A float32 | float64, R number](m map[key]Loop, in, out Type) {
	least, most := R(0), ^uint64(0)>>(64-8*out.Bytes())
	if least-1 < 0 {
		most >>= 1
		least = -R(most) - 1
	}
	low, above := A(least), A(most/2+1)*2 // a power of two
	m[key{"ConvertDType", in, out}] = loop1(func(a A) R {
		switch {
		case a != a:
			return 0
		case a <= low:
			return least
		case a >= above:
			return R(most)
		}
		return R(a)
	})
}

// addHalves adds the conversions of half types, to nearest even.
func addHalves(m map[key]Loop) {
	for t, half := range map[Type]tensor.DType{Float16: tensor.Float16, BFloat16: tensor.BFloat16} {
		m[key{"ConvertDType", t, Float32}] = func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
			kernel.Convert(tensor.Float32, half, dst, in[0], n)
		}
		m[key{"ConvertDType", Float32, t}] = func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
			kernel.Convert(half, tensor.Float32, dst, in[0], n)
		}
	}
}

// larger is the larger one of a and b, or NaN if one is.
func larger[T number](a, b T) T {
	if a > b || a != a {
		return a
	}
	return b
}

// smaller is the smaller one of a and b, or NaN if one is.
func smaller[T number](a, b T) T {
	if a < b || a != a {
		return a
	}
	return b
}

// addFloats adds what both floating-point types have.
func addFloats[T float32 | float64](m map[key]Loop, t Type) {
	add2(m, "Div", t, func(a, b T) T { return a / b })
	add1(m, "Neg", t, func(a T) T { return -a })
	add1(m, "Abs", t, func(a T) T { return T(math.Abs(float64(a))) })
	add1(m, "Sign", t, func(a T) T {
		switch {
		case a > 0:
			return 1
		case a < 0:
			return -1
		}
		return a
	})
	truncate[T, int32](m, t, Int32)
	truncate[T, int64](m, t, Int64)
	truncate[T, uint8](m, t, Uint8)
	truncate[T, uint32](m, t, Uint32)
	truncate[T, uint64](m, t, Uint64)
	m[key{"IsNaN", t, Bool}] = loop1(func(a T) uint32 { return mask(a != a) })
	m[key{"IsFinite", t, Bool}] = loop1(func(a T) uint32 { return mask(a-a == 0) })
}

func addMasks(m map[key]Loop) {
	add2(m, "LogicalAnd", Bool, func(a, b uint32) uint32 { return a & b })
	add2(m, "LogicalOr", Bool, func(a, b uint32) uint32 { return a | b })
	add2(m, "LogicalXor", Bool, func(a, b uint32) uint32 { return a ^ b })
	add1(m, "LogicalNot", Bool, func(a uint32) uint32 { return ^a })
	add2(m, "Equal", Bool, func(a, b uint32) uint32 { return ^(a ^ b) })
	add2(m, "NotEqual", Bool, func(a, b uint32) uint32 { return a ^ b })
	m[key{"Where", Bool, Bool}] = func(dst unsafe.Pointer, in *[3]unsafe.Pointer, n int) {
		r, c, a, b := slice[uint32](dst, n), slice[uint32](in[0], n), slice[uint32](in[1], n), slice[uint32](in[2], n)
		for i, yes := range c {
			r[i] = yes&a[i] | ^yes&b[i]
		}
	}
	m[key{"Bitcast", Bool, Uint8}] = loop1(func(a uint32) uint8 { return uint8(a & 1) })
}

// Expand makes masks of booleans.
func Expand(dst, src unsafe.Pointer, n int) {
	to := slice[uint32](dst, n)
	for i, b := range slice[uint8](src, n) {
		to[i] = -uint32(b & 1)
	}
}

// Shrink makes booleans of masks.
func Shrink(dst, src unsafe.Pointer, n int) {
	to := slice[uint8](dst, n)
	for i, b := range slice[uint32](src, n) {
		to[i] = uint8(b & 1)
	}
}

// Reduction is how the elements of a row become one.
type Reduction uint8

// The reductions.
const (
	Sum Reduction = iota
	Largest
	Smallest
)

// lanes is the number of partial results of a row: element i belongs to partial result i modulo lanes. At the end the
// second half of the partial results is combined with the first half, until one is left.
const lanes = 32

// Reduce combines the elements of each row of a matrix.
func Reduce(r Reduction, t Type, dst, src unsafe.Pointer, rows, columns int) {
	switch t {
	case Float32:
		reduceRows(r, slice[float32](dst, rows), slice[float32](src, rows*columns), columns)
	case Float64:
		reduceRows(r, slice[float64](dst, rows), slice[float64](src, rows*columns), columns)
	case Int32:
		reduceRows(r, slice[int32](dst, rows), slice[int32](src, rows*columns), columns)
	case Int64:
		reduceRows(r, slice[int64](dst, rows), slice[int64](src, rows*columns), columns)
	default:
		panic("vector: no reduction of this type")
	}
}

func reduceRows[T number](r Reduction, dst, src []T, columns int) {
	if reduceRowsFast(r, dst, src, columns) {
		return
	}
	for i := range dst {
		dst[i] = reduceRow(r, src[i*columns:(i+1)*columns])
	}
}

func reduceRow[T number](r Reduction, row []T) T {
	var part [lanes]T
	n := lanes // partial results: fewer than lanes if the row is shorter, except of a sum, which starts from 0
	if r != Sum {
		n = copy(part[:], row)
		row = row[n:]
	}
	if done := len(row) &^ (lanes - 1); done > 0 {
		if !reduceFast(r, &part, row[:done]) {
			for at := 0; at < done; at += lanes {
				combine(r, part[:], row[at:at+lanes])
			}
		}
		row = row[done:]
	}
	combine(r, part[:], row)
	for half := lanes / 2; half > 0; half /= 2 {
		if half < n {
			combine(r, part[:half], part[half:min(2*half, n)])
			n = half
		}
	}
	return part[0]
}

// combine combines the first elements of to with those of from.
func combine[T number](r Reduction, to, from []T) {
	to = to[:len(from)]
	switch r {
	case Sum:
		for i, v := range from {
			to[i] += v
		}
	case Largest:
		for i, v := range from {
			to[i] = larger(to[i], v)
		}
	case Smallest:
		for i, v := range from {
			to[i] = smaller(to[i], v)
		}
	}
}

// ReduceRows combines rows of n elements, step bytes apart, one after another with those of dst.
func ReduceRows(r Reduction, t Type, dst, src unsafe.Pointer, rows, step, n int) {
	done := 0
	if r == Sum && t == Float32 {
		done = addRowsFast(dst, src, rows, step, n)
	}
	switch t {
	case Float32:
		combineRows[float32](r, dst, src, rows, step, done, n)
	case Float64:
		combineRows[float64](r, dst, src, rows, step, done, n)
	case Int32:
		combineRows[int32](r, dst, src, rows, step, done, n)
	case Int64:
		combineRows[int64](r, dst, src, rows, step, done, n)
	default:
		panic("vector: no reduction of this type")
	}
}

func combineRows[T number](r Reduction, dst, src unsafe.Pointer, rows, step, done, n int) {
	if done == n {
		return
	}
	to := slice[T](dst, n)[done:]
	for i := range rows {
		combine(r, to, slice[T](unsafe.Add(src, i*step), n)[done:])
	}
}

// Spread repeats the element of each row, of so many bytes.
func Spread(dst, src unsafe.Pointer, rows, columns, bytes int) {
	switch bytes {
	case 8:
		spread[uint64](dst, src, rows, columns)
	case 4:
		if !spreadFast(dst, src, rows, columns) {
			spread[uint32](dst, src, rows, columns)
		}
	case 2:
		spread[uint16](dst, src, rows, columns)
	default:
		spread[uint8](dst, src, rows, columns)
	}
}

func spread[T any](dst, src unsafe.Pointer, rows, columns int) {
	all := slice[T](dst, rows*columns)
	for i, x := range slice[T](src, rows) {
		row := all[i*columns : (i+1)*columns]
		for j := range row {
			row[j] = x
		}
	}
}

// ScatterExtreme adds each of n numbers to one of several rows: to the first one where the rows of from have the
// largest element, or the smallest. A later NaN counts as more extreme. places are the first elements of the rows, in
// bytes.
func ScatterExtreme[T float32 | float64](smallest bool, to, from unsafe.Pointer, places []int, add unsafe.Pointer,
	n int,
) {
	if len(places) == 0 {
		return
	}
	done := 0
	if !smallest {
		done = scatterLargestFast[T](to, from, places, add, n)
	}
	size := int(unsafe.Sizeof(*new(T)))
	for i, v := range slice[T](add, n)[done:] {
		at := (done + i) * size
		place := places[0]
		best := *(*T)(unsafe.Add(from, place+at))
		for _, p := range places[1:] {
			if x := *(*T)(unsafe.Add(from, p+at)); x != x || !smallest && x > best || smallest && x < best {
				best, place = x, p
			}
		}
		*(*T)(unsafe.Add(to, place+at)) += v
	}
}
