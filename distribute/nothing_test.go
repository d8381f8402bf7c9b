package distribute_test

import (
	"context"
	"errors"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestNothingGiven: a nil value, destination or function is an error, not a panic.
func TestNothingGiven(t *testing.T) {
	m, ctx := mirrored(t, 2), t.Context()
	cross, err := m.Cross(ctx)
	if err != nil {
		t.Fatal(err)
	}
	v, err := m.NewVariable(ctx, distribute.VariableConfig{Initial: tensor.Scalar(float32(1))})
	if err != nil {
		t.Fatal(err)
	}
	two := distribute.NewComponents(tensor.Scalar(float32(1)), tensor.Scalar(float32(2)))
	for name, f := range map[string]func() error{
		"a tensor to assign": func() error { return v.Assign(cross, (*tensor.Tensor)(nil)) },
		"a tensor to reduce": func() error {
			_, err := distribute.Run(ctx, m,
				func(ctx context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
					return distribute.AllReduce(ctx, r, distribute.Sum, []any{(*tensor.Tensor)(nil)})
				}, nil)
			return err
		},
		"a function of values": func() error {
			_, err := m.Extended().DistributeValues(ctx, nil)
			return err
		},
		"a destination": func() error { _, err := m.Extended().ReduceTo(m.Scope(ctx), distribute.Sum, two, nil); return err },
		"a batch's destination": func() error {
			_, err := m.Extended().BatchReduceTo(m.Scope(ctx), distribute.Sum, []distribute.Value{two}, []distribute.Value{nil})
			return err
		},
		"operations": func() error { _, err := reduceWith(ctx, nil, distribute.Sum, two, nil); return err },
		"a destination of operations": func() error {
			_, err := reduceWith(ctx, distribute.NewReductionToOneDevice("", nil), distribute.Sum, two, nil)
			return err
		},
	} {
		if err := f(); !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%s: got %v, want an error that names what is nil", name, err)
		}
	}
}
