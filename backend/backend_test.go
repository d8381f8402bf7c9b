package backend

import (
	"fmt"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/compute/support/backendtest"
)

// TestLayerNormOfFullRank: the gain and offset of a layer normalization may have the rank of its operand, as GoMLX's
// layer gives them.
func TestLayerNormOfFullRank(t *testing.T) {
	theirs, err := gobackend.New("ops_sequential")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := New("")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Finalize()
	defer theirs.Finalize()
	var want []float32
	for _, b := range []compute.Backend{theirs, ours} {
		builder := b.Builder("norm")
		f := builder.Main()
		var in []compute.Buffer
		parameter := func(dims ...int) compute.Value {
			s := shapes.Make(dtypes.Float32, dims...)
			flat := make([]float32, s.Size())
			for i := range flat {
				flat[i] = float32(i*i%17) + float32(len(in))
			}
			v, err := f.Parameter(fmt.Sprint("p", len(in)), s, nil)
			if err != nil {
				t.Fatal(err)
			}
			x, err := b.BufferFromFlatData(0, flat, s)
			if err != nil {
				t.Fatal(err)
			}
			in = append(in, x)
			return v
		}
		y, err := f.FusedLayerNorm(parameter(2, 3, 5), []int{2}, 1e-5, parameter(1, 1, 5), parameter(1, 1, 5))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Return([]compute.Value{y}, nil); err != nil {
			t.Fatal(err)
		}
		exe, err := builder.Compile()
		if err != nil {
			t.Fatal(err)
		}
		out, err := exe.Execute(in, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := out[0].Data()
		if want == nil {
			want = got.([]float32)
			continue
		}
		if err := compareData(got, want); err != nil {
			t.Error(err)
		}
	}
}

// TestConformance runs GoMLX's conformance suite.
func TestConformance(t *testing.T) {
	b, err := New("")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Finalize()
	backendtest.RunAll(t, b, nil)
}
