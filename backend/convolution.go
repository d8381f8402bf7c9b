package backend

import (
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend/internal/product"
	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// convolutionPlan is a convolution as a contraction, or as one for each index of the outer axes: groups of channels or
// images, or parts of a long depth.
type convolutionPlan struct {
	*product.Contraction
	outer  []product.Axis
	groups int // indexes of the outer axes
	rows   int // of a contraction
	work   int // multiplications of a contraction
	parts  int // of the depth, whose results are added
	biased bool
}

// window is a convolution along one spatial axis: output p and tap s of the kernel read the operand's element
// (p·stride + s·step - before) / dilation, if that is an integer within the operand.
type window struct {
	in, taps, out                  int // sizes
	stride, before, dilation, step int
	a, b, c                        int // elements of the operand, the kernel and the result from an index to the next
}

// windowBox is a part of the outputs along an axis, with the taps that read elements: outputs p, p+pStep, … and taps
// s, s+sStep, …. The operand's element moves by aP and aS.
type windowBox struct{ p, pStep, pSize, s, sStep, sSize, a, aP, aS int }

// boxes divides the outputs so that all outputs of a box have the same taps.
func (w window) boxes() (list []windowBox) {
	pStep := w.dilation / gcd(w.stride, w.dilation)
	sStep := w.dilation / gcd(w.step, w.dilation)
	for residue := range min(pStep, w.out) {
		first := -1 // the first tap whose element is an integer
		for s := range min(sStep, w.taps) {
			if (residue*w.stride+s*w.step-w.before)%w.dilation == 0 {
				first = s
				break
			}
		}
		b := windowBox{}
		for p := residue; p < w.out; p += pStep {
			from, until := 0, 0 // taps first + i·sStep
			if first >= 0 {
				for s := first; s < w.taps; s += sStep {
					if at := p*w.stride + s*w.step - w.before; at < 0 {
						from++
						until++
					} else if at/w.dilation < w.in {
						until++
					}
				}
			}
			s := first + from*sStep
			if b.pSize > 0 && (b.sSize == 0 && until == from || b.s == s && b.sSize == until-from) {
				b.pSize++
				continue
			}
			if b.pSize > 0 {
				list = append(list, b)
			}
			b = windowBox{
				p: p, pStep: pStep, pSize: 1, s: max(0, s), sStep: sStep, sSize: until - from,
				aP: pStep * w.stride / w.dilation * w.a, aS: sStep * w.step / w.dilation * w.a,
			}
			if b.sSize > 0 {
				b.a = (p*w.stride + s*w.step - w.before) / w.dilation * w.a
			}
		}
		list = append(list, b)
	}
	return list
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// convolution lowers ConvGeneral.
func (p *planner) convolution(o *record.Op, in []view) (_ view, ok bool) {
	dtype, dims := o.Outputs[0].Shape.DType, o.Outputs[0].Shape.Dimensions
	if !floating(dtype) {
		return view{}, false
	}
	x, w := in[0], in[1]
	axes := o.Attributes[0].(compute.ConvolveAxesConfig)
	strides, paddings := o.Attributes[1].([]int), o.Attributes[2].([][2]int)
	dilations, steps := o.Attributes[3].([]int), o.Attributes[4].([]int)
	groups, batchGroups := max(1, o.Attributes[5].(int)), max(1, o.Attributes[6].(int))
	at := func(list []int, i int) int {
		if len(list) == 0 {
			return 1
		}
		return max(1, list[i])
	}
	result := rowMajor(dims)
	windows := func() (list []window) {
		for i, axis := range axes.InputSpatial {
			v := window{
				in: x.dims[axis], taps: w.dims[axes.KernelSpatial[i]], out: dims[axes.OutputSpatial[i]],
				stride: at(strides, i), dilation: at(dilations, i), step: at(steps, i),
				a: x.strides[axis], b: w.strides[axes.KernelSpatial[i]], c: result[axes.OutputSpatial[i]],
			}
			if len(paddings) > 0 {
				v.before = paddings[i][0]
			}
			list = append(list, v)
		}
		return list
	}
	channels, filters := w.dims[axes.KernelInputChannels], w.dims[axes.KernelOutputChannels]/groups/batchGroups
	if groups > 1 && channels == 1 && filters == 1 {
		if v, ok := p.depthwise(x, w, axes, windows(), o.Outputs[0].Shape); ok {
			return v, true
		}
	}
	rows, side, boxes, partial := dims[axes.OutputBatch], 1, 1, false // side: pixels side by side in the result
	for i := len(dims) - 1; i >= 0 && (dims[i] == 1 || slices.Contains(axes.OutputSpatial, i)); i-- {
		side *= dims[i]
	}
	for _, v := range windows() {
		rows *= v.out
		parts := v.boxes()
		boxes *= len(parts)
		partial = partial || len(parts) > 1 || parts[0].sStep > 1 || parts[0].sSize < v.taps
	}
	// The columns are the channels of the result, or pixels that lie side by side. Then, and where boxes would be small,
	// the operand is padded by a copy.
	wide := side >= 16 && 16*side > filters && result[axes.OutputChannels] != 1
	if partial && (wide || boxes > 64 || rows < 8*boxes) {
		config, shape := make([]compute.PadAxis, len(x.dims)), slices.Clone(x.dims)
		for i, axis := range axes.InputSpatial {
			c := compute.PadAxis{Interior: at(dilations, i) - 1}
			if len(paddings) > 0 {
				c.Start, c.End = paddings[i][0], paddings[i][1]
			}
			config[axis] = c
			shape[axis] = (shape[axis]-1)*(c.Interior+1) + 1 + c.Start + c.End
		}
		x = p.padded(shapes.Make(dtype, shape...), []view{x, p.number(0, dtype)}, config)
		paddings, dilations, partial = nil, nil, false
	}
	wide = wide && !partial

	c := contraction{depth: []product.Axis{{
		Size: channels, A: x.strides[axes.InputChannels], B: w.strides[axes.KernelInputChannels],
	}}}
	images := product.Axis{Size: dims[axes.OutputBatch], A: x.strides[axes.InputBatch], C: result[axes.OutputBatch]}
	c.boxes = []product.Box{{A: x.offset, Depth: []product.Range{{Step: 1, Size: channels, A: c.depth[0].A}}}}
	for _, v := range windows() {
		c.depth = append(c.depth, product.Axis{Size: v.taps, A: v.a * v.step / v.dilation, B: v.b})
		var next []product.Box
		for _, b := range c.boxes {
			for _, part := range v.boxes() {
				next = append(next, product.Box{
					A: b.A + part.a, C: b.C + part.p*v.c,
					Rows:  append(slices.Clone(b.Rows), product.Axis{Size: part.pSize, A: part.aP, C: part.pStep * v.c}),
					Depth: append(slices.Clone(b.Depth), product.Range{First: part.s, Step: part.sStep, Size: part.sSize, A: part.aS}),
				})
			}
		}
		c.boxes = next
	}
	filter := product.Axis{Size: filters, B: w.strides[axes.KernelOutputChannels], C: result[axes.OutputChannels]}
	if n := groups * batchGroups; n > 1 {
		g := product.Axis{Size: n, A: channels * c.depth[0].A, B: filters * filter.B, C: filters * filter.C}
		if batchGroups > 1 {
			g.A = images.Size * images.A
		}
		c.outer = append(c.outer, g)
	}
	if wide {
		c.turn(w, filter, images)
		x, w = w, x
	} else {
		c.columns, c.firstB = []product.Axis{filter}, w.offset
		for i := range c.boxes {
			c.boxes[i].Rows = append(c.boxes[i].Rows, images)
		}
	}
	return p.contracted(&c, x, w, dims, dtype), true
}

// contraction is what a convolution is made of.
type contraction struct {
	columns, depth, outer []product.Axis
	boxes                 []product.Box
	firstB                int
}

// turn exchanges the operands of a contraction of one box: its rows become the columns, and the images outer.
func (c *contraction) turn(w view, filter, images product.Axis) {
	swap := func(a product.Axis) product.Axis { return product.Axis{Size: a.Size, A: a.B, B: a.A, C: a.C} }
	b := &c.boxes[0]
	for _, r := range b.Rows {
		c.columns = append(c.columns, swap(r))
	}
	for i := range c.depth {
		c.depth[i] = swap(c.depth[i])
		b.Depth[i].A = c.depth[i].A
	}
	for i := range c.outer {
		c.outer[i] = swap(c.outer[i])
	}
	c.outer = append(c.outer, swap(images))
	c.firstB, b.A, b.Rows = b.A, w.offset, []product.Axis{swap(filter)}
}

// contracted adds a node that computes a contraction.
func (p *planner) contracted(c *contraction, a, b view, dims []int, dtype dtypes.DType) view {
	// The order of the axes is that of b and c in memory.
	order := make([]int, len(c.depth))
	for i := range order {
		order[i] = i
	}
	distance := func(x int) int { return max(x, -x) }
	slices.SortStableFunc(order, func(i, j int) int { return distance(c.depth[j].B) - distance(c.depth[i].B) })
	depth := make([]product.Axis, len(order))
	work, rows := 1, 0
	for i, from := range order {
		depth[i] = c.depth[from]
		work *= depth[i].Size
	}
	byResult := func(x, y product.Axis) int { return y.C - x.C }
	slices.SortStableFunc(c.columns, byResult)
	for i := range c.boxes {
		box := &c.boxes[i]
		ranges := make([]product.Range, len(order))
		for i, from := range order {
			ranges[i] = box.Depth[from]
		}
		box.Depth = ranges
		slices.SortStableFunc(box.Rows, byResult)
		n := 1
		for _, r := range box.Rows {
			n *= r.Size
		}
		rows += n
	}
	plan := &convolutionPlan{outer: c.outer, rows: rows, groups: 1, parts: 1}
	columns := 1
	for _, axis := range c.columns {
		columns *= axis.Size
	}
	for _, axis := range c.outer {
		plan.groups *= axis.Size
	}
	plan.work = work * rows * columns
	sizeC := size(dims)
	// A deep contraction with a small result is divided along the depth, into parts that are added in order.
	if first := depth[0]; plan.work > 4*taskOperations && plan.groups*(rows/leastRows+1)*(columns/panelColumns+1) < 8 &&
		!slices.ContainsFunc(c.boxes, func(b product.Box) bool { return b.Depth[0].Size != first.Size }) {
		for n := 2; n <= 16; n++ {
			if first.Size%n == 0 {
				plan.parts = n
			}
		}
		depth[0].Size /= plan.parts
		for i := range c.boxes {
			c.boxes[i].Depth[0].Size = depth[0].Size
		}
	}
	if plan.parts > 1 {
		plan.outer = append([]product.Axis{{
			Size: plan.parts, A: depth[0].Size * c.boxes[0].Depth[0].A, B: depth[0].Size * depth[0].B, C: sizeC,
		}}, plan.outer...)
		plan.groups *= plan.parts
		plan.work /= plan.parts
	}
	plan.Contraction = product.NewContraction(c.columns, depth, c.boxes, c.firstB, size(a.of.dims), size(b.of.dims), sizeC)
	if plan.parts > 1 {
		dims = append([]int{plan.parts}, dims...)
	}
	v := p.withTasks(dims, dtype, plan.tasks, a, b)
	v.of.convolution = plan
	if plan.parts > 1 {
		v, _ = p.reduced(vector.Sum, v, []int{0}, dtype)
	}
	return v
}

// biased returns the sum of a convolution that nothing else reads, and a number for each of its channels, which are the
// last axis: another convolution, whose tasks add the numbers while their results are in the cache.
func (p *planner) biased(o *record.Op, in []view) (_ view, ok bool) {
	for i, v := range in {
		n := v.of
		if n == nil || n.convolution == nil || p.users[o.Inputs[i]] > 1 || !v.identity() || !slices.Equal(v.dims, n.dims) {
			continue
		}
		last, plan := len(n.dims)-1, *n.convolution
		b := in[1-i].to(n.dims)
		if plan.biased || plan.groups > 1 || plan.Count() != n.dims[last] || b.strides[last] != 1 ||
			b.of.dtype != n.dtype || slices.ContainsFunc(b.strides[:last], func(s int) bool { return s != 0 }) {
			continue
		}
		plan.biased = true
		return p.withTasks(n.dims, n.dtype, plan.tasks, n.in[0], n.in[1], b), true
	}
	return view{}, false
}

// Tasks of convolutions have at least so many rows, if there are enough, and columns in panels.
const leastRows, panelColumns = 256, 32

// tasks divides a convolution into tasks.
func (plan *convolutionPlan) tasks(n *node) *tasksInstruction {
	parts := min(max(1, plan.work*plan.groups/taskOperations), 32)
	parts = (parts + plan.groups - 1) / plan.groups
	panels := (plan.Count() + panelColumns - 1) / panelColumns
	rowParts := min(parts, max(1, plan.rows/leastRows))
	columnParts := min((parts+rowParts-1)/rowParts, panels)
	a, b, to := n.in[0].of.slot, n.in[1].of.slot, n.slot
	bytes := n.bytes()
	run := product.Contract[float32]
	if n.dtype == dtypes.Float64 {
		run = product.Contract[float64]
	}
	addBias := func(int, int, int, int, []unsafe.Pointer, *worker) {}
	if plan.biased {
		addBias = plan.addBias(n)
	}
	return &tasksInstruction{
		tasks: plan.groups * rowParts * columnParts, scratch: max(product.ContractionBytes, blockElements*bytes),
		task: func(task int, memory []unsafe.Pointer, w *worker) {
			rest, i, j := task/(rowParts*columnParts), task/columnParts%rowParts, task%columnParts
			var at [3]int
			for _, axis := range slices.Backward(plan.outer) {
				k := rest % axis.Size
				rest /= axis.Size
				at[0], at[1], at[2] = at[0]+k*axis.A, at[1]+k*axis.B, at[2]+k*axis.C
			}
			j0, j1 := panels*j/columnParts*panelColumns, min(panels*(j+1)/columnParts*panelColumns, plan.Count())
			run(plan.Contraction, unsafe.Add(memory[to], at[2]*bytes), unsafe.Add(memory[a], at[0]*bytes),
				unsafe.Add(memory[b], at[1]*bytes), i, rowParts, j0, j1, w.scratch)
			addBias(i, rowParts, j0, j1, memory, w)
		},
	}
}

// addBias returns a function that adds the bias to a part of the rows, in columns j0 to j1.
func (plan *convolutionPlan) addBias(n *node) func(part, parts, j0, j1 int, memory []unsafe.Pointer, w *worker) {
	bytes, to, from, first := n.bytes(), n.slot, n.in[2].of.slot, n.in[2].offset
	t := types[n.dtype]
	add := vector.Lookup("Add", t, t)
	return func(part, parts, j0, j1 int, memory []unsafe.Pointer, w *worker) {
		columns := j1 - j0
		bias, repeats := unsafe.Add(memory[from], (first+j0)*bytes), 1
		if columns == plan.Count() && columns <= blockElements/2 { // rows that lie side by side are one vector
			repeats = blockElements / columns
			for i := range repeats {
				copy(unsafe.Slice((*byte)(unsafe.Add(w.scratch, i*columns*bytes)), columns*bytes),
					unsafe.Slice((*byte)(bias), columns*bytes))
			}
			bias = w.scratch
		}
		w.in[1], w.in[2] = bias, bias
		plan.EachRun(part, parts, func(at, rows, stride int) {
			many := 1
			if stride == columns {
				many = repeats
			}
			for r := 0; r < rows; r += many {
				dst := unsafe.Add(memory[to], (at+r*stride+j0)*bytes)
				w.in[0] = dst
				add(dst, &w.in, min(many, rows-r)*columns)
			}
		})
	}
}
