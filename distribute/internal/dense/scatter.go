package dense

import "github.com/lockstep-ml/lockstep/tensor"

// ScatterOp is the operation of a scatter on two elements.
type ScatterOp uint8

// The operations, named like the methods of a variable.
const (
	ScatterAdd ScatterOp = iota
	ScatterSub
	ScatterMul
	ScatterDiv
	ScatterMin
	ScatterMax
	ScatterUpdate
)

// String returns the method's name.
func (o ScatterOp) String() string {
	return [...]string{
		"ScatterAdd", "ScatterSub", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax",
		"ScatterUpdate",
	}[o]
}

// Scatter returns a copy of old with the rows of s applied.
func Scatter(o ScatterOp, old *tensor.Tensor, s *tensor.IndexedSlices) *tensor.Tensor {
	out := old.Clone()
	switch old.DType() {
	case tensor.Bool:
		scatterRows(tensor.Data[bool](out), s, tensor.Data[bool](s.Values), func(_, x bool) bool { return x })
	case tensor.String:
		scatterRows(out.StringData(), s, s.Values.StringData(), func(_, x string) string { return x })
	case tensor.Float16:
		f := combine[float32](o)
		scatterRows(tensor.Data[tensor.F16](out), s, tensor.Data[tensor.F16](s.Values), func(a, b tensor.F16) tensor.F16 {
			return tensor.F16From(f(a.Float32(), b.Float32()))
		})
	case tensor.BFloat16:
		f := combine[float32](o)
		scatterRows(tensor.Data[tensor.BF16](out), s, tensor.Data[tensor.BF16](s.Values), func(a, b tensor.BF16) tensor.BF16 {
			return tensor.BF16From(f(a.Float32(), b.Float32()))
		})
	default:
		numbersOf(old.DType()).scatter(o, out, s)
	}
	return out
}

// combine returns the function of an operation on the variable's element and the row's element.
func combine[T number](o ScatterOp) func(a, b T) T {
	switch o {
	case ScatterAdd:
		return func(a, b T) T { return a + b }
	case ScatterSub:
		return func(a, b T) T { return a - b }
	case ScatterMul:
		return func(a, b T) T { return a * b }
	case ScatterDiv:
		return func(a, b T) T { return a / b }
	case ScatterMin:
		return func(a, b T) T { return min(a, b) }
	case ScatterMax:
		return func(a, b T) T { return max(a, b) }
	}
	return func(_, b T) T { return b }
}

// scatterRows applies the rows of src to the rows of dst at s.Indices, element by element.
func scatterRows[T any](dst []T, s *tensor.IndexedSlices, src []T, f func(a, b T) T) {
	rows := s.Indices.Len()
	if rows == 0 {
		return
	}
	width := len(src) / rows
	for i, at := range s.Indices.Float64s() {
		to := dst[int(at)*width:][:width]
		for j, x := range src[i*width:][:width] {
			to[j] = f(to[j], x)
		}
	}
}
