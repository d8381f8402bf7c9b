package kernel

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// squareSums is the number of sums in which [Squares] adds.
const squareSums = 16

// Squares returns the sum of the squares of the n elements of src, in float64. Element i is added to sum i%16, in
// order, and then the sums in pairs: j and j+8, j and j+4, and so on. So the bits are the same on every processor. It
// panics if t is not a floating-point type.
func Squares(t tensor.DType, src unsafe.Pointer, n int) float64 {
	var sums [squareSums]float64
	switch t {
	case tensor.Float32:
		squares32(&sums, src, n)
	case tensor.Float64:
		squaresOf[float64](&sums, src, 0, n)
	case tensor.Float16, tensor.BFloat16:
		var wide [512]float32
		for i := 0; i < n; i += len(wide) {
			m := min(n-i, len(wide))
			Convert(tensor.Float32, t, unsafe.Pointer(&wide), unsafe.Add(src, 2*i), m)
			squares32(&sums, unsafe.Pointer(&wide), m)
		}
	default:
		panic(fmt.Sprintf("kernel: Squares of %v", t))
	}
	for half := squareSums / 2; half > 0; half /= 2 {
		for j := range half {
			sums[j] += sums[j+half]
		}
	}
	return sums[0]
}

func squares32(sums *[squareSums]float64, src unsafe.Pointer, n int) {
	squaresOf[float32](sums, src, squaresFast(sums, src, n), n)
}

// squaresOf adds the squares of the elements [i, n), where i is a multiple of the number of sums.
func squaresOf[T float32 | float64](sums *[squareSums]float64, src unsafe.Pointer, i, n int) {
	for ; i+squareSums <= n; i += squareSums {
		low, high := at[T](src, i), at[T](src, i+lanes)
		for j := range lanes {
			sums[j] += square(low[j])
			sums[lanes+j] += square(high[j])
		}
	}
	for j := 0; i+j < n; j++ {
		sums[j] += square(*one[T](src, i+j))
	}
}

// square rounds the square to float64; without the conversion it could be fused with the addition.
func square[T float32 | float64](x T) float64 { return float64(float64(x) * float64(x)) }
