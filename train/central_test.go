package train_test

import (
	"math"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// newCentral returns a trainer of a model for the digits, over a strategy that keeps the variables on one device.
func newCentral(t *testing.T, engineName string, devices []string, at string, bucketBytes int, opt optimizer.Interface,
	forward func(*model.Scope, []*graph.Node) []*graph.Node,
) *train.Trainer {
	t.Helper()
	e, err := gomlx.Open(engineName, gomlx.Options{Devices: len(devices)})
	if err != nil {
		t.Fatal(err)
	}
	s, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{
		ComputeDevices: devices, ParameterDevice: at, Engine: e,
	})
	if err != nil {
		t.Fatal(err)
	}
	m := &gomlx.Model{
		Forward: forward, Loss: gomlx.SparseCategoricalCrossEntropyLogits, Optimizer: opt,
		Metrics: []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	trainer, err := train.New(t.Context(), s, m, train.Config{
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
		Labels: []engine.Feature{{DType: tensor.Int32}}, GlobalBatch: 30, Seed: 1, BucketBytes: bucketBytes,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, close := range []func() error{trainer.Close, s.Close, e.Close} {
			if err := close(); err != nil {
				t.Error(err)
			}
		}
	})
	return trainer
}

// TestCentralStorage checks that with central storage all replicas train one copy of each variable. Parameters and
// slots have the bits of mirrored ones; averages are the mean of the mirrored ones.
func TestCentralStorage(t *testing.T) {
	// a replica without examples keeps its own averages; with central storage they are common
	batches := loadDigits(t).Train.Take(150).Batch(30)
	validation := loadDigits(t).Test.Take(50).Batch(30)
	adam := func() optimizer.Interface { return optimizer.Adam().Done() }
	eachEngine(t, func(t *testing.T, engineName string) {
		for _, test := range []struct {
			devices []string
			at      string
			bytes   int // per bucket
		}{
			{[]string{"CPU:0", "CPU:1"}, "", 0},
			{[]string{"CPU:0"}, "", 0},
			{[]string{"CPU:0", "CPU:1", "CPU:2"}, "CPU:1", 100},
		} {
			replicas := len(test.devices)
			cfg := train.Config{GlobalBatch: 30, Seed: 1, BucketBytes: test.bytes} // on XLA other buckets can give other bits
			mirrored := newTrainerWith(t, engineName, replicas, cfg, unchanged, adam(), forgetful)
			central := newCentral(t, engineName, test.devices, test.at, test.bytes, adam(), forgetful)
			var results [2]*train.History
			var snapshots [2]*train.Snapshot
			for i, trainer := range []*train.Trainer{mirrored, central} {
				h, err := trainer.Fit(t.Context(), batches, train.FitConfig{Validation: validation})
				if err != nil {
					t.Fatal(err)
				}
				results[i] = h
				if snapshots[i], err = trainer.Snapshot(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if a, b := results[0].Epochs[0], results[1].Epochs[0]; a.Loss != b.Loss ||
				math.Abs(a.Validation.Loss-b.Validation.Loss) > 1e-5 {
				t.Errorf("%v: losses %v and %v, of mirrored variables %v and %v",
					test, b.Loss, b.Validation.Loss, a.Loss, a.Validation.Loss)
			}
			for i, v := range mirrored.Variables() {
				a, b := snapshots[0].Variables[i].Value, snapshots[1].Variables[i].Value
				if v.Role != engine.Average {
					if !a.Equal(b) {
						t.Errorf("%v: %s has other bits than mirrored", test, v.Name)
					}
					continue
				}
				for replica := range replicas {
					if !b.Rows(replica, replica+1).Equal(b.Rows(0, 1)) {
						t.Errorf("%v: replica %d has a separate copy of %s", test, replica, v.Name)
					}
				}
				rows, n := a.Float64s(), a.Len()/replicas
				for j, x := range b.Float64s()[:n] {
					mean := 0.0
					for replica := range replicas {
						mean += rows[replica*n+j] / float64(replicas)
					}
					if math.Abs(x-mean) > 1e-5*math.Max(1, math.Abs(mean)) {
						t.Errorf("%v: element %d of %s is %v, the mirrored ones' mean is %v", test, j, v.Name, x, mean)
						break
					}
				}
			}
			kind := "AggregatingVariable"
			if replicas == 1 {
				kind = "ResourceVariable"
			}
			in, err := central.Strategy().Cross(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for i, v := range central.Variables() {
				d := central.Variable(v.Name)
				read, err := d.Read(in)
				want := snapshots[1].Variables[i].Value
				if v.Role == engine.Average {
					want = want.Rows(0, 1).Reshape(v.Shape...)
				}
				if err != nil || d.Kind() != kind || !want.Equal(read) {
					t.Errorf("%v: %s, a %v, reads %v, %v", test, v.Name, d.Kind(), read, err)
				}
			}
			if test.bytes == 0 {
				continue
			}
			restored := newCentral(t, engineName, test.devices, test.at, test.bytes, adam(), forgetful)
			if _, err := restored.Restore(t.Context(), throughContents(t, snapshots[1])); err != nil {
				t.Fatal(err)
			}
			if a, b := hash(t, central), hash(t, restored); a != b {
				t.Errorf("%v: a restored trainer has weights %s, want %s", test, b, a)
			}
			gradients, _, err := restored.Gradients(t.Context(), digitBatches(t, 1, 30)[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := restored.ApplyGradients(t.Context(), gradients); err != nil {
				t.Fatal(err)
			}
			if err := restored.CheckMirrored(); err != nil {
				t.Error(err)
			}
			if _, err := restored.Predict(t.Context(), validation); err != nil {
				t.Error(err)
			}
		}
	})
}
