// Package data reads examples and turns them into the batches that training consumes.
//
// A [Dataset] is a sequence that can be read again and again. A [Pipeline] is a Dataset with methods that derive
// others from it, in the manner of TensorFlow's tf.data:
//
//	images, err := data.LoadIDX("images.idx3")            // uint8, shape (60000, 28, 28)
//	labels, err := data.LoadIDX("labels.idx1")            // uint8, shape (60000)
//	all, err := data.FromImages(images, labels, 255)      // float32 in [0, 1], int32
//	train, validation := all.Split(0.1, 1)
//	batches := train.Shuffle(1).Batch(128).Prefetch(2)
//	for epoch := range 5 {
//		for b, err := range batches.Iter(data.WithEpoch(ctx, epoch)) {
//			…
//		}
//	}
//
// # Epochs and seeds
//
// A Pipeline has no state: what an iteration yields depends on the pipeline, its seeds, and the number of the epoch that
// the context carries ([WithEpoch]; 0 without one). The same epoch always gives the same order, another epoch another
// one. Whoever loops over epochs numbers them.
//
// # Ownership
//
// Elements are read-only: a tensor may share the memory of the data set, or of other elements. They stay valid for as
// long as somebody holds them; a function given to Map returns new tensors instead of changing those it got.
//
// # Random access
//
// Datasets that are [Indexed], such as tensors in memory, are shuffled as a whole by indices, and split exactly. Map, Take,
// Skip, Shard, Split and Shuffle keep the random access; Batch, Repeat and Prefetch end it, and what they return can be
// shuffled by ShuffleBuffer only.
package data

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Element is what a dataset yields: a nest of *tensor.Tensor, such as a [Batch], a map[string]*tensor.Tensor, or a struct
// of one's own with tensors in its exported fields. A nil tensor is an optional field not used. After Batch every
// tensor's first dimension counts examples.
type Element = any

// Dataset is a sequence of elements that can be read several times, also at the same time.
type Dataset interface {
	// Iter reads the dataset from its start. It yields an error at most once, as its last pair. Ending the loop or ctx
	// frees everything that the iteration holds.
	Iter(ctx context.Context) iter.Seq2[Element, error]
	// Len returns the number of elements of one iteration, or -1 if that is not known.
	Len() int
}

// Batch is the element that training reads: examples along the first dimension of every tensor. Before the
// pipeline's Batch the same type holds one example, without that dimension.
type Batch struct {
	Inputs  []*tensor.Tensor
	Labels  []*tensor.Tensor
	Weights *tensor.Tensor // float32, one per example; nil: 1 each
}

// Rows returns the number of examples.
func (b Batch) Rows() int { return b.Inputs[0].Shape()[0] }
