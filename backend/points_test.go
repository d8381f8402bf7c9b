package backend

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/internal/race"
)

// layers compiles the first layers of a random chain with all-reduces, with an output for each layer, which is a
// bucket. The outputs are recorded after all layers. It also returns the names of the points in their order.
func layers(t *testing.T, b *Backend, seed uint64, n int, bucketed bool) (e *Executable, args []compute.Buffer,
	want []string,
) {
	r, p := rand.New(rand.NewPCG(seed, 1)), newProgram(t, b)
	const width = 24
	x := p.parameter(make([]float32, width*width), dtypes.Float32, width, width)
	var results, outputs []compute.Value
	var calls [][]compute.Value
	var buckets [][]int
	for i := range n {
		x = p.must(p.f.Tanh(p.must(p.f.DotGeneral(x, []int{1}, nil, x, []int{0}, nil, compute.DotGeneralConfig{}))))
		if r.IntN(3) == 0 {
			x = p.must(p.f.Identity(x))
			want = append(want, fmt.Sprint("call ", len(calls)))
			calls = append(calls, []compute.Value{x})
		}
		if bucketed {
			want = append(want, fmt.Sprint("bucket ", i))
			buckets = append(buckets, []int{i})
		}
		results = append(results, x)
	}
	for _, x := range results {
		outputs = append(outputs, p.must(p.f.ReduceSum(x, 1)))
	}
	if err := p.f.Return(outputs, nil); err != nil {
		t.Fatal(err)
	}
	e, err := p.builder.(*builder).CompileWithPoints(calls, buckets)
	if err != nil {
		t.Fatal(err)
	}
	return e, p.in, want
}

// TestPoints checks the order of the points of random plans, that no more instructions are before a bucket than it
// needs, and that an execution allocates nothing.
func TestPoints(t *testing.T) {
	b := withThreads(t, 2)
	defer b.Finalize()
	for seed := range uint64(20) {
		const n = 6
		e, args, want := layers(t, b, seed, n, true)
		before := 0
		for _, x := range e.instructions {
			p, ok := x.(*point)
			if !ok || p.bucket < 0 {
				before++
				continue
			}
			if alone, _, _ := layers(t, b, seed, p.bucket+1, false); before > len(alone.instructions) {
				t.Errorf("seed %d: %d instructions and calls before bucket %d, which needs %d", seed, before, p.bucket,
					len(alone.instructions))
			}
		}
		sum, _, err := b.NewSharedBuffer(0, shapes.Make(dtypes.Float32, 24, 24))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		counts := true
		sums, out := []compute.Buffer{sum}, make([]compute.Buffer, n)
		points := Points{
			AllReduce: func(call int, _ []compute.Buffer) ([]compute.Buffer, error) {
				if counts {
					got = append(got, fmt.Sprint("call ", call))
				}
				return sums, nil
			},
			Bucket: func(k int, results []compute.Buffer) error {
				if counts {
					got = append(got, fmt.Sprint("bucket ", k))
				}
				return results[0].Finalize()
			},
		}
		run := func() {
			if err := e.Run(out, args, nil, points); err != nil {
				t.Fatal(err)
			}
		}
		if run(); !slices.Equal(got, want) {
			t.Errorf("seed %d: points %v, want %v", seed, got, want)
		}
		counts = false
		if n := testing.AllocsPerRun(10, run); n > 0 && !race.Enabled {
			t.Errorf("seed %d: an execution allocates %v times", seed, n)
		}
	}
}
