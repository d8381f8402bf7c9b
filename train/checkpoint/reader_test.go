package checkpoint

import (
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// TestReaderProgress: reading a snapshot in pieces reports each of them, and returns the same tensors.
func TestReaderProgress(t *testing.T) {
	dir := t.TempDir()
	m := open(t, Config{Dir: dir})
	defer m.Close()
	values := make([]float32, 5*pieceBytes/4/2) // two pieces and a half
	for i := range values {
		values[i] = float32(i)
	}
	want := &Contents{Step: 1, Tensors: []Tensor{
		{"a", tensor.Of(values, len(values))}, {"b", tensor.Of([]float32{7}, 1)}, {"empty", tensor.Of([]float32{}, 0)},
	}}
	if err := m.Save(want); err != nil {
		t.Fatal(err)
	}
	pieces := 0
	s, refused, err := Reader{Progress: func() { pieces++ }}.Find(dir)
	if err != nil || refused != nil {
		t.Fatal(err, refused)
	}
	if !slices.EqualFunc(s.Tensors, want.Tensors,
		func(a, b Tensor) bool { return a.Name == b.Name && a.Value.Equal(b.Value) }) {
		t.Error("the tensors differ from those that were saved")
	}
	if pieces < 2*3 {
		t.Errorf("%d pieces were reported, want at least 3 for each of two passes", pieces)
	}
}
