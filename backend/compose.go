package backend

import (
	"math"
	"slices"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"

	"github.com/lockstep-ml/lockstep/backend/internal/product"
	"github.com/lockstep-ml/lockstep/backend/internal/vector"
	"github.com/lockstep-ml/lockstep/internal/record"
)

// productPlan is a product of matrices, or one for each combination of batch indices.
type productPlan struct {
	product.Product
	batch  []int    // dimensions
	stride [3][]int // of a, b and the result, along the batch dimensions
	first  [2]int   // the first element of a and b
	rows   int      // axes of the result that are rows
}

// dot contracts axes of two operands. Other axes are batch axes, which both have, rows or columns.
func (p *planner) dot(a, b view, contractA, contractB, batchA, batchB []int, dtype dtypes.DType) (_ view, ok bool) {
	if dtype != dtypes.Float32 && dtype != dtypes.Float64 || a.of.dtype != dtype || b.of.dtype != dtype {
		return view{}, false
	}
	rest := func(v view, a, b []int) (list []int) {
		for i := range v.dims {
			if !slices.Contains(a, i) && !slices.Contains(b, i) {
				list = append(list, i)
			}
		}
		return list
	}
	a = a.transposed(slices.Concat(batchA, rest(a, batchA, contractA), contractA))
	b = b.transposed(slices.Concat(batchB, contractB, rest(b, batchB, contractB)))
	batch, contracted := len(batchA), len(contractA)
	rows := len(a.dims) - batch - contracted
	x := &productPlan{batch: a.dims[:batch]}
	for {
		m, row, ok1 := merged(a.dims[batch:batch+rows], a.strides[batch:batch+rows])
		k, column, ok2 := merged(a.dims[batch+rows:], a.strides[batch+rows:])
		if !ok1 || !ok2 || row < 0 || column < 0 {
			a = p.copied(a)
			continue
		}
		x.Rows, x.Depth, x.A = m, k, product.Strides{Row: row, Column: column}
		break
	}
	for {
		_, row, ok1 := merged(b.dims[batch:batch+contracted], b.strides[batch:batch+contracted])
		n, column, ok2 := merged(b.dims[batch+contracted:], b.strides[batch+contracted:])
		if !ok1 || !ok2 || row < 0 || column < 0 {
			b = p.copied(b)
			continue
		}
		x.Columns, x.B, x.C = n, product.Strides{Row: row, Column: column}, n
		break
	}
	dims := slices.Concat(a.dims[:batch+rows], b.dims[batch+contracted:])
	x.stride = [3][]int{a.strides[:batch], b.strides[:batch], rowMajor(dims)[:batch]}
	x.first, x.rows = [2]int{a.offset, b.offset}, rows
	n := &node{kind: productNode, dims: dims, dtype: dtype, in: []view{a, b}, product: x}
	p.alone(n)
	return p.add(n), true
}

// transposedProduct returns the transpose of a product that nothing else uses: a product that writes its elements in
// another order. ok is false if it cannot.
func (p *planner) transposedProduct(n *node, permutation []int) (_ view, ok bool) {
	x, dims, of := *n.product, make([]int, len(n.dims)), make([]int, len(n.dims))
	for i, axis := range permutation {
		dims[i] = n.dims[axis]
	}
	for i, stride := range rowMajor(dims) { // of is by axis of the product
		of[permutation[i]] = stride
	}
	batch := len(x.batch)
	_, row, ok1 := merged(n.dims[batch:batch+x.rows], of[batch:batch+x.rows])
	_, column, ok2 := merged(n.dims[batch+x.rows:], of[batch+x.rows:])
	in := n.in
	switch {
	case !ok1 || !ok2:
		return view{}, false
	case column == 1 || x.Columns == 1:
		x.C = row
	case row == 1 || x.Rows == 1:
		x.Rows, x.Columns = x.Columns, x.Rows
		x.A, x.B = product.Strides{Row: x.B.Column, Column: x.B.Row}, product.Strides{Row: x.A.Column, Column: x.A.Row}
		x.stride[0], x.stride[1], x.first[0], x.first[1] = x.stride[1], x.stride[0], x.first[1], x.first[0]
		in = []view{in[1], in[0]}
		x.C = column
	default:
		return view{}, false
	}
	x.stride[2], x.rows = of[:batch], 0
	t := &node{kind: productNode, dims: dims, dtype: n.dtype, in: in, product: &x}
	p.alone(t)
	t.fixed = true
	return p.add(t), true
}

// attentionProjection is one product whose columns are those of the queries, keys and values, which get a bias each.
func (p *planner) attentionProjection(o *record.Op, in []view) bool {
	dtype := o.Outputs[0].Shape.DType
	if !floating(dtype) {
		return false
	}
	x, w := in[0], in[1]
	all, ok := p.dot(x, w, []int{len(x.dims) - 1}, []int{0}, nil, nil, dtype)
	if !ok {
		return false
	}
	last, at := len(all.dims)-1, 0
	for i, v := range o.Outputs {
		starts, limits := make([]int, last+1), slices.Clone(all.dims)
		starts[last], limits[last] = at, at+v.Shape.Dimensions[last]
		at = limits[last]
		part := all.sliced(starts, limits, nil)
		if bias := in[2+i]; bias.of != nil {
			part = formula{p, dtype, part.dims}.of("Add", part, bias.broadcast(part.dims, []int{last}))
		}
		p.views[v] = part
	}
	return true
}

// Fused operations of GoMLX, made of others.

func (p *planner) dense(in []view, c compute.DenseConfig, dtype dtypes.DType) (_ view, ok bool) {
	x, w := in[0], in[1]
	axis := 0
	if c.WeightLayout == compute.DenseLayoutOutputsInput {
		axis = len(w.dims) - 1
	}
	switch c.Activation {
	case compute.ActivationNone, compute.ActivationRelu, compute.ActivationGelu, compute.ActivationSilu,
		compute.ActivationTanh:
	default:
		return view{}, false
	}
	y, ok := p.dot(x, w, []int{len(x.dims) - 1}, []int{axis}, nil, nil, dtype)
	if !ok {
		return view{}, false
	}
	f := formula{p, dtype, y.dims}
	if bias := in[2]; bias.of != nil {
		var axes []int // the last ones
		for i := range bias.dims {
			axes = append(axes, len(y.dims)-len(bias.dims)+i)
		}
		y = f.of("Add", y, bias.broadcast(y.dims, axes))
	}
	switch c.Activation {
	case compute.ActivationRelu:
		y = f.of("Max", y, f.number(0))
	case compute.ActivationGelu:
		return p.gelu(y, true, dtype)
	case compute.ActivationSilu:
		y = f.of("Mul", y, f.of("Logistic", y))
	case compute.ActivationTanh:
		y = f.of("Tanh", y)
	}
	return y, true
}

// formula applies operations to values of the same dimensions, of float32 or float64.
type formula struct {
	p     *planner
	dtype dtypes.DType
	dims  []int
}

func (f formula) of(name string, in ...view) view {
	v, ok := f.p.elements(name, f.dtype, f.dims, in...)
	if !ok {
		panic("backend: no loop for " + name)
	}
	return v
}

func (f formula) number(x float64) view { return f.p.number(x, f.dtype) }

// along returns what a reduction of axes has made of each row, for all elements of the row.
func (f formula) along(r vector.Reduction, v view, axes []int) view {
	x, _ := f.p.reduced(r, v, axes, f.dtype)
	var kept []int
	for i := range f.dims {
		if !slices.Contains(axes, i) {
			kept = append(kept, i)
		}
	}
	return x.broadcast(f.dims, kept)
}

func floating(dtype dtypes.DType) bool { return dtype == dtypes.Float32 || dtype == dtypes.Float64 }

func (p *planner) softmax(x view, axis int, dtype dtypes.DType) (_ view, ok bool) {
	if !floating(dtype) {
		return view{}, false
	}
	f := formula{p, dtype, x.dims}
	e := f.of("Exp", f.of("Sub", x, f.along(vector.Largest, x, []int{axis})))
	return f.of("Div", e, f.along(vector.Sum, e, []int{axis})), true
}

func (p *planner) gelu(x view, exact bool, dtype dtypes.DType) (_ view, ok bool) {
	if !floating(dtype) {
		return view{}, false
	}
	f := formula{p, dtype, x.dims}
	if exact { // as in GoMLX's gradient, so that both have one error function
		share := f.of("Add", f.of("Erf", f.of("Mul", x, f.number(1/math.Sqrt2))), f.number(1))
		return f.of("Mul", x, f.of("Mul", share, f.number(0.5))), true
	}
	half := f.of("Mul", x, f.number(0.5))
	cube := f.of("Mul", f.of("Mul", x, x), x)
	inner := f.of("Mul", f.of("Add", x, f.of("Mul", cube, f.number(0.044715))), f.number(math.Sqrt2/math.SqrtPi))
	return f.of("Mul", half, f.of("Add", f.of("Tanh", inner), f.number(1))), true
}

func (p *planner) layerNorm(in []view, axes []int, epsilon float64, dtype dtypes.DType) (_ view, ok bool) {
	if !floating(dtype) {
		return view{}, false
	}
	x := in[0]
	f := formula{p, dtype, x.dims}
	count, inner := 1, []int{}
	for _, axis := range axes {
		count *= x.dims[axis]
		inner = append(inner, axis)
	}
	share := f.number(1 / float64(count))
	d := f.of("Sub", x, f.of("Mul", f.along(vector.Sum, x, axes), share))
	variance := f.of("Mul", f.along(vector.Sum, f.of("Mul", d, d), axes), share)
	y := f.of("Div", d, f.of("Sqrt", f.of("Add", variance, f.number(epsilon))))
	var dims []int // of gamma and beta, which may have other axes of one element
	for _, axis := range axes {
		dims = append(dims, x.dims[axis])
	}
	for i, name := range []string{"Mul", "Add"} {
		if v := in[1+i]; v.of != nil {
			if v, ok = v.reshaped(dims); !ok {
				v, _ = p.copied(in[1+i]).reshaped(dims)
			}
			y = f.of(name, y, v.broadcast(x.dims, inner))
		}
	}
	return y, true
}
