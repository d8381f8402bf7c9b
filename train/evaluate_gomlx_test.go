package train_test

import (
	"path/filepath"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// TestEvaluateComputesWithExportedWeights checks that validation, Evaluate and Predict compute with the weights that
// Export writes, bit for bit, although averages differ between replicas, and that they do not change these averages.
func TestEvaluateComputesWithExportedWeights(t *testing.T) {
	all := loadDigits(t).Train
	validation := all.Skip(300).Take(70).Batch(30)
	for _, replicas := range []int{2, 3} {
		trainer := newTrainer(t, "go", replicas, 30, 1, sgd(), forgetful)
		path := filepath.Join(t.TempDir(), "epoch")
		save, err := train.NewModelCheckpoint(trainer, train.ModelCheckpointConfig{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		cfg := train.FitConfig{Validation: validation, Callbacks: []train.Callback{save}}
		h, err := trainer.Fit(t.Context(), all.Take(155).Batch(30), cfg)
		if err != nil {
			t.Fatal(err)
		}
		before, err := trainer.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		outputs, err := trainer.Predict(t.Context(), validation)
		if err != nil {
			t.Fatal(err)
		}
		after, err := trainer.Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range before.Variables {
			if !after.Variables[i].Value.Equal(v.Value) {
				t.Errorf("%d replicas: evaluation changed %s", replicas, v.Name)
			}
		}

		tensors, _, err := checkpoint.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		var weights []train.Weight
		for _, w := range tensors {
			weights = append(weights, train.Weight(w))
		}
		loaded := newTrainer(t, "go", replicas, 30, 2, sgd(), forgetful)
		if err := loaded.SetWeights(weights); err != nil {
			t.Fatal(err)
		}
		result, err := loaded.Evaluate(t.Context(), validation)
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Epochs[0].Validation.Loss; got != result.Loss {
			t.Errorf("%d replicas: val_loss %v, and %v of the weights in the file", replicas, got, result.Loss)
		}
		again, err := loaded.Predict(t.Context(), validation)
		if err != nil {
			t.Fatal(err)
		}
		if !equalAll(outputs, again) {
			t.Errorf("%d replicas: other predictions than with the weights in the file", replicas)
		}
	}
}

func equalAll(a, b []*tensor.Tensor) bool {
	for i, x := range a {
		if !x.Equal(b[i]) {
			return false
		}
	}
	return len(a) == len(b)
}
