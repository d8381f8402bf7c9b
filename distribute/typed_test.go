package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// layerGrads is a nest of the user's type.
type layerGrads struct{ A, B *tensor.Tensor }

// TestTypesOfResults: what a function returns has the type that it was given, whatever the values are.
func TestTypesOfResults(t *testing.T) {
	s := mirrored(t, 2)
	ctx := t.Context()
	equal, err := distribute.Run(ctx, s, func(context.Context, *distribute.Replica, struct{}) (float64, error) {
		return 0.1, nil // equal on both replicas, and no float32
	}, nil)
	if err != nil || len(equal) != 2 {
		t.Fatalf("got %v, %v, want one result for each replica", equal, err)
	}
	sum, err := distribute.Reduce(ctx, s, distribute.Sum, equal, distribute.ReduceOptions{})
	if err != nil || sum != 0.2 {
		t.Errorf("the sum of %v is %v, %v", equal, sum, err)
	}
	mean, err := distribute.Reduce(ctx, s, distribute.Mean, []*tensor.Tensor{scalar(1), scalar(4)},
		distribute.ReduceOptions{})
	if err != nil || mean.Float64s()[0] != 2.5 {
		t.Errorf("the mean is %v, %v, want 2.5", mean, err)
	}
	_, err = distribute.Reduce(ctx, s, distribute.Mean, []int{1, 2}, distribute.ReduceOptions{})
	if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "which a int cannot hold") {
		t.Errorf("the mean of integers: got %v, want ErrInvalid", err)
	}
	_, err = distribute.Reduce(ctx, s, distribute.Sum, []float64{1}, distribute.ReduceOptions{})
	if !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("one value for two replicas: got %v, want ErrInvalid", err)
	}
	both, err := distribute.Gather(ctx, s, []layerGrads{
		{tensor.From([]int32{1}), tensor.From([]float32{2})}, {tensor.From([]int32{3, 4}), tensor.From([]float32{5})},
	}, 0)
	if err != nil || both.A.Format() != "[1 3 4]" || both.B.Format() != "[2. 5.]" {
		t.Errorf("gathered %v, %v", both, err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		n, err := distribute.AllReduce(ctx, r, distribute.Sum, 1<<29+r.ID())
		if err != nil || n != 2<<29+1 {
			return fmt.Errorf("the sum of ints is %d, %w", n, err)
		}
		p, err := distribute.AllReduce(ctx, r, distribute.Sum, layerGrads{scalar(float64(r.ID())), scalar(1)})
		if err != nil || p.A.Float64s()[0] != 1 || p.B.Float64s()[0] != 2 {
			return fmt.Errorf("the sum of a struct is %v, %w", p, err)
		}
		ids, err := distribute.MergeCall(ctx, r,
			func(_ context.Context, _ *distribute.CrossReplica, ids distribute.PerReplica[int]) ([]int, error) {
				return ids, nil
			}, r.ID())
		if err != nil || fmt.Sprint(ids) != "[0 1]" {
			return fmt.Errorf("a merge call of ids gives %v, %w", ids, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestReturnedVariable: a variable that all replicas return reduces as that variable: its components are added if each
// replica has one, and a mirrored one has no sum.
func TestReturnedVariable(t *testing.T) {
	s := mirrored(t, 2)
	seen := variable(t, s, distribute.OnRead, distribute.AggregateSum)
	kept := variable(t, s, distribute.OnWrite, distribute.AggregateSum)
	returned := func(v *distribute.Variable) distribute.PerReplica[distribute.Value] {
		out, err := distribute.Run(t.Context(), s,
			func(_ context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
				return v, seen.Assign(r, tensor.From([]float32{float32(r.ID()), 1}))
			}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	sum, err := distribute.Reduce(t.Context(), s, distribute.Sum, returned(seen), distribute.ReduceOptions{})
	if err != nil || sum.(*tensor.Tensor).Format() != "[1. 2.]" {
		t.Errorf("a sync-on-read variable: got %v, %v, want the sum of its components", sum, err)
	}
	mean, err := distribute.Reduce(t.Context(), s, distribute.Mean, returned(kept), distribute.ReduceOptions{})
	if err != nil || mean.(*tensor.Tensor).Format() != "[1. 2.]" {
		t.Errorf("the mean of a mirrored variable: got %v, %v, want its value", mean, err)
	}
	if _, err = distribute.Reduce(t.Context(), s, distribute.Sum, returned(kept), distribute.ReduceOptions{}); !errors.Is(
		err, distribute.ErrInvalid) {
		t.Errorf("the sum of a mirrored variable: got %v, want ErrInvalid", err)
	}
	nests := distribute.PerReplica[[]any]{{seen}, {seen}}
	in, err := distribute.Reduce(t.Context(), s, distribute.Sum, nests, distribute.ReduceOptions{})
	if err != nil || in[0].(*tensor.Tensor).Format() != "[1. 2.]" {
		t.Errorf("in a nest: got %v, %v, want the sum of its components", in, err)
	}
}
