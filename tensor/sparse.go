package tensor

import "fmt"

// IndexedSlices is a sparse tensor: row i of Values belongs to row Indices[i] of the whole. Rows may repeat, and
// then add up; their order is kept. It is TensorFlow's tf.IndexedSlices, the gradient of a table look-up.
type IndexedSlices struct {
	Values     *Tensor // shape (k, …)
	Indices    *Tensor // shape (k), int32 or int64
	DenseShape *Tensor // the shape of the whole, int32 or int64; nil if unknown
}

// String prints the slices with their shapes.
func (s *IndexedSlices) String() string {
	dense := "None"
	if s.DenseShape != nil {
		dense = s.DenseShape.String()
	}
	return fmt.Sprintf("IndexedSlices(indices=%v, values=%v, dense_shape=%s)", s.Indices, s.Values, dense)
}
