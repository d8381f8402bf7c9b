package train_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	gomlx "github.com/gomlx/gomlx/ml/model/checkpoint"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// gomlxValues are variables of several types and shapes.
var gomlxValues = map[string]any{
	"/dense/weights":  [][]float32{{1, -2, 3}, {4, 5, 6.5}},
	"/dense/biases":   []float64{0.5, 7},
	"/deep/in/scopes": int32(-3),
	"/mask":           []bool{true, false},
	"/bytes":          []uint8{1, 255},
}

// rawOf returns the elements of a tensor of GoMLX.
func rawOf(t *testing.T, x *tensors.Tensor) (raw []byte) {
	t.Helper()
	if err := x.ConstBytes(func(b []byte) { raw = slices.Clone(b) }); err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestReadGoMLX reads checkpoints that GoMLX's own package writes, compressed and not.
func TestReadGoMLX(t *testing.T) {
	for _, format := range []gomlx.BinFormat{gomlx.BinGZIP, gomlx.BinUncompressed} {
		dir := t.TempDir()
		store := model.NewStore()
		for path, value := range gomlxValues {
			store.VariableWithValue(path, value)
		}
		store.SetParam("learning_rate", 0.5)
		h, err := gomlx.Build(store).Dir(dir).Keep(3).WithCompression(format).Done()
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := h.Save(); err != nil {
				t.Fatal(err)
			}
		}
		got, _, err := checkpoint.LoadWeights(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != len(gomlxValues)+1 { // and the step
			t.Errorf("%v: got %d tensors, want %d", format, len(got), len(gomlxValues)+1)
		}
		for _, x := range got {
			v := store.GetVariable(x.Name)
			if v == nil {
				t.Fatalf("%v: the store has no %s", format, x.Name)
			}
			value := v.MustValue()
			if !slices.Equal(value.Shape().Dimensions, x.Value.Shape()) && value.Rank()+x.Value.Rank() > 0 ||
				!strings.EqualFold(value.DType().String(), x.Value.DType().String()) ||
				!slices.Equal(rawOf(t, value), x.Value.Memory().HostBytes()) {
				t.Errorf("%v: %s: got %v, want %v", format, x.Name, x.Value, value)
			}
		}
		// A damaged file is refused.
		files, err := filepath.Glob(filepath.Join(dir, "*.bin"))
		if err != nil || len(files) != 2 {
			t.Fatalf("%v, %v", files, err)
		}
		data, err := os.ReadFile(files[1])
		if err != nil {
			t.Fatal(err)
		}
		for _, damaged := range [][]byte{data[:len(data)-1], append(slices.Clone(data), 1), data[:3]} {
			if err := os.WriteFile(files[1], damaged, 0o666); err != nil {
				t.Fatal(err)
			}
			if _, _, err := checkpoint.LoadWeights(dir); err == nil || !strings.Contains(err.Error(), files[1]) {
				t.Errorf("%v: %d bytes of %d: %v", format, len(damaged), len(data), err)
			}
		}
	}
}

// TestSaveGoMLX has GoMLX's own package read what SaveGoMLX writes.
func TestSaveGoMLX(t *testing.T) {
	dir := t.TempDir()
	list := []checkpoint.Tensor{
		{Name: "/dense/weights", Value: tensor.Of([]float32{1, 2, 3, 4}, 2, 2)},
		{Name: "/global_step", Value: tensor.Scalar[int64](7)},
		{Name: "/half", Value: tensor.Of([]tensor.BF16{1, 2})},
		{Name: "/mask", Value: tensor.Of([]bool{true, false})},
	}
	for step := range int64(2) { // the second counts
		list[1].Value = tensor.Scalar(6 + step)
		path, err := checkpoint.SaveGoMLX(dir, list, 6+step)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	store := model.NewStore()
	h, err := gomlx.Load(store).Dir(dir).Immediate().Done()
	if err != nil {
		t.Fatal(err)
	}
	if got := optimizer.GetGlobalStep(store); got != 7 {
		t.Errorf("step %d, want 7", got)
	}
	for _, x := range list {
		v := store.GetVariable(x.Name)
		if v == nil {
			t.Fatalf("GoMLX has no %s", x.Name)
		}
		if got := v.MustValue(); !slices.Equal(rawOf(t, got), x.Value.Memory().HostBytes()) ||
			!strings.EqualFold(got.DType().String(), x.Value.DType().String()) {
			t.Errorf("%s: GoMLX reads %v, want %v", x.Name, got, x.Value)
		}
	}
	if err := h.Save(); err != nil { // GoMLX continues the count
		t.Fatal(err)
	}
	again, _, err := checkpoint.LoadWeights(dir)
	if err != nil || len(again) != len(list) {
		t.Errorf("%d tensors of %d, %v", len(again), len(list), err)
	}
	list[0].Name = "/mask"
	if _, err := checkpoint.SaveGoMLX(dir, list, 8); err == nil || !strings.Contains(err.Error(), "different names") {
		t.Errorf("one name twice: %v", err)
	}
}
