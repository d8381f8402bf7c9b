package kernel

import (
	"math"
	"unsafe"
)

// The loops of compressed gradients: 8-bit integers with a scale per block, and products of small matrices, all of
// float32. Every product and every sum is rounded by itself: none of them is a fused multiply-add.

// AddLargest sets dst[i] = a[i] + b[i] and returns the bits of the largest magnitude of dst, as of math.Float32bits:
// the bits of a NaN are above those of an infinity, and those above the bits of all numbers. 0 if n is 0.
func AddLargest(dst, a, b unsafe.Pointer, n int) uint32 {
	m, largest := addLargestFast(dst, a, b, n)
	if m < n {
		largest = max(largest, addLargestPlain(skip32(dst, m), skip32(a, m), skip32(b, m), n-m))
	}
	return largest
}

// Quantize sets q[i] = round(e[i]*inverse) as int8, to nearest even, and then subtracts what q represents:
// e[i] -= float32(q[i]) * scale. Every e[i]*inverse must round to an int8.
func Quantize(q, e unsafe.Pointer, n int, inverse, scale float32) {
	if m := quantizeFast(q, e, n, inverse, scale); m < n {
		quantizePlain(unsafe.Add(q, m), skip32(e, m), n-m, inverse, scale)
	}
}

// Dequantize sets dst[i] = float32(q[i]) * scale, where q are n elements of int8.
func Dequantize(dst, q unsafe.Pointer, n int, scale float32) {
	if m := dequantizeFast(dst, q, n, scale); m < n {
		dequantizePlain(skip32(dst, m), unsafe.Add(q, m), n-m, scale)
	}
}

// AddDequantized sets dst[i] = dst[i] + float32(q[i])*scale, where q are n elements of int8.
func AddDequantized(dst, q unsafe.Pointer, n int, scale float32) {
	if m := addDequantizedFast(dst, q, n, scale); m < n {
		addDequantizedPlain(skip32(dst, m), unsafe.Add(q, m), n-m, scale)
	}
}

// AddScaled sets dst[i] = a[i] + by*x[i]. dst may be a or x.
func AddScaled(dst, a, x unsafe.Pointer, n int, by float32) {
	if m := addScaledFast(dst, a, x, n, by); m < n {
		addScaledPlain(skip32(dst, m), skip32(a, m), skip32(x, m), n-m, by)
	}
}

// dotLanes is the number of partial sums of a dot product.
const dotLanes = 32

// Dot returns the sum of a[i]*b[i]. Its order is defined: of the elements before the last multiple of 32, element i is
// added to partial sum i%32; then the upper half of the partial sums is added to the lower half, until one is left;
// then the other elements are added to it one after the other.
func Dot(a, b unsafe.Pointer, n int) float32 {
	m := n &^ (dotLanes - 1)
	sum, ok := dotFast(a, b, m)
	if !ok {
		sum = dotPlain(a, b, m)
	}
	for i := m; i < n; i++ {
		sum = add(sum, mul(*one[float32](a, i), *one[float32](b, i)))
	}
	return sum
}

// skip32 moves p on by n elements of 4 bytes.
func skip32(p unsafe.Pointer, n int) unsafe.Pointer { return unsafe.Add(p, 4*n) }

func addLargestPlain(dst, a, b unsafe.Pointer, n int) (largest uint32) {
	for i := range n {
		sum := add(*one[float32](a, i), *one[float32](b, i))
		*one[float32](dst, i) = sum
		largest = max(largest, math.Float32bits(sum)&0x7fffffff)
	}
	return largest
}

func quantizePlain(q, e unsafe.Pointer, n int, inverse, scale float32) {
	// Adding this number, whose unit in the last place is 1, rounds to nearest even.
	const whole = 3 << 22
	for i := range n {
		x := *one[float32](e, i)
		rounded := float32(float32(x*inverse)+whole) - whole
		*one[int8](q, i) = int8(rounded)
		*one[float32](e, i) = x - float32(rounded*scale)
	}
}

func dequantizePlain(dst, q unsafe.Pointer, n int, scale float32) {
	for i := range n {
		*one[float32](dst, i) = mul(float32(*one[int8](q, i)), scale)
	}
}

func addDequantizedPlain(dst, q unsafe.Pointer, n int, scale float32) {
	for i := range n {
		*one[float32](dst, i) = add(*one[float32](dst, i), mul(float32(*one[int8](q, i)), scale))
	}
}

func addScaledPlain(dst, a, x unsafe.Pointer, n int, by float32) {
	for i := range n {
		*one[float32](dst, i) = add(*one[float32](a, i), mul(by, *one[float32](x, i)))
	}
}

func dotPlain(a, b unsafe.Pointer, n int) float32 {
	var sums [dotLanes]float32
	for i := 0; i < n; i += dotLanes {
		for lane := range sums {
			sums[lane] = add(sums[lane], mul(*one[float32](a, i+lane), *one[float32](b, i+lane)))
		}
	}
	for half := dotLanes / 2; half > 0; half /= 2 {
		for lane := range half {
			sums[lane] = add(sums[lane], sums[lane+half])
		}
	}
	return sums[0]
}
