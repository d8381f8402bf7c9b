package train

import (
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestForgottenBatch checks the errors for elements that are single examples, and for batches of batches.
func TestForgottenBatch(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	image := func(shape ...int) data.Dataset {
		return batches(data.Batch{
			Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, shape...)},
			Labels: []*tensor.Tensor{tensor.New(tensor.Float32, 10)},
		})
	}
	for _, c := range []struct {
		name  string
		batch int
		ds    data.Dataset
		want  string
	}{
		{
			"an example", 8, image(8, 8, 1),
			"input 0 is one example of shape (8, 8, 1): want a first dimension that counts examples: call Batch " +
				"on the pipeline",
		},
		{"an example of more rows than a batch has", 4, image(8, 8, 1), "input 0 is one example of shape (8, 8, 1)"},
		{
			"batched twice", 8, image(2, 4, 8, 8, 1),
			"input 0 has shape (2, 4, 8, 8, 1), where one example has (8, 8, 1): want one dimension that counts " +
				"examples, not two",
		},
		{"a label that is an example's", 10, image(10, 8, 8, 1), "label 0 is one example of shape (10,)"},
		{"another shape", 8, image(8, 9, 8, 1), "input 0: got float32(8, 9, 8, 1), want float32(8, 8, 8, 1)"},
	} {
		trainer, err := New(t.Context(), s, fakeModel{}, Config{
			Inputs:      []engine.Feature{{DType: tensor.Float32, Shape: []int{8, 8, 1}}},
			Labels:      []engine.Feature{{DType: tensor.Float32, Shape: []int{10}}},
			GlobalBatch: c.batch,
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := trainer.Fit(t.Context(), c.ds, FitConfig{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if err := trainer.Close(); err != nil {
			t.Error(err)
		}
	}
	_, err = New(t.Context(), s, fakeModel{}, Config{Data: image(8, 8, 1)})
	if want := "Config.Data: first batch: input 0 has 8 rows, label 0 has 10: want the first dimension of each to " +
		"count examples: call Batch on the pipeline"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Config.Data without Batch: got %v, want %q", err, want)
	}
}
