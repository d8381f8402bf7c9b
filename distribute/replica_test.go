package distribute_test

import (
	"context"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// skipRace skips a test that counts allocations.
func skipRace(t *testing.T) {
	t.Helper()
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
}

// doesNotAllocate checks that f, which every replica calls as often, allocates nothing. testing.AllocsPerRun counts the
// whole process, so one replica measures, several times: the runtime itself allocates now and then.
func doesNotAllocate(t *testing.T, r *distribute.Replica, f func()) {
	t.Helper()
	const runs, tries = 50, 5
	if r.ID() != 0 {
		for range tries * (runs + 1) {
			f()
		}
		return
	}
	allocs := math.Inf(1)
	for range tries {
		allocs = min(allocs, testing.AllocsPerRun(runs, f))
	}
	if allocs > 0 {
		t.Errorf("%d replicas: %v allocations a call, want none", r.NumReplicas(), allocs)
	}
}

func TestAllReduceIntoDoesNotAllocate(t *testing.T) {
	skipRace(t)
	for _, n := range []int{1, 2} {
		s := mirrored(t, n)
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			src := []*tensor.Tensor{tensor.New(tensor.Float32, 1000), tensor.New(tensor.Float64, 3)}
			dst := []*tensor.Tensor{tensor.New(tensor.Float32, 1000), tensor.New(tensor.Float64, 3)}
			names := []string{"kernel", "bias"}
			var err error
			reduce := func() {
				if e := r.AllReduceInto(ctx, distribute.Mean, dst, src, names); e != nil {
					err = e
				}
			}
			doesNotAllocate(t, r, reduce)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestAllReduceIntoErrors(t *testing.T) {
	s := mirrored(t, 2)
	f32, f64, ints, text := tensor.New(tensor.Float32, 2), tensor.New(tensor.Float64, 2), tensor.New(tensor.Int32,
		2), tensor.New(tensor.String, 2)
	for _, c := range []struct {
		name     string
		op       distribute.ReduceOp
		dst, src []*tensor.Tensor
		names    []string
		message  string
	}{
		{
			"lengths", distribute.Sum,
			[]*tensor.Tensor{f32},
			[]*tensor.Tensor{f32, f32},
			nil,
			"1 destinations and 0 names given for 2 tensors",
		},
		{
			"names", distribute.Sum,
			[]*tensor.Tensor{f32},
			[]*tensor.Tensor{f32},
			[]string{"a", "b"},
			"2 names given for 1 tensors",
		},
		{
			"dtype", distribute.Sum,
			[]*tensor.Tensor{f64},
			[]*tensor.Tensor{f32},
			nil,
			"value 0: the destination is float64 (2,), the source float32 (2,)",
		},
		{
			"nil", distribute.Sum,
			[]*tensor.Tensor{nil},
			[]*tensor.Tensor{f32},
			[]string{"kernel"},
			"value 0 (kernel): the tensor or its destination is nil",
		},
		{
			"mean of integers", distribute.Mean,
			[]*tensor.Tensor{ints},
			[]*tensor.Tensor{ints},
			nil,
			"use AllReduce, which returns a float",
		},
		{
			"strings", distribute.Sum,
			[]*tensor.Tensor{text},
			[]*tensor.Tensor{text},
			nil,
			"string is not in the list of allowed values",
		},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			err := r.AllReduceInto(ctx, c.op, c.dst, c.src, c.names)
			if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), c.message) {
				t.Errorf("%s: got %v, want ErrInvalid with %q", c.name, err, c.message)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestStructsAndMapsInAllReduce(t *testing.T) {
	type grads struct {
		Kernel *tensor.Tensor
		Slots  map[string]*tensor.Tensor
		step   int
	}
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		x := tensor.Scalar(float32(r.ID() + 1))
		got, err := distribute.AllReduce(ctx, r, distribute.Sum,
			grads{Kernel: x, Slots: map[string]*tensor.Tensor{"m": x}, step: 7})
		if err != nil {
			return err
		}
		if got.Kernel.Float64s()[0] != 3 || got.Slots["m"].Float64s()[0] != 3 || got.step != 7 {
			t.Errorf("got %+v", got)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestNestsThatDifferInAllReduce(t *testing.T) {
	x := tensor.From([]float32{1, 2})
	one := func(key string) any { return map[string]*tensor.Tensor{key: x} }
	for _, c := range []struct {
		name string
		ops  distribute.CrossDeviceOps
		nest func(id int) any
	}{
		{"keys", nil, func(id int) any { return one([]string{"a", "b"}[id]) }},
		{"depth", nil, func(id int) any { return []any{x, []any{x}}[id] }},
		{
			"keys, the user's operations",
			distribute.NewReductionToOneDevice("", nil),
			func(id int) any { return one([]string{"a", "b"}[id]) },
		},
		{
			"depth, the user's operations",
			distribute.NewReductionToOneDevice("", nil),
			func(id int) any { return []any{x, []any{x}}[id] },
		},
	} {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.CrossDeviceOps = c.ops })
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.AllReduce(ctx, r, distribute.Sum, c.nest(r.ID()))
			return err
		})
		if !errors.Is(err, distribute.ErrMismatch) || !strings.Contains(err.Error(), "differ") {
			t.Errorf("%s: got %v, want ErrMismatch", c.name, err)
		}
	}
}

func TestConcurrentMergeCallsInOrder(t *testing.T) {
	s := mirrored(t, 4)
	var log []int
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		for k := range 100 {
			out, err := distribute.MergeNests(ctx, r,
				func(_ context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
					log = append(log, k)
					return args[0], nil
				}, r.ID()*1000+k)
			if err != nil {
				return err
			}
			if out != r.ID()*1000+k {
				t.Errorf("replica %d got %v back, want its own argument %d", r.ID(), out, r.ID()*1000+k)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, k := range log {
		if i != k {
			t.Fatalf("merge function %d ran as number %d", k, i)
		}
	}
	if len(log) != 100 {
		t.Errorf("%d merge functions ran, want 100", len(log))
	}
}

func TestStatsAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2)
		for range 3 {
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				if r.ID() == 1 {
					time.Sleep(5 * time.Millisecond)
				}
				if err := sum(ctx, r, "x", 1000); err != nil {
					return err
				}
				if r.ID() == 0 {
					time.Sleep(time.Millisecond)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		var got distribute.Stats
		s.ReadStats(&got)
		want := distribute.Stats{Runs: 3, Elapsed: 18 * time.Millisecond, Replicas: []distribute.ReplicaStats{
			{Step: 18 * time.Millisecond, Wait: 15 * time.Millisecond, Calls: 3},
			{Step: 15 * time.Millisecond, Wait: 3 * time.Millisecond, Calls: 3},
		}}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	})
}
