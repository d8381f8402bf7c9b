package elementwise

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// names are the operations that Apply accepts, by their results for floating-point operands.
var (
	numeric = []string{
		"Add", "Sub", "Mul", "Div", "Min", "Max", "Sqrt", "Neg", "Abs", "Sign", "Clamp", "Where", "Identity",
	}
	relations = []string{
		"Equal", "NotEqual", "LessThan", "LessOrEqual", "GreaterThan", "GreaterOrEqual", "IsFinite", "IsNaN",
	}
	booleans = []string{"LogicalAnd", "LogicalOr", "LogicalNot"}
)

// slow is one element of an operation on float32.
func slow(name string, x []float64) float64 {
	one := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	a, b, c := x[0], x[1%len(x)], x[2%len(x)]
	switch name {
	case "Add":
		return float64(float32(a) + float32(b))
	case "Sub":
		return float64(float32(a) - float32(b))
	case "Mul":
		return float64(float32(a) * float32(b))
	case "Div":
		return float64(float32(a) / float32(b))
	case "Min":
		return min(a, b)
	case "Max":
		return max(a, b)
	case "Clamp":
		return min(max(a, b), c)
	case "Sqrt":
		return float64(float32(math.Sqrt(a)))
	case "Neg":
		return -a
	case "Abs":
		if a < 0 { // as the Go backend: -0 stays
			return -a
		}
		return a
	case "Sign":
		return one(a > 0) - one(a < 0)
	case "Where":
		if a != 0 {
			return b
		}
		return c
	case "Identity":
		return a
	case "Equal":
		return one(a == b)
	case "NotEqual":
		return one(a != b)
	case "LessThan":
		return one(a < b)
	case "LessOrEqual":
		return one(a <= b)
	case "GreaterThan":
		return one(a > b)
	case "GreaterOrEqual":
		return one(a >= b)
	case "IsFinite":
		return one(!math.IsNaN(a) && !math.IsInf(a, 0))
	case "IsNaN":
		return one(a != a)
	case "LogicalAnd":
		return a * b
	case "LogicalOr":
		return max(a, b)
	case "LogicalNot":
		return 1 - a
	}
	panic(name)
}

// drawn is a random program with the vectors that an oracle computes one operation at a time.
type drawn struct {
	p       *Program
	job     Job
	values  []Value // by the oracle's vectors
	vectors [][]float64
	bools   []bool // by vector
	memory  [][]float32
}

func (d *drawn) operand(r *rand.Rand, boolean bool) int {
	for {
		if i := r.IntN(len(d.vectors)); d.bools[i] == boolean {
			return i
		}
	}
}

func (d *drawn) apply(name string, t tensor.DType, in ...int) {
	values, vector := make([]Value, len(in)), make([]float64, len(d.vectors[0]))
	for i, k := range in {
		values[i] = d.values[k]
	}
	for e := range vector {
		x := make([]float64, len(in))
		for i, k := range in {
			x[i] = d.vectors[k][e]
		}
		vector[e] = slow(name, x)
	}
	d.values, d.bools = append(d.values, d.p.Apply(name, t, values...)), append(d.bools, t == tensor.Bool)
	d.vectors = append(d.vectors, vector)
}

// draw makes a program with every kind of operation on vectors and numbers.
func draw(r *rand.Rand, n int) *drawn {
	d := &drawn{p: &Program{}, job: Job{N: n}}
	number := func() float32 {
		special := []float32{0, 1, -1, float32(math.Inf(1)), float32(math.NaN()), 1e-40, 3e38}
		if r.IntN(20) == 0 {
			return special[r.IntN(len(special))]
		}
		return float32(r.NormFloat64())
	}
	for range 3 {
		m, v := make([]float32, n), make([]float64, n)
		for i := range m {
			m[i] = number()
			v[i] = float64(m[i])
		}
		d.memory, d.job.In = append(d.memory, m), append(d.job.In, unsafe.Pointer(unsafe.SliceData(m)))
		d.values, d.vectors = append(d.values, d.p.Input(tensor.Float32)), append(d.vectors, v)
		d.bools = append(d.bools, false)
	}
	for k := range 4 {
		x, boolean, v := number(), k == 3, make([]float64, n)
		var stored Number
		t := tensor.Float32
		if boolean {
			t = tensor.Bool
			x = float32(r.IntN(2))
			stored[0] = byte(x)
		} else {
			*(*float32)(unsafe.Pointer(&stored)) = x
		}
		for i := range v {
			v[i] = float64(x)
		}
		d.job.Numbers = append(d.job.Numbers, stored)
		d.values, d.vectors, d.bools = append(d.values, d.p.Number(t)), append(d.vectors, v), append(d.bools, boolean)
	}
	for range 40 {
		f := func() int { return d.operand(r, false) }
		b := func() int { return d.operand(r, true) }
		switch k := r.IntN(10); {
		case k == 0:
			name := booleans[r.IntN(len(booleans))]
			d.apply(name, tensor.Bool, []int{b(), b()}[:operations[name].operands]...)
		case k <= 2:
			name := relations[r.IntN(len(relations))]
			d.apply(name, tensor.Bool, []int{f(), f()}[:max(1, operations[name].operands)]...)
		default:
			switch name := numeric[r.IntN(len(numeric))]; name {
			case "Where":
				d.apply(name, tensor.Float32, b(), f(), f())
			case "Clamp":
				d.apply(name, tensor.Float32, f(), f(), f())
			default:
				d.apply(name, tensor.Float32, []int{f(), f()}[:operations[name].operands]...)
			}
		}
	}
	return d
}

// TestPrograms compares random programs with an oracle that computes one operation and one element at a time. They run
// at the same time, with few goroutines.
func TestPrograms(t *testing.T) {
	pool := NewPool(2)
	var all sync.WaitGroup
	for seed := range uint64(30) {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, 3))
			n := []int{0, 1, 17, block - 1, block, block + 1, 3*block + 5, chunk + 3}[r.IntN(8)]
			d := draw(r, n)
			var outputs []Value
			var wanted []int
			for range 5 {
				k := d.operand(r, false)
				outputs, wanted = append(outputs, d.values[k]), append(wanted, k)
				out := make([]float32, n+1)
				out[n] = 12345
				d.memory, d.job.Out = append(d.memory, out), append(d.job.Out, unsafe.Pointer(unsafe.SliceData(out)))
			}
			d.p.Outputs(outputs...)
			d.job.Program = d.p
			for range 2 {
				pool.Run([]Job{d.job})
				for i, k := range wanted {
					if err := differ(d.memory[3+i], d.vectors[k]); err != nil {
						t.Errorf("seed %d, %d elements, output %d: %v", seed, n, i, err)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

// differ compares bits, except those of NaNs, and the guard after the last element.
func differ(got []float32, want []float64) error {
	for i, w := range append(want[:len(want):len(want)], 12345) {
		if g := got[i]; math.Float32bits(g) != math.Float32bits(float32(w)) && !(g != g && w != w) {
			return fmt.Errorf("element %d is %v, want %v", i, g, w)
		}
	}
	return nil
}

// TestConvert checks conversions in both directions, and that a wider result does not overwrite its operand.
func TestConvert(t *testing.T) {
	p := &Program{}
	x := p.Input(tensor.Float32)
	sum := p.Apply("Add", tensor.Float32, x, x)
	wide := p.Apply("ConvertDType", tensor.Float64, sum)
	third := p.Apply("Div", tensor.Float64, wide, p.Number(tensor.Float64))
	half := p.Apply("ConvertDType", tensor.BFloat16, p.Apply("ConvertDType", tensor.Float32, third))
	p.Outputs(third, half)
	const n = 2*block + 3
	in, thirds, halves := make([]float32, n), make([]float64, n), make([]tensor.BF16, n)
	for i := range in {
		in[i] = float32(i)
	}
	var three Number
	*(*float64)(unsafe.Pointer(&three)) = 3
	NewPool(0).Run([]Job{{
		Program: p, In: []unsafe.Pointer{unsafe.Pointer(&in[0])}, Numbers: []Number{three}, N: n,
		Out: []unsafe.Pointer{unsafe.Pointer(&thirds[0]), unsafe.Pointer(&halves[0])},
	}})
	for i := range in {
		want := float64(in[i]+in[i]) / 3
		if thirds[i] != want || halves[i] != tensor.BF16From(float32(want)) {
			t.Fatalf("element %d is %v and %v, want %v", i, thirds[i], halves[i].Float32(), want)
		}
	}
}

// TestSupports checks what must be left to the backend.
func TestSupports(t *testing.T) {
	f32, f64, i32, b := tensor.Float32, tensor.Float64, tensor.Int32, tensor.Bool
	for _, test := range []struct {
		name   string
		result tensor.DType
		in     []tensor.DType
		want   bool
	}{
		{"Add", f32, []tensor.DType{f32, f32}, true},
		{"Add", f32, []tensor.DType{f32, f64}, false},
		{"Add", i32, []tensor.DType{i32, i32}, false},
		{"Add", tensor.BFloat16, []tensor.DType{tensor.BFloat16, tensor.BFloat16}, false},
		{"Pow", f32, []tensor.DType{f32, f32}, false},
		{"ReduceSum", f32, []tensor.DType{f32}, false},
		{"Where", f64, []tensor.DType{b, f64, f64}, true},
		{"Where", f64, []tensor.DType{f64, f64, f64}, false},
		{"ConvertDType", i32, []tensor.DType{f32}, false},
		{"ConvertDType", tensor.BFloat16, []tensor.DType{f64}, false},
		{"LogicalNot", b, []tensor.DType{b}, true},
		{"LogicalNot", b, []tensor.DType{i32}, false},
	} {
		if got := Supports(test.name, test.result, test.in...); got != test.want {
			t.Errorf("Supports(%s, %v, %v) is %v, want %v", test.name, test.result, test.in, got, test.want)
		}
	}
}
