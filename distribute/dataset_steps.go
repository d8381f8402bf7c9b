package distribute

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/pieces"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DistributedDataset yields the elements of a dataset, one per replica and step (TensorFlow's DistributedDataset).
type DistributedDataset struct {
	strategy *Strategy
	options  InputOptions
	steps    int                              // per iteration, or -1
	sources  []data.Dataset                   // one, or one per replica
	pieces   func(data.Dataset) pieces.Pieces // nil: elements are not split
	pad      bool                             // complete a last step that lacks elements for some replicas
}

// Len returns the number of steps per iteration, or -1 if it is not known.
func (d *DistributedDataset) Len() int { return d.steps }

// rounds collects successive pieces of one dataset, one for each replica of this worker, as a []Value per step.
// The last one may have fewer.
func (d *DistributedDataset) rounds(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		n := len(d.strategy.devices)
		round := make([]Value, 0, n)
		for piece, err := range d.pieces(d.sources[0])(ctx) {
			if err != nil {
				yield(nil, failed("DistributeDataset", err))
				return
			}
			if round = append(round, piece); len(round) < n {
				continue
			}
			if !yield(round, nil) {
				return
			}
			round = make([]Value, 0, n)
		}
		if len(round) > 0 {
			yield(round, nil)
		}
	}
}

// together gives successive pieces of one dataset to the replicas, one round per step.
func (d *DistributedDataset) together(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		for v, err := range d.rounds(ctx) {
			if err != nil {
				yield(nil, err)
				return
			}
			if round := v.([]Value); len(round) == len(d.strategy.devices) {
				v, err = d.group(round)
			} else {
				v, err = d.fill(append(round, make([]Value, len(d.strategy.devices)-len(round))...), round[0])
			}
			if v == nil && err == nil || !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// apart gives each replica the elements of its dataset, until all datasets have ended.
func (d *DistributedDataset) apart(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		next := make([]func() (Value, error, bool), len(d.sources))
		for i, ds := range d.sources {
			var stop func()
			next[i], stop = iter.Pull2(ds.Iter(ctx))
			defer stop()
		}
		for {
			round := make([]Value, len(next))
			some, missing := Value(nil), false
			for i := range next {
				v, err, ok := next[i]()
				if err != nil {
					yield(nil, err)
					return
				}
				if round[i] = v; ok {
					some = v
				}
				missing = missing || !ok
			}
			if some == nil {
				return
			}
			v, err := Value(nil), error(nil)
			if missing {
				v, err = d.fill(round, some)
			} else {
				v, err = d.group(round)
			}
			if v == nil && err == nil || !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// fill completes a step by pieces like another one, without rows. It returns nil if the elements have no rows.
func (d *DistributedDataset) fill(round []Value, like Value) (Value, error) {
	if !d.pad || pieces.HasScalars(like) {
		return nil, nil
	}
	empty, err := pieces.WithoutRows(like)
	if err != nil {
		return nil, err
	}
	for i, v := range round {
		if v == nil {
			round[i] = empty
		}
	}
	return d.group(round)
}

// group combines the replicas' elements of a step into one value.
func (d *DistributedDataset) group(round []Value) (Value, error) {
	const op = "DistributedDataset.Iter"
	placed := make([]Value, len(round))
	for i, piece := range round {
		at := d.strategy.devices[i]
		if d.options.KeepOnHost {
			at = device.CPU(0)
		}
		var err error
		if placed[i], err = tensor.Map(piece, func(leaf any) (any, error) {
			if t, ok := leaf.(*tensor.Tensor); ok && t == nil {
				return leaf, nil // an optional part that is absent
			}
			return onDevice(leaf, at), nil
		}); err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
	}
	return PerReplica[data.Element](placed), nil
}
