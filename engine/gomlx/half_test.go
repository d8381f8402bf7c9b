package gomlx

import (
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	planned "github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestHalfProducts compares products of float16 and bfloat16 of every layout with those in float64, and does so in
// another process without AVX-512, which other kernels compute.
func TestHalfProducts(t *testing.T) {
	e, err := planned.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer e.Finalize()
	for _, dtype := range []dtypes.DType{dtypes.Float16, dtypes.BFloat16} {
		for k := 1; k <= 64; k++ {
			for layout := range 4 {
				checkHalfProduct(t, e, dtype, 33, k, 18, layout&1 != 0, layout&2 != 0)
			}
		}
	}
	const fewer = "cpu.avx512f=off"
	if os.Getenv("GODEBUG") == fewer || t.Failed() {
		return
	}
	child := exec.Command(os.Args[0], "-test.run", "^TestHalfProducts$")
	child.Env = append(os.Environ(), "GODEBUG="+fewer)
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("with GODEBUG=%s: %v\n%s", fewer, err, out)
	}
}

// checkHalfProduct multiplies random matrices of m × k and k × n numbers, whose memory may hold them transposed.
func checkHalfProduct(t *testing.T, e compute.Backend, dtype dtypes.DType, m, k, n int,
	lhsTransposed, rhsTransposed bool,
) {
	t.Helper()
	r := rand.New(rand.NewPCG(uint64(k), 2))
	b := e.Builder("product")
	f := b.Main()
	var buffers []compute.Buffer
	operand := func(name string, rows, columns int, transposed bool) (compute.Value, []float64) {
		values := make([]float64, rows*columns) // by rows
		dims := []int{rows, columns}
		if transposed {
			dims = []int{columns, rows}
		}
		stored := tensor.New(tensor.Float16, dims...)
		if dtype == dtypes.BFloat16 {
			stored = tensor.New(tensor.BFloat16, dims...)
		}
		for i := range values {
			x := float32(r.NormFloat64())
			if dtype == dtypes.BFloat16 {
				tensor.Data[tensor.BF16](stored)[i] = tensor.BF16From(x)
			} else {
				tensor.Data[tensor.F16](stored)[i] = tensor.F16From(x)
			}
		}
		for i, x := range stored.Float64s() {
			if transposed {
				i = i%rows*columns + i/rows
			}
			values[i] = x
		}
		shape := shapes.Make(dtype, dims...)
		v, err := f.Parameter(name, shape, nil)
		if err != nil {
			t.Fatal(err)
		}
		buffer, err := e.BufferFromFlatData(0, flatOf(stored.Memory(), dtype, stored.Len()), shape)
		if err != nil {
			t.Fatal(err)
		}
		buffers = append(buffers, buffer)
		return v, values
	}
	lhs, x := operand("lhs", m, k, lhsTransposed)
	rhs, y := operand("rhs", k, n, rhsTransposed)
	axis := map[bool]int{false: 1, true: 0}
	product, err := f.DotGeneral(lhs, []int{axis[lhsTransposed]}, nil, rhs, []int{axis[!rhsTransposed]}, nil,
		compute.DotGeneralConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Return([]compute.Value{product}, nil); err != nil {
		t.Fatal(err)
	}
	exe, err := b.Compile()
	if err != nil {
		t.Fatal(err)
	}
	defer exe.Finalize()
	out, err := exe.Execute(buffers, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	got, err := toHost(out[0])
	if err != nil {
		t.Fatal(err)
	}
	for i, z := range got.Float64s() {
		want, size := 0.0, 0.0
		for j := range k {
			want += x[i/n*k+j] * y[j*n+i%n]
			size += math.Abs(x[i/n*k+j] * y[j*n+i%n])
		}
		bound := math.Abs(want)/256 + size/1e5
		if dtype == dtypes.Float16 {
			bound += 0x1p-14 // the Go backend's conversion makes 0 of subnormal numbers
		}
		if !(math.Abs(z-want) <= bound) {
			t.Fatalf("%v, %d × %d × %d, transposed %v and %v: element %d is %v, want %v", dtype, m, k, n, lhsTransposed,
				rhsTransposed, i, z, want)
		}
	}
}
