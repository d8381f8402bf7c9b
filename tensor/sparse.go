package tensor

import "fmt"

// IndexedSlices is a sparse tensor: row i of Values is row Indices[i] of the dense tensor. Rows with the same
// index add up; their order is kept. It is TensorFlow's tf.IndexedSlices, the gradient of an embedding look-up.
type IndexedSlices struct {
	Values     *Tensor // shape (k, …)
	Indices    *Tensor // shape (k), int32 or int64
	DenseShape *Tensor // shape of the dense tensor, int32 or int64; nil if unknown
}

// String prints the slices with their shapes.
func (s *IndexedSlices) String() string {
	dense := "None"
	if s.DenseShape != nil {
		dense = s.DenseShape.String()
	}
	return fmt.Sprintf("IndexedSlices(indices=%v, values=%v, dense_shape=%s)", s.Indices, s.Values, dense)
}
