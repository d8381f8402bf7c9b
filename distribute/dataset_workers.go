package distribute

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute/internal/pieces"
	"github.com/lockstep-ml/lockstep/distribute/internal/wire"
)

// State of a worker's data for the next step. The workers exchange it before each step.
const (
	hasElement int64 = 1 << iota // for at least one replica
	hasLike                      // an element to copy the structure of
	hasFailed                    // its data cannot be read
)

// agreed yields a step as long as some worker has an element for it. Local data may be read ahead. The workers
// agree when the step is requested, so that the exchange is in order with their other calls.
func (d *DistributedDataset) agreed(ctx context.Context) iter.Seq2[Value, error] {
	rounds := d.rounds
	if n := d.options.Prefetch; n > 0 {
		rounds = data.FromSeq(-1, rounds).Prefetch(n).Iter
	}
	return func(yield func(Value, error) bool) {
		next, stop := iter.Pull2(rounds(ctx))
		defer stop()
		var like Value
		for {
			v, failure, _ := next()
			round, _ := v.([]Value)
			if len(round) > 0 {
				like = round[0]
			}
			v, err := d.agree(ctx, round, &like, failure)
			if err != nil {
				yield(nil, err)
				return
			}
			if v == nil || !yield(v, nil) {
				return
			}
		}
	}
}

// agree returns the step's value, or nil if no worker has an element for it.
func (d *DistributedDataset) agree(ctx context.Context, round []Value, like *Value, failure error) (Value, error) {
	const op = "DistributedDataset.Iter"
	s := d.strategy
	state := int64(0)
	if len(round) > 0 {
		state |= hasElement
	}
	if *like != nil {
		state |= hasLike
	}
	if failure != nil {
		state |= hasFailed
	}
	mine := make([][]int64, len(s.devices))
	for i := range mine {
		mine[i] = []int64{state}
	}
	all, err := s.collective.exchange(ctx, "whether the dataset goes on", mine, s.options)
	switch {
	case failure != nil:
		return nil, failure
	case err != nil:
		return nil, errorf(op, nil, "%w", err)
	}
	some, lacking := false, false
	for rank, is := range all {
		if is[0]&hasFailed != 0 {
			return nil, errorf(op, ErrAborted, "the worker of replica %d could not read its data", rank)
		}
		some = some || is[0]&hasElement != 0
		lacking = lacking || is[0]&hasLike == 0
	}
	if !some {
		return nil, nil
	}
	if lacking {
		if *like, err = d.sendLike(ctx, *like); err != nil {
			return nil, err
		}
	}
	for len(round) < len(s.devices) {
		empty, err := pieces.WithoutRows(*like)
		if err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
		round = append(round, empty)
	}
	return d.group(round)
}

// sendLike sends an element without rows to the workers that have read no element yet.
func (d *DistributedDataset) sendLike(ctx context.Context, like Value) (Value, error) {
	const op = "DistributedDataset.Iter"
	s := d.strategy
	mine := make([]Value, len(s.devices))
	if like != nil {
		empty, err := pieces.WithoutRows(like)
		if err == nil {
			_, err = wire.Encode(empty)
		}
		if err == nil { // otherwise all workers detect that no worker could send it
			mine[0] = empty
		}
	}
	all, err := s.collective.gatherValues(ctx, "an element without rows", mine, s.options)
	if err != nil {
		return nil, errorf(op, nil, "%w", err)
	}
	for _, v := range all {
		if v != nil {
			if like == nil {
				like = v
			}
			return like, nil
		}
	}
	return nil, errorf(op, ErrUnsupported, "a worker without elements cannot receive their structure from the other "+
		"workers: want tensors, or []any, tensor.Tuple or map[string]any of them")
}
