package distribute_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// abandonedWrites lists what a merge function tries to write after its Run has been abandoned and rolled back.
var abandonedWrites = []struct {
	name  string
	write func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable) error
}{
	{"Assign", func(_ context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		return v.Assign(c, float32(7))
	}},
	{"AssignSub", func(_ context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		return v.AssignSub(c, float32(7))
	}},
	{"Restore", func(_ context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		return v.Restore(c, tensor.Scalar(float32(7)))
	}},
	{"Variable.Update", func(_ context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		return v.Update(c, func(_ context.Context, c *distribute.Component) error { return v.Assign(c, float32(7)) })
	}},
	{"Strategy.Update", func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		_, err := c.Strategy().Extended().Update(ctx, v, setSeven)
		return err
	}},
	{"Strategy.Scope", func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		_, err := c.Strategy().Extended().Update(c.Strategy().Scope(ctx), v, setSeven)
		return err
	}},
	{"Strategy.Cross", func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		cross, err := c.Strategy().Cross(ctx)
		if err != nil {
			return err
		}
		return v.Assign(cross, float32(7))
	}},
	{"Run", func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable) error {
		_, err := distribute.Run(context.WithoutCancel(ctx), c.Strategy(),
			func(_ context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
				return nil, v.Assign(r, float32(7))
			}, nil)
		return err
	}},
}

func setSeven(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
	return nil, c.Variable().Assign(c, float32(7))
}

// lateCode is the code of a merge function that is abandoned while resume waits.
type lateCode func(ctx context.Context, c *distribute.CrossReplica, v *distribute.Variable, resume func()) error

// TestAbandonedMergeFunction checks that a merge function that goes on after its Run was rolled back changes no
// variable: each of its writes returns the Run's failure, and the next Run's values stay.
func TestAbandonedMergeFunction(t *testing.T) {
	for _, c := range abandonedWrites {
		t.Run(c.name, func(t *testing.T) {
			checkAbandoned(t, func(
				ctx context.Context, in *distribute.CrossReplica, v *distribute.Variable, resume func(),
			) error {
				resume()
				return c.write(ctx, in, v)
			})
		})
	}
}

// TestAbandonedUpdateFunction is the same for an update function, which has changed a component before.
func TestAbandonedUpdateFunction(t *testing.T) {
	for name, next := range map[string]func(context.Context, *distribute.Component) error{
		"its component": func(_ context.Context, c *distribute.Component) error { return c.Variable().Assign(c, float32(7)) },
		"another update": func(ctx context.Context, c *distribute.Component) error {
			_, err := c.Variable().Strategy().Extended().Update(ctx, c.Variable(), setSeven)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			checkAbandoned(t, func(
				ctx context.Context, in *distribute.CrossReplica, v *distribute.Variable, resume func(),
			) error {
				var late error
				_, err := in.Strategy().Extended().Update(ctx, v,
					func(ctx context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
						if err := c.Variable().Assign(c, float32(3)); err != nil {
							t.Errorf("before the failure: %v", err)
						}
						resume()
						late = next(ctx, c)
						return nil, late
					})
				if !errors.Is(err, late) {
					t.Errorf("Update returned %v, want its function's error %v", err, late)
				}
				return late
			})
		})
	}
}

// checkAbandoned abandons a merge function that calls resume, which returns after the Run's failure and another
// Run. What the merge function returns must be the failure, and the variable must have the value of the other Run.
func checkAbandoned(t *testing.T, f lateCode) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: float32(1)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var late error
		err = inStepOf(ctx, s, func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(ctx context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
					late = f(ctx, c, v, func() { time.Sleep(time.Minute) })
					return nil, nil
				}, 0)
			return err
		})
		failure, ok := err.(*distribute.StepError)
		if !ok {
			t.Fatalf("got %v, want a *StepError", err)
		}
		checkValues(t, "after the failed Run", v, 1)
		set := func(_ context.Context, r *distribute.Replica) error { return v.Assign(r, float32(5)) }
		if err := inStep(t, s, set); err != nil {
			t.Errorf("the next Run: %v", err)
		}
		failure.Wait()
		if !errors.Is(late, failure) {
			t.Errorf("the abandoned function's write returned %v, want the failure of its Run", late)
		}
		checkValues(t, "after the abandoned function", v, 5)
	})
}

func checkValues(t *testing.T, when string, v *distribute.Variable, want float64) {
	t.Helper()
	for i, value := range v.Values() {
		if got := value.(*tensor.Tensor).Float64s()[0]; got != want {
			t.Errorf("%s: component %d is %v, want %v", when, i, got, want)
		}
	}
}

// TestComponentAfterItsUpdate checks that a component that is kept beyond its update cannot be written.
func TestComponentAfterItsUpdate(t *testing.T) {
	for name, s := range map[string]*distribute.Strategy{
		"mirrored": mirrored(t, 2), "default": distribute.Default(),
	} {
		v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: float32(1)})
		if err != nil {
			t.Fatal(err)
		}
		for _, fails := range []bool{false, true} {
			var kept []*distribute.Component
			_, err = s.Extended().Update(t.Context(), v,
				func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
					kept = append(kept, c)
					if fails {
						return nil, errStep
					}
					return nil, c.Variable().Assign(c, float32(2))
				})
			if errors.Is(err, errStep) != fails {
				t.Errorf("%s: Update returned %v", name, err)
			}
			for _, c := range kept {
				for method, write := range map[string]func(distribute.Context, distribute.Value) error{
					"Assign": v.Assign, "AssignAdd": v.AssignAdd, "AssignSub": v.AssignSub,
				} {
					if err := write(c, float32(3)); !errors.Is(err, distribute.ErrContext) {
						t.Errorf("%s: %s of component %d after the update returned %v, want ErrContext", name, method, c.Replica(), err)
					}
				}
			}
			checkValues(t, name, v, 2)
		}
	}
}
