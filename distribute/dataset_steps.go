package distribute

import (
	"context"
	"iter"

	"github.com/lockstep-ml/lockstep/data"
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
			} else if v, err = d.fill(round); v == nil && err == nil {
				return
			}
			if !yield(v, err) || err != nil {
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
			if some == nil || missing && !d.pad {
				return
			}
			for i, v := range round {
				if v != nil {
					continue
				}
				var err error
				if round[i], err = pieces.WithoutRows(some); round[i] == nil || err != nil {
					if err != nil {
						yield(nil, err)
					}
					return
				}
			}
			if v, err := d.group(round); !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// fill completes a step by pieces without rows. It returns nil if the elements have no rows.
func (d *DistributedDataset) fill(round []Value) (Value, error) {
	if !d.pad {
		return nil, nil
	}
	empty, err := pieces.WithoutRows(round[0])
	if err != nil || empty == nil {
		return nil, err
	}
	for len(round) < len(d.strategy.devices) {
		round = append(round, empty)
	}
	return d.group(round)
}

// group combines the replicas' elements of a step into one value.
func (d *DistributedDataset) group(round []Value) (Value, error) {
	const op = "DistributedDataset.Iter"
	placed := make([]Value, len(round))
	for i, piece := range round {
		device := d.strategy.devices[i]
		if d.options.KeepOnHost {
			device = localCPU
		}
		var err error
		if placed[i], err = tensor.Map(piece, func(leaf any) (any, error) {
			if t, ok := leaf.(*tensor.Tensor); ok && t == nil {
				return leaf, nil // an optional part that is absent
			}
			return onDevice(leaf, device), nil
		}); err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
	}
	if len(placed) == 1 {
		return placed[0], nil
	}
	return regroup(op, placed, true)
}
