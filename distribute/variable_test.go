package distribute_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// variable makes a variable of two elements, 1 and 2.
func variable(
	t *testing.T, s *distribute.Strategy, sync distribute.Synchronization, agg distribute.Aggregation,
) *distribute.Variable {
	t.Helper()
	v, err := s.NewVariable(t.Context(),
		distribute.VariableConfig{Name: "v", Initial: tensor.From([]float32{1, 2}), Synchronization: sync, Aggregation: agg})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func values(v *distribute.Variable) [][]float64 {
	var out [][]float64
	for _, c := range v.Values() {
		out = append(out, c.(*tensor.Tensor).Float64s())
	}
	return out
}

func wantValues(t *testing.T, v *distribute.Variable, want ...[]float64) {
	t.Helper()
	got := values(v)
	for i := range want {
		for j := range want[i] {
			if got[i][j] != want[i][j] {
				t.Errorf("component %d: got %v, want %v", i, got[i], want[i])
				break
			}
		}
	}
}

// inStep runs f on every replica.
func inStep(t *testing.T, s *distribute.Strategy, f func(ctx context.Context, r *distribute.Replica) error) error {
	t.Helper()
	return inStepOf(t.Context(), s, f)
}

func inStepOf(
	ctx context.Context, s *distribute.Strategy, f func(ctx context.Context, r *distribute.Replica) error,
) error {
	_, err := distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
			return struct{}{}, f(ctx, r)
		}, nil)
	return err
}

func TestVariableWritesInReplicaContext(t *testing.T) {
	for _, c := range []struct {
		agg  distribute.Aggregation
		want [][]float64 // after adding (1, 1)*(id+1) on each of 2 replicas
	}{
		{distribute.AggregateSum, [][]float64{{4, 5}, {4, 5}}},
		{distribute.AggregateMean, [][]float64{{2.5, 3.5}, {2.5, 3.5}}},
		{distribute.AggregateFirst, [][]float64{{2, 3}, {2, 3}}},
		{distribute.AggregateNone, [][]float64{{2, 3}, {3, 4}}},
	} {
		t.Run(c.agg.String(), func(t *testing.T) {
			s := mirrored(t, 2)
			v := variable(t, s, distribute.OnWrite, c.agg)
			err := inStep(t, s, func(_ context.Context, r *distribute.Replica) error {
				x := float32(r.ID() + 1)
				return v.AssignAdd(r, tensor.From([]float32{x, x}))
			})
			if err != nil {
				t.Fatal(err)
			}
			wantValues(t, v, c.want...)
		})
	}
}

func TestSyncOnReadVariable(t *testing.T) {
	for _, c := range []struct {
		agg   distribute.Aggregation
		cross []float64
	}{
		{distribute.AggregateSum, []float64{5, 7}},
		{distribute.AggregateMean, []float64{2.5, 3.5}},
		{distribute.AggregateFirst, []float64{2, 3}},
		{distribute.AggregateNone, nil},
	} {
		t.Run(c.agg.String(), func(t *testing.T) {
			s := mirrored(t, 2)
			v := variable(t, s, distribute.OnRead, c.agg)
			err := inStep(t, s, func(_ context.Context, r *distribute.Replica) error {
				x := float32(r.ID() + 1)
				if err := v.AssignAdd(r, tensor.From([]float32{x, x})); err != nil {
					return err
				}
				own, err := v.Read(r)
				if err == nil && own.Float64s()[0] != float64(1+x) {
					t.Errorf("replica %d reads %v, want its own value %v", r.ID(), own, 1+x)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			cross, err := s.Cross(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			got, err := v.Read(cross)
			switch {
			case c.cross == nil:
				if !errors.Is(err, distribute.ErrInvalid) {
					t.Errorf("got %v, %v, want ErrInvalid", got, err)
				}
			case err != nil:
				t.Error(err)
			case got.Float64s()[0] != c.cross[0] || got.Float64s()[1] != c.cross[1]:
				t.Errorf("got %v, want %v", got, c.cross)
			}
		})
	}
}

func TestFailedRunLeavesVariables(t *testing.T) {
	for name, f := range map[string]func(v *distribute.Variable) step{
		"assigned by aggregation": func(v *distribute.Variable) step {
			return func(_ context.Context, r *distribute.Replica) error {
				return v.AssignAdd(r, tensor.From([]float32{5, 5}))
			}
		},
		"updated in a merge": func(v *distribute.Variable) step {
			return func(ctx context.Context, r *distribute.Replica) error {
				_, err := distribute.MergeNests(ctx, r,
					func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
						return c.Strategy().Extended().Update(ctx, v,
							func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
								return nil, v.Assign(c, args[0])
							}, args...)
					}, tensor.From([]float32{7, 7}))
				return err
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := mirrored(t, 3)
			v := variable(t, s, distribute.OnWrite, distribute.AggregateSum)
			write := f(v)
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				for range 2 {
					if err := write(ctx, r); err != nil {
						return err
					}
				}
				if own, err := v.Read(r); err != nil || own.Float64s()[0] == 1 {
					t.Errorf("the step itself reads %v, %v, want the value that it wrote", own, err)
				}
				if r.ID() == 2 {
					return errStep
				}
				return merge(ctx, r)
			})
			if !errors.Is(err, errStep) {
				t.Fatalf("got %v, want the step's error", err)
			}
			wantValues(t, v, []float64{1, 2}, []float64{1, 2}, []float64{1, 2})
			if err := inStep(t, s, write); err != nil {
				t.Fatal(err)
			}
			if values(v)[0][0] == 1 {
				t.Error("the next Run did not write")
			}
		})
	}
}

func TestFailedUpdateLeavesVariable(t *testing.T) {
	s := mirrored(t, 3)
	v := variable(t, s, distribute.OnWrite, distribute.AggregateNone)
	_, err := s.Extended().Update(t.Context(), v,
		func(_ context.Context, c *distribute.Component, _ ...distribute.Value) (distribute.Value, error) {
			if err := c.Variable().Assign(c, tensor.From([]float32{9, 9})); err != nil || c.Replica() < 2 {
				return nil, err
			}
			return nil, errStep
		})
	if !errors.Is(err, errStep) {
		t.Fatalf("got %v, want the function's error", err)
	}
	wantValues(t, v, []float64{1, 2}, []float64{1, 2}, []float64{1, 2})
}

func TestVariableMadeInStep(t *testing.T) {
	s := mirrored(t, 3)
	var made [3]*distribute.Variable
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		v, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Initial: float32(r.ID() + 3), Name: "w"})
		made[r.ID()] = v
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if made[0] == nil || made[0] != made[1] || made[0] != made[2] {
		t.Fatalf("the replicas got different variables: %v", made)
	}
	wantValues(t, made[0], []float64{3}, []float64{3}, []float64{3})

	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		name := "foo"
		if r.ID() == 1 {
			name = "bar"
		}
		_, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Initial: 1.0, Name: name})
		return err
	})
	if !errors.Is(err, distribute.ErrMismatch) || !strings.Contains(err.Error(), "tried to create variable bar with "+
		"mismatching name on device 1") {
		t.Errorf("other names: got %v", err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if r.ID() != 0 {
			return nil
		}
		_, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Initial: 1.0})
		return err
	})
	if !errors.Is(err, distribute.ErrDesync) {
		t.Errorf("on replica 0 only: got %v, want ErrDesync", err)
	}
}

func TestVariableContexts(t *testing.T) {
	s, other := mirrored(t, 2), mirrored(t, 2)
	v := variable(t, other, distribute.OnWrite, distribute.AggregateSum)
	cross, err := s.Cross(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Assign(cross, 1.0); !errors.Is(err, distribute.ErrContext) {
		t.Errorf("another strategy's variable: got %v, want ErrContext", err)
	}
	mine := variable(t, s, distribute.OnWrite, distribute.AggregateSum)
	if err := mine.Assign(cross, tensor.From([]float32{1, 2, 3})); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("another shape: got %v, want ErrInvalid", err)
	}
	if err := mine.Assign(cross, tensor.From([]int32{1, 2})); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("another dtype: got %v, want ErrInvalid", err)
	}
	wantValues(t, mine, []float64{1, 2}, []float64{1, 2})

	var kept *distribute.CrossReplica
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if err := mine.Assign(cross, tensor.From([]float32{0, 0})); !errors.Is(err, distribute.ErrContext) {
			t.Errorf("cross-replica context in a step: got %v, want ErrContext", err)
		}
		if _, err := s.Cross(ctx); !errors.Is(err, distribute.ErrContext) {
			t.Errorf("Cross in a step: got %v, want ErrContext", err)
		}
		_, err := distribute.MergeCall(ctx, r,
			func(_ context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
				kept = c
				return nil, mine.Assign(c, tensor.From([]float32{3, 4}))
			}, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	wantValues(t, mine, []float64{3, 4}, []float64{3, 4})
	if err := mine.Assign(kept, tensor.From([]float32{5, 6})); !errors.Is(err, distribute.ErrContext) {
		t.Errorf("a merge function's context after it: got %v, want ErrContext", err)
	}
}

func TestVariablePrints(t *testing.T) {
	s := mirrored(t, 2)
	v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: tensor.From([]float64{1, 10, 3, 4}, 2, 2)})
	if err != nil {
		t.Fatal(err)
	}
	want := `MirroredVariable:{
  0: <tf.Variable 'Variable:0' shape=(2, 2) dtype=float64, numpy=
array([[ 1., 10.],
       [ 3.,  4.]])>,
  1: <tf.Variable 'Variable/replica_1:0' shape=(2, 2) dtype=float64, numpy=
array([[ 1., 10.],
       [ 3.,  4.]])>
}`
	if v.String() != want {
		t.Errorf("got %s, want %s", v, want)
	}
	if w := variable(t, s, distribute.OnRead, distribute.AggregateMean).String(); !strings.Contains(w,
		"SyncOnReadVariable:{\n  0: <tf.Variable 'v:0' shape=(2,) dtype=float32, numpy=array([1., 2.], dtype=float32)>,") {
		t.Errorf("got %s", w)
	}
	one, err := distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	v, err = one.NewVariable(t.Context(), distribute.VariableConfig{Initial: 1.0})
	if want := "<tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"; err != nil || v.String() != want {
		t.Errorf("got %v, %v, want %s", v, err, want)
	}
}

// TestReduceVariableOverAxis has TensorFlow's answers for variables whose components differ.
func TestReduceVariableOverAxis(t *testing.T) {
	s := mirrored(t, 2)
	for _, c := range []struct {
		op   distribute.ReduceOp
		axis []int
		want []float64
	}{
		{distribute.Sum, []int{0}, []float64{23}},
		{distribute.Mean, []int{0}, []float64{5.75}},
		{distribute.Sum, []int{}, []float64{3, 20}},
	} {
		v, err := s.NewVariable(t.Context(), distribute.VariableConfig{
			Initial: tensor.From([]float32{0, 0}), Synchronization: distribute.OnRead, Aggregation: distribute.AggregateSum,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := distribute.Run(t.Context(), s, func(_ context.Context, r *distribute.Replica, _ int) (any, error) {
			return nil, v.Assign(r, tensor.From([]float32{float32(1 + r.ID()), 10}))
		}, nil); err != nil {
			t.Fatal(err)
		}
		for what, value := range map[string]distribute.Value{"the variable": v, "a nest of it": []any{v}} {
			if what != "the variable" && (c.op == distribute.Mean || len(c.axis) > 0) {
				continue
			}
			out, err := s.Extended().Reduce(t.Context(), c.op, value, distribute.ReduceOptions{Axis: c.axis})
			if err != nil {
				t.Fatal(err)
			}
			if got := out.(*tensor.Tensor).Float64s(); !slices.Equal(got, c.want) {
				t.Errorf("%v of %s over the axes %v: got %v, want %v", c.op, what, c.axis, got, c.want)
			}
		}
	}
}

// TestReadCentralVariable: what the replicas read from the only component of a variable is a value of each.
func TestReadCentralVariable(t *testing.T) {
	s, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
		ComputeDevices: []string{"CPU:0", "CPU:1"}, ParameterDevice: "CPU:0", LogicalCPUs: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	v, err := s.NewVariable(t.Context(), distribute.VariableConfig{Initial: tensor.From([]float32{1, 2})})
	if err != nil {
		t.Fatal(err)
	}
	read, err := distribute.RunNest(t.Context(), s, func(_ context.Context, r *distribute.Replica, _ ...distribute.Value) (
		distribute.Value, error,
	) {
		return v.Read(r)
	})
	if err != nil {
		t.Fatal(err)
	}
	sum, err := s.Extended().Reduce(t.Context(), distribute.Sum, read, distribute.ReduceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := sum.(*tensor.Tensor).Float64s(); !slices.Equal(got, []float64{2, 4}) {
		t.Errorf("got %v, want [2 4]", got)
	}
}

// TestOneReplicaReduces: the error names the tensor of the caller, not what the replicas exchange first.
func TestOneReplicaReduces(t *testing.T) {
	s := mirrored(t, 2)
	_, err := distribute.Run(t.Context(), s, func(ctx context.Context, r *distribute.Replica, _ int) (any, error) {
		if r.ID() == 1 {
			return nil, nil
		}
		return distribute.AllReduce(ctx, r, distribute.Sum, tensor.From([]float32{1, 2}))
	}, nil)
	const want = "replica 1 (CPU:1) returned, but replica 0 (CPU:0) waits for it in all_reduce SUM of a tensor, " +
		"float32 (2,)"
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
}
