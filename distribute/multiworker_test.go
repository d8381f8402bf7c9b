package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
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
	ids := s.LocalReplicas()
	own := func(f func(id int) distribute.Value) *distribute.Components { // a value of each replica of this worker
		var values []distribute.Value
		for _, id := range ids {
			values = append(values, f(id))
		}
		return distribute.NewComponents(values...)
	}
	w, err := s.NewVariable(ctx,
		distribute.VariableConfig{
			Name: "w", Initial: tensor.From([]float32{0.1, float32(ids[0])}),
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
			func(ctx context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
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
				sum, err := distribute.AllReduce(ctx, r, distribute.Sum, []any{gradient, slices, tensor.Scalar(int64(r.ID()))})
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
				merged, err := distribute.MergeNests(ctx, r,
					func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
						list, err := c.Strategy().Extended().BatchReduceTo(ctx, distribute.Mean,
							args, []distribute.Value{w, "CPU:0"})
						return list, err
					}, gradient, slices)
				if err != nil {
					return nil, err
				}
				if r.LocalID() == 0 {
					rows = []any{rows, merged}
				}
				return nil, errors.Join(w.AssignSub(r, gradient), seen.AssignAdd(r, tensor.Scalar(int64(r.ID()+1))))
			}, nil)
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
			return s.Extended().Reduce(ctx, distribute.Mean, ragged, distribute.ReduceOptions{Axis: []int{0}})
		}},
		{"mean of integers", func() (distribute.Value, error) {
			return s.Extended().Reduce(ctx, distribute.Mean,
				own(func(id int) distribute.Value { return tensor.Scalar(int32(id)) }),
				distribute.ReduceOptions{})
		}},
		{"gather", func() (distribute.Value, error) { return s.Extended().Gather(ctx, ragged, 0) }},
		{"gather of text", func() (distribute.Value, error) {
			return s.Extended().Gather(ctx, own(func(id int) distribute.Value {
				return tensor.Strings(slices.Repeat([]string{fmt.Sprint("r", id)}, id), id)
			}), -1)
		}},
		{"all_gather of text", func() (distribute.Value, error) {
			v, err := distribute.RunNest(ctx, s,
				func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
					return distribute.AllGather(ctx, r, tensor.Strings([]string{fmt.Sprint("r", r.ID())}, 1), 0)
				})
			return s.Extended().LocalResults(v)[0], err
		}},
		{"a text for all", func() (distribute.Value, error) {
			v, err := s.NewVariable(ctx,
				distribute.VariableConfig{Name: "text", Initial: tensor.Strings([]string{fmt.Sprint("of ", ids[0])}, 1)})
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
	v, err := distribute.RunNest(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return distribute.MergeNests(ctx, r,
				func(ctx context.Context, _ *distribute.CrossReplica, _ ...distribute.Value) (distribute.Value, error) {
					v, err := distribute.RunNest(ctx, s,
						func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
							return distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(r.ID())))
						})
					if err != nil {
						return nil, err
					}
					return s.Extended().LocalResults(v)[0], nil
				})
		})
	if err != nil {
		return nil, err
	}
	return s.Extended().LocalResults(v)[0], nil
}

// The ids of a worker's replicas need not be contiguous, nor in the order of the workers.
func TestIDsNeedNotBeContiguous(t *testing.T) {
	want, err := jobProgram(t.Context(), mirrored(t, 4))
	if err != nil {
		t.Fatal(err)
	}
	for _, ids := range [][][]int{
		{{0, 2}, {1, 3}}, {{1, 3}, {0, 2}}, {{0, 3}, {1, 2}}, {{1}, {0, 2, 3}}, {{0, 1, 3}, {2}},
	} {
		for w, err := range onWorkers(workersOf(t, mem.NewPipes(4), ids...), func(s *distribute.Strategy, w int) error {
			if got, all := s.LocalReplicas(), s.ReplicasByWorker(); !slices.Equal(got, ids[w]) ||
				!slices.EqualFunc(all, ids, slices.Equal) {
				return fmt.Errorf("got the replicas %v, of all workers %v", got, all)
			}
			if got, err := jobProgram(t.Context(), s); err != nil || got != want {
				return fmt.Errorf("got\n%s\nand %w, want\n%s", got, err, want)
			}
			return eachReadsItsPart(t.Context(), s, len(ids[0]) == len(ids[1]), w)
		}) {
			if err != nil {
				t.Errorf("%v, worker %d: %v", ids, w, err)
			}
		}
	}
}

// TestSizesFollowIDs: rows that replicas cannot share equally go to the replicas with the lowest ids, however workers
// hold them. Each worker cuts its own dataset, and in every step all workers together read one batch.
func TestSizesFollowIDs(t *testing.T) {
	for _, c := range []struct {
		ids  [][]int
		want [][][]int // number of rows by worker, step and replica
	}{
		{[][]int{{0, 2}, {1, 3}}, [][][]int{{{3, 2}, {3, 2}}, {{3, 2}, {3, 2}}}},
		{[][]int{{0, 1}, {2, 3}}, [][][]int{{{3, 3}, {2, 2}}, {{2, 2}, {3, 3}}}},
		{[][]int{{1, 3}, {0, 2}}, [][][]int{{{3, 2}, {3, 2}}, {{3, 2}, {3, 2}}}},
	} {
		for w, err := range onWorkers(workersOf(t, mem.NewPipes(4), c.ids...), func(s *distribute.Strategy, w int) error {
			set, err := s.DistributeDataset(fromTensors(counting(0, 10)).Batch(10),
				distribute.InputOptions{AutoShard: distribute.ShardOff})
			if err != nil {
				return err
			}
			var got [][]int
			for parts, err := range set.Iter(t.Context()) {
				if err != nil {
					return err
				}
				var rows []int
				for _, v := range parts {
					rows = append(rows, v.(*tensor.Tensor).Shape()[0])
				}
				got = append(got, rows)
			}
			if !reflect.DeepEqual(got, c.want[w]) {
				return fmt.Errorf("got %v, want %v", got, c.want[w])
			}
			return nil
		}) {
			if err != nil {
				t.Errorf("%v, worker %d: %v", c.ids, w, err)
			}
		}
	}
}

// eachReadsItsPart checks the rows that the replicas of two workers get of a global batch of 8: two each, in turn if
// the workers have equally many, else by id.
func eachReadsItsPart(ctx context.Context, s *distribute.Strategy, inTurn bool, worker int) error {
	set, err := s.DistributeDataset(elements{counting(0, 8)})
	if err != nil {
		return err
	}
	for parts, err := range set.Iter(ctx) {
		if err != nil {
			return err
		}
		for i, id := range s.LocalReplicas() {
			part := id
			if inTurn {
				part = 2*i + worker
			}
			if got := parts[i].(*tensor.Tensor); !got.Equal(counting(2*part, 2*part+2)) {
				return fmt.Errorf("replica %d gets %v, want part %d", id, got, part)
			}
		}
	}
	return nil
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
	numbers := func() data.Dataset { return fromTensors(counting(0, 14)).Batch(6) }
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
			func(w int) data.Dataset { return fromTensors(counting(0, 4*w)).Batch(3) },
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
					for _, v := range s.Extended().LocalResults(element) {
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
			return fromTensors(counting(0, 9)).Batch(1), nil
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
				func(ctx context.Context, r *distribute.Replica, _ struct{}) (distribute.Value, error) {
					if r.ID() == 2 {
						return nil, nil
					}
					return distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(1)))
				}, nil)
			if err == nil || errors.Is(err, distribute.ErrTimeout) || worker == 1 &&
				(!errors.Is(err, distribute.ErrDesync) || !strings.Contains(err.Error(), "replica 2 (CPU:1) returned, but "+
					"replica 1")) {
				return fmt.Errorf("round %d: got %w, want a step whose replicas' calls can never match", round, err)
			}
			got, err := distribute.RunNest(t.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
					return distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(r.ID())))
				})
			if err != nil {
				return fmt.Errorf("after round %d: %w", round, err)
			}
			if sum := s.Extended().LocalResults(got)[0].(*tensor.Tensor); !sum.Equal(tensor.Scalar(float32(3))) {
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
		_, err = s.Extended().Gather(t.Context(), tensor.From([]int64{1}), 0)
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

// TestReduceHostValues: the replicas return host numbers, some of them equal, and sum and mean are those of all
// replicas, however they are spread over workers.
func TestReduceHostValues(t *testing.T) {
	program := func(ctx context.Context, s *distribute.Strategy) error {
		r := rand.New(rand.NewPCG(1, 2)) // the same on all workers
		for round := range 60 {
			counts, sum := make([]int, s.NumReplicasInSync()), 0
			for i := range counts {
				counts[i] = 3 + r.IntN(2)
				sum += counts[i]
			}
			out, err := distribute.RunNest(ctx, s, func(_ context.Context, r *distribute.Replica, _ ...distribute.Value) (
				distribute.Value, error,
			) {
				return map[string]any{"count": counts[r.ID()], "half": float64(counts[r.ID()]) / 2}, nil
			})
			if err != nil {
				return err
			}
			for _, leaf := range []string{"count", "half"} {
				scale := map[string]float64{"count": 1, "half": 0.5}[leaf]
				v := out.(map[string]any)[leaf]
				total, err := s.Extended().Reduce(ctx, distribute.Sum, v, distribute.ReduceOptions{})
				if err != nil {
					return fmt.Errorf("round %d, sum of %s of %v: %w", round, leaf, counts, err)
				}
				mean, err := s.Extended().Reduce(ctx, distribute.Mean, v, distribute.ReduceOptions{})
				if err != nil {
					return fmt.Errorf("round %d, mean of %s of %v: %w", round, leaf, counts, err)
				}
				if got, want := total.(*tensor.Tensor).Float64s()[0], float64(sum)*scale; got != want {
					return fmt.Errorf("round %d, sum of %s of %v: got %v, want %v", round, leaf, counts, got, want)
				}
				got, want := mean.(*tensor.Tensor).Float64s()[0], float64(sum)*scale/float64(len(counts))
				if leaf == "half" && math.Abs(got-want) > 1e-6 { // a mean of integers is cut
					return fmt.Errorf("round %d, mean of %s of %v: got %v, want %v", round, leaf, counts, got, want)
				}
			}
		}
		return nil
	}
	for n := 2; n <= 3; n++ {
		if err := program(t.Context(), mirrored(t, n)); err != nil {
			t.Errorf("%d replicas: %v", n, err)
		}
	}
	for _, layout := range [][]int{{1, 1}, {2, 2}, {3, 1}, {2, 1, 2}} {
		for w, err := range onWorkers(workerConfigs(t, layout...), func(s *distribute.Strategy, _ int) error {
			return program(t.Context(), s)
		}) {
			if err != nil {
				t.Errorf("%v, worker %d: %v", layout, w, err)
			}
		}
	}
}
