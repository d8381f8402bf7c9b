package distribute_test

import (
	"context"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestUpdatePanic: an update function that panics outside of a step changes no value, and the caller gets the panic.
func TestUpdatePanic(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: float32(1)})
	if err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if got := recover(); got != "boom" {
				t.Errorf("got the panic %v, want boom", got)
			}
		}()
		_, err := s.Extended().Update(t.Context(), v,
			func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
				if c.Replica() == 1 {
					panic("boom")
				}
				return nil, c.Variable().Assign(c, float32(7))
			})
		t.Errorf("Update returned: %v", err)
	}()
	for i, value := range v.Values() {
		if x := value.(*tensor.Tensor).Float64s()[0]; x != 1 {
			t.Errorf("component %d is %v after the panic, want 1", i, x)
		}
	}
}
