package gomlx

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Dataset returns a pipeline of the batches of a dataset of GoMLX, as [data.Batch]. A batch is copied and then
// finalized. The pipeline is a stream: with several workers each of them reads all batches, which must be the same on
// all. Each epoch calls ds.Iter once, so the order of an epoch is up to ds. Batches with a Spec are an error, because
// a model of Lockstep has one graph.
func Dataset(ds train.Dataset) data.Pipeline {
	return data.FromSeq(-1, func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			number := 0
			for theirs, err := range ds.Iter() {
				var b data.Batch
				if err == nil {
					number++
					b, err = batchFrom(theirs)
				}
				if err != nil {
					err = fmt.Errorf("gomlx: batch %d of dataset %q: %w", number, ds.Name(), err)
				}
				if !yield(b, err) || err != nil {
					return
				}
			}
		}
	})
}

// batchFrom copies a batch of GoMLX and finalizes it.
func batchFrom(theirs train.Batch) (b data.Batch, err error) {
	defer func() { err = errors.Join(err, theirs.Finalize()) }()
	if theirs.Spec != nil {
		return b, fmt.Errorf("it has the Spec %v: want none", theirs.Spec)
	}
	for _, list := range []struct {
		from []*tensors.Tensor
		to   *[]*tensor.Tensor
	}{{theirs.Inputs, &b.Inputs}, {theirs.Labels, &b.Labels}} {
		for _, x := range list.from {
			dtype, err := fromGoMLX(x.DType())
			if err != nil {
				return b, err
			}
			ours := tensor.New(dtype, x.Shape().Dimensions...)
			if err := x.ConstBytes(func(from []byte) { copy(ours.Memory().HostBytes(), from) }); err != nil {
				return b, err
			}
			*list.to = append(*list.to, ours)
		}
	}
	return b, nil
}
