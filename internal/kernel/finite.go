package kernel

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// FiniteBetween reports whether the elements [lo, hi) of t are finite, as [tensor.FiniteBetween] does, which it
// replaces where vector instructions are faster: for float32. As integers, the bits of magnitudes are in the order of
// the numbers, so it is enough to find the largest.
func FiniteBetween(t *tensor.Tensor, lo, hi int) bool {
	const infinity = 0x7f800000
	if t.DType() == tensor.Float32 && lo < hi {
		done, largest := largestFast(unsafe.Pointer(&t.Memory().HostBytes()[4*lo]), hi-lo)
		if largest >= infinity {
			return false
		}
		lo += done
	}
	return tensor.FiniteBetween(t, lo, hi)
}
