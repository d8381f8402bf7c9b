package distribute_test

import (
	"context"
	"errors"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// tf has TensorFlow's functions that need no strategy.
var tf = distribute.Default().Extended()

// reduceWith combines the components of one value by ops.
func reduceWith(
	ctx context.Context, ops distribute.CrossDeviceOps, op distribute.ReduceOp, v, to distribute.Value,
	opts ...distribute.Options,
) (distribute.Value, error) {
	out, err := tf.BatchReduceWith(ctx, ops, op, []distribute.Value{v}, []distribute.Value{to}, opts...)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// onOneDevice makes a mirrored strategy use CrossDeviceOps that are not collectives.
func onOneDevice(cfg *distribute.MirroredConfig) {
	cfg.CrossDeviceOps = distribute.NewReductionToOneDevice("", nil)
}

// mirroredOf returns a mirrored value with these components, by replica.
func mirroredOf(values ...distribute.Value) *distribute.Mirrored {
	return &distribute.Mirrored{Values: values}
}

// reductions lists values and the destinations of their reductions.
type reductions struct{ values, to []distribute.Value }

func (b *reductions) add(v, to distribute.Value) {
	b.values, b.to = append(b.values, v), append(b.to, to)
}

// scatter returns the method of a variable that scatters by op.
func scatter(op distribute.ScatterOp) func(*distribute.Variable, distribute.Context, distribute.Value) error {
	return func(v *distribute.Variable, in distribute.Context, x distribute.Value) error {
		return v.Scatter(in, op, x)
	}
}

// valueOf returns the value of a component.
func valueOf(c *distribute.Component) *tensor.Tensor {
	return c.Variable().Values()[c.Replica()].(*tensor.Tensor)
}

// TestCallsOutsideOfStrategies: the functions that take CrossDeviceOps, and Broadcast, are refused in a step, and
// without operations.
func TestCallsOutsideOfStrategies(t *testing.T) {
	s := mirrored(t, 2)
	calls := func(ctx context.Context, ops distribute.CrossDeviceOps) []error {
		v := distribute.NewComponents(tensor.From([]float32{1}), tensor.From([]float32{2}))
		_, reduced := s.Extended().BatchReduceWith(ctx, ops, distribute.Sum, []distribute.Value{v},
			[]distribute.Value{"CPU:0"})
		_, gathered := s.Extended().GatherWith(ctx, ops, v, "CPU:0", 0)
		_, placed := s.Extended().Broadcast(ctx, scalar(1), "CPU:0")
		return []error{reduced, gathered, placed}
	}
	ops := distribute.NewReductionToOneDevice("", nil)
	for i, err := range calls(t.Context(), ops) {
		if err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	for i, err := range calls(t.Context(), nil)[:2] {
		if !errors.Is(err, distribute.ErrInvalid) || !containsAll(err.Error(), "the CrossDeviceOps are nil") {
			t.Errorf("call %d without operations: got %v", i, err)
		}
	}
	if err := inStep(t, s, func(ctx context.Context, _ *distribute.Replica) error {
		for i, err := range calls(ctx, ops) {
			if !errors.Is(err, distribute.ErrContext) || !containsAll(err.Error(), "requires being in cross-replica context") {
				t.Errorf("call %d in a step: got %v", i, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
