package distribute_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestReform moves four replicas between two strategies that begin with all of them, on shared devices. Sums are over
// all replicas, and variables keep the components of those that stay.
func TestReform(t *testing.T) {
	one := func(ctx context.Context, r *distribute.Replica, _ struct{}) (float64, error) {
		sum, err := distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float64(1+r.ID())))
		if err != nil {
			return 0, err
		}
		return sum.Float64s()[0], nil
	}
	strategies, variables := make([]*distribute.Strategy, 2), make([][]*distribute.Variable, 2)
	for w := range strategies {
		s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
			Devices: []string{"CPU:0", "CPU:0", "CPU:1", "CPU:0"}, LogicalCPUs: 2, Elastic: true,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		strategies[w] = s
		for _, how := range []distribute.Synchronization{distribute.OnWrite, distribute.OnRead, distribute.OnWrite} {
			v, err := s.NewVariable(t.Context(), distribute.VariableConfig{
				Initial: tensor.Scalar(1.0), Synchronization: how, Aggregation: distribute.AggregateSum,
			})
			if err != nil {
				t.Fatal(err)
			}
			variables[w] = append(variables[w], v)
		}
		_, err = distribute.Run(t.Context(), s, func(_ context.Context, r *distribute.Replica, _ struct{}) (bool, error) {
			return true, variables[w][1].Assign(r, tensor.Scalar(float64(10*r.ID())))
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	for round, ids := range [][][]int{{{0, 2}, {1, 3}}, {{3}, {0, 1, 2}}, {{1, 2, 3}, {0}}} {
		ends := mem.NewPipes(4)
		errs := make([]error, 2)
		var both sync.WaitGroup
		for w, s := range strategies {
			both.Go(func() {
				var own []transport.Endpoint
				for _, id := range ids[w] {
					own = append(own, ends[id])
				}
				group, err := collective.Open(own, collective.Config{Timeout: time.Minute})
				if err == nil {
					err = s.Reform(distribute.Placement{
						Worker: w, Replicas: ids, Group: group, Devices: slices.Repeat([]string{"CPU:1"}, len(own)),
					}, variables[w][:2]...)
				}
				if err != nil {
					errs[w] = err
					return
				}
				sums, err := distribute.Run(t.Context(), s, one, nil)
				if err == nil && (len(sums) != len(own) || sums[0] != 10) {
					t.Errorf("round %d, worker %d: sums %v, want %d times 10", round, w, sums, len(own))
				}
				errs[w] = err
			})
		}
		both.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		for w, s := range strategies {
			if !slices.Equal(s.LocalReplicas(), ids[w]) || s.Properties().ShouldCheckpoint != (w == 0) {
				t.Errorf("round %d, worker %d: replicas %v, %+v", round, w, s.LocalReplicas(), s.Properties())
			}
			mirrored, own := variables[w][0].Values(), variables[w][1].Values()
			for i, id := range ids[w] {
				if x := mirrored[i].(*tensor.Tensor).Float64s()[0]; x != 1 {
					t.Errorf("round %d: the mirrored variable is %v on replica %d", round, x, id)
				}
				if x := own[i].(*tensor.Tensor).Float64s()[0]; round == 0 && x != float64(10*id) {
					t.Errorf("the component of replica %d is %v", id, x)
				}
			}
			in, err := s.Cross(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := variables[w][2].Read(in); !errors.Is(err, distribute.ErrInvalid) {
				t.Errorf("a variable that Reform did not get: %v", err)
			}
		}
	}
	for want, p := range map[string]distribute.Placement{
		"replica 3 has no worker":               {Replicas: [][]int{{0, 1, 2}}, Devices: []string{"CPU:0", "CPU:0", "CPU:0"}},
		"which does not exist":                  {Replicas: [][]int{{0, 1, 2, 3, 4}}},
		"has a worker already":                  {Replicas: [][]int{{0, 1, 2, 3}, {3}}},
		"in ascending order":                    {Replicas: [][]int{{1, 0, 2, 3}}},
		"with 1 devices":                        {Replicas: [][]int{{0, 1, 2, 3}}, Devices: []string{"CPU:0"}},
		"this is worker 1 of 1":                 {Worker: 1, Replicas: [][]int{{0, 1, 2, 3}}},
		"no group for 2 workers":                {Replicas: [][]int{{0}, {1, 2, 3}}, Devices: []string{"CPU:0"}},
		"device CPU:70000 does not exist: want": {Replicas: [][]int{{0}, {1, 2, 3}}, Devices: []string{"CPU:70000"}},
	} {
		if err := strategies[0].Reform(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	mirrored, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer mirrored.Close()
	if err := mirrored.Reform(distribute.Placement{}); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("a mirrored strategy: %v", err)
	}
}
