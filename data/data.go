// Package data reads examples and builds the batches for training.
//
// A [Dataset] is a sequence that can be read any number of times. A [Pipeline] is a Dataset with methods that
// derive other pipelines from it, like TensorFlow's tf.data:
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
// A Pipeline has no state. The elements of an iteration depend on the pipeline, its seeds, and the epoch
// number in the context ([WithEpoch]; default 0). The same epoch always gives the same order, and different
// epochs give different orders. The loop over epochs sets the number.
//
// # Ownership
//
// Elements are read-only: a tensor may share the memory of the data set or of other elements. They stay valid
// as long as they are referenced. A function given to Map must return new tensors instead of modifying its
// arguments.
//
// # Random access
//
// [Indexed] datasets, such as tensors in memory or files with an index ([OpenLines]), are shuffled completely and
// split exactly. All stages except ShuffleBuffer and Through preserve random access: they are [Seekable], and
// [Open] reads any element, and single rows of batches. By it, each worker of a training reads only its rows, and
// a training that resumes reads nothing that it skips. Shuffle and Split need examples, not batches.
package data

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Element is an element of a dataset: a nest of *tensor.Tensor, such as a [Batch], a
// map[string]*tensor.Tensor, or a struct with tensors in its exported fields. A nil tensor is an unused
// optional field. After Batch, the first dimension of every tensor counts examples.
type Element = any

// Dataset is a sequence of elements. It can be read several times, also concurrently.
type Dataset interface {
	// Iter reads the dataset from its start. It yields an error at most once, as its last pair. When the loop
	// or ctx ends, the iteration frees all its resources.
	Iter(ctx context.Context) iter.Seq2[Element, error]
	// Len returns the number of elements of one iteration, or -1 if it is unknown.
	Len() int
}

// Batch is the element type for training: examples along the first dimension of every tensor. Before
// Pipeline.Batch, the same type holds one example, without that dimension.
type Batch struct {
	Inputs  []*tensor.Tensor // the model's inputs
	Labels  []*tensor.Tensor // the labels for the loss; may be empty for prediction
	Weights *tensor.Tensor   // float32, one per example; nil means 1 for each
}

// Rows returns the number of examples: the first dimension of the first input.
func (b Batch) Rows() int { return b.Inputs[0].Shape()[0] }
