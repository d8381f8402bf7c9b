package kernel

import (
	"math"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// chunk is how many half-width elements are widened at a time, into float32 on the stack.
const chunk = 256

// halfLoops returns the loops of float16 or bfloat16: every node of the tree is rounded to the type.
func halfLoops(op Op, t tensor.DType) loops {
	two := func(dst, a, b unsafe.Pointer, n int) { half2(op, t, dst, a, b, n) }
	return loops{
		two: two,
		three: func(dst, a, b, c unsafe.Pointer, n int) {
			var ab [chunk]uint16
			for ; n > 0; n -= chunk {
				m := min(n, chunk)
				half2(op, t, unsafe.Pointer(&ab), a, b, m)
				half2(op, t, dst, unsafe.Pointer(&ab), c, m)
				dst, a, b, c = skip(dst, n), skip(a, n), skip(b, n), skip(c, n)
			}
		},
		four: func(dst, a, b, c, d unsafe.Pointer, n int) {
			var ab, cd [chunk]uint16
			for ; n > 0; n -= chunk {
				m := min(n, chunk)
				half2(op, t, unsafe.Pointer(&ab), a, b, m)
				half2(op, t, unsafe.Pointer(&cd), c, d, m)
				half2(op, t, dst, unsafe.Pointer(&ab), unsafe.Pointer(&cd), m)
				dst, a, b, c, d = skip(dst, n), skip(a, n), skip(b, n), skip(c, n), skip(d, n)
			}
		},
	}
}

// half2 sets dst[i] = round(float32(a[i]) ⊕ float32(b[i])).
func half2(op Op, t tensor.DType, dst, a, b unsafe.Pointer, n int) {
	var wide [2][chunk]float32
	x, y := unsafe.Pointer(&wide[0]), unsafe.Pointer(&wide[1])
	for ; n > 0; n -= chunk {
		m := min(n, chunk)
		widenPlain(t, x, a, m)
		widenPlain(t, y, b, m)
		switch op {
		case Sum:
			sum2[float32](x, x, y, m)
		case Prod:
			prod2[float32](x, x, y, m)
		case Min:
			min2[float32](x, x, y, m)
		case Max:
			max2[float32](x, x, y, m)
		}
		narrowPlain(t, dst, x, m)
		dst, a, b = skip(dst, n), skip(a, n), skip(b, n)
	}
}

// scaleHalf is scaleBy for half-width elements, in float32.
func scaleHalf(op scaling, t tensor.DType, dst, src unsafe.Pointer, n int, by float32) {
	var wide [chunk]float32
	x := unsafe.Pointer(&wide)
	for ; n > 0; n -= chunk {
		m := min(n, chunk)
		widen(t, x, src, m)
		scaleBy(op, x, x, m, by)
		narrow(t, dst, x, m)
		dst, src = skip(dst, n), skip(src, n)
	}
}

// skip moves p on by one chunk of half-width elements if more than a chunk is left: a pointer never leaves its memory.
func skip(p unsafe.Pointer, left int) unsafe.Pointer {
	if left <= chunk {
		return p
	}
	return unsafe.Add(p, 2*chunk)
}

// widen sets dst[i] = float32(src[i]), narrow dst[i] = src[i] rounded to the type, by the fastest loops.

func widen(t tensor.DType, dst, src unsafe.Pointer, n int) {
	if m := widenFast(t, dst, src, n); m < n {
		widenPlain(t, unsafe.Add(dst, 4*m), unsafe.Add(src, 2*m), n-m)
	}
}

func narrow(t tensor.DType, dst, src unsafe.Pointer, n int) {
	if m := narrowFast(t, dst, src, n); m < n {
		narrowPlain(t, unsafe.Add(dst, 2*m), unsafe.Add(src, 4*m), n-m)
	}
}

// widenPlain and narrowPlain are the same by the generic loops.

func widenPlain(t tensor.DType, dst, src unsafe.Pointer, n int) {
	if t == tensor.BFloat16 {
		widenBFloat16(dst, src, n)
	} else {
		widenFloat16(dst, src, n)
	}
}

func narrowPlain(t tensor.DType, dst, src unsafe.Pointer, n int) {
	if t == tensor.BFloat16 {
		narrowBFloat16(dst, src, n)
	} else {
		narrowFloat16(dst, src, n)
	}
}

// widenBFloat16 sets dst[i] = src[i].Float32().
func widenBFloat16(dst, src unsafe.Pointer, n int) {
	i := 0
	for ; i+lanes <= n; i += lanes {
		r, x := at[uint32](dst, i), at[uint16](src, i)
		r[0] = uint32(x[0]) << 16
		r[1] = uint32(x[1]) << 16
		r[2] = uint32(x[2]) << 16
		r[3] = uint32(x[3]) << 16
		r[4] = uint32(x[4]) << 16
		r[5] = uint32(x[5]) << 16
		r[6] = uint32(x[6]) << 16
		r[7] = uint32(x[7]) << 16
	}
	for ; i < n; i++ {
		*one[uint32](dst, i) = uint32(*one[uint16](src, i)) << 16
	}
}

// narrowBFloat16 sets dst[i] = tensor.BF16From(src[i]).
func narrowBFloat16(dst, src unsafe.Pointer, n int) {
	for i := range n {
		b := *one[uint32](src, i)
		if b&0x7fffffff > 0x7f800000 {
			*one[uint16](dst, i) = uint16(b>>16 | 0x0040)
			continue
		}
		*one[uint16](dst, i) = uint16((b + 0x7fff + b>>16&1) >> 16)
	}
}

// widenFloat16 sets dst[i] = src[i].Float32(). Zeros and subnormals are common among gradients, so they are handled
// without a branch: the fraction is put behind 2^-14, which is then taken away again.
func widenFloat16(dst, src unsafe.Pointer, n int) {
	for i := range n {
		h := uint32(*one[uint16](src, i))
		e := h & 0x7fff
		r := e<<13 + 0x38000000
		small := math.Float32bits(math.Float32frombits(e<<13|0x38800000) - 0x1p-14)
		if e < 0x0400 {
			r = small
		}
		if e >= 0x7c00 { // infinity, NaN
			r = math.Float32bits(tensor.F16(e).Float32())
		}
		*one[uint32](dst, i) = h&0x8000<<16 | r
	}
}

// narrowFloat16 sets dst[i] = tensor.F16From(src[i]).
func narrowFloat16(dst, src unsafe.Pointer, n int) {
	for i := range n {
		b := *one[uint32](src, i)
		a := b & 0x7fffffff
		r := (a + 0x0fff + a>>13&1 - 0x38000000) >> 13
		small := math.Float32bits(math.Float32frombits(a)+0.5) - 0x3f000000
		if a < 0x38800000 {
			r = small
		}
		if a >= 0x477ff000 { // infinity, NaN, or rounds to infinity
			r = uint32(tensor.F16From(math.Float32frombits(a)))
		}
		*one[uint16](dst, i) = uint16(b>>16&0x8000 | r)
	}
}
