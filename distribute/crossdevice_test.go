package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
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
		var batch reductions
		for i := range shapes {
			components := make([]distribute.Value, n)
			for r := range components {
				components[r] = randomTensors(rng, shapes[i:i+1], dtypes[i:i+1])[0].OnDevice(r)
			}
			batch.add(distribute.NewComponents(components...), "CPU:0")
		}
		hier, err := distribute.NewHierarchicalCopyAllReduce(packs,
			func(devices []device.Spec) []int { return groups[:len(devices)] })
		if err != nil {
			rt.Fatal(err)
		}
		want, err := tf.BatchReduceWith(context.Background(), distribute.NewReductionToOneDevice("", nil), op, batch.values,
			batch.to, o)
		if err != nil {
			rt.Fatal(err)
		}
		got, err := tf.BatchReduceWith(context.Background(), hier, op, batch.values, batch.to, o)
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
	all, err := distribute.Run(t.Context(), s,
		func(ctx context.Context, r *distribute.Replica, x *tensor.Tensor) (distribute.Value, error) {
			return distribute.AllReduce(ctx, r, distribute.Mean, x, o)
		}, parts)
	if err != nil {
		t.Fatal(err)
	}
	v := distribute.NewComponents(parts[0].OnDevice(0), parts[1].OnDevice(1), parts[2].OnDevice(2))
	for _, ops := range []distribute.CrossDeviceOps{distribute.NewReductionToOneDevice("", nil), s.CrossDeviceOps()} {
		out, err := reduceWith(t.Context(), ops, distribute.Mean, v, "CPU:0", o)
		if err != nil {
			t.Fatal(err)
		}
		if !out.(*tensor.Tensor).Equal(all[0].(*tensor.Tensor).OnDevice(0)) {
			t.Errorf("%v gives other bits than the replicas", ops)
		}
	}
}

// TestReductionsAreNumbered: errors say which reduction of the group failed.
func TestReductionsAreNumbered(t *testing.T) {
	ops, err := distribute.NewCollectiveAllReduce(distribute.CollectiveConfig{
		Devices: []string{"CPU:0", "CPU:1"}, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ops.Close()
	v := distribute.NewComponents(tensor.From([]float32{1}), tensor.From([]float32{2}).OnDevice(1))
	for range 2 {
		if _, err := reduceWith(t.Context(), ops, distribute.Sum, v, v); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := reduceWith(ctx, ops, distribute.Sum, v, v); err == nil ||
		!containsAll(err.Error(), `"cross-replica group"`, `"reduction 3"`) {
		t.Errorf("got %v, want an error that names the group and the reduction", err)
	}
	if _, err := reduceWith(t.Context(), ops, distribute.Sum, v, v); err != nil {
		t.Errorf("after a failure: %v", err)
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
				Options: o, CrossDeviceOps: distribute.NewReductionToOneDevice("", nil),
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
			_, err := distribute.AllReduce(ctx, r, distribute.Sum, []any{float32(1), float32(2)}, o...)
			return err
		},
		"sparse": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			_, err := distribute.AllReduce(ctx, r, distribute.Sum, slices, o...)
			return err
		},
		"gather": func(ctx context.Context, r *distribute.Replica, o ...distribute.Options) error {
			_, err := distribute.AllGather(ctx, r, tensor.New(tensor.Float32, 2), 0, o...)
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
	v := distribute.NewComponents(tensor.From([]float32{1}), tensor.From([]float32{2}).OnDevice(1))
	for message, f := range map[string]func([]*tensor.Tensor) (*tensor.Tensor, error){
		"function: the step's own error":   func([]*tensor.Tensor) (*tensor.Tensor, error) { return nil, errStep },
		"function returned nil without an": func([]*tensor.Tensor) (*tensor.Tensor, error) { return nil, nil },
	} {
		_, err := reduceWith(t.Context(), distribute.NewReductionToOneDevice("", f), distribute.Sum, v, v)
		if err == nil || !containsAll(err.Error(), message) {
			t.Errorf("got %v, want %q", err, message)
		}
	}
	// For example the maximum.
	most := distribute.NewReductionToOneDevice("", func(ts []*tensor.Tensor) (*tensor.Tensor, error) {
		out := ts[0].Clone()
		for _, t := range ts[1:] {
			for i, x := range tensor.Data[float32](t) {
				tensor.Data[float32](out)[i] = max(x, tensor.Data[float32](out)[i])
			}
		}
		return out, nil
	})
	out, err := reduceWith(t.Context(), most, distribute.Sum, v, "CPU:0")
	if err != nil || tensor.Data[float32](out.(*tensor.Tensor))[0] != 2 {
		t.Errorf("got %v, %v, want the maximum 2", out, err)
	}
}
