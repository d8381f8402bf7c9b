package backend

import (
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
)

// program is a graph with its arguments.
type program struct {
	t       *testing.T
	b       *Backend
	builder compute.Builder
	f       compute.Function
	in      []compute.Buffer
}

func newProgram(t *testing.T, b *Backend) *program {
	builder := b.Builder(t.Name())
	return &program{t: t, b: b, builder: builder, f: builder.Main()}
}

// must returns v, and ends the test if err is not nil.
func (p *program) must(v compute.Value, err error) compute.Value {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
	return v
}

// parameter adds a parameter, and its argument.
func (p *program) parameter(flat any, dtype dtypes.DType, dims ...int) compute.Value {
	p.t.Helper()
	s := shapes.Make(dtype, dims...)
	x, err := p.b.BufferFromFlatData(0, flat, s)
	if err != nil {
		p.t.Fatal(err)
	}
	p.in = append(p.in, x)
	return p.must(p.f.Parameter(string(rune('a'+len(p.in))), s, nil))
}

func (p *program) compile(out ...compute.Value) compute.Executable {
	p.t.Helper()
	if err := p.f.Return(out, nil); err != nil {
		p.t.Fatal(err)
	}
	exe, err := p.builder.Compile()
	if err != nil {
		p.t.Fatal(err)
	}
	return exe
}

// data returns the elements of buffers.
func (p *program) data(out []compute.Buffer, err error) (list []any) {
	p.t.Helper()
	for _, x := range out {
		var flat any
		if err == nil {
			flat, err = x.Data()
		}
		list = append(list, flat)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	return list
}

// TestFailedExecution: a panic of the Go backend becomes an error, and the buffers that were donated to the execution
// can be finalized without harm to others.
func TestFailedExecution(t *testing.T) {
	for _, whole := range []bool{false, true} {
		b := withThreads(t, 2)
		defer b.Finalize()
		p := newProgram(t, b)
		x := p.parameter([]float32{1, 2, 3}, dtypes.Float32, 3)
		n := p.parameter([]int32{0, 0, 0}, dtypes.Int32, 3)
		out := []compute.Value{p.must(p.f.Exp(x)), p.must(p.f.Reverse(x, 0)), p.must(p.f.Div(n, n))}
		if whole { // which no plan can execute
			out = append(out, p.must(p.f.DynamicDimensionSize(x, 0)))
		}
		_, err := p.compile(out...).Execute(p.in, slices.Repeat([]bool{true}, len(p.in)), 0)
		if err == nil || !strings.Contains(err.Error(), "divide by zero") {
			t.Fatalf("whole %v: got error %v, want one of a division by zero", whole, err)
		}
		if n := b.team.running.Load(); n != 0 {
			t.Errorf("whole %v: %d plans count as running after the error", whole, n)
		}
		q := newProgram(t, b)
		exe := q.compile(q.must(q.f.Neg(q.parameter([]float32{1, 2, 3}, dtypes.Float32, 3))))
		result, err := exe.Execute(q.in, []bool{true}, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range p.in {
			if err := x.Finalize(); err != nil {
				t.Error(err)
			}
		}
		other, flat, err := b.NewSharedBuffer(0, shapes.Make(dtypes.Float32, 3))
		if err != nil {
			t.Fatal(err)
		}
		if len(flat.([]float32)) != 3 {
			t.Fatalf("whole %v: a new buffer has the elements %v", whole, flat)
		}
		copy(flat.([]float32), []float32{7, 7, 7})
		if got := q.data(result, nil)[0]; other == result[0] || !slices.Equal(got.([]float32), []float32{-1, -2, -3}) {
			t.Errorf("whole %v: a result is %v after buffers of the failed execution were finalized", whole, got)
		}
	}
}

// TestFinalizedExecutable: an executable that is finalized returns an error.
func TestFinalizedExecutable(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	p := newProgram(t, b)
	exe := p.compile(p.must(p.f.Exp(p.parameter([]float32{1}, dtypes.Float32, 1))))
	exe.Finalize()
	if out, err := exe.Execute(p.in, nil, 0); err == nil {
		t.Fatalf("got results %v, want an error", p.data(out, nil))
	}
}

// TestConstantsAreCopied: a slice may change after it was made a constant.
func TestConstantsAreCopied(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	p := newProgram(t, b)
	flat := []float32{1, 2}
	y := p.must(p.f.Add(p.parameter([]float32{10, 20}, dtypes.Float32, 2), p.must(p.f.Constant(flat, 2))))
	flat[0] = 100
	if got := p.data(p.compile(y).Execute(p.in, nil, 0))[0]; !slices.Equal(got.([]float32), []float32{11, 22}) {
		t.Errorf("got %v, want [11 22]", got)
	}
}

// TestPackedParameters: parameters of types with several elements in a byte go to the Go backend.
func TestPackedParameters(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	p := newProgram(t, b)
	packed := []byte{0x21, 0x43}
	x, w := p.parameter([]float32{1, 2, 3, 4}, dtypes.Float32, 2, 2), p.parameter(packed, dtypes.Int4, 2, 2)
	scale := p.parameter([]float32{0.5, 0.25, 0.5, 0.25}, dtypes.Float32, 2, 2)
	y := p.must(p.f.FusedQuantizedDense(x, w, nil, &compute.Quantization{
		Scheme: compute.QuantLinear, Scale: scale, BlockAxis: 1, BlockSize: 1,
	}, compute.ActivationNone))
	out := p.data(p.compile(p.must(p.f.Neg(y)), w, p.must(p.f.ConvertDType(w, dtypes.Int32)), w).Execute(p.in, nil, 0))
	if got, want := out[0].([]float32), []float32{-3.5, -2.5, -7.5, -5.5}; !slices.Equal(got, want) {
		t.Errorf("a product with packed weights is %v, want %v", got, want)
	}
	if got, want := out[2].([]int32), []int32{1, 2, 3, 4}; !slices.Equal(got, want) {
		t.Errorf("packed numbers are %v, want %v", got, want)
	}
	for _, i := range []int{1, 3} {
		if got := out[i].([]byte); !slices.Equal(got, packed) {
			t.Errorf("output %d is %v, want the parameter %v", i, got, packed)
		}
	}
}

// TestWithoutElements: operations on values without elements have the results that their definitions give.
func TestWithoutElements(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	p := newProgram(t, b)
	x, y := p.parameter([]float32{}, dtypes.Float32, 2, 0), p.parameter([]float32{}, dtypes.Float32, 0, 3)
	c := p.parameter([]bool{true}, dtypes.Bool)
	half := p.parameter(shapes.CastAsDType([]float64{}, dtypes.Float16), dtypes.Float16, 0)
	one := p.parameter(shapes.CastAsDType([]float64{1}, dtypes.Float16), dtypes.Float16)
	dot := p.must(p.f.DotGeneral(x, []int{1}, nil, y, []int{0}, nil, compute.DotGeneralConfig{}))
	where, less := p.must(p.f.Where(c, half, half)), p.must(p.f.LessThan(half, one))
	out := p.data(p.compile(dot, where, less).Execute(p.in, nil, 0))
	if got := out[0].([]float32); !slices.Equal(got, make([]float32, 6)) {
		t.Errorf("a product without depth is %v, want zeros", got)
	}
	if got := out[2].([]bool); len(got) != 0 {
		t.Errorf("got %v, want no elements", got)
	}
}

// TestBufferMemory: buffers of data that is copied use the memory of those that were finalized before.
func TestBufferMemory(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	flat := make([]float32, 1<<10)
	shape := shapes.Make(dtypes.Float32, len(flat))
	for i := range 3 {
		flat[0] = float32(i)
		x, err := b.BufferFromFlatData(0, flat, shape)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := x.Data(); err != nil || !slices.Equal(got.([]float32), flat) {
			t.Fatalf("the buffer has %v, %v", got, err)
		}
		if err := x.Finalize(); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(b.free[shape.String()]); n != 1 {
		t.Errorf("%d buffers wait for their next use, want 1", n)
	}
	for _, wrong := range []any{flat[1:], make([]float64, len(flat)), []int32{1}, 1, nil} {
		if _, err := b.BufferFromFlatData(0, wrong, shape); err == nil {
			t.Errorf("no error for a buffer of shape %s made of a %T", shape, wrong)
		}
	}
}

// TestLargeGraphs: what planning a graph allocates does not grow with the square of its operations.
func TestLargeGraphs(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	planned := func(n int) float64 {
		p := newProgram(t, b)
		x := p.parameter(make([]float32, 4), dtypes.Float32, 2, 2)
		y, last := x, x
		for range n { // products, each added to what was before
			y = p.must(p.f.DotGeneral(y, []int{1}, nil, x, []int{0}, nil, compute.DotGeneralConfig{}))
			e := p.must(p.f.Tanh(y))
			y, last = p.must(p.f.Add(e, last)), e
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		p.compile(y)
		runtime.ReadMemStats(&after)
		return float64(after.TotalAlloc - before.TotalAlloc)
	}
	small, large := planned(200), planned(1600)
	if large > 20*small {
		t.Errorf("a graph of 8 times as many operations needs %.0f times the memory: %.0f bytes, %.0f", large/small, small,
			large)
	}
}

// TestLongRows: a loop over long rows works on parts of them.
func TestLongRows(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	const n = 1 << 20
	p := newProgram(t, b)
	x, v := make([]float32, 2*n), make([]float32, n)
	for i := range x {
		x[i], v[i%n] = float32(i), float32(i%n%3)
	}
	s := shapes.Make(dtypes.Float32, 2, n)
	y := p.must(p.f.Add(p.parameter(x, dtypes.Float32, 2, n),
		p.must(p.f.BroadcastInDim(p.parameter(v, dtypes.Float32, n), s, []int{1}))))
	exe := p.compile(p.must(p.f.Neg(y)))
	if got := exe.(*Executable).scratchBytes; got > 1<<20 {
		t.Errorf("the loop needs %d bytes besides its operands", got)
	}
	for i, got := range p.data(exe.Execute(p.in, nil, 0))[0].([]float32) {
		if want := -(x[i] + v[i%n]); got != want {
			t.Fatalf("element %d is %v, want %v", i, got, want)
		}
	}
}

// TestDonatedTwice: an argument that is donated twice is one buffer for the next use. The race detector would report
// two.
func TestDonatedTwice(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	p := newProgram(t, b)
	s := shapes.Make(dtypes.Float32, 4)
	x, y := p.must(p.f.Parameter("x", s, nil)), p.must(p.f.Parameter("y", s, nil))
	exe := p.compile(p.must(p.f.ReduceSum(p.must(p.f.Add(x, y)), 0)))
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for range 5000 {
				a, _, err := b.NewSharedBuffer(0, s)
				if err == nil && g%2 == 0 {
					_, err = exe.Execute([]compute.Buffer{a, a}, []bool{true, true}, 0)
				} else if err == nil {
					err = a.Finalize()
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	seen := map[*Buffer]bool{}
	for _, x := range b.free[s.String()] {
		if seen[x] {
			t.Fatal("a buffer waits twice for its next use")
		}
		seen[x] = true
	}
}
