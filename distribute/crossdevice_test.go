package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestHierarchyGivesTheSameBits: for every grouping, number of packs and accumulation, the sums have
// the bits of a reduction to one device. NaNs of any payload are among the numbers.
func TestHierarchyGivesTheSameBits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 13).Draw(rt, "replicas")
		groups := make([]int, n)
		for i := range groups {
			groups[i] = rapid.IntRange(0, 3).Draw(rt, "group")
		}
		packs := rapid.IntRange(0, 6).Draw(rt, "packs")
		op := rapid.SampledFrom([]distribute.ReduceOp{distribute.Sum, distribute.Mean}).Draw(rt, "op")
		o := distribute.Options{Accumulate: rapid.SampledFrom([]collective.Accumulate{
			collective.AccumulateDType,
			collective.AccumulateFloat32,
		}).Draw(rt, "accumulate")}
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		shapes := [][]int{{rng.IntN(20)}, {}, {rng.IntN(5), 3}}
		dtypes := []tensor.DType{tensor.Float32, tensor.Float16, tensor.BFloat16, tensor.Float64, tensor.Int8, tensor.Int64}
		rng.Shuffle(len(dtypes), func(i, j int) { dtypes[i], dtypes[j] = dtypes[j], dtypes[i] })
		var batch []distribute.ValueTo
		for i := range shapes {
			components := make([]distribute.Value, n)
			for r := range components {
				components[r] = randomTensors(rng, shapes[i:i+1], dtypes[i:i+1])[0].OnDevice(r)
			}
			batch = append(batch, distribute.ValueTo{Value: distribute.NewPerReplica(components...), To: distribute.At("CPU:0")})
		}
		hier, err := distribute.NewHierarchicalCopyAllReduce(packs)
		if err != nil {
			rt.Fatal(err)
		}
		hier = hier.WithGroups(func(devices []distribute.Device) []int { return groups[:len(devices)] })
		want, err := distribute.BatchReduceWith(context.Background(), distribute.ReductionToOneDevice{}, op, batch, o)
		if err != nil {
			rt.Fatal(err)
		}
		got, err := distribute.BatchReduceWith(context.Background(), hier, op, batch, o)
		if err != nil {
			rt.Fatal(err)
		}
		for i := range got {
			if !got[i].(*tensor.Tensor).Equal(want[i].(*tensor.Tensor)) {
				rt.Fatalf("value %d, groups %v: got %v, want %v", i, groups, got[i], want[i])
			}
		}
	})
}

// TestAccumulateIsOneRounding: a mean whose sums stay float32 is rounded once, in a step and outside of it.
func TestAccumulateIsOneRounding(t *testing.T) {
	const n = 3
	rng := rand.New(rand.NewPCG(1, 2))
	var parts []*tensor.Tensor
	for range n {
		x := tensor.New(tensor.BFloat16, 500)
		for i := range x.Len() {
			setNumber(x, i, rng.NormFloat64())
		}
		parts = append(parts, x)
	}
	o := distribute.Options{Accumulate: collective.AccumulateFloat32}
	s := mirrored(t, n)
	all, err := distribute.RunTyped(t.Context(), s,
		func(ctx context.Context, r *distribute.Replica, x *tensor.Tensor) (distribute.Value, error) {
			return r.AllReduce(ctx, distribute.Mean, x, o)
		}, parts)
	if err != nil {
		t.Fatal(err)
	}
	v := distribute.NewPerReplica(parts[0].OnDevice(0), parts[1].OnDevice(1), parts[2].OnDevice(2))
	for _, ops := range []distribute.CrossDeviceOps{distribute.ReductionToOneDevice{}, s.CrossDeviceOps()} {
		out, err := distribute.ReduceWith(t.Context(), ops, distribute.Mean, v, distribute.At("CPU:0"), o)
		if err != nil {
			t.Fatal(err)
		}
		if !out.(*tensor.Tensor).Equal(all[0].(*tensor.Tensor).OnDevice(0)) {
			t.Errorf("%v gives other bits than the replicas", ops)
		}
	}
}

func TestCollectiveKeys(t *testing.T) {
	keys := distribute.NewCollectiveKeys(7)
	if a, b, c := keys.GroupKey([]string{"a", "b"}), keys.GroupKey([]string{"b", "a"}), keys.GroupKey([]string{
		"a",
		"b",
	}); a != 7 || b != 8 || c != 7 {
		t.Errorf("groups %d, %d, %d: want 7, 8, 7", a, b, c)
	}
	if k, err := keys.InstanceKey(7, "a"); k != 100 || err != nil {
		t.Errorf("got %d, %v, want 100", k, err)
	}
	other := keys.Clone()
	for range 2 {
		if _, err := other.InstanceKey(7, "a"); err != nil {
			t.Fatal(err)
		}
	}
	if k, err := keys.InstanceKey(7, "a"); k != 101 || err != nil {
		t.Errorf("after the clone has gone on: got %d, %v, want 101", k, err)
	}
	if k, _ := other.InstanceKey(7, "a"); k != 103 {
		t.Errorf("the clone: got %d, want 103", k)
	}
	// Operations with keys from outside use them, and print them in errors.
	ops, err := distribute.NewCollectiveAllReduce(distribute.CollectiveConfig{
		Devices: []string{"CPU:0", "CPU:1"},
		Keys:    keys, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ops.Close()
	v := distribute.NewPerReplica(tensor.From([]float32{1}), tensor.From([]float32{2}).OnDevice(1))
	for range 2 {
		if _, err := distribute.ReduceWith(t.Context(), ops, distribute.Sum, v, v); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := distribute.ReduceWith(ctx, ops, distribute.Sum, v, v); err == nil ||
		!containsAll(err.Error(), `"cross-replica group 9"`, `"instance 102 of group 9"`) {
		t.Errorf("got %v, want an error that names the group and the instance", err)
	}
	if _, err := distribute.ReduceWith(t.Context(), ops, distribute.Sum, v, v); err != nil {
		t.Errorf("after a failure: %v", err)
	}
	clone, err := ops.Clone()
	if err != nil {
		t.Fatal(err)
	}
	defer clone.Close()
	if _, err := distribute.ReduceWith(t.Context(), clone, distribute.Sum, v, v); err != nil {
		t.Errorf("a clone: %v", err)
	}
}

func TestCollectiveConfigErrors(t *testing.T) {
	for _, c := range []struct {
		cfg     distribute.CollectiveConfig
		message string
	}{
		{distribute.CollectiveConfig{}, "the list of devices is empty"},
		{
			distribute.CollectiveConfig{Devices: []string{"CPU:0", "CPU:1"}, GroupSize: 3},
			"group_size must be divisible by the number of devices",
		},
		{distribute.CollectiveConfig{Devices: []string{"CPU:0"}, GroupSize: -1}, "group_size must be divisible"},
		{distribute.CollectiveConfig{Devices: []string{"BLA:0"}}, "unknown attribute"},
		{
			distribute.CollectiveConfig{Devices: []string{"CPU:0"}, Options: distribute.Options{BytesPerPack: -1}},
			"must be >=0, received -1",
		},
	} {
		if _, err := distribute.NewCollectiveAllReduce(c.cfg); !errors.Is(err, distribute.ErrInvalid) ||
			!containsAll(err.Error(), c.message) {
			t.Errorf("%+v: got %v, want an error with %q", c.cfg, err, c.message)
		}
	}
}

// TestGroupOfSeveralWorkers: operations over parts of one group of communicators, as several workers have them,
// reduce over all members.
func TestGroupOfSeveralWorkers(t *testing.T) {
	const workers, each = 2, 2
	parts := workerGroups(t, workers, each)
	results := make([]distribute.Value, workers)
	var wait sync.WaitGroup
	for w := range workers {
		devices := []string{"CPU:0", "CPU:1"}
		ops, err := distribute.NewCollectiveAllReduce(distribute.CollectiveConfig{
			Devices: devices, GroupSize: workers * each,
			Group: parts[w],
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := ops.Close(); err != nil {
				t.Error(err)
			}
		})
		wait.Go(func() {
			v := distribute.NewPerReplica(tensor.From([]float32{float32(2 * w)}),
				tensor.From([]float32{float32(2*w + 1)}).OnDevice(1))
			var err error
			if results[w], err = distribute.ReduceWith(t.Context(), ops, distribute.Mean, v, v); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	for w, v := range results {
		for _, x := range v.(*distribute.Mirrored).Values() {
			if got := tensor.Data[float32](x.(*tensor.Tensor))[0]; got != 1.5 {
				t.Errorf("worker %d got %v, want the mean 1.5 of 0, 1, 2, 3", w, got)
			}
		}
	}
}

// TestTimeoutsUnderEveryStrategy: a call's own timeout, or the strategy's, ends its wait, with every strategy.
func TestTimeoutsUnderEveryStrategy(t *testing.T) {
	devices := []string{"CPU:0", "CPU:1"}
	o := distribute.Options{Timeout: 7 * time.Second}
	strategies := map[string]func() (*distribute.Strategy, error){
		"mirrored": func() (*distribute.Strategy, error) {
			return distribute.NewMirroredStrategy(distribute.MirroredConfig{
				Devices: devices, LogicalCPUs: 2, Logger: quiet,
				Options: o,
			})
		},
		"one device's reduction": func() (*distribute.Strategy, error) {
			return distribute.NewMirroredStrategy(distribute.MirroredConfig{
				Devices: devices, LogicalCPUs: 2, Logger: quiet,
				Options: o, CrossDeviceOps: distribute.ReductionToOneDevice{},
			})
		},
		"central storage": func() (*distribute.Strategy, error) {
			return distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
				ComputeDevices: devices, LogicalCPUs: 2,
				Logger: quiet, Options: o,
			})
		},
		"multi-worker": func() (*distribute.Strategy, error) {
			return distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
				Devices: devices, LogicalCPUs: 2,
				Logger: quiet, Options: o,
			})
		},
	}
	slices := &tensor.IndexedSlices{Values: tensor.New(tensor.Float32, 1, 2), Indices: tensor.From([]int64{0})}
	calls := map[string]func(context.Context, *distribute.Replica, ...distribute.Options) error{
		"dense": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			_, err := r.AllReduce(ctx, distribute.Sum, []any{float32(1), float32(2)}, o...)
			return err
		},
		"sparse": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			_, err := r.AllReduce(ctx, distribute.Sum, slices, o...)
			return err
		},
		"gather": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			_, err := r.AllGather(ctx, tensor.New(tensor.Float32, 2), 0, o...)
			return err
		},
		"bucket": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			h, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 3, 3), o...)
			if err != nil {
				return err
			}
			return h.Wait(ctx)
		},
	}
	for name, open := range strategies {
		for what, call := range calls {
			for _, c := range []struct {
				given []distribute.Options
				want  time.Duration
			}{{nil, 7 * time.Second}, {[]distribute.Options{{Timeout: 2 * time.Second}}, 2 * time.Second}} {
				t.Run(fmt.Sprintf("%s/%s/%v", name, what, c.want), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						s, err := open()
						if err != nil {
							t.Fatal(err)
						}
						defer s.Close()
						start := time.Now()
						err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
							if r.ID() == 1 {
								<-ctx.Done()
								return nil
							}
							return call(ctx, r, c.given...)
						})
						if passed := time.Since(start); passed != c.want || !errors.Is(err, distribute.ErrTimeout) {
							t.Errorf("got %v after %v, want ErrTimeout after %v", err, passed, c.want)
						}
					})
				})
			}
		}
	}
}

// TestAccumulationFnErrors: an error of a user's function names the function.
func TestAccumulationFnErrors(t *testing.T) {
	v := distribute.NewPerReplica(tensor.From([]float32{1}), tensor.From([]float32{2}).OnDevice(1))
	for message, f := range map[string]func([]*tensor.Tensor) (*tensor.Tensor, error){
		"AccumulationFn: the step's own error":   func([]*tensor.Tensor) (*tensor.Tensor, error) { return nil, errStep },
		"AccumulationFn returned nil without an": func([]*tensor.Tensor) (*tensor.Tensor, error) { return nil, nil },
	} {
		_, err := distribute.ReduceWith(t.Context(), distribute.ReductionToOneDevice{AccumulationFn: f}, distribute.Sum, v, v)
		if err == nil || !containsAll(err.Error(), message) {
			t.Errorf("got %v, want %q", err, message)
		}
	}
	// For example the maximum.
	most := distribute.ReductionToOneDevice{AccumulationFn: func(ts []*tensor.Tensor) (*tensor.Tensor, error) {
		out := ts[0].Clone()
		for _, t := range ts[1:] {
			for i, x := range tensor.Data[float32](t) {
				tensor.Data[float32](out)[i] = max(x, tensor.Data[float32](out)[i])
			}
		}
		return out, nil
	}}
	out, err := distribute.ReduceWith(t.Context(), most, distribute.Sum, v, distribute.At("CPU:0"))
	if err != nil || tensor.Data[float32](out.(*tensor.Tensor))[0] != 2 {
		t.Errorf("got %v, %v, want the maximum 2", out, err)
	}
}

// workerGroups opens one group of communicators in parts, as several processes would.
func workerGroups(t *testing.T, workers, each int) []collective.Group {
	t.Helper()
	ends := mem.NewPipes(workers * each)
	out := make([]collective.Group, workers)
	for w := range out {
		g, err := collective.Open(ends[w*each:(w+1)*each], collective.Config{Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		out[w] = g
	}
	return out
}
