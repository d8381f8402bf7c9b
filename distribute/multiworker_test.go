package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// layouts are ways to spread four replicas over workers.
var layouts = [][]int{{2, 2}, {1, 3}, {3, 1}, {1, 2, 1}, {1, 1, 1, 1}}

// jobProgram trains and reduces in every way, and returns as text the results that must not depend, bit for bit, on the
// placement of the replicas. Each replica's data depend on its id.
func jobProgram(ctx context.Context, s *distribute.Strategy) (string, error) {
	var out strings.Builder
	note := func(what string, v distribute.Value, err error) error {
		if err == nil {
			fmt.Fprintf(&out, "%s: %v\n", what, v)
		}
		return err
	}
	first, n := s.LocalReplicas()
	own := func(f func(id int) distribute.Value) *distribute.PerReplica { // a value of each replica of this worker
		var values []distribute.Value
		for id := first; id < first+n; id++ {
			values = append(values, f(id))
		}
		return distribute.NewPerReplica(values...)
	}
	w, err := s.NewVariable(ctx,
		distribute.VariableConfig{
			Name: "w", Initial: tensor.From([]float32{0.1, float32(first)}),
			Aggregation: distribute.AggregateMean,
		})
	if err != nil {
		return "", err
	}
	seen, err := s.NewVariable(ctx,
		distribute.VariableConfig{
			Name: "seen", Initial: tensor.Scalar(int64(0)), Synchronization: distribute.OnRead,
			Aggregation: distribute.AggregateSum,
		})
	if err != nil {
		return "", err
	}
	for step := range 5 {
		var rows distribute.Value
		_, err := distribute.Run(ctx, s,
			func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
				at, err := w.Read(r)
				if err != nil {
					return nil, err
				}
				gradient := tensor.New(tensor.Float32, 2)
				for i, x := range tensor.Data[float32](at) {
					tensor.Data[float32](gradient)[i] = x * (0.3 + 1/float32(3+r.ID()+step))
				}
				slices := &tensor.IndexedSlices{
					Values:     tensor.From([]float32{1 / float32(r.ID()+3), 2}, 2, 1),
					Indices:    tensor.From([]int64{int64(r.ID() % 2), int64(r.ID())}),
					DenseShape: tensor.From([]int64{4, 1}),
				}
				sum, err := r.AllReduce(ctx, distribute.Sum, []any{gradient, slices, tensor.Scalar(int64(r.ID()))})
				if err != nil {
					return nil, err
				}
				if r.LocalID() == 0 {
					rows = sum
				}
				bucket := onesBucket(2, 3, 20_000, 1)
				bucket.Scalars[1] = 0.1 * float64(r.ID())
				tensor.Data[float32](bucket.Src[1])[9] = 1 / float32(r.ID()+3)
				started, err := r.StartAllReduce(ctx, distribute.Sum, bucket)
				if err != nil {
					return nil, err
				}
				if err := sumConcurrently(ctx, r); err != nil {
					return nil, err
				}
				if err := started.Wait(ctx); err != nil {
					return nil, err
				}
				bucket.Owners = []int{r.NumReplicas() - 1, 0, 1}
				if started, err = r.StartReduceToOwners(ctx, distribute.Mean, bucket); err != nil {
					return nil, err
				}
				if err := started.Wait(ctx); err != nil {
					return nil, err
				}
				if started, err = r.StartGatherFromOwners(ctx, bucket, distribute.Options{Concurrent: true}); err != nil {
					return nil, err
				}
				if err := started.Wait(ctx); err != nil {
					return nil, err
				}
				if r.LocalID() == 0 {
					fmt.Fprintf(&out, "bucket: %v %v %v\n", tensor.Data[float32](bucket.Dst[1])[9], bucket.Scalars,
						tensor.Data[float32](bucket.Dst[0]))
				}
				merged, err := r.MergeCall(ctx,
					func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
						list, err := c.BatchReduceTo(ctx, distribute.Mean,
							[]distribute.ValueTo{{Value: args[0], To: w}, {Value: args[1], To: distribute.At("CPU:0")}})
						return list, err
					}, gradient, slices)
				if err != nil {
					return nil, err
				}
				if r.LocalID() == 0 {
					rows = []any{rows, merged}
				}
				return nil, errors.Join(w.AssignSub(r, gradient), seen.AssignAdd(r, tensor.Scalar(int64(r.ID()+1))))
			})
		if err := note(fmt.Sprint("step ", step), rows, err); err != nil {
			return "", err
		}
	}
	cross, err := s.Cross(ctx)
	if err != nil {
		return "", err
	}
	value, err := w.Read(cross)
	if err := note("w", value, err); err != nil {
		return "", err
	}
	for i, v := range w.Values() {
		if !v.(*tensor.Tensor).Equal(value) {
			return "", fmt.Errorf("component %d of w is %v, not %v", i, v, value)
		}
	}
	value, err = seen.Read(cross)
	if err := note("seen", value, err); err != nil {
		return "", err
	}
	ragged := own(func(id int) distribute.Value { return counting(0, id+1) })
	for _, c := range []struct {
		what string
		call func() (distribute.Value, error)
	}{
		{"mean over an axis", func() (distribute.Value, error) {
			return s.Reduce(ctx, distribute.Mean, ragged, distribute.ReduceOptions{Axis: []int{0}})
		}},
		{"mean of integers", func() (distribute.Value, error) {
			return s.Reduce(ctx, distribute.Mean, own(func(id int) distribute.Value { return tensor.Scalar(int32(id)) }),
				distribute.ReduceOptions{})
		}},
		{"gather", func() (distribute.Value, error) { return s.Gather(ctx, ragged, 0) }},
		{"gather of text", func() (distribute.Value, error) {
			return s.Gather(ctx, own(func(id int) distribute.Value {
				return tensor.Strings(slices.Repeat([]string{fmt.Sprint("r", id)}, id), id)
			}), -1)
		}},
		{"all_gather of text", func() (distribute.Value, error) {
			v, err := distribute.Run(ctx, s,
				func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
					return r.AllGather(ctx, tensor.Strings([]string{fmt.Sprint("r", r.ID())}, 1), 0)
				})
			return s.LocalResults(v)[0], err
		}},
		{"a text for all", func() (distribute.Value, error) {
			v, err := s.NewVariable(ctx,
				distribute.VariableConfig{Name: "text", Initial: tensor.Strings([]string{fmt.Sprint("of ", first)}, 1)})
			if err != nil {
				return nil, err
			}
			return v.Values()[0], nil
		}},
		{"a Run in a merge function", func() (distribute.Value, error) { return runInMerge(ctx, s) }},
	} {
		v, err := c.call()
		if err := note(c.what, v, err); err != nil {
			return "", fmt.Errorf("%s: %w", c.what, err)
		}
	}
	return out.String(), nil
}

// runInMerge sums the replicas' ids in a Run that a merge function begins.
func runInMerge(ctx context.Context, s *distribute.Strategy) (distribute.Value, error) {
	v, err := distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return r.MergeCall(ctx,
				func(ctx context.Context, _ *distribute.CrossReplica, _ ...distribute.Value) (distribute.Value, error) {
					v, err := distribute.Run(ctx, s,
						func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
							return r.AllReduce(ctx, distribute.Sum, tensor.Scalar(float32(r.ID())))
						})
					if err != nil {
						return nil, err
					}
					return s.LocalResults(v)[0], nil
				})
		})
	if err != nil {
		return nil, err
	}
	return s.LocalResults(v)[0], nil
}

// However replicas are spread over workers, all workers get the bits of one process.
func TestWorkersLikeOneProcess(t *testing.T) {
	want, err := jobProgram(t.Context(), mirrored(t, 4))
	if err != nil {
		t.Fatal(err)
	}
	for _, layout := range layouts {
		t.Run(fmt.Sprint(layout), func(t *testing.T) {
			for w, err := range onWorkers(workerConfigs(t, layout...), func(s *distribute.Strategy, _ int) error {
				got, err := jobProgram(t.Context(), s)
				if err == nil && got != want {
					err = fmt.Errorf("got\n%s\nwant\n%s", got, want)
				}
				return err
			}) {
				if err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
			}
		})
	}
}

// Workers of different sizes get every row once, in the order of the replicas, and end at the same step.
func TestWorkersDataset(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for i, n := range []int{5, 1, 3} {
		var text []byte
		for k := range n {
			text = data.AppendTFRecord(text, fmt.Appendf(nil, "%c%d", 'a'+i, k))
		}
		files = append(files, filepath.Join(dir, fmt.Sprint(i)))
		if err := os.WriteFile(files[i], text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	numbers := func() data.Dataset { return data.FromTensors(counting(0, 14)).Batch(6) }
	for name, c := range map[string]struct {
		dataset func(worker int) data.Dataset
		options distribute.InputOptions
		want    [][][]int // number of rows by worker, step and replica
	}{
		"data": {
			func(int) data.Dataset { return numbers() },
			distribute.InputOptions{},
			[][][]int{{{2}, {2}, {1}}, {{2, 2}, {2, 2}, {1, 0}}},
		},
		"read ahead": {
			func(int) data.Dataset { return numbers() },
			distribute.InputOptions{Prefetch: 2},
			[][][]int{{{2}, {2}, {1}}, {{2, 2}, {2, 2}, {1, 0}}},
		},
		"off": {
			func(int) data.Dataset { return numbers() },
			distribute.InputOptions{AutoShard: distribute.ShardOff},
			[][][]int{{{2}, {2}, {2}, {2}, {2}, {2}, {2}}, {{2, 2}, {2, 2}, {2, 2}, {2, 0}, {0, 0}, {0, 0}, {0, 0}}},
		},
		"file": {
			func(int) data.Dataset { return data.TFRecords(files...).Batch(3) },
			distribute.InputOptions{},
			[][][]int{
				{{1}, {1}, {1}, {1}, {1}, {1}, {1}, {1}},
				{{1, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}},
			},
		},
		"none here": {
			func(w int) data.Dataset { return data.FromTensors(counting(0, 4*w)).Batch(3) },
			distribute.InputOptions{AutoShard: distribute.ShardOff},
			[][][]int{{{0}, {0}}, {{1, 1}, {1, 1}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			for w, err := range onWorkers(workerConfigs(t, 1, 2), func(s *distribute.Strategy, worker int) error {
				set, err := s.DistributeDataset(c.dataset(worker), c.options)
				if err != nil {
					return err
				}
				var got [][]int
				for element, err := range set.Iter(t.Context()) {
					if err != nil {
						return err
					}
					var rows []int
					for _, v := range s.LocalResults(element) {
						rows = append(rows, v.(*tensor.Tensor).Shape()[0])
					}
					got = append(got, rows)
				}
				if fmt.Sprint(got) != fmt.Sprint(c.want[worker]) {
					return fmt.Errorf("got %v, want %v", got, c.want[worker])
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("worker %d: %v", w, err)
				}
			}
		})
	}
}

// A worker that cannot read its data ends the iteration on all.
func TestWorkersDatasetFails(t *testing.T) {
	errs := onWorkers(workerConfigs(t, 1, 1), func(s *distribute.Strategy, worker int) error {
		set, err := s.DistributeDatasetsFromFunction(t.Context(), func(c distribute.InputContext) (data.Dataset, error) {
			if c.InputPipelineID == 1 {
				return data.TFRecords(filepath.Join(t.TempDir(), "none")).Batch(1), nil
			}
			return data.FromTensors(counting(0, 9)).Batch(1), nil
		})
		if err != nil {
			return err
		}
		for _, err := range set.Iter(t.Context()) {
			if err != nil {
				return err
			}
		}
		return nil
	})
	if errs[1] == nil || !errors.Is(errs[0], distribute.ErrAborted) ||
		!strings.Contains(errs[0].Error(), "replica 1 could not read") {
		t.Errorf("got %v, want a failure on both", errs)
	}
}

// A deadlock between replicas of one worker is detected at once, although other workers take part. The failure ends the
// step on all workers and names replicas by their ids, and the strategies run again.
func TestWorkersFailTogether(t *testing.T) {
	for w, err := range onWorkers(workerConfigs(t, 1, 2), func(s *distribute.Strategy, worker int) error {
		for round := range 3 {
			_, err := distribute.Run(t.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
					if r.ID() == 2 {
						return nil, nil
					}
					return r.AllReduce(ctx, distribute.Sum, tensor.Scalar(float32(1)))
				})
			if err == nil || errors.Is(err, distribute.ErrTimeout) || worker == 1 &&
				(!errors.Is(err, distribute.ErrDesync) || !strings.Contains(err.Error(), "replica 2 (CPU:1) returned, but "+
					"replica 1")) {
				return fmt.Errorf("round %d: got %w, want a step whose replicas' calls can never match", round, err)
			}
			got, err := distribute.Run(t.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
					return r.AllReduce(ctx, distribute.Sum, tensor.Scalar(float32(r.ID())))
				})
			if err != nil {
				return fmt.Errorf("after round %d: %w", round, err)
			}
			if sum := s.LocalResults(got)[0].(*tensor.Tensor); !sum.Equal(tensor.Scalar(float32(3))) {
				return fmt.Errorf("after round %d: got %v, want 3", round, sum)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// A call in cross-replica context that the workers make differently fails on all of them; then they continue.
func TestWorkersDiffer(t *testing.T) {
	for w, err := range onWorkers(workerConfigs(t, 2, 1), func(s *distribute.Strategy, worker int) error {
		_, err := s.NewVariable(t.Context(),
			distribute.VariableConfig{Name: "v", Initial: tensor.New(tensor.Float32, 2+worker)})
		if !errors.Is(err, distribute.ErrMismatch) || !strings.Contains(err.Error(), "initial value of v:0") {
			return fmt.Errorf("got %w, want a mismatch of v", err)
		}
		_, err = s.Gather(t.Context(), tensor.From([]int64{1}), 0)
		return err
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// An invalid job is an error when the strategies are made.
func TestWorkersDisagree(t *testing.T) {
	spec := func(n int) cluster.Spec {
		return cluster.NewSpec(map[string][]string{"worker": []string{"a:1", "b:1", "c:1"}[:n]})
	}
	for name, c := range map[string]struct {
		change  func([]distribute.MultiWorkerConfig)
		kind    error
		message string
	}{
		"two are worker 0": {func(c []distribute.MultiWorkerConfig) {
			c[1].Resolver = &cluster.Simple{Cluster: spec(2), This: &cluster.Task{Type: "worker"}}
		}, distribute.ErrMismatch, "worker"},
		"another order": {func(c []distribute.MultiWorkerConfig) {
			c[0].Resolver, c[1].Resolver = c[1].Resolver,
				c[0].Resolver
		}, distribute.ErrMismatch, "in the order of the workers"},
		"other clusters": {func(c []distribute.MultiWorkerConfig) {
			c[1].Resolver = &cluster.Simple{Cluster: spec(3), This: &cluster.Task{Type: "worker", Index: 1}}
		}, distribute.ErrMismatch, "one cluster spec on all"},
	} {
		t.Run(name, func(t *testing.T) {
			configs := workerConfigs(t, 1, 1)
			c.change(configs)
			for w, err := range onWorkers(configs, func(*distribute.Strategy, int) error { return nil }) {
				if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.message) {
					t.Errorf("worker %d: got %v, want %v with %q", w, err, c.kind, c.message)
				}
			}
		})
	}
	group, err := collective.Open(mem.New(2), collective.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	two := &cluster.Simple{Cluster: spec(2), This: &cluster.Task{Type: "worker"}}
	for _, cfg := range []distribute.MultiWorkerConfig{
		{Resolver: two, Devices: []string{"CPU:0"}, Group: group},
		{Resolver: two, Devices: []string{"CPU:0", "CPU:1"}, Group: group},
	} {
		cfg.LogicalCPUs = 2
		if _, err := distribute.NewMultiWorkerMirroredStrategy(cfg); !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%v: got %v, want ErrInvalid", cfg.Devices, err)
		}
	}
}
