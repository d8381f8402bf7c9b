package data

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Element is what a dataset yields: a nest of *tensor.Tensor. After Batch every tensor's first dimension counts
// examples.
type Element = any

// Dataset is a sequence of elements that can be read several times.
type Dataset interface {
	// Iter reads the dataset from its start. It yields an error at most once, as its last pair. Ending the loop or ctx
	// frees everything that the iteration holds.
	Iter(ctx context.Context) iter.Seq2[Element, error]
	// Len returns the number of elements of one iteration, or -1 if that is not known.
	Len() int
}

// Batch is the element that training reads: examples along the first dimension of every tensor.
type Batch struct {
	Inputs []*tensor.Tensor
	Labels []*tensor.Tensor
}

// Rows returns the number of examples.
func (b Batch) Rows() int { return b.Inputs[0].Shape()[0] }
