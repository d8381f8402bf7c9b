package dense

import "github.com/lockstep-ml/lockstep/tensor"

// number lists the Go types of numeric elements, without the half-precision ones.
type number interface {
	int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | float32 | float64
}

// numbers has the operations whose loops depend on the Go type of the elements.
type numbers interface {
	// negate returns -t.
	negate(t *tensor.Tensor) *tensor.Tensor
	// truncate returns the integers of xs.
	truncate(xs []float64, shape []int) *tensor.Tensor
	// scatter applies the rows of s to out.
	scatter(o ScatterOp, out *tensor.Tensor, s *tensor.IndexedSlices)
}

// numbersOf returns the operations on a dtype that has a Go type.
func numbersOf(d tensor.DType) numbers {
	switch d {
	case tensor.Int8:
		return numbersIn[int8]{}
	case tensor.Int16:
		return numbersIn[int16]{}
	case tensor.Int32:
		return numbersIn[int32]{}
	case tensor.Int64:
		return numbersIn[int64]{}
	case tensor.Uint8:
		return numbersIn[uint8]{}
	case tensor.Uint16:
		return numbersIn[uint16]{}
	case tensor.Uint32:
		return numbersIn[uint32]{}
	case tensor.Uint64:
		return numbersIn[uint64]{}
	case tensor.Float32:
		return numbersIn[float32]{}
	}
	return numbersIn[float64]{}
}

type numbersIn[T number] struct{}

func (numbersIn[T]) negate(t *tensor.Tensor) *tensor.Tensor {
	out := tensor.New(t.DType(), t.Shape()...)
	to := tensor.Data[T](out)
	for i, x := range tensor.Data[T](t) {
		to[i] = -x
	}
	return out
}

func (numbersIn[T]) truncate(xs []float64, shape []int) *tensor.Tensor {
	out := tensor.New(tensor.DTypeOf[T](), shape...)
	to := tensor.Data[T](out)
	for i, x := range xs {
		to[i] = T(int64(x))
	}
	return out
}

func (numbersIn[T]) scatter(o ScatterOp, out *tensor.Tensor, s *tensor.IndexedSlices) {
	scatterRows(tensor.Data[T](out), s, tensor.Data[T](s.Values), combine[T](o))
}
