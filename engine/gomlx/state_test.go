package gomlx_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// stateModel has new numbers (2, n) of one row and kept ones (2, 4) as inputs. Its results are the kept ones, their
// sums with a variable, and the new ones times 10, which are kept.
func stateModel(s *model.Scope, in []*graph.Node) []*graph.Node {
	x := layer.Dense(s, graph.Reshape(in[1], 2, -1), 4)
	return []*graph.Node{in[1], graph.Reshape(x, 1, 2, 4), graph.MulScalar(in[0], 10)}
}

func stateInputs(n int) []engine.Feature {
	return []engine.Feature{
		{DType: tensor.Float32, Shape: []int{2, n}}, {DType: tensor.Float32, Shape: []int{2, 4}},
	}
}

func inference(t *testing.T, e engine.Engine) engine.Inference {
	t.Helper()
	x, err := (&gomlx.Model{Forward: stateModel}).CompileInference(t.Context(), e, engine.Spec{
		Rows: 1, Devices: e.Devices()[:1], Inputs: stateInputs(1),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

// TestState compares a state, which programs for one and for three new columns change, with numbers of the host: with
// memory that host and device share, and without.
func TestState(t *testing.T) {
	eachEngine(t, 1, func(t *testing.T, e engine.Engine) {
		t.Run("shared", func(t *testing.T) { testState(t, e) })
		t.Run("not shared", func(t *testing.T) { testState(t, gomlx.Unshared(e)) })
	})
}

func testState(t *testing.T, e engine.Engine) {
	one := inference(t, e)
	three, err := one.ForInputs(t.Context(), stateInputs(3))
	if err != nil {
		t.Fatal(err)
	}
	defer three.Close()
	s, err := one.NewState(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := make([]float32, 8)
	next := float32(1)
	for _, test := range []struct{ n, at, count int }{
		{1, 0, 1}, {3, 1, 3}, {3, 2, 2}, {1, 3, 1}, {3, 0, 2}, {3, 3, 1}, {1, 1, 0}, {1, 0, 1},
	} {
		x := tensor.New(tensor.Float32, 1, 2, test.n)
		for i := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[i] = next
			next++
		}
		p := one
		if test.n == 3 {
			p = three
		}
		kept := tensor.Of(slices.Clone(want), 1, 2, 4)
		predicted, err := p.Predict(t.Context(), []*tensor.Tensor{x, kept})
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.Continue(t.Context(), s, test.at, test.count, []*tensor.Tensor{x})
		if err != nil || len(got) != 2 {
			t.Fatalf("%v: %d results, %v", test, len(got), err)
		}
		for i := range got {
			if !slices.Equal(got[i].Float64s(), predicted[i].Float64s()) {
				t.Errorf("%v: result %d is %v, of a state that should be %v", test, i, got[i].Float64s(), want)
			}
		}
		for row := range 2 {
			for i := range test.count {
				want[4*row+test.at+i] = 10 * tensor.Data[float32](x)[test.n*row+i]
			}
		}
	}
	x := tensor.New(tensor.Float32, 1, 2, 3)
	for _, test := range []struct {
		name      string
		at, count int
		inputs    []*tensor.Tensor
		want      string
	}{
		{"beyond the end", 2, 3, []*tensor.Tensor{x}, "3 elements at 2 of axis 2: the result"},
		{"more than computed", 0, 4, []*tensor.Tensor{x}, "has 3, and the state 4"},
		{"far beyond the end", math.MaxInt, 1, []*tensor.Tensor{x}, "1 elements at 9223372036854775807"},
		{"before the beginning", -1, 1, []*tensor.Tensor{x}, "1 elements at -1"},
		{"no input", 0, 1, nil, "0 inputs and a state of 1: want 2 together"},
		{"another shape", 0, 1, []*tensor.Tensor{tensor.New(tensor.Float32, 1, 2, 2)}, "input 0"},
	} {
		if _, err := three.Continue(t.Context(), s, test.at, test.count, test.inputs); err == nil ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", test.name, err, test.want)
		}
	}
	got, err := three.Continue(t.Context(), s, 0, 0, []*tensor.Tensor{x})
	if err != nil || !slices.Equal(tensor.Data[float32](got[0]), want) {
		t.Errorf("after errors: %v, %v, want %v", got, err, want)
	}
	if _, err := inference(t, e).Continue(t.Context(), s, 0, 1, []*tensor.Tensor{x}); err == nil ||
		!strings.Contains(err.Error(), "of another model") {
		t.Errorf("the state of another model: got %v", err)
	}
	for _, wrong := range [][2]int{{2, 2}, {-1, 2}, {1, 0}, {1, 3}} {
		if _, err := one.NewState(wrong[0], wrong[1]); err == nil {
			t.Errorf("NewState(%v): no error", wrong)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := three.Continue(t.Context(), s, 0, 1, []*tensor.Tensor{x}); err == nil ||
		!strings.Contains(err.Error(), "is closed") {
		t.Errorf("a closed state: got %v", err)
	}
}

// TestForInputs checks that programs for several inputs have one set of variables, and end with the first.
func TestForInputs(t *testing.T) {
	e := openEngine(t, "go", 1)
	one := inference(t, e)
	three, err := one.ForInputs(t.Context(), stateInputs(3))
	if err != nil {
		t.Fatal(err)
	}
	defer three.Close()
	for i, v := range one.Variables() {
		ones := tensor.New(v.DType, v.Shape...)
		for k := range tensor.Data[float32](ones) {
			tensor.Data[float32](ones)[k] = 1
		}
		if err := one.Write(i, ones); err != nil {
			t.Fatal(err)
		}
	}
	in := []*tensor.Tensor{tensor.New(tensor.Float32, 1, 2, 3), tensor.Of([]float32{1, 2, 3, 4, 5, 6, 7, 8}, 1, 2, 4)}
	out, err := three.Predict(t.Context(), in)
	if err != nil || !slices.Equal(tensor.Data[float32](out[1]), []float32{11, 11, 11, 11, 27, 27, 27, 27}) {
		t.Errorf("got %v, %v", out, err)
	}
	other := stateInputs(1)
	other[1].Shape = []int{2, 5}
	_, err = one.ForInputs(t.Context(), other)
	if err == nil || !strings.Contains(err.Error(), "want the same variables") {
		t.Errorf("inputs with other variables: got %v", err)
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	if _, err := three.Predict(t.Context(), in); err == nil || !strings.Contains(err.Error(), "the model is closed") {
		t.Errorf("after Close of the first: got %v", err)
	}
}
