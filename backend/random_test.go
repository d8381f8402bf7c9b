package backend

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/race"
)

// randomGraph adds random operations to a function. It makes the same choices for the same seed.
type randomGraph struct {
	*rand.Rand
	f      compute.Function
	values []compute.Value
	shapes []shapes.Shape
	log    []string
}

func (g *randomGraph) add(what string, v compute.Value, err error) {
	if err != nil {
		panic(fmt.Sprintf("%s: %v", what, err))
	}
	s, err := g.f.Shape(v)
	if err != nil {
		panic(err)
	}
	g.values, g.shapes = append(g.values, v), append(g.shapes, s)
	g.log = append(g.log, fmt.Sprintf("%d = %s: %s", len(g.values)-1, what, s))
}

// pick returns the number of a random value for which ok holds, or -1.
func (g *randomGraph) pick(ok func(s shapes.Shape) bool) int {
	start := g.IntN(len(g.values))
	for i := range g.values {
		if at := (start + i) % len(g.values); ok(g.shapes[at]) {
			return at
		}
	}
	return -1
}

func isFloat(s shapes.Shape) bool { return s.DType == dtypes.Float32 }

func (g *randomGraph) step() {
	a := g.pick(isFloat)
	x, s := g.values[a], g.shapes[a]
	dims := s.Dimensions
	axis := -1
	if len(dims) > 0 {
		axis = g.IntN(len(dims))
	}
	like := g.pick(func(t shapes.Shape) bool { return t.Equal(s) })
	if g.IntN(2) == 0 {
		for range 3 {
			if i := g.IntN(len(g.values)); g.shapes[i].Equal(s) {
				like = i
			}
		}
	}
	y := g.values[like]
	name := func(op string) string { return fmt.Sprintf("%s %d %d axis %d", op, a, like, axis) }
	switch g.IntN(34) {
	case 0:
		v, err := g.f.Add(x, y)
		g.add(name("Add"), v, err)
	case 1:
		v, err := g.f.Sub(x, y)
		g.add(name("Sub"), v, err)
	case 2:
		v, err := g.f.Mul(x, y)
		g.add(name("Mul"), v, err)
	case 3:
		v, err := g.f.Tanh(x)
		g.add(name("Tanh"), v, err)
	case 4:
		v, err := g.f.Logistic(x)
		g.add(name("Logistic"), v, err)
	case 5:
		v, err := g.f.Max(x, y)
		g.add(name("Max"), v, err)
	case 6:
		a = g.IntN(3) // of a parameter, since rounding could turn the comparison of what is computed
		x, y = g.values[a], g.values[a]
		negative, err := g.f.Neg(x)
		g.add(name("Neg"), negative, err)
		c, err := g.f.GreaterThan(x, negative)
		g.add(name("GreaterThan"), c, err)
		v, err := g.f.Where(c, x, y)
		g.add(name("Where"), v, err)
		v, err = g.f.ConvertDType(c, dtypes.Float32)
		g.add(name("Convert"), v, err)
	case 7, 8:
		if axis >= 0 {
			axes := []int{axis}
			if g.IntN(3) == 0 {
				axes = nil
				for i := axis; i < len(dims); i++ {
					axes = append(axes, i)
				}
			}
			v, err := g.f.ReduceSum(x, axes...)
			g.add(name(fmt.Sprint("ReduceSum ", axes)), v, err)
		}
	case 9:
		if axis >= 0 {
			v, err := g.f.ReduceMax(x, axis)
			g.add(name("ReduceMax"), v, err)
		}
	case 10, 11: // a reduction, spread again
		if axis >= 0 {
			v, err := g.f.ReduceSum(x, axis)
			g.add(name("ReduceSum"), v, err)
			var axes []int
			for i := range dims {
				if i != axis {
					axes = append(axes, i)
				}
			}
			v, err = g.f.BroadcastInDim(v, s, axes)
			g.add(name("BroadcastInDim"), v, err)
			v, err = g.f.Sub(x, v)
			g.add(name("Sub spread"), v, err)
		}
	case 12:
		permutation := g.Perm(len(dims))
		v, err := g.f.Transpose(x, permutation...)
		g.add(name(fmt.Sprint("Transpose ", permutation)), v, err)
	case 13:
		var flat []int
		rest := s.Size()
		for _, d := range []int{2, 3, 5} {
			if rest%d == 0 && g.IntN(2) == 0 {
				flat, rest = append(flat, d), rest/d
			}
		}
		flat = append(flat, rest)
		v, err := g.f.Reshape(x, flat...)
		g.add(name("Reshape"), v, err)
	case 14:
		starts, limits, steps := make([]int, len(dims)), make([]int, len(dims)), make([]int, len(dims))
		for i, d := range dims {
			starts[i] = g.IntN(d)
			limits[i] = starts[i] + 1 + g.IntN(d-starts[i])
			steps[i] = 1 + g.IntN(2)
		}
		v, err := g.f.Slice(x, starts, limits, steps)
		g.add(name("Slice"), v, err)
	case 15, 16, 17: // a product
		if axis >= 0 {
			b := g.pick(func(t shapes.Shape) bool {
				for _, d := range t.Dimensions {
					if isFloat(t) && d == dims[axis] && s.Size()*t.Size() < 1<<18 {
						return true
					}
				}
				return false
			})
			if b < 0 {
				return
			}
			other := 0
			for i, d := range g.shapes[b].Dimensions {
				if d == dims[axis] {
					other = i
				}
			}
			v, err := g.f.DotGeneral(x, []int{axis}, nil, g.values[b], []int{other}, nil, compute.DotGeneralConfig{})
			g.add(name(fmt.Sprint("DotGeneral ", b, other)), v, err)
		}
	case 18:
		if axis > 0 {
			v, err := g.f.DotGeneral(x, []int{axis}, []int{0}, y, []int{axis}, []int{0}, compute.DotGeneralConfig{})
			g.add(name("DotGeneral of batches"), v, err)
		}
	case 19:
		if axis >= 0 {
			v, err := g.f.Concatenate(axis, x, y, x)
			g.add(name("Concatenate"), v, err)
		}
	case 22:
		zero, err := g.f.Constant([]float32{0.5})
		g.add("Constant", zero, err)
		config := make([]compute.PadAxis, len(dims))
		for i := range config {
			config[i] = compute.PadAxis{Start: g.IntN(3), End: g.IntN(2), Interior: g.IntN(2)}
		}
		v, err := g.f.Pad(x, zero, config...)
		g.add(name("Pad"), v, err)
	case 33: // slices along an axis, padded and added, as in the gradient of slices
		if axis < 0 {
			return
		}
		zero, err := g.f.Constant([]float32{0})
		g.add("Constant", zero, err)
		var sum compute.Value
		for from := 0; from < dims[axis] && g.IntN(8) > 0; {
			until := from + 1 + g.IntN(dims[axis]-from)
			starts, limits, config := make([]int, len(dims)), slices.Clone(dims), make([]compute.PadAxis, len(dims))
			starts[axis], limits[axis] = from, until
			config[axis] = compute.PadAxis{Start: from, End: dims[axis] - until}
			v, err := g.f.Slice(y, starts, limits, nil)
			g.add(name("Slice"), v, err)
			v, err = g.f.Pad(v, zero, config...)
			g.add(name(fmt.Sprintf("Pad %d to %d", from, until)), v, err)
			if sum != nil {
				v, err = g.f.Add(sum, v)
				g.add("Add", v, err)
			}
			sum = v
			from = until - g.IntN(2)*g.IntN(2)*g.IntN(2) // they can overlap
		}
	case 20:
		if axis >= 0 {
			v, err := g.f.Reverse(x, axis)
			g.add(name("Reverse"), v, err)
		}
	case 23, 24:
		g.indexed(a)
	case 25: // of a parameter, since rounding could change which element is the largest
		a = g.IntN(3)
		axis = g.IntN(g.shapes[a].Rank())
		v, err := g.f.ArgMinMax(g.values[a], axis, []dtypes.DType{dtypes.Int32, dtypes.Int64}[g.IntN(2)], g.IntN(2) == 0)
		g.add(fmt.Sprintf("ArgMinMax %d axis %d", a, axis), v, err)
		v, err = g.f.ConvertDType(v, dtypes.Float32)
		g.add("ConvertDType", v, err)
		v, err = g.f.Bitcast(g.values[a], dtypes.Uint32)
		g.add("Bitcast", v, err)
	case 26:
		state, err := g.f.Constant([]uint64{g.Uint64(), g.Uint64(), 0}, 3)
		g.add("Constant", state, err)
		state, bits, err := g.f.RNGBitGenerator(state, shapes.Make(dtypes.Uint32, dims...))
		g.add("RNGBitGenerator", bits, err)
		v, err := g.f.ConvertDType(bits, dtypes.Float32)
		g.add("ConvertDType", v, err)
		v, err = g.f.Log(v)
		g.add("Log", v, err)
		v, err = g.f.Slice(state, []int{0}, []int{2}, nil) // the Go backend does not set the rest
		g.add("Slice", v, err)
	case 27, 28, 29:
		g.convolution(x, s)
	case 30, 31, 32:
		g.windows(a)
	case 21:
		if axis >= 0 {
			v, err := g.f.FusedSoftmax(x, axis)
			g.add(name("FusedSoftmax"), v, err)
		}
	}
	if last := len(g.values) - 1; g.shapes[last].Size() > 1<<13 { // keep values small, in size and number
		g.values, g.shapes = g.values[:last], g.shapes[:last]
		return
	}
	if last := len(g.values) - 1; isFloat(g.shapes[last]) {
		v, err := g.f.Tanh(g.values[last])
		if g.IntN(3) == 0 {
			g.add(fmt.Sprint("Tanh ", last), v, err)
		}
	}
}

// indexed gathers windows of a value, and adds or compares windows with those of another one. The windows of a scatter
// are as long as the axes that no index is for, since the Go backend handles no others.
func (g *randomGraph) indexed(a int) {
	x, dims := g.values[a], g.shapes[a].Dimensions
	rank := len(dims)
	if rank == 0 {
		return
	}
	axes := g.Perm(rank)[:1+g.IntN(rank)]
	batch := [][]int{{}, {4}, {2, 3}, {3, 1, 2}}[g.IntN(4)]
	scatter := g.IntN(2) == 0
	sizes, limit := slices.Clone(dims), make([]int, len(axes))
	var collapsed []int
	for axis, d := range dims {
		at := slices.Index(axes, axis)
		if !scatter {
			sizes[axis] = 1 + g.IntN(d)
		} else if at >= 0 {
			sizes[axis] = 1
		}
		if at >= 0 {
			limit[at] = d - sizes[axis]
		}
		if sizes[axis] == 1 && (at >= 0 && scatter || g.IntN(2) == 0 && !scatter) {
			collapsed = append(collapsed, axis)
		}
	}
	vector := g.IntN(len(batch) + 1)
	indexDims := slices.Insert(slices.Clone(batch), vector, len(axes))
	flat := make([]int32, len(axes)*size(batch))
	step := size(batch[vector:])
	for i := range flat {
		at := i / step % len(axes)
		flat[i] = int32(g.IntN(limit[at] + 1))
		if !scatter && g.IntN(4) == 0 {
			flat[i] += int32(g.IntN(50) - 25)
		}
	}
	indices, err := g.f.Constant(flat, indexDims...)
	g.add(fmt.Sprint("Constant ", flat), indices, err)
	windowed := rank - len(collapsed)
	offsets := g.Perm(len(batch) + windowed)[:windowed]
	slices.Sort(offsets)
	v, err := g.f.Gather(x, indices, vector, offsets, collapsed, axes, sizes, false)
	g.add(fmt.Sprintf("Gather %d vector %d offsets %v collapsed %v axes %v sizes %v", a, vector, offsets, collapsed, axes,
		sizes), v, err)
	if !scatter {
		return
	}
	f := []func(operand, indices, updates compute.Value, vector int, window, inserted, axes []int, sorted, unique bool) (
		compute.Value, error){g.f.ScatterSum, g.f.ScatterMax, g.f.ScatterMin}[g.IntN(3)]
	v, err = f(x, indices, v, vector, offsets, collapsed, axes, false, false)
	g.add("Scatter", v, err)
}

// build makes a random graph for a backend, and executes it.
func (g *randomGraph) execute(t *testing.T, b compute.Backend, seed uint64) (out []compute.Buffer) {
	g.Rand = rand.New(rand.NewPCG(seed, 1))
	builder := b.Builder("random")
	g.f = builder.Main()
	var in []compute.Buffer
	for i := range 3 {
		dims := [][]int{{6, 10}, {4, 15, 2}, {30}, {2, 3, 5, 4}, {64, 33}, {5, 300}}[g.IntN(6)]
		s := shapes.Make(dtypes.Float32, dims...)
		v, err := g.f.Parameter(fmt.Sprint("x", i), s, nil)
		g.add("Parameter", v, err)
		flat := make([]float32, s.Size())
		for j := range flat {
			flat[j] = float32(g.NormFloat64())
		}
		x, err := b.BufferFromFlatData(0, flat, s)
		if err != nil {
			t.Fatal(err)
		}
		in = append(in, x)
	}
	for range 5 + g.IntN(25) {
		g.step()
	}
	var results []compute.Value
	for i, v := range g.values {
		if g.IntN(3) == 0 || i == len(g.values)-1 {
			results = append(results, v)
		}
	}
	if err := g.f.Return(results, nil); err != nil {
		t.Fatal(err)
	}
	exe, err := builder.Compile()
	if err != nil {
		t.Fatal(err)
	}
	defer exe.Finalize()
	for _, again := range []bool{false, true} { // the second execution uses the memory of the first one
		if e, ok := exe.(*Executable); ok { // with NaNs in it
			f, err := e.frame()
			if err != nil {
				t.Fatal(err)
			}
			for i := range f.arena {
				f.arena[i] = math.MaxUint64
			}
			for i := range f.worker.memory {
				f.worker.memory[i] = math.MaxUint64
			}
			e.free = append(e.free, f)
		}
		var donate []bool
		if again {
			donate = []bool{g.IntN(2) == 0, g.IntN(2) == 0, g.IntN(2) == 0}
		}
		if out, err = exe.Execute(in, donate, 0); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestRandomGraphs compares random graphs with the Go backend. LOCKSTEP_RANDOM_GRAPHS is how many, from
// LOCKSTEP_RANDOM_SEED on.
func TestRandomGraphs(t *testing.T) {
	number := func(name string, n int) int {
		if x, err := strconv.Atoi(os.Getenv(name)); err == nil {
			return x
		}
		return n
	}
	ours, err := New("")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Finalize()
	theirs, err := gobackend.New("ops_sequential,parallelism=0") // its SelectAndScatter has a race between goroutines
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Finalize()
	first, graphs := number("LOCKSTEP_RANDOM_SEED", 1), 1000
	if testing.Short() {
		graphs = 100
	}
	for seed := first; seed < first+number("LOCKSTEP_RANDOM_GRAPHS", graphs); seed++ {
		var a, b randomGraph
		got, want := a.execute(t, ours, uint64(seed)), b.execute(t, theirs, uint64(seed))
		for i := range want {
			x, _ := got[i].Data()
			y, _ := want[i].Data()
			if err := compareData(x, y); err != nil {
				t.Fatalf("LOCKSTEP_RANDOM_SEED=%d: result %d: %v, of the graph\n%v", seed, i, err, join(a.log))
			}
		}
		for _, x := range got {
			if err := x.Finalize(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func join(list []string) (s string) {
	for _, x := range list {
		s += x + "\n"
	}
	return s
}

func compareData(got, want any) error {
	y, ok := want.([]float32)
	if !ok {
		if !reflect.DeepEqual(got, want) {
			return fmt.Errorf("it is %v, want %v", got, want)
		}
		return nil
	}
	x := got.([]float32)
	if len(x) != len(y) {
		return fmt.Errorf("it has %d elements, want %d", len(x), len(y))
	}
	largest := 1.0
	for _, v := range y {
		if a := math.Abs(float64(v)); a > largest && !math.IsInf(a, 0) {
			largest = a
		}
	}
	for i, v := range y {
		e := math.Abs(float64(x[i]) - float64(v))
		if e > 2e-3*largest || (x[i] != x[i]) != (v != v) {
			return fmt.Errorf("element %d is %v, want %v", i, x[i], v)
		}
	}
	return nil
}

// withThreads returns a backend whose team has so many goroutines.
func withThreads(t *testing.T, threads int) *Backend {
	x, err := New("")
	if err != nil {
		t.Fatal(err)
	}
	b := x.(*Backend)
	b.team.close()
	b.team = newTeam(threads - 1)
	return b
}

// TestBits executes random graphs with teams of several sizes, and in processes with fewer instructions: the bits are
// the same, on all processors.
func TestBits(t *testing.T) {
	const child = "LOCKSTEP_RANDOM_CHILD" // set in a process with fewer instructions
	const want = "12b7c3c339291280"
	hash := func(threads int) string {
		b := withThreads(t, threads)
		defer b.Finalize()
		h := fnv.New64a()
		for seed := range uint64(60) {
			var g randomGraph
			for _, x := range g.execute(t, b, 1_000_000+seed) {
				data, _ := x.Data()
				if list, ok := data.([]float32); ok {
					for i, v := range list {
						if v != v {
							list[i] = float32(math.NaN()) // which of several NaNs results is not determined
						}
					}
				}
				if err := binary.Write(h, binary.LittleEndian, data); err != nil {
					t.Fatal(err)
				}
			}
		}
		return fmt.Sprintf("%016x", h.Sum64())
	}
	threads := []int{1, 2, 3, 8}
	if os.Getenv(child) != "" {
		threads = threads[:1]
	}
	for _, n := range threads {
		if got := hash(n); got != want {
			t.Fatalf("with %d threads the results have hash %s, want %s", n, got, want)
		}
	}
	if runtime.GOARCH != "amd64" || len(threads) == 1 {
		return
	}
	for _, off := range []string{"cpu.avx512f=off", "cpu.avx512f=off,cpu.avx2=off,cpu.fma=off"} {
		c := exec.Command(os.Args[0], "-test.run=^TestBits$")
		c.Env = append(os.Environ(), child+"=1", "GODEBUG="+off)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("with %s: %v\n%s", off, err, out)
		}
	}
}

// TestThreads executes a graph with teams of several sizes: the bits are the same.
func TestThreads(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	flat := make([]float32, 300*200)
	for i := range flat {
		flat[i] = float32(r.NormFloat64())
	}
	s := shapes.Make(dtypes.Float32, 300, 200)
	var want []float32
	for _, threads := range []int{1, 2, 3, 8} {
		b := withThreads(t, threads)
		builder := b.Builder("threads")
		f := builder.Main()
		value := func(v compute.Value, err error) compute.Value {
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		p := value(f.Parameter("x", s, nil))
		y := value(f.DotGeneral(p, []int{0}, nil, p, []int{0}, nil, compute.DotGeneralConfig{}))
		z := value(f.DotGeneral(p, []int{1}, nil, y, []int{0}, nil, compute.DotGeneralConfig{}))
		soft := value(f.FusedSoftmax(z, 1))
		sums := value(f.ReduceSum(value(f.Mul(soft, p)), 0))
		if err := f.Return([]compute.Value{soft, sums, value(f.ReduceSum(z))}, nil); err != nil {
			t.Fatal(err)
		}
		exe, err := builder.Compile()
		if err != nil {
			t.Fatal(err)
		}
		in, err := b.BufferFromFlatData(0, flat, s)
		if err != nil {
			t.Fatal(err)
		}
		var got []float32
		for range 20 {
			out, err := exe.Execute([]compute.Buffer{in}, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			got = nil
			for _, o := range out {
				data, _ := o.Data()
				got = append(got, data.([]float32)...)
			}
			if want == nil {
				want = got
			}
			for i := range want {
				if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
					t.Fatalf("%d threads: element %d is %v, want %v", threads, i, got[i], want[i])
				}
			}
		}
		b.Finalize()
	}
}

// TestConstants: what depends on constants only is computed when a graph is compiled.
func TestConstants(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	builder := b.Builder("constants")
	f := builder.Main()
	value := func(v compute.Value, err error) compute.Value {
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	square := shapes.Make(dtypes.Float32, 4, 4)
	x := value(f.Parameter("x", square, nil))
	below := value(f.GreaterThan(value(f.Iota(square, 0)), value(f.Iota(square, 1))))
	sums := value(f.ReduceSum(value(f.ConvertDType(below, dtypes.Float32)), 1))
	spread := value(f.BroadcastInDim(sums, square, []int{0}))
	y := value(f.Add(x, value(f.Where(below, spread, value(f.Neg(spread))))))
	if err := f.Return([]compute.Value{y}, nil); err != nil {
		t.Fatal(err)
	}
	exe, err := builder.Compile()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(exe.(*Executable).instructions); n != 1 {
		t.Errorf("the plan has %d instructions, want 1", n)
	}
	in, err := b.BufferFromFlatData(0, make([]float32, 16), square)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exe.Execute([]compute.Buffer{in}, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	data, _ := out[0].Data()
	want := []float32{0, 0, 0, 0, 1, -1, -1, -1, 2, 2, -2, -2, 3, 3, 3, -3}
	if got := data.([]float32); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// TestDonationToAnotherShape: a result has its own shape, not that of a donated argument.
func TestDonationToAnotherShape(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	builder := b.Builder("reshape")
	f := builder.Main()
	value := func(v compute.Value, err error) compute.Value {
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	s, want := shapes.Make(dtypes.Float32, 1, 3), shapes.Make(dtypes.Float32, 3)
	y := value(f.Reshape(value(f.Neg(value(f.Parameter("x", s, nil)))), 3))
	if err := f.Return([]compute.Value{y}, nil); err != nil {
		t.Fatal(err)
	}
	exe, err := builder.Compile()
	if err != nil {
		t.Fatal(err)
	}
	x, err := b.BufferFromFlatData(0, []float32{1, 2, 3}, s)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exe.Execute([]compute.Buffer{x}, []bool{true}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := out[0].Shape(); !got.Equal(want) {
		t.Errorf("the result has shape %s, want %s", got, want)
	}
}

// TestDonation: an optimizer's update writes its results to the memory of donated parameters.
func TestDonation(t *testing.T) {
	b := withThreads(t, 1)
	defer b.Finalize()
	builder := b.Builder("update")
	f := builder.Main()
	value := func(v compute.Value, err error) compute.Value {
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	s := shapes.Make(dtypes.Float32, 3, 5)
	var in []compute.Buffer
	var parameters []compute.Value
	for i := range 3 {
		parameters = append(parameters, value(f.Parameter(fmt.Sprint("p", i), s, nil)))
		flat := make([]float32, s.Size())
		for j := range flat {
			flat[j] = float32(j + i)
		}
		x, err := b.BufferFromFlatData(0, flat, s)
		if err != nil {
			t.Fatal(err)
		}
		in = append(in, x)
	}
	w, m, g := parameters[0], parameters[1], parameters[2]
	m = value(f.Add(value(f.Add(m, m)), g))
	w = value(f.Sub(w, value(f.Mul(m, g))))
	if err := f.Return([]compute.Value{w, m, value(f.Transpose(g, 1, 0))}, nil); err != nil {
		t.Fatal(err)
	}
	exe, err := builder.Compile()
	if err != nil {
		t.Fatal(err)
	}
	memory := func(x compute.Buffer) *float32 {
		flat, err := x.Data()
		if err != nil {
			t.Fatal(err)
		}
		return &flat.([]float32)[0]
	}
	before := []*float32{memory(in[0]), memory(in[1]), memory(in[2])}
	out, err := exe.Execute(in, []bool{true, true, false}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if memory(out[0]) != before[0] || memory(out[1]) != before[1] {
		t.Error("the results lie elsewhere than in the donated memory")
	}
	for i := range 2 {
		if _, err := in[i].Data(); err == nil {
			t.Error("a donated buffer can be used")
		}
	}
	for i := range 15 {
		g := float32(i + 2)
		m := 2*float32(i+1) + g
		got := [2]float32{unsafe.Slice(memory(out[0]), 15)[i], unsafe.Slice(memory(out[1]), 15)[i]}
		if want := [2]float32{float32(i) - m*g, m}; got != want {
			t.Errorf("element %d of the results is %v, want %v", i, got, want)
		}
	}
}

// TestAllocations checks that an execution allocates nothing.
func TestAllocations(t *testing.T) {
	if race.Enabled {
		t.Skip("the race detector allocates")
	}
	for _, threads := range []int{1, 2, 3} {
		b := withThreads(t, threads)
		builder := b.Builder("allocations")
		f := builder.Main()
		value := func(v compute.Value, err error) compute.Value {
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		s := shapes.Make(dtypes.Float32, 200, 200)
		w := value(f.Parameter("w", s, nil))
		n := value(f.ArgMinMax(w, 1, dtypes.Int32, false))
		n = value(f.Reshape(n, 200, 1))
		x := value(f.Gather(w, n, 1, []int{1}, []int{0}, []int{0}, []int{1, 200}, false))
		x = value(f.DotGeneral(x, []int{1}, nil, w, []int{0}, nil, compute.DotGeneralConfig{}))
		x = value(f.FusedSoftmax(value(f.Transpose(x, 1, 0)), 1))
		sums := value(f.ReduceSum(value(f.Transpose(x, 1, 0)), 1))
		x = value(f.ScatterSum(x, n, w, 1, []int{1}, []int{0}, []int{0}, false, false))
		x = value(f.Concatenate(0, x, w))
		state, bits, err := f.RNGBitGenerator(value(f.Constant([]uint64{1, 2, 3}, 3)), shapes.Make(dtypes.Uint32, 500))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Return([]compute.Value{x, sums, state, bits, value(f.Add(w, w))}, nil); err != nil {
			t.Fatal(err)
		}
		exe, err := builder.Compile()
		if err != nil {
			t.Fatal(err)
		}
		flat := make([]float32, s.Size())
		in, err := b.BufferFromFlatData(0, flat, s)
		if err != nil {
			t.Fatal(err)
		}
		args, donate, out := []compute.Buffer{in}, []bool{true}, make([]compute.Buffer, 5)
		if got := testing.AllocsPerRun(100, func() {
			if err := exe.(*Executable).Run(out, args, donate, Points{}); err != nil {
				t.Fatal(err)
			}
			for _, x := range out[:4] {
				if err := x.Finalize(); err != nil {
					t.Fatal(err)
				}
			}
			args[0] = out[4]
		}); got > 0 {
			t.Errorf("with %d threads an execution allocates %v times, want 0", threads, got)
		}
		b.Finalize()
	}
}
