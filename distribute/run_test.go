package distribute_test

import (
	"context"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// mirrored returns a strategy over n logical CPUs, closed with the test.
func mirrored(t testing.TB, n int, change ...func(*distribute.MirroredConfig)) *distribute.Strategy {
	t.Helper()
	cfg := distribute.MirroredConfig{LogicalCPUs: n}
	for _, f := range change {
		f(&cfg)
	}
	s, err := distribute.NewMirroredStrategy(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

func TestRunCallsEveryReplicaOnce(t *testing.T) {
	for _, n := range []int{1, 2, 3, 8} {
		s := mirrored(t, n)
		out, err := distribute.RunNest(t.Context(), s,
			func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
				return distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(r.ID()+1)))
			})
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range s.Extended().LocalResults(out) {
			if got, want := tensor.Data[float32](v.(*tensor.Tensor))[0], float32(n*(n+1)/2); got != want {
				t.Errorf("replica %d of %d: got %v, want %v", i, n, got, want)
			}
		}
	}
}

// A Run allocates a few objects, the same number for every number of replicas.
func TestRunAllocations(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	step := func(context.Context, *distribute.Replica, struct{}) (struct{}, error) { return struct{}{}, nil }
	for _, n := range []int{1, 2, 8} {
		s := mirrored(t, n)
		const most = 8
		if got := testing.AllocsPerRun(100, func() {
			if _, err := distribute.Run(t.Context(), s, step, nil); err != nil {
				t.Error(err)
			}
		}); got > most {
			t.Errorf("%d replicas: %v allocations, want at most %d", n, got, most)
		}
	}
}
