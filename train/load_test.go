package train

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

func TestLoadWeights(t *testing.T) {
	names, err := checkpoint.ParseNameMap("fc.w weights\nfc.b bias")
	if err != nil {
		t.Fatal(err)
	}
	two := tensor.Of([]float64{7, 8})
	trainer, _ := newFake(t, 2, 4, fakeModel{})
	loaded, err := trainer.LoadWeights([]Weight{
		{"fc.w", tensor.Of([]float32{7, 8})}, {"fc.b", tensor.Scalar(tensor.BF16From(3))}, {"seen", tensor.Scalar(2.0)},
	}, LoadOptions{Names: names})
	if err != nil {
		t.Fatal(err)
	}
	want := Loaded{Set: []string{"bias", "weights", "seen"}, Converted: []string{"bias", "weights"}}
	if !reflect.DeepEqual(loaded, want) {
		t.Errorf("got %+v, want %+v", loaded, want)
	}
	got, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []Weight{{"bias", tensor.Scalar(3.0)}, {"weights", two}, {"seen", tensor.Scalar(2.0)}} {
		if i := slices.IndexFunc(got, func(g Weight) bool { return g.Name == w.Name }); !got[i].Value.Equal(w.Value) {
			t.Errorf("%s is %v, want %v", w.Name, got[i].Value, w.Value)
		}
	}
	// Averages of several replicas, as a snapshot has them.
	rows := []Weight{{"seen", tensor.Of([]float64{2, 4, 9})}}
	if _, err := trainer.LoadWeights(rows, LoadOptions{Partial: true}); err != nil {
		t.Fatal(err)
	}
	seen := slices.IndexFunc(trainer.variables, func(v engine.Variable) bool { return v.Name == "seen" })
	if value, err := trainer.weight(t.Context(), seen); err != nil || !value.Equal(tensor.Scalar(5.0)) {
		t.Errorf("seen is %v, %v, want 5", value, err)
	}
	// What is missing keeps its value.
	loaded, err = trainer.LoadWeights([]Weight{{"bias", tensor.Scalar(4.0)}, {"more", two}}, LoadOptions{Partial: true})
	want = Loaded{Set: []string{"bias"}, Missing: []string{"weights", "seen"}, Unexpected: []string{"more"}}
	if err != nil || !reflect.DeepEqual(loaded, want) {
		t.Errorf("got %+v, %v, want %+v", loaded, err, want)
	}
	value, err := trainer.weight(t.Context(), slices.IndexFunc(trainer.variables,
		func(v engine.Variable) bool { return v.Name == "weights" }))
	if err != nil || !value.Equal(two) {
		t.Errorf("weights are %v, %v, want %v", value, err, two)
	}
}

func TestLoadWeightsErrors(t *testing.T) {
	one, two := tensor.Scalar(1.0), tensor.New(tensor.Float64, 2)
	trainer, p := newFake(t, 2, 4, fakeModel{})
	before := p.snapshot()
	for _, test := range []struct {
		want    string
		weights []Weight
		options LoadOptions
	}{
		{"1 missing (seen): want all", []Weight{{"bias", one}, {"weights", two}}, LoadOptions{}},
		{
			"1 missing (seen), and 2 that the model does not have (a, velocity/bias)",
			[]Weight{{"a", one}, {"bias", one}, {"momentum/bias", one}, {"velocity/bias", one}, {"weights", two}},
			LoadOptions{},
		},
		{"no weight has the name of a variable: the weights are a; the model has bias", []Weight{{"a", one}}, LoadOptions{}},
		{"the weights are a;", []Weight{{"a", one}}, LoadOptions{Partial: true}},
		{"the weights are none;", nil, LoadOptions{Partial: true}},
		{"bias: got float64(2,), want float64()", []Weight{{"bias", two}}, LoadOptions{Partial: true}},
		{"bias: got int32(), want float64()", []Weight{{"bias", tensor.Scalar[int32](1)}}, LoadOptions{Partial: true}},
		{"bias is given twice", []Weight{{"bias", one}, {"bias", one}}, LoadOptions{Partial: true}},
		{"bias: missing: want float64()", []Weight{{"bias", nil}}, LoadOptions{Partial: true}},
	} {
		_, err := trainer.LoadWeights(test.weights, test.options)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("got %v, want %q in it", err, test.want)
		}
	}
	if !reflect.DeepEqual(p.snapshot(), before) {
		t.Error("a refused call changed variables")
	}
}

// TestMatchByPath matches a name with dots to a path with slashes.
func TestMatchByPath(t *testing.T) {
	variables := []engine.Variable{{Name: "/h/0/weight", DType: tensor.Float32}}
	values, _, err := matchWeights(variables, []Weight{{"h.0.weight", tensor.Scalar[float32](1)}}, LoadOptions{})
	if err != nil || values[0] == nil {
		t.Errorf("%v, %v", values, err)
	}
}

func TestLoadWeightsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weights.safetensors")
	trainer, _ := newFake(t, 2, 4, fakeModel{})
	if err := trainer.Export(t.Context(), path, nil); err != nil {
		t.Fatal(err)
	}
	got, err := LoadWeights(path)
	if err != nil {
		t.Fatal(err)
	}
	want, err := trainer.Weights(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if HashWeights(got) != HashWeights(want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
