package backend

import (
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
)

// TestSink: a factor of values before a product, which is used after it, is computed where it is used. The operation
// that both loops need is computed twice, and no memory has its result.
func TestSink(t *testing.T) {
	b := withThreads(t, 1)
	const n = 64
	s := shapes.Make(dtypes.Float32, n, n)
	builder := b.Builder("sink")
	f := builder.Main()
	must := func(v compute.Value, err error) compute.Value {
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	x := must(f.Parameter("x", s, nil))
	dot := func(x, y compute.Value) compute.Value {
		return must(f.DotGeneral(x, []int{1}, nil, y, []int{0}, nil, compute.DotGeneralConfig{}))
	}
	double := must(f.Add(x, x))
	factor := must(f.Exp(must(f.Neg(must(f.Mul(double, double))))))
	y := must(f.Mul(dot(must(f.Tanh(double)), x), factor))
	if err := f.Return([]compute.Value{y}, nil); err != nil {
		t.Fatal(err)
	}
	compiled, err := builder.Compile()
	if err != nil {
		t.Fatal(err)
	}
	exe := compiled.(*Executable)
	if want := 2 * n * n * 4; exe.arenaBytes > want || len(exe.instructions) != 3 {
		t.Errorf("%d instructions have %d bytes of intermediate values: want 3, with those of a loop and of a product, %d",
			len(exe.instructions), exe.arenaBytes, want)
	}
}
