package train

import (
	"errors"
	"fmt"
	"testing"

	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// sharded sets the ShardOptimizer of fakeConfig and of golden trainings for a test.
func sharded(t *testing.T, s Sharding) {
	t.Helper()
	before := fakeSharding
	fakeSharding = s
	t.Cleanup(func() { fakeSharding = before })
}

// TestSharded runs tests of other files with a sharded optimizer. The fake program fills the slots that a device must
// not use with NaN. One worker, and several, make the same trainings.
func TestSharded(t *testing.T) {
	sharded(t, ShardOn)
	for name, test := range map[string]func(*testing.T){
		"fit":               TestFitEqualsOneLoop,
		"failed steps":      TestFailedStepChangesNothing,
		"bits repeat":       TestBitsRepeat,
		"workers":           TestTrainOverWorkers,
		"overlap":           TestReducesWhileComputing,
		"accumulate":        TestAccumulateEqualsLargeBatches,
		"several batches":   TestGradientsOfSeveralBatches,
		"clipped":           TestClipped,
		"infinite norm":     TestClippingByAnInfiniteNorm,
		"not finite":        TestNotFiniteOverWorkers,
		"skip is exact":     TestNotFiniteSkipIsExact,
		"loss scale":        TestLossScale,
		"loss scale ends":   TestLossScaleEnds,
		"loss scale, own":   TestLossScaleOfGradients,
		"own loop":          TestOwnLoop,
		"resume anywhere":   TestResumeAnywhere,
		"resume over":       TestResumeOverWorkers,
		"restart":           TestRestart,
		"set on one worker": TestSetOnOneWorker,
		"weights":           TestWeights,
	} {
		t.Run(name, test)
	}
}

// TestShardedDevices checks that a sharded optimizer makes the bits of an unsharded one, however the replicas share
// devices: in Fit, in a custom loop and after setting a slot.
func TestShardedDevices(t *testing.T) {
	const steps = 6
	for name, change := range map[string]func(*Config){
		"plain":            func(*Config) {},
		"ClipNorm":         func(c *Config) { c.ClipNorm = 0.1 },
		"ClipVariableNorm": func(c *Config) { c.ClipVariableNorm = 0.1 },
		"ClipValue":        func(c *Config) { c.ClipValue = 0.1 },
	} {
		t.Run(name, func(t *testing.T) {
			want := ""
			for _, deviceOf := range [][]int{nil, {0, 1, 2, 3}, {0, 0, 0, 0}, {0, 1, 1, 0}, {0, 0, 1, 2}} {
				cfg := fakeConfig(8)
				change(&cfg)
				if deviceOf != nil {
					cfg.ShardOptimizer = ShardOn
				}
				trainer, _ := newFakeWith(t, 4, cfg, fakeModel{})
				if deviceOf != nil {
					share(t, trainer, deviceOf...)
				}
				got := ""
				fit := func() {
					h, err := trainer.Fit(t.Context(), sizes(lineExamples(8*steps+3), 8, 8, 8, 8, 8, 8, 3), FitConfig{Accumulate: 2})
					if err != nil {
						t.Fatal(err)
					}
					got += fmt.Sprint(h.Epochs[0].Result)
				}
				fit()
				g, result, err := trainer.Gradients(t.Context(), lineExamples(8))
				if err == nil {
					err = trainer.ApplyGradients(t.Context(), g)
				}
				if err == nil {
					err = trainer.SetVariable("momentum/bias", tensor.Scalar(0.5))
				}
				if err != nil {
					t.Fatal(err)
				}
				fit()
				s, err := trainer.Snapshot(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for _, v := range s.Variables {
					got += fmt.Sprint(v.Name, v.Value.Float64s())
				}
				if got += fmt.Sprint(result); want == "" {
					want = got
				}
				if got != want {
					t.Errorf("devices %v: got\n%s, want\n%s", deviceOf, got, want)
				}
				if sharded := trainer.Sharded(); sharded != (deviceOf != nil && len(trainer.devices) > 1) {
					t.Errorf("devices %v: sharded %v", deviceOf, sharded)
				}
			}
		})
	}
}

// TestSlotsAreGatheredAtChief checks that a snapshot that the chief writes has the slots of all workers, which the
// others do not receive.
func TestSlotsAreGatheredAtChief(t *testing.T) {
	sharded(t, ShardOn)
	errs := overWorkers(t, []int{1, 1, 1}, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(6))
		if err != nil {
			return err
		}
		defer trainer.Close()
		divided := 0
		for i, v := range trainer.variables {
			if !trainer.divided(i) {
				continue
			}
			divided++
			want := tensor.New(v.DType, v.Shape...)
			for j := range tensor.Data[float64](want) {
				tensor.Data[float64](want)[j] = float64(i + j)
			}
			if _, local := trainer.keeper(i); local >= 0 {
				if err := trainer.program.Write(local, i, want); err != nil {
					return err
				}
			}
			got, err := trainer.keptAtChief(t.Context(), i)
			switch {
			case err != nil:
				return err
			case w == 0 && !got.Equal(want), w > 0 && got != nil:
				t.Errorf("worker %d: %s is %v, want %v on the chief only", w, v.Name, got, want)
			}
		}
		if divided != 2 {
			return fmt.Errorf("%d variables are on some devices only, want 2", divided)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// TestOptimizerBytes checks the size of Adam's slots on each of four workers that train a network of 21 million
// parameters: at most 0.27 of the unsharded size.
func TestOptimizerBytes(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: it exchanges the initial values of 20 million parameters")
	}
	layout := []int{1, 1, 1, 1}
	engines := make([]engine.Engine, len(layout))
	for w := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	const width = 1024
	features := engine.Feature{DType: tensor.Float32, Shape: []int{width}}
	rows := tensor.New(tensor.Float32, 4, width)
	zeros := func(g *graph.Graph, shape shapes.Shape) *graph.Node { return graph.Zeros(g, shape) } // random ones take long
	errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				for i := range 20 {
					in[0] = layer.Dense(s.In("%d", i).WithInitializer(zeros), in[0], width)
				}
				return in
			},
			Loss: gomlx.MeanSquaredError, Optimizer: optimizer.Adam().Done(),
		}, Config{
			Inputs: []engine.Feature{features}, Labels: []engine.Feature{features}, GlobalBatch: 4,
			ShardOptimizer: ShardOn,
		})
		if err != nil {
			return err
		}
		defer trainer.Close()
		if _, err := trainer.Fit(t.Context(), batches(data.Batch{
			Inputs: []*tensor.Tensor{rows}, Labels: []*tensor.Tensor{rows},
		}), FitConfig{}); err != nil {
			return err
		}
		parameters, slots := 0, 0
		for _, v := range trainer.Variables() {
			switch v.Role {
			case engine.Parameter:
				parameters += v.Bytes() / v.DType.Bytes()
			case engine.Slot:
				slots += v.Bytes()
			}
		}
		share := float64(trainer.OptimizerBytes()) / float64(slots)
		t.Logf("worker %d: %d parameters, %d of %d bytes of the optimizer's slots: %.4f", w, parameters,
			trainer.OptimizerBytes(), slots, share)
		if parameters < 20e6 || slots < 8*parameters || share > 0.27 {
			t.Errorf("worker %d has %.3f of the slots", w, share)
		}
		return nil
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
