package product

import (
	"fmt"
	"slices"
	"unsafe"
)

// Axis is an axis of a contraction: its size, and the elements of a, b and c from an index to the next.
type Axis struct{ Size, A, B, C int }

// Box is a part of the rows of c whose elements are sums over the same part of the depth.
type Box struct {
	A, C  int     // the first elements: of a at the start of the depth
	Rows  []Axis  // strides in a and c
	Depth []Range // of each axis of the depth
}

// Range is a part of an axis of the depth: the indexes First, First+Step, …; and the elements of a from one to the
// next.
type Range struct{ First, Step, Size, A int }

// Contraction describes c = a·b with several axes in place of rows, columns and depth: a convolution, for example,
// whose windows are read in place. A box can leave out a part of the depth: that which multiplies padding.
//
// An element of c is a sum of chains of fused multiply-adds of at most 1024 elements each, in order. Where the chains
// start and end depends on the axes only.
type Contraction struct {
	columns []Axis // strides in b and c; none is empty
	count   int    // of columns
	boxes   []box
	chunks  []chunk
	direct  bool // b can be read in place
}

type box struct {
	a, c  int
	rows  []Axis // the strips of a kernel are along the last one
	count int
	empty bool // it has no depth
}

// chunk is a part of the depth whose rows of b are packed together.
type chunk struct {
	runs  []rowRun
	calls []call
}

// rowRun is a number of rows of b, from an element on.
type rowRun struct{ from, rows, stride int }

// call is a chain for all elements of a box.
type call struct {
	box, a, b, row        int // the first elements, from those of the box and of b; the first packed row
	steps, segments       int
	column, segment       int // elements of a
	right, rightSegment   int // elements of b in place
	packed, packedSegment int // packed rows
	add                   int
}

const (
	mostDepth   = 1024 // packed rows
	mostColumns = mostBytes / 4
)

// ContractionBytes is the size of the memory that [Contract] needs besides the operands.
const ContractionBytes = (mostDepth + mostRows) * mostBytes

// NewContraction plans a contraction. columns have strides in b and c, and depth in b, from the element firstB on. The
// sizes are those of the operands.
func NewContraction(columns, depth []Axis, boxes []Box, firstB, sizeA, sizeB, sizeC int) *Contraction {
	x := &Contraction{columns: mergedAxes(columns), count: 1, direct: true}
	for _, c := range x.columns {
		x.count *= c.Size
	}
	for _, b := range boxes {
		rows := mergedAxes(b.Rows)
		y := box{a: b.A, c: b.C, count: 1, empty: true}
		strip := len(rows) - 1
		for i, r := range rows {
			y.count *= r.Size
			if rows[strip].Size < 4 && r.Size > rows[strip].Size {
				strip = i
			}
		}
		if strip < 0 {
			rows, strip = []Axis{{Size: 1}}, 0
		}
		y.rows = append(slices.Delete(slices.Clone(rows), strip, strip+1), rows[strip])
		x.boxes = append(x.boxes, y)
		first, last := extent(b.C, append(slices.Clone(b.Rows), columns...), func(a Axis) int { return a.C })
		within("c", first, last, sizeC)
	}
	sizes := make([]int, len(depth))
	for i, d := range depth {
		sizes[i] = d.Size
	}
	// Chunks divide the axis cut; those before it have one index in each.
	cut, inner := len(depth)-1, 1
	for cut > 0 && inner*sizes[cut] <= mostDepth {
		inner *= sizes[cut]
		cut--
	}
	if len(depth) == 0 {
		x.plan(nil, nil, depth, boxes, columns, firstB, sizeA, sizeB)
		return x
	}
	parts := (sizes[cut] + mostDepth/inner - 1) / (mostDepth / inner)
	outer := 1
	for _, n := range sizes[:cut] {
		outer *= n
	}
	for i := range outer * parts {
		from, until := make([]int, len(depth)), slices.Clone(sizes)
		from[cut], until[cut] = sizes[cut]*(i%parts)/parts, sizes[cut]*(i%parts+1)/parts
		rest := i / parts
		for axis, n := range slices.Backward(sizes[:cut]) {
			from[axis], until[axis] = rest%n, rest%n+1
			rest /= n
		}
		x.plan(from, until, depth, boxes, columns, firstB, sizeA, sizeB)
	}
	return x
}

// level is a loop over a part of the depth.
type level struct{ n, a, b, packed int }

// plan adds a chunk of the depth from some indexes until others.
func (x *Contraction) plan(from, until []int, depth []Axis, boxes []Box, columns []Axis, firstB, sizeA, sizeB int) {
	var ch chunk
	packed := make([]int, len(depth)) // rows from an index to the next
	rows, first := 1, firstB
	var axes []Axis
	for i, d := range slices.Backward(depth) {
		packed[i] = rows
		rows *= until[i] - from[i]
		first += from[i] * d.B
		axes = append([]Axis{{Size: until[i] - from[i], B: d.B}}, axes...)
	}
	low, high := extent(first, append(slices.Clone(axes), columns...), func(a Axis) int { return a.B })
	within("b", low, high, sizeB)
	axes = mergedAxes(axes)
	if len(axes) == 0 {
		axes = []Axis{{Size: 1}}
	}
	last := axes[len(axes)-1]
	for i := range rows / last.Size {
		at := offset(axes[:len(axes)-1], i, func(a Axis) int { return a.B })
		ch.runs = append(ch.runs, rowRun{first + at, last.Size, last.B})
	}
boxes:
	for k, b := range boxes {
		c := call{box: k, b: firstB}
		var levels []level
		for i, r := range b.Depth {
			lo := max(0, (from[i]-r.First+r.Step-1)/r.Step)
			if from[i] < r.First {
				lo = 0
			}
			hi := min(r.Size, (until[i]-r.First+r.Step-1)/r.Step)
			if until[i] <= r.First || lo >= hi {
				continue boxes
			}
			at := r.First + lo*r.Step
			c.a += lo * r.A
			c.b += at * depth[i].B
			c.row += (at - from[i]) * packed[i]
			levels = append(levels, level{hi - lo, r.A, r.Step * depth[i].B, r.Step * packed[i]})
		}
		reach := append(slices.Clone(b.Rows), Axis{Size: 1})
		for _, l := range levels {
			reach = append(reach, Axis{Size: l.n, A: l.a})
		}
		low, high := extent(b.A+c.a, reach, func(a Axis) int { return a.A })
		within("a", low, high, sizeA)
		x.addCalls(&ch, c, levels)
	}
	x.chunks = append(x.chunks, ch)
}

// addCalls adds the calls for a box, of which c is the start.
func (x *Contraction) addCalls(ch *chunk, c call, levels []level) {
	var l []level // as few as possible
	for _, v := range levels {
		n := len(l) - 1
		switch {
		case v.n == 1:
		case n >= 0 && l[n].a == v.n*v.a && l[n].packed == v.n*v.packed:
			x.direct = x.direct && l[n].b == v.n*v.b
			l[n] = level{l[n].n * v.n, v.a, v.b, v.packed}
		default:
			l = append(l, v)
		}
	}
	for len(l) < 2 {
		l = append([]level{{n: 1}}, l...)
	}
	if n := len(l); l[n-1].n*l[n-2].n < 64 {
		slices.SortStableFunc(l, func(a, b level) int { return a.n - b.n })
	}
	outer, s, r := l[:len(l)-2], l[len(l)-2], l[len(l)-1]
	c.steps, c.segments = r.n, s.n
	c.column, c.segment = r.a, s.a-r.n*r.a
	c.right, c.rightSegment = r.b, s.b-r.n*r.b
	c.packed, c.packedSegment = r.packed, s.packed-r.n*r.packed
	n := 1
	for _, v := range outer {
		n *= v.n
	}
	for i := range n {
		y, rest := c, i
		for _, v := range slices.Backward(outer) {
			y.a += rest % v.n * v.a
			y.b += rest % v.n * v.b
			y.row += rest % v.n * v.packed
			rest /= v.n
		}
		if !x.boxes[c.box].empty {
			y.add = 1
		}
		x.boxes[c.box].empty = false
		ch.calls = append(ch.calls, y)
	}
}

// mergedAxes returns the same axes with as few as possible.
func mergedAxes(axes []Axis) (list []Axis) {
	for _, a := range axes {
		last := len(list) - 1
		switch {
		case a.Size == 1:
		case last >= 0 && list[last].A == a.Size*a.A && list[last].B == a.Size*a.B && list[last].C == a.Size*a.C:
			a.Size *= list[last].Size
			list[last] = a
		default:
			list = append(list, a)
		}
	}
	return list
}

// offset returns the position of element i of some axes in an operand.
func offset(axes []Axis, i int, stride func(Axis) int) int {
	at := 0
	for _, a := range slices.Backward(axes) {
		at += i % a.Size * stride(a)
		i /= a.Size
	}
	return at
}

// extent returns the first and the last element that axes reach.
func extent(first int, axes []Axis, stride func(Axis) int) (low, high int) {
	low, high = first, first
	for _, a := range axes {
		if d := (a.Size - 1) * stride(a); d < 0 {
			low += d
		} else {
			high += d
		}
	}
	return low, high
}

func within(name string, low, high, size int) {
	if low < 0 || high >= size {
		panic(fmt.Sprintf("product: elements %d to %d of %s, which has %d", low, high, name, size))
	}
}

// Count is the number of columns.
func (x *Contraction) Count() int { return x.count }

// Contract computes a part of the rows, and columns j0 to j1, at the best level.
func Contract[T Float](x *Contraction, c, a, b unsafe.Pointer, part, parts, j0, j1 int, scratch unsafe.Pointer) {
	contract[T](x, best, c, a, b, part, parts, j0, j1, scratch)
}

func contract[T Float](x *Contraction, l Level, c, a, b unsafe.Pointer, part, parts, j0, j1 int,
	scratch unsafe.Pointer,
) {
	size := int(unsafe.Sizeof(*new(T)))
	k := kernelsOf[T](l)
	rows := 0
	for i := range x.boxes {
		rows += x.boxes[i].count / parts
	}
	p := panel[T]{tile: unsafe.Slice((*T)(unsafe.Add(scratch, mostDepth*mostBytes)), mostRows*mostBytes/size)}
	for j := j0; j < j1; j += k.wide {
		p.columns, p.vectors = min(k.wide, j1-j), 2
		if p.columns <= k.wide/2 {
			p.vectors = 1
		}
		p.width = k.wide / 2 * p.vectors
		place(x, &p, j)
		for i := range x.chunks {
			ch := &x.chunks[i]
			direct := x.direct && p.columns == p.width && p.strideB == 1 &&
				(rows <= 2*k.rows || len(ch.calls) > 0 && ch.calls[0].right == p.width)
			if !direct {
				at := scratch
				for _, r := range ch.runs {
					from := unsafe.Add(b, (r.from+p.b[0])*size)
					if p.strideB != 0 || p.columns == 1 {
						pack[T](k, at, from, Strides{r.stride, p.strideB}, r.rows, p.columns, p.width)
					} else {
						gather(&p, at, from, r.rows, r.stride)
					}
					at = unsafe.Add(at, r.rows*p.width*size)
				}
			}
			for i := range ch.calls {
				y := &ch.calls[i]
				z := arguments{
					b: unsafe.Add(scratch, y.row*p.width*size), column: y.column * size, segmentStep: y.segment * size,
					right: y.packed * p.width * size, rightStep: y.packedSegment * p.width * size,
					steps: y.steps, segments: y.segments, add: y.add,
				}
				if direct {
					z.b, z.right, z.rightStep = unsafe.Add(b, (y.b+p.b[0])*size), y.right*size, y.rightSegment*size
				}
				bx := &x.boxes[y.box]
				strips(k, bx, &p, &z, unsafe.Add(a, (bx.a+y.a)*size), unsafe.Add(c, bx.c*size), part, parts)
			}
		}
		for i := range x.boxes {
			if bx := &x.boxes[i]; bx.empty {
				for r := bx.count * part / parts; r < bx.count*(part+1)/parts; r++ {
					at := bx.c + offset(bx.rows, r, func(a Axis) int { return a.C })
					for _, column := range p.c[:p.columns] {
						*(*T)(unsafe.Add(c, (at+column)*size)) = 0
					}
				}
			}
		}
	}
}

// EachRun calls f for the rows of a part as [Contract] has them, some at a time: the first element of c without its
// column, how many rows, and the elements from one to the next.
func (x *Contraction) EachRun(part, parts int, f func(at, rows, stride int)) {
	for i := range x.boxes {
		bx := &x.boxes[i]
		strip := bx.rows[len(bx.rows)-1]
		end := bx.count * (part + 1) / parts
		for r := bx.count * part / parts; r < end; {
			n := min(strip.Size-r%strip.Size, end-r)
			f(bx.c+offset(bx.rows, r, func(a Axis) int { return a.C }), n, strip.C)
			r += n
		}
	}
}

// panel is what a kernel computes of some rows: a number of columns.
type panel[T Float] struct {
	columns, width, vectors int
	b, c                    [mostColumns]int // where they are
	strideB, strideC        int              // from one to the next; 0 if they are not evenly spaced
	tile                    []T
}

// place finds the columns of a panel.
func place[T Float](x *Contraction, p *panel[T], j int) {
	for i := range p.columns {
		p.b[i] = offset(x.columns, j+i, func(a Axis) int { return a.B })
		p.c[i] = offset(x.columns, j+i, func(a Axis) int { return a.C })
	}
	even := func(at *[mostColumns]int) int {
		if p.columns == 1 {
			return 1
		}
		for i := 2; i < p.columns; i++ {
			if at[i]-at[i-1] != at[1]-at[0] {
				return 0
			}
		}
		return at[1] - at[0]
	}
	p.strideB, p.strideC = even(&p.b), even(&p.c)
}

// strips makes a call of a kernel for each strip of rows of a part of a box.
func strips[T Float](k *kernels, bx *box, p *panel[T], x *arguments, a, c unsafe.Pointer, part, parts int) {
	size := int(unsafe.Sizeof(*new(T)))
	outer, strip := bx.rows[:len(bx.rows)-1], bx.rows[len(bx.rows)-1]
	inPlace := p.columns == p.width && p.strideC == 1
	add := x.add
	x.row, x.result = strip.A*size, strip.C*size
	if !inPlace {
		x.c, x.result, x.add = unsafe.Pointer(&p.tile[0]), p.width*size, 0
	}
	end := bx.count * (part + 1) / parts
	for r := bx.count * part / parts; r < end; {
		o, from := r/strip.Size, r%strip.Size
		n := min(strip.Size-from, end-r)
		atA, atC := from*strip.A, p.c[0]+from*strip.C
		for i := len(outer) - 1; i >= 0; i-- {
			q := o / outer[i].Size
			atA += (o - q*outer[i].Size) * outer[i].A
			atC += (o - q*outer[i].Size) * outer[i].C
			o = q
		}
		count := (n + k.rows - 1) / k.rows
		height := (n + count - 1) / count
		for i := 0; i < n; i += height {
			rows := min(height, n-i)
			x.a = unsafe.Add(a, (atA+i*strip.A)*size)
			if inPlace {
				x.c = unsafe.Add(c, (atC+i*strip.C)*size)
				k.multiply(rows, p.vectors, x)
				continue
			}
			k.multiply(rows, p.vectors, x)
			for r := range rows {
				p.store(unsafe.Add(c, (atC+(i+r)*strip.C)*size), p.tile[r*p.width:][:p.columns], add)
			}
		}
		r += n
	}
}

// store copies a row of the tile to c, or adds it.
func (p *panel[T]) store(c unsafe.Pointer, row []T, add int) {
	if p.strideC == 1 {
		addRow(unsafe.Slice((*T)(c), len(row)), row, add)
		return
	}
	for i, v := range row {
		to := (*T)(unsafe.Add(c, (p.c[i]-p.c[0])*int(unsafe.Sizeof(v))))
		if add != 0 {
			v += *to
		}
		*to = v
	}
}

// gather packs columns that are not evenly spaced.
func gather[T Float](p *panel[T], to, from unsafe.Pointer, rows, stride int) {
	size := int(unsafe.Sizeof(*new(T)))
	packed := unsafe.Slice((*T)(to), rows*p.width)
	for r := range rows {
		row := packed[r*p.width : (r+1)*p.width]
		for i, at := range p.b[:p.columns] {
			row[i] = *(*T)(unsafe.Add(from, (at-p.b[0]+r*stride)*size))
		}
		clear(row[p.columns:])
	}
}
