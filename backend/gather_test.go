package backend

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
)

// TestScatter compares scatters of windows of any size, at any position, with a loop over their elements. Windows that
// do not lie in the operand are left out.
func TestScatter(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, threads := range []int{1, 2, 3} {
		b := withThreads(t, threads)
		for range 100 {
			dims := [][]int{{40}, {7, 5}, {1, 6, 4}, {300, 128}, {3, 64, 64}, {1, 1}}[r.IntN(6)]
			batch := [][]int{{}, {20}, {3, 4}, {100}}[r.IntN(4)]
			axes := r.Perm(len(dims))[:1+r.IntN(len(dims))]
			window, inserted, windowDims := make([]int, len(dims)), []int(nil), []int(nil)
			for i, d := range dims {
				window[i] = []int{1, d, 1 + r.IntN(d)}[r.IntN(3)]
				if window[i] == 1 && r.IntN(2) == 0 {
					inserted = append(inserted, i)
				} else {
					windowDims = append(windowDims, window[i])
				}
			}
			indices := make([]int64, size(batch)*len(axes))
			for i := range indices {
				d := dims[axes[i%len(axes)]]
				indices[i] = int64(r.IntN(d+2) - 1)
				if r.IntN(2) == 0 {
					indices[i] = int64(r.IntN(d - window[axes[i%len(axes)]] + 1))
				}
			}
			updateDims := slices.Concat(windowDims, batch)
			permutation := r.Perm(len(updateDims)) // of window axes and batch axes in updates
			at := slices.Sorted(slices.Values(permutation[:len(windowDims)]))
			for i, d := range windowDims {
				updateDims[at[i]] = d
			}
			for i, axis := range without(len(updateDims), at) {
				updateDims[axis] = batch[i]
			}
			operand, updates := make([]float32, size(dims)), make([]float32, size(updateDims))
			for _, list := range [][]float32{operand, updates} {
				for i := range list {
					list[i] = float32(r.NormFloat64())
				}
			}
			name := []string{"Sum", "Max", "Min"}[r.IntN(3)]

			want := slices.Clone(operand)
			ordered := view{dims: updateDims, strides: rowMajor(updateDims)}.transposed(
				slices.Concat(without(len(updateDims), at), at))
			for i := range size(batch) {
				start, inside := make([]int, len(dims)), true
				for k, axis := range axes {
					start[axis] = int(indices[i*len(axes)+k])
					inside = inside && start[axis] >= 0 && start[axis]+window[axis] <= dims[axis]
				}
				for j := range size(window) {
					if !inside {
						break
					}
					place, rest := 0, j
					for axis, d := range slices.Backward(window) {
						place += (start[axis] + rest%d) * rowMajor(dims)[axis]
						rest /= d
					}
					u := updates[ordered.at(i*size(window)+j)]
					switch name {
					case "Sum":
						want[place] += u
					case "Max":
						want[place] = max(want[place], u)
					case "Min":
						want[place] = min(want[place], u)
					}
				}
			}

			builder := b.Builder("scatter")
			f := builder.Main()
			value := func(v compute.Value, err error) compute.Value {
				if err != nil {
					t.Fatal(err)
				}
				return v
			}
			x := value(f.Parameter("x", shapes.Make(dtypes.Float32, dims...), nil))
			n := value(f.Constant(indices, append(slices.Clone(batch), len(axes))...))
			u := value(f.Parameter("u", shapes.Make(dtypes.Float32, updateDims...), nil))
			op := map[string]func(x, n, u compute.Value, vector int, at, inserted, axes []int, sorted, unique bool) (
				compute.Value, error){"Sum": f.ScatterSum, "Max": f.ScatterMax, "Min": f.ScatterMin}[name]
			result := value(op(x, n, u, len(batch), at, inserted, axes, false, false))
			if err := f.Return([]compute.Value{result}, nil); err != nil {
				t.Fatal(err)
			}
			exe, err := builder.Compile()
			if err != nil {
				t.Fatal(err)
			}
			var in []compute.Buffer
			for i, list := range [][]float32{operand, updates} {
				y, err := b.BufferFromFlatData(0, list, exe.(*Executable).shapes[i])
				if err != nil {
					t.Fatal(err)
				}
				in = append(in, y)
			}
			out, err := exe.Execute(in, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := out[0].Data(); !slices.Equal(got.([]float32), want) {
				t.Fatalf("Scatter%s of %v with windows %v, inserted %v, at %v, axes %v: got\n%v, want\n%v", name, dims, window,
					inserted, indices, axes, got, want)
			}
			exe.Finalize()
		}
		b.Finalize()
	}
}

// TestGenerator compares the states of rand.PCG after some numbers.
func TestGenerator(t *testing.T) {
	g := rand.NewPCG(3, 1<<63+5)
	for n := range uint64(300) {
		high, low := pcgAfter(3, 1<<63+5, n)
		state, _ := g.MarshalBinary()
		want, _ := rand.NewPCG(high, low).MarshalBinary()
		if got, want := fmt.Sprintf("%x", state), fmt.Sprintf("%x", want); got != want {
			t.Fatalf("after %d numbers the state is %s, want %s", n, got, want)
		}
		g.Uint64()
	}
}
