package backend

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/dtypes/bfloat16"
	"github.com/gomlx/compute/dtypes/float16"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/tensor"
)

// argument is an operand of an operation that is tested: elements of float32, which are stored in the type that is
// tested, or of another type.
type argument struct {
	dims []int
	flat any
}

// narrowed returns numbers as elements of a half type, and float32 of those.
func narrowed(t dtypes.DType, list []float32) (flat any, wide []float32) {
	if t == dtypes.BFloat16 {
		x := make([]bfloat16.BFloat16, len(list))
		for i, v := range list {
			h := tensor.BF16From(v)
			x[i], wide = bfloat16.BFloat16(h), append(wide, h.Float32())
		}
		return x, wide
	}
	x := make([]float16.Float16, len(list))
	for i, v := range list {
		h := tensor.F16From(v)
		x[i], wide = float16.Float16(h), append(wide, h.Float32())
	}
	return x, wide
}

// widths returns elements of a half type as float32, and others as they are.
func widths(flat any) any {
	var list []float32
	switch x := flat.(type) {
	case []bfloat16.BFloat16:
		for _, v := range x {
			list = append(list, tensor.BF16(v).Float32())
		}
	case []float16.Float16:
		for _, v := range x {
			list = append(list, tensor.F16(v).Float32())
		}
	default:
		return flat
	}
	return list
}

type graphFunction func(f compute.Function, in []compute.Value, t dtypes.DType) (compute.Value, error)

// execute executes a function of arguments whose float32 elements are stored in a type.
func execute(t *testing.T, b compute.Backend, dtype dtypes.DType, args []argument, g graphFunction) any {
	t.Helper()
	builder := b.Builder("half")
	f := builder.Main()
	var values []compute.Value
	var in []compute.Buffer
	for i, a := range args {
		flat, s := a.flat, shapes.Make(dtypes.Int32, a.dims...)
		if list, ok := flat.([]float32); ok {
			s.DType = dtype
			if dtype != dtypes.Float32 {
				flat, _ = narrowed(dtype, list)
			}
		}
		v, err := f.Parameter(fmt.Sprint("x", i), s, nil)
		if err != nil {
			t.Fatal(err)
		}
		x, err := b.BufferFromFlatData(0, flat, s)
		if err != nil {
			t.Fatal(err)
		}
		values, in = append(values, v), append(in, x)
	}
	y, err := g(f, values, dtype)
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
	defer exe.Finalize()
	if e, ok := exe.(*Executable); !ok || slices.ContainsFunc(e.instructions, func(x instruction) bool {
		_, yes := x.(*foreign)
		return yes
	}) {
		t.Error("GoMLX's Go backend executes it")
	}
	out, err := exe.Execute(in, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	data, err := out[0].Data()
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// halfOperations has operations of x, y and z with 4 × 6, 4 × 6 and 6 × 5 elements, and of windows, a kernel and
// indices.
func halfOperations() map[string]graphFunction {
	m := map[string]graphFunction{}
	one := func(name string, g func(f compute.Function, x compute.Value) (compute.Value, error)) {
		m[name] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
			return g(f, in[0])
		}
	}
	two := func(name string, g func(f compute.Function, x, y compute.Value) (compute.Value, error)) {
		m[name] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
			return g(f, in[0], in[1])
		}
	}
	two("Add", compute.Function.Add)
	two("Sub", compute.Function.Sub)
	two("Mul", compute.Function.Mul)
	two("Div", compute.Function.Div)
	two("Pow", compute.Function.Pow)
	two("Max", compute.Function.Max)
	two("Min", compute.Function.Min)
	two("Equal", compute.Function.Equal)
	two("LessThan", compute.Function.LessThan)
	for name, g := range map[string]func(f compute.Function, x compute.Value) (compute.Value, error){
		"Exp": compute.Function.Exp, "Log": compute.Function.Log, "Tanh": compute.Function.Tanh,
		"Erf": compute.Function.Erf,
		"Neg": compute.Function.Neg, "Abs": compute.Function.Abs, "Sign": compute.Function.Sign,
		"Sqrt": compute.Function.Sqrt, "Rsqrt": compute.Function.Rsqrt, "Logistic": compute.Function.Logistic,
		"Cos": compute.Function.Cos, "Floor": compute.Function.Floor, "IsNaN": compute.Function.IsNaN,
		"IsFinite": compute.Function.IsFinite,
	} {
		one(name, g)
	}
	for _, to := range []dtypes.DType{
		dtypes.Float32, dtypes.Float64, dtypes.Int32, dtypes.Int64, dtypes.Uint8, dtypes.Uint32, dtypes.Uint64, dtypes.Bool,
	} {
		one(fmt.Sprint("ConvertDType to ", to), func(f compute.Function, x compute.Value) (compute.Value, error) {
			return f.ConvertDType(x, to)
		})
	}
	reduce := func(name string, g func(f compute.Function, x compute.Value, axes ...int) (compute.Value, error)) {
		for _, axes := range [][]int{{0}, {1}, {0, 1}} {
			one(fmt.Sprint(name, axes), func(f compute.Function, x compute.Value) (compute.Value, error) {
				return g(f, x, axes...)
			})
		}
	}
	reduce("ReduceSum", compute.Function.ReduceSum)
	reduce("ReduceMax", compute.Function.ReduceMax)
	reduce("ReduceMin", compute.Function.ReduceMin)
	one("Transpose", func(f compute.Function, x compute.Value) (compute.Value, error) { return f.Transpose(x, 1, 0) })
	two("Concatenate", func(f compute.Function, x, y compute.Value) (compute.Value, error) {
		return f.Concatenate(1, x, y, x)
	})
	two("Where", func(f compute.Function, x, y compute.Value) (compute.Value, error) {
		c, err := f.LessThan(x, y)
		if err != nil {
			return nil, err
		}
		return f.Where(c, y, x)
	})
	one("ArgMinMax", func(f compute.Function, x compute.Value) (compute.Value, error) {
		return f.ArgMinMax(x, 1, dtypes.Int32, false)
	})
	m["DotGeneral"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.DotGeneral(in[0], []int{1}, nil, in[2], []int{0}, nil, compute.DotGeneralConfig{})
	}
	m["DotGeneral to float32"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.DotGeneral(in[0], []int{1}, nil, in[2], []int{0}, nil, compute.DotGeneralConfig{
			AccumulatorDType: dtypes.Float32, OutputDType: dtypes.Float32,
		})
	}
	m["ConvGeneral"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		axes := compute.ConvolveAxesConfig{
			InputBatch: 0, InputChannels: 3, InputSpatial: []int{1, 2}, KernelInputChannels: 2, KernelOutputChannels: 3,
			KernelSpatial: []int{0, 1}, OutputBatch: 0, OutputChannels: 3, OutputSpatial: []int{1, 2},
		}
		return f.ConvGeneral(in[3], in[4], axes, []int{1, 1}, [][2]int{{1, 1}, {1, 1}}, nil, nil, 1, 1)
	}
	m["ReduceWindow"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.ReduceWindow(in[3], compute.ReduceOpSum, []int{1, 2, 2, 1}, []int{1, 1, 2, 1}, nil, nil, nil)
	}
	m["SelectAndScatterMax"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.SelectAndScatterMax(in[3], in[5], []int{1, 2, 2, 1}, []int{1, 2, 2, 1}, nil)
	}
	m["Gather"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.Gather(in[0], in[6], 1, []int{1}, []int{0}, []int{0}, []int{1, 6}, false)
	}
	m["ScatterSum"] = func(f compute.Function, in []compute.Value, _ dtypes.DType) (compute.Value, error) {
		return f.ScatterSum(in[1], in[6], in[0], 1, []int{1}, []int{0}, []int{0}, false, false)
	}
	m["Iota"] = func(f compute.Function, in []compute.Value, t dtypes.DType) (compute.Value, error) {
		v, err := f.Iota(shapes.Make(t, 4, 6), 1)
		if err != nil {
			return nil, err
		}
		return f.Add(v, in[0])
	}
	return m
}

// TestHalf compares each operation of float16 and bfloat16 with that of float32 of the same numbers, whose result is
// rounded.
func TestHalf(t *testing.T) {
	b := withThreads(t, 2)
	defer b.Finalize()
	r := rand.New(rand.NewPCG(1, 2))
	for _, dtype := range []dtypes.DType{dtypes.Float16, dtypes.BFloat16} {
		for name, g := range halfOperations() {
			t.Run(fmt.Sprint(name, " of ", dtype), func(t *testing.T) {
				for range 5 {
					var args, wide []argument
					for i, dims := range [][]int{{4, 6}, {4, 6}, {6, 5}, {2, 4, 4, 3}, {3, 3, 3, 5}, {2, 2, 2, 3}} {
						list := make([]float32, size(dims))
						for j := range list {
							list[j] = float32(r.NormFloat64() * 3)
							if i < 2 && r.IntN(12) == 0 {
								list[j] = []float32{0, 1e-7, 1e30, 70000, float32(math.Inf(-1)), float32(math.NaN()), -1e-40}[r.IntN(7)]
							}
						}
						_, rounded := narrowed(dtype, list)
						args, wide = append(args, argument{dims, list}), append(wide, argument{dims, rounded})
					}
					indices := argument{[]int{4, 1}, []int32{2, 0, 2, 3}}
					args, wide = append(args, indices), append(wide, indices)
					got, want := widths(execute(t, b, dtype, args, g)), execute(t, b, dtypes.Float32, wide, g)
					x, ok := got.([]float32)
					y, also := want.([]float32)
					if !ok || !also {
						if fmt.Sprint(got) != fmt.Sprint(want) {
							t.Fatalf("it is %v, want %v", got, want)
						}
						continue
					}
					if name != "ConvertDType to Float32" && name != "DotGeneral to float32" {
						_, y = narrowed(dtype, y)
					}
					for i, v := range y {
						if math.Float32bits(x[i]) != math.Float32bits(v) && (x[i] == x[i] || v == v) {
							t.Fatalf("element %d is %v, want %v", i, x[i], v)
						}
					}
				}
			})
		}
	}
}

// TestHalfRounds: a graph of several operations rounds the result of each, as graphs of one operation do.
func TestHalfRounds(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	r := rand.New(rand.NewPCG(3, 4))
	steps := []graphFunction{
		halfOperations()["Exp"], halfOperations()["Div"], halfOperations()["Tanh"],
		halfOperations()["Add"], halfOperations()["Mul"], halfOperations()["DotGeneral"],
	}
	for _, dtype := range []dtypes.DType{dtypes.Float16, dtypes.BFloat16} {
		var args []argument
		for _, dims := range [][]int{{4, 6}, {4, 6}, {6, 5}} {
			list := make([]float32, size(dims))
			for i := range list {
				list[i] = float32(r.NormFloat64())
			}
			args = append(args, argument{dims, list})
		}
		together := execute(t, b, dtype, args, func(f compute.Function, in []compute.Value, d dtypes.DType) (
			compute.Value, error,
		) {
			in = slices.Clone(in)
			for _, g := range steps {
				v, err := g(f, in, d)
				if err != nil {
					return nil, err
				}
				in[0] = v
			}
			return in[0], nil
		})
		for _, g := range steps {
			args[0].flat = widths(execute(t, b, dtype, args, g))
		}
		want, _ := narrowed(dtype, args[0].flat.([]float32))
		if fmt.Sprint(together) != fmt.Sprint(want) {
			t.Errorf("%v: got %v, want %v", dtype, together, want)
		}
	}
}

// TestTruncation: a conversion to integers takes the nearest one that there is.
func TestTruncation(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	large := float32(1e19)
	list := []float32{-1e30, -3e9, -2.9, -0.5, 0, 0.9, 255, 256.5, 2147483647, 3e9, large, 1e30, float32(math.NaN())}
	for to, want := range map[dtypes.DType]any{
		dtypes.Int32: []int32{
			math.MinInt32, math.MinInt32, -2, 0, 0, 0, 255, 256, math.MaxInt32, math.MaxInt32, math.MaxInt32, math.MaxInt32, 0,
		},
		dtypes.Uint8: []uint8{0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 0},
		dtypes.Int64: []int64{
			math.MinInt64, -3000000000, -2, 0, 0, 0, 255, 256, 2147483648, 3000000000, math.MaxInt64, math.MaxInt64, 0,
		},
		dtypes.Uint64: []uint64{0, 0, 0, 0, 0, 0, 255, 256, 2147483648, 3000000000, uint64(large), math.MaxUint64, 0},
	} {
		got := execute(t, b, dtypes.Float32, []argument{{[]int{len(list)}, list}}, func(f compute.Function,
			in []compute.Value, _ dtypes.DType,
		) (compute.Value, error) {
			return f.ConvertDType(in[0], to)
		})
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%v: got %v, want %v", to, got, want)
		}
	}
}
