package dataparallel

import (
	"fmt"
	"iter"

	"github.com/gomlx/gomlx/ml/train"
)

// Dataset returns this worker's batches of ds: of as many successive ones as there are workers, the one of this
// worker's number. Every worker reads ds in the same order, so a shuffle needs the same seed on all workers. Batches
// at the end that are not enough for all workers are left out. A step of all workers makes as many batches of ds.
func (j *Job) Dataset(ds train.Dataset) train.Dataset {
	if j.Size() == 1 {
		return ds
	}
	return &shard{ds, j.Rank(), j.Size()}
}

type shard struct {
	train.Dataset
	rank, size int
}

// Name implements train.Dataset.
func (s *shard) Name() string {
	return fmt.Sprintf("%s [worker %d of %d]", s.Dataset.Name(), s.rank, s.size)
}

// Iter implements train.Dataset.
func (s *shard) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		var mine *train.Batch
		i := 0
		defer func() {
			if mine != nil {
				_ = mine.Finalize() // of an incomplete group
			}
		}()
		for b, err := range s.Dataset.Iter() {
			if err == nil && i%s.size == s.rank {
				mine = &b
			} else if err == nil {
				err = b.Finalize()
			}
			if err != nil {
				yield(train.Batch{}, err)
				return
			}
			if i++; i%s.size == 0 {
				whole := *mine
				mine = nil
				if !yield(whole, nil) {
					return
				}
			}
		}
	}
}
