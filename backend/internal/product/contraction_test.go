package product

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// randomContraction returns a contraction of operands of so many elements, and its terms: for each element of c, the
// pairs of elements of a and b.
func randomContraction(r *rand.Rand) (x *Contraction, sizes [3]int, terms map[int][][2]int) {
	axes := func(n, most int) (list []Axis) {
		for range n {
			list = append(list, Axis{Size: 1 + r.IntN(most)})
		}
		return list
	}
	most := []int{4, 7, 12}[r.IntN(3)]
	columns, depth, rows := axes(1+r.IntN(2), 40/most), axes(1+r.IntN(3), most), axes(1+r.IntN(3), most)
	if r.IntN(8) == 0 {
		depth[len(depth)-1].Size = 1000 + r.IntN(100)
	}
	if r.IntN(3) == 0 {
		columns[len(columns)-1].Size = []int{8, 16, 32, 33}[r.IntN(4)]
	}
	if size(columns)*size(depth)*size(rows) > 1<<16 {
		return randomContraction(r)
	}
	// Elements of an operand lie side by side, in a random order of the axes.
	lay := func(set func(a *Axis, stride int), lists ...[]Axis) int {
		var all []*Axis
		for _, l := range lists {
			for i := range l {
				all = append(all, &l[i])
			}
		}
		if r.IntN(2) == 0 {
			r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		}
		n := 1
		for i := len(all) - 1; i >= 0; i-- {
			set(all[i], n)
			n *= all[i].Size
		}
		return n
	}
	sizes[0] = lay(func(a *Axis, s int) { a.A = s }, rows, depth)
	sizes[1] = lay(func(a *Axis, s int) { a.B = s }, depth, columns)
	sizes[2] = lay(func(a *Axis, s int) { a.C = s }, rows, columns)
	firstB := 0
	if r.IntN(3) == 0 { // b in reverse along an axis
		d := &depth[r.IntN(len(depth))]
		firstB, d.B = (d.Size-1)*d.B, -d.B
	}
	// Boxes divide the first axis of the rows, and have parts of the depth.
	var boxes []Box
	terms = map[int][][2]int{}
	for at := 0; at < rows[0].Size; {
		n := 1 + r.IntN(rows[0].Size-at)
		b := Box{A: at * rows[0].A, C: at * rows[0].C, Rows: append([]Axis{}, rows...)}
		b.Rows[0].Size = n
		at += n
		points := [][2]int{{b.A, firstB}}
		for _, d := range depth {
			x := Range{Size: d.Size, Step: 1, A: d.A}
			if r.IntN(2) == 0 {
				x.First, x.Step = r.IntN(d.Size), 1+r.IntN(3)
				x.Size, x.A = r.IntN((d.Size-x.First+x.Step-1)/x.Step+1), x.Step*d.A
				b.A += x.First * d.A
			}
			b.Depth = append(b.Depth, x)
			var next [][2]int
			for _, p := range points {
				for i := range x.Size {
					next = append(next, [2]int{p[0] + (x.First+i*x.Step)*d.A, p[1] + (x.First+i*x.Step)*d.B})
				}
			}
			points = next
		}
		boxes = append(boxes, b)
		for i := range size(b.Rows) {
			for j := range size(columns) {
				c := b.C + offset(b.Rows, i, func(a Axis) int { return a.C }) + offset(columns, j, func(a Axis) int { return a.C })
				list := [][2]int{}
				for _, p := range points {
					list = append(list, [2]int{
						p[0] + offset(b.Rows, i, func(a Axis) int { return a.A }),
						p[1] + offset(columns, j, func(a Axis) int { return a.B }),
					})
				}
				terms[c] = list
			}
		}
	}
	return NewContraction(columns, depth, boxes, firstB, sizes[0], sizes[1], sizes[2]), sizes, terms
}

func size(axes []Axis) int {
	n := 1
	for _, a := range axes {
		n *= a.Size
	}
	return n
}

func checkContraction[T Float](t *testing.T, seed uint64, special bool) {
	r := rand.New(rand.NewPCG(seed, 9))
	x, sizes, terms := randomContraction(r)
	a, b := numbers[T](r, sizes[0]+1, special)[1:], numbers[T](r, sizes[1]+3, special)[3:]
	scratch := unsafe.Pointer(&make([]byte, ContractionBytes)[0])
	var want []T
	for _, l := range levels() {
		for _, parts := range []int{1, 3} {
			got := make([]T, sizes[2]+2)
			for i := range got {
				got[i] = 12345
			}
			for i := range parts {
				middle := x.Count() * i / parts
				for _, columns := range [][2]int{{0, middle}, {middle, x.Count()}} {
					contract[T](x, l, unsafe.Pointer(&got[1]), unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]), i, parts, columns[0],
						columns[1], scratch)
				}
			}
			if want == nil {
				want = got
				for c, list := range terms {
					sum, absolute := 0.0, 0.0
					for _, p := range list {
						v := float64(a[p[0]]) * float64(b[p[1]])
						sum, absolute = sum+v, absolute+math.Abs(v)
					}
					if e := math.Abs(float64(got[c+1]) - sum); !special && e > 1e-12+absolute*float64(len(list))*0x1p-24 {
						t.Fatalf("seed %d: element %d is %v, want %v", seed, c, got[c+1], sum)
					}
				}
				if got[0] != 12345 || got[sizes[2]+1] != 12345 {
					t.Fatalf("seed %d: it writes outside of the result", seed)
				}
			}
			for i := range want {
				if !same(got[i], want[i]) {
					t.Fatalf("seed %d, %v, %d parts: element %d is %v, want %v", seed, l, parts, i-1, got[i], want[i])
				}
			}
		}
	}
}

func TestContractions(t *testing.T) {
	seeds := uint64(1000)
	if testing.Short() {
		seeds = 300
	}
	for seed := range seeds {
		checkContraction[float32](t, seed, false)
		checkContraction[float64](t, seed, false)
		checkContraction[float32](t, seed, true)
	}
}

func BenchmarkContract(b *testing.B) {
	conv := func(n, h, w, c, f, k int) (*Contraction, [3]int, float64) { // NHWC, without padding
		oh, ow := h-k+1, w-k+1
		sizes := [3]int{n * h * w * c, k * k * c * f, n * oh * ow * f}
		full := func(size, a int) Range { return Range{Size: size, Step: 1, A: a} }
		return NewContraction([]Axis{{Size: f, B: 1, C: 1}},
			[]Axis{{Size: k, B: k * c * f}, {Size: k, B: c * f}, {Size: c, B: f}},
			[]Box{{
				Rows:  []Axis{{Size: n, A: h * w * c, C: oh * ow * f}, {Size: oh, A: w * c, C: ow * f}, {Size: ow, A: c, C: f}},
				Depth: []Range{full(k, w*c), full(k, c), full(c, 1)},
			}}, 0, sizes[0], sizes[1], sizes[2]), sizes, 2 * float64(n*oh*ow*f) * float64(k*k*c)
	}
	for _, s := range [][6]int{
		{32, 28, 28, 1, 32, 3}, {32, 12, 12, 32, 64, 3}, {16, 34, 34, 16, 16, 3}, {16, 10, 10, 64, 64, 3},
	} {
		for _, l := range levels()[1:] {
			b.Run(fmt.Sprint(s, l), func(b *testing.B) {
				x, sizes, ops := conv(s[0], s[1], s[2], s[3], s[4], s[5])
				p, q, c := make([]float32, sizes[0]), make([]float32, sizes[1]), make([]float32, sizes[2])
				scratch := unsafe.Pointer(&make([]byte, ContractionBytes)[0])
				for b.Loop() {
					contract[float32](x, l, unsafe.Pointer(&c[0]), unsafe.Pointer(&p[0]), unsafe.Pointer(&q[0]), 0, 1, 0,
						x.Count(), scratch)
				}
				b.ReportMetric(ops*float64(b.N)/float64(b.Elapsed().Nanoseconds()), "GFLOP/s")
			})
		}
	}
}
