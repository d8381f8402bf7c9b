package backend

import (
	"reflect"
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// elements returns, for each output along an axis, the first element that its window has, and how many. Elements are
// step apart.
func (w window) elements() (first, count []int, step int) {
	first, count = make([]int, w.out), make([]int, w.out)
	w.a = 1
	for _, b := range w.boxes() {
		for i := range b.pSize {
			p := b.p + i*b.pStep
			first[p], count[p] = b.a+i*b.aP, b.sSize
		}
		step = b.aS
	}
	return first, count, step
}

// alongAxes returns the windows of an operation along each axis, without input dilation.
func alongAxes(in, out, taps, strides, steps []int, paddings [][2]int) []window {
	list := make([]window, len(in))
	for i := range in {
		w := window{in: in[i], taps: taps[i], out: out[i], stride: taps[i], dilation: 1, step: 1}
		if len(strides) > 0 {
			w.stride = strides[i]
		}
		if len(steps) > 0 {
			w.step = steps[i]
		}
		if len(paddings) > 0 {
			w.before = paddings[i][0]
		}
		list[i] = w
	}
	return list
}

// trivial reports whether the windows of an axis are its elements.
func (w window) trivial() bool { return w.taps == 1 && w.stride == 1 && w.before == 0 && w.in == w.out }

// reductions has the loops that combine two elements, and what they start from.
var reductions = map[compute.ReduceOpType]struct {
	loop  string
	start func(dtypes.DType) any
}{
	compute.ReduceOpSum: {"Add", func(t dtypes.DType) any { return reflect.Zero(t.GoType()).Interface() }},
	compute.ReduceOpProduct: {"Mul", func(t dtypes.DType) any {
		return reflect.ValueOf(1).Convert(t.GoType()).Interface()
	}},
	compute.ReduceOpMax: {"Max", dtypes.DType.LowestValue},
	compute.ReduceOpMin: {"Min", dtypes.DType.HighestValue},
}

// reduceWindow lowers ReduceWindow: one axis after another.
func (p *planner) reduceWindow(o *record.Op, v view, dims []int, dtype dtypes.DType) (_ view, ok bool) {
	r, known := reductions[o.Attributes[0].(compute.ReduceOpType)]
	t, also := types[dtype]
	loop := vector.Lookup(r.loop, t, t)
	if !known || !also || dtype == dtypes.Bool || loop == nil {
		return view{}, false
	}
	taps, strides := o.Attributes[1].([]int), o.Attributes[2].([]int)
	dilations, steps, paddings := o.Attributes[3].([]int), o.Attributes[4].([]int), o.Attributes[5].([][2]int)
	start := reflect.MakeSlice(reflect.SliceOf(dtype.GoType()), 1, 1)
	start.Index(0).Set(reflect.ValueOf(r.start(dtype)))
	if slices.ContainsFunc(dilations, func(d int) bool { return d > 1 }) {
		config, shape := make([]compute.PadAxis, len(v.dims)), slices.Clone(v.dims)
		for i, d := range dilations {
			config[i].Interior = d - 1
			if len(paddings) > 0 {
				config[i].Start, config[i].End = paddings[i][0], paddings[i][1]
			}
			shape[i] = (shape[i]-1)*d + 1 + config[i].Start + config[i].End
		}
		fill := p.add(&node{kind: constantNode, dtype: dtype, literal: start.Interface()})
		v = p.padded(shapes.Make(dtype, shape...), []view{v, fill}, config)
		paddings = nil
	}
	for axis, w := range alongAxes(v.dims, dims, taps, strides, steps, paddings) {
		if !w.trivial() {
			v = p.reducedAlong(v, axis, w, loop, start.UnsafePointer(), dtype)
		}
	}
	return v, true
}

// leastInner is the number of elements after an axis from which a window is reduced along it. Otherwise the axis goes
// first, by a copy.
const leastInner = 16

// reducedAlong reduces windows along one axis.
func (p *planner) reducedAlong(v view, axis int, w window, loop vector.Loop, start unsafe.Pointer,
	dtype dtypes.DType,
) view {
	if axis > 0 && size(v.dims[axis+1:]) < leastInner && size(v.dims) > size(v.dims[axis:]) {
		order, back := []int{axis}, make([]int, len(v.dims))
		for i := range v.dims {
			if i != axis {
				order = append(order, i)
			}
		}
		for i, from := range order {
			back[from] = i
		}
		return p.reducedAlong(v.transposed(order), 0, w, loop, start, dtype).transposed(back)
	}
	if n, stride, ok := merged(v.dims[axis+1:], v.strides[axis+1:]); !ok || n > 1 && stride != 1 {
		v = p.copied(v)
	}
	dims := slices.Clone(v.dims)
	dims[axis] = w.out
	inner, bytes := size(dims[axis+1:]), int(dtype.Size())
	first, count, between := w.elements()
	outer := view{offset: v.offset, dims: v.dims[:axis], strides: v.strides[:axis]}
	return p.withTasks(dims, dtype, func(n *node) *tasksInstruction {
		from, to, along := v.of.slot, n.slot, v.strides[axis]*bytes
		rows := size(outer.dims) * w.out
		each := max(1, taskElements/inner, (rows+mostTasks-1)/mostTasks)
		return &tasksInstruction{
			tasks: (rows + each - 1) / each,
			task: func(task int, memory []unsafe.Pointer, k *worker) {
				end, run := min((task+1)*each, rows), 1
				for row := task * each; row < end; row += run {
					at := row % w.out
					// Neighbours whose elements lie side by side are one vector.
					for run = 1; along == inner*bytes && row+run < end && at+run < w.out && run*inner < blockElements &&
						count[at+run] == count[at] && first[at+run] == first[at]+run; run++ {
					}
					n := run * inner
					dst := unsafe.Add(memory[to], row*inner*bytes)
					if count[at] == 0 {
						repeat(dst, start, n, bytes)
						continue
					}
					src := unsafe.Add(memory[from], outer.at(row/w.out)*bytes+first[at]*along)
					if count[at] == 1 {
						copy(unsafe.Slice((*byte)(dst), n*bytes), unsafe.Slice((*byte)(src), n*bytes))
					}
					k.in[0], k.in[2] = src, src
					for i := 1; i < count[at]; i++ {
						k.in[1] = unsafe.Add(src, i*between*along)
						loop(dst, &k.in, n)
						k.in[0] = dst
					}
				}
			},
		}
	}, v)
}

// repeat writes an element n times.
func repeat(dst, from unsafe.Pointer, n, bytes int) {
	for i := range n {
		copy(unsafe.Slice((*byte)(unsafe.Add(dst, i*bytes)), bytes), unsafe.Slice((*byte)(from), bytes))
	}
}

// selectAndScatter lowers SelectAndScatterMax and SelectAndScatterMin: it adds the elements of the source where windows
// of the operand have their first extreme element.
func (p *planner) selectAndScatter(o *record.Op, x, source view, dtype dtypes.DType) (_ view, ok bool) {
	if dtype != dtypes.Float32 && dtype != dtypes.Float64 || len(x.dims) == 0 {
		return view{}, false
	}
	for _, v := range []*view{&x, &source} {
		if !v.contiguous() {
			*v = p.copied(*v)
		}
	}
	taps, strides, paddings := o.Attributes[0].([]int), o.Attributes[1].([]int), o.Attributes[2].([][2]int)
	windows := alongAxes(x.dims, source.dims, taps, strides, nil, paddings)
	// The last axes without windows are the elements of a row; the first ones divide the tasks.
	rank, images := len(x.dims), 0
	for rank > 0 && windows[rank-1].trivial() {
		rank--
	}
	for images < rank && windows[images].trivial() {
		images++
	}
	inner, taskImages := size(x.dims[rank:]), size(x.dims[:images])
	windows = windows[images:rank]
	if len(windows) == 0 {
		windows = []window{{in: 1, taps: 1, out: 1, stride: 1, dilation: 1, step: 1}}
	}
	axes := make([]windowAxis, len(windows))
	positions, most := 1, 1 // of windows in an image, and elements of a window
	for i, w := range slices.Backward(windows) {
		axes[i] = windowAxis{size: w.in, out: w.out, later: positions}
		axes[i].first, axes[i].count, _ = w.elements()
		positions *= w.out
		most *= w.taps
	}
	last := &axes[len(axes)-1]
	scatter := vector.ScatterExtreme[float32]
	if dtype == dtypes.Float64 {
		scatter = vector.ScatterExtreme[float64]
	}
	smallest, rows, bytes := o.Name == "SelectAndScatterMin", size(x.dims[images:rank]), int(dtype.Size())
	return p.withTasks(x.dims, dtype, func(n *node) *tasksInstruction {
		return &tasksInstruction{
			tasks: taskImages, scratch: 16 * most,
			task: func(task int, memory []unsafe.Pointer, k *worker) {
				places := unsafe.Slice((*int)(k.scratch), 2*most) // of the elements of a window
				from := unsafe.Add(memory[x.of.slot], (x.offset+task*rows*inner)*bytes)
				to := unsafe.Add(memory[n.slot], task*rows*inner*bytes)
				add := unsafe.Add(memory[source.of.slot], (source.offset+task*positions*inner)*bytes)
				clear(unsafe.Slice((*byte)(to), rows*inner*bytes))
				for row := range positions / last.out {
					// The elements before the last axis, then those along it.
					outer := places[most:][:1]
					outer[0] = 0
					for i := range axes[:len(axes)-1] {
						a := &axes[i]
						outer = a.expand(outer, places[most:], row/(a.later/last.out)%a.out, 1)
					}
					for p := range last.out {
						list := append(places[:0], outer...)
						list = last.expand(list, places[:most], p, inner*bytes)
						scatter(smallest, to, from, list, unsafe.Add(add, (row*last.out+p)*inner*bytes), inner)
					}
				}
			},
		}
	}, x, source), true
}

// windowAxis is an axis along which windows move.
type windowAxis struct {
	first, count []int // of the elements of a window
	size, out    int
	later        int // positions of the axes after it
}

// expand returns the places of the elements of window p along one more axis, times a number of bytes. list has those
// along the axes before it, at the start of memory.
func (a *windowAxis) expand(list, memory []int, p, bytes int) []int {
	n, count := len(list), a.count[p]
	for j := n - 1; j >= 0; j-- {
		base := memory[j]*a.size + a.first[p]
		for k := count - 1; k >= 0; k-- {
			memory[j*count+k] = (base + k) * bytes
		}
	}
	return memory[:n*count]
}
