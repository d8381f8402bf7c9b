package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// gatherer is implemented by CrossDeviceOps that also gather.
type gatherer interface {
	BatchGather(ctx context.Context, batch []Reduction, axis int, opts Options) ([]Value, error)
}

// gatherBatch concatenates the components of each value of a batch.
func gatherBatch(ctx context.Context, ops CrossDeviceOps, batch []Reduction, axis int, o Options) ([]Value, error) {
	if g, ok := ops.(gatherer); ok {
		return g.BatchGather(ctx, batch, axis, o)
	}
	return gatherHere(ops.String(), batch, axis)
}

// gatherHere concatenates the components of each value of a batch on the host.
func gatherHere(name string, batch []Reduction, axis int) ([]Value, error) {
	out := make([]Value, len(batch))
	for i, b := range batch {
		parts := make([]*tensor.Tensor, len(b.Values))
		for j, v := range b.Values {
			leaf, err := operand(v)
			if err != nil {
				return nil, errorf(name, ErrInvalid, "component %d: %w", j, err)
			}
			t, ok := leaf.(*tensor.Tensor)
			if !ok {
				return nil, errorf(name, ErrInvalid, "component %d is sparse: want tensors only", j)
			}
			parts[j] = t
		}
		joined := parts[0]
		if len(parts) > 1 {
			var err error
			if joined, err = dense.Concat(parts, axis); err != nil {
				return nil, failed(name, err)
			}
		}
		out[i] = place(joined, b.To)
	}
	return out, nil
}
