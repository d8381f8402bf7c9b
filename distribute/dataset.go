package distribute

import (
	"context"
	"fmt"
	"iter"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DistributedDataset yields each global batch of a dataset split over the replicas.
type DistributedDataset struct {
	strategy *Strategy
	source   data.Dataset
}

// DistributeDataset returns a dataset whose elements are those of ds split along the first dimension of their tensors:
// replica i gets the rows from i*ceil(n/replicas) on, ceil(n/replicas) of them or what is left, where n is the number
// of rows of that batch. Later replicas may so get fewer rows, or a tensor with none; the step runs on every replica
// all the same.
//
// An element comes as one nest of [*PerReplica] (see [Regroup]), to be given to [Run]; with [NewOneDeviceStrategy] it
// comes as it is.
func (s *Strategy) DistributeDataset(ds data.Dataset) (*DistributedDataset, error) {
	if err := s.requireOpen("DistributeDataset"); err != nil {
		return nil, err
	}
	if ds == nil {
		return nil, errorf("DistributeDataset", ErrInvalid, "the dataset is nil")
	}
	return &DistributedDataset{s, ds}, nil
}

// Len returns the number of steps of one iteration, or -1 if that is not known.
func (d *DistributedDataset) Len() int { return d.source.Len() }

// Iter reads the dataset from its start, one global batch a step. It yields an error at most once, as its last pair. It
// belongs outside of steps: inside a step it yields an error that matches [ErrContext].
func (d *DistributedDataset) Iter(ctx context.Context) iter.Seq2[Value, error] {
	return func(yield func(Value, error) bool) {
		const op = "DistributedDataset.Iter"
		if err := d.strategy.requireCross(ctx, op); err != nil {
			yield(nil, fmt.Errorf("%w. Take elements outside of the step and give them to Run", err))
			return
		}
		for element, err := range d.source.Iter(ctx) {
			var v Value
			if err == nil {
				v, err = d.strategy.split(op, element)
			}
			if !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// split splits a global batch over the replicas.
func (s *Strategy) split(op string, element any) (Value, error) {
	if s.oneDevice {
		return element, nil
	}
	n := len(s.devices)
	rows, err := rowsOf(op, element)
	if err != nil {
		return nil, err
	}
	per := (rows + n - 1) / n
	shares := make([]Value, n)
	for i := range shares {
		lo, hi := min(i*per, rows), min((i+1)*per, rows)
		shares[i], err = tensor.Map(element, func(leaf any) (any, error) {
			t, _ := leaf.(*tensor.Tensor)
			if t == nil {
				return leaf, nil // an optional part that is not there
			}
			return t.Rows(lo, hi).OnDevice(s.devices[i].Index), nil
		})
		if err != nil {
			return nil, errorf(op, ErrInvalid, "%w", err)
		}
	}
	if n == 1 {
		return shares[0], nil
	}
	return regroup(op, shares, true)
}

// rowsOf returns the number of examples of an element, which all its tensors must share.
func rowsOf(op string, element any) (int, error) {
	rows := -1
	_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
		t, ok := leaves[0].(*tensor.Tensor)
		switch {
		case ok && t == nil, leaves[0] == nil:
			return leaves[0], nil
		case !ok:
			return nil, errorf(op, ErrInvalid, "element%s is a %T: want tensors", path, leaves[0])
		case t.Rank() == 0:
			return nil, errorf(op, ErrInvalid, "element%s is a scalar: call Batch on the dataset, so that its elements can be split across the replicas", path)
		case rows >= 0 && t.Shape()[0] != rows:
			return nil, errorf(op, ErrMismatch, "element%s has %d rows, the tensors before it %d: the first dimension counts examples", path, t.Shape()[0], rows)
		}
		rows = t.Shape()[0]
		return t, nil
	}, nil, element)
	if err == nil && rows < 0 {
		err = errorf(op, ErrInvalid, "the element holds no tensor: %v", element)
	}
	return max(rows, 0), err
}

// ValueContext says for which replica [Strategy.DistributeValuesFromFunction] wants a value.
type ValueContext struct {
	ReplicaID   int // TensorFlow's replica_id_in_sync_group
	NumReplicas int // its num_replicas_in_sync
}

// String prints the context as TensorFlow does.
func (c ValueContext) String() string {
	return fmt.Sprintf("tf.distribute.ValueContext(replica id %d,  total replicas in sync: %d)", c.ReplicaID, c.NumReplicas)
}

// DistributeValuesFromFunction calls f once per replica, in order, and returns what it gave as one nest of [*PerReplica],
// also with one replica and where all values are the same; with [NewOneDeviceStrategy] as it is.
func (s *Strategy) DistributeValuesFromFunction(ctx context.Context, f func(ValueContext) (Value, error)) (Value, error) {
	const op = "DistributeValuesFromFunction"
	if err := s.requireCross(ctx, op); err != nil {
		return nil, err
	}
	values := make([]Value, len(s.devices))
	for i := range values {
		v, err := f(ValueContext{i, len(s.devices)})
		if err != nil {
			return nil, errorf(op, nil, "replica %d: %w", i, err)
		}
		values[i] = v
	}
	if s.oneDevice {
		return values[0], nil
	}
	return regroup(op, values, true)
}
