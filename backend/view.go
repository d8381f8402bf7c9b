package backend

import (
	"reflect"
	"slices"
	"unsafe"
)

// view is where the elements of a value are in the memory of a node: a number of elements from one to the next along
// each axis.
type view struct {
	of      *node
	offset  int
	dims    []int
	strides []int
}

func size(dims []int) int {
	n := 1
	for _, d := range dims {
		n *= d
	}
	return n
}

// rowMajor returns the strides of elements that lie side by side.
func rowMajor(dims []int) []int {
	s, n := make([]int, len(dims)), 1
	for i, d := range slices.Backward(dims) {
		s[i] = n
		n *= d
	}
	return s
}

// whole returns the view of all elements of a node.
func whole(n *node) view { return view{of: n, dims: n.dims, strides: rowMajor(n.dims)} }

// contiguous reports whether the elements lie side by side.
func (v view) contiguous() bool {
	n := 1
	for i, d := range slices.Backward(v.dims) {
		if d != 1 && v.strides[i] != n {
			return false
		}
		n *= d
	}
	return true
}

// identity reports whether the view has all elements of its node in their order.
func (v view) identity() bool {
	return v.offset == 0 && size(v.dims) == size(v.of.dims) && v.contiguous()
}

// constant reports whether all elements are one.
func (v view) constant() bool {
	for i, d := range v.dims {
		if d != 1 && v.strides[i] != 0 {
			return false
		}
	}
	return true
}

// collapsed returns the view with as few axes as possible.
func (v view) collapsed() view {
	w := view{of: v.of, offset: v.offset}
	for i, d := range v.dims {
		last := len(w.dims) - 1
		switch {
		case d == 1:
		case last >= 0 && w.strides[last] == d*v.strides[i]:
			w.dims[last] *= d
			w.strides[last] = v.strides[i]
		default:
			w.dims, w.strides = append(w.dims, d), append(w.strides, v.strides[i])
		}
	}
	return w
}

// squeezed returns the view without axes of one element.
func (v view) squeezed() view {
	var axes []int
	for i, d := range v.dims {
		if d != 1 {
			axes = append(axes, i)
		}
	}
	return v.transposed(axes)
}

// reshaped returns the view with other dimensions, if strides can express it.
func (v view) reshaped(dims []int) (view, bool) {
	w := view{of: v.of, offset: v.offset, dims: dims, strides: make([]int, len(dims))}
	if size(dims) == 0 {
		return w, true
	}
	c := v.collapsed()
	at := len(c.dims) - 1
	left, stride := 1, 0
	if at >= 0 {
		left, stride = c.dims[at], c.strides[at]
	}
	for i, d := range slices.Backward(dims) {
		if d == 1 {
			continue
		}
		if left == 1 && at > 0 {
			at--
			left, stride = c.dims[at], c.strides[at]
		}
		if left%d != 0 {
			return view{}, false
		}
		w.strides[i] = stride
		stride *= d
		left /= d
	}
	return w, true
}

// transposed returns the view with axis i of the result being axis permutation[i].
func (v view) transposed(permutation []int) view {
	w := view{of: v.of, offset: v.offset}
	for _, axis := range permutation {
		w.dims, w.strides = append(w.dims, v.dims[axis]), append(w.strides, v.strides[axis])
	}
	return w
}

// sliced returns a part of the view.
func (v view) sliced(starts, limits, steps []int) view {
	w := view{of: v.of, offset: v.offset}
	for i, start := range starts {
		step := 1
		if len(steps) > 0 {
			step = steps[i]
		}
		w.offset += start * v.strides[i]
		w.dims = append(w.dims, (limits[i]-start+step-1)/step)
		w.strides = append(w.strides, v.strides[i]*step)
	}
	return w
}

// reversed returns the view with the elements along some axes in reverse order.
func (v view) reversed(axes []int) view {
	w := view{of: v.of, offset: v.offset, dims: v.dims, strides: slices.Clone(v.strides)}
	if size(v.dims) == 0 {
		return w
	}
	for _, axis := range axes {
		w.offset += (v.dims[axis] - 1) * v.strides[axis]
		w.strides[axis] = -v.strides[axis]
	}
	return w
}

// broadcast returns the view with new axes: axis i becomes axes[i].
func (v view) broadcast(dims, axes []int) view {
	w := view{of: v.of, offset: v.offset, dims: dims, strides: make([]int, len(dims))}
	for i, axis := range axes {
		if v.dims[i] != 1 {
			w.strides[axis] = v.strides[i]
		}
	}
	return w
}

// to returns the view with the dimensions of an operation's result: axes of one element, or none at all, repeat.
func (v view) to(dims []int) view {
	if len(v.dims) == 0 {
		return v.broadcast(dims, nil)
	}
	axes := make([]int, len(dims))
	for i := range axes {
		axes[i] = i
	}
	return v.broadcast(dims, axes)
}

// merged returns the one stride of some axes, if there is one.
func merged(dims, strides []int) (n, stride int, ok bool) {
	c := view{dims: dims, strides: strides}.collapsed()
	switch len(c.dims) {
	case 0:
		return 1, 0, true
	case 1:
		return c.dims[0], c.strides[0], true
	}
	return 0, 0, false
}

// pointerOf returns the address of the elements of a slice.
func pointerOf(flat any) unsafe.Pointer { return reflect.ValueOf(flat).UnsafePointer() }

// copyView copies elements from to until of a view, in order, to memory where they lie side by side. The view is
// collapsed.
func copyView(dst, src unsafe.Pointer, v view, bytes, from, until int) {
	switch bytes {
	case 1:
		copyElements[uint8](dst, src, v, from, until)
	case 2:
		copyElements[uint16](dst, src, v, from, until)
	case 4:
		copyElements[uint32](dst, src, v, from, until)
	case 8:
		copyElements[uint64](dst, src, v, from, until)
	default:
		panic("backend: no copies of elements of this size")
	}
}

func copyElements[T any](dst, src unsafe.Pointer, v view, from, until int) {
	var zero T
	bytes := int(unsafe.Sizeof(zero))
	to := unsafe.Slice((*T)(dst), until-from)
	base := unsafe.Add(src, v.offset*bytes)
	if len(v.dims) == 0 {
		for i := range to {
			to[i] = *(*T)(base)
		}
		return
	}
	last := len(v.dims) - 1
	inner, stride := v.dims[last], v.strides[last]
	for at := from; at < until; {
		row, column := at/inner, at%inner
		offset := column * stride
		for axis := last - 1; axis >= 0; axis-- {
			offset += row % v.dims[axis] * v.strides[axis]
			row /= v.dims[axis]
		}
		n := min(inner-column, until-at)
		p := unsafe.Add(base, offset*bytes)
		part := to[at-from : at-from+n]
		switch stride {
		case 1:
			copy(part, unsafe.Slice((*T)(p), n))
		case 0:
			x := *(*T)(p)
			for i := range part {
				part[i] = x
			}
		default:
			for i := range part {
				part[i] = *(*T)(unsafe.Add(p, i*stride*bytes))
			}
		}
		at += n
	}
}
