package distribute

import (
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// concatRows returns the concatenation of tensors of one dtype and equal rows along the first dimension.
func concatRows(parts []*tensor.Tensor) *tensor.Tensor {
	shape := slices.Clone(parts[0].Shape())
	shape[0] = 0
	for _, p := range parts {
		shape[0] += p.Shape()[0]
	}
	if parts[0].DType() == tensor.String {
		var all []string
		for _, p := range parts {
			all = append(all, p.StringData()...)
		}
		return tensor.Strings(all, shape...)
	}
	out := tensor.New(parts[0].DType(), shape...)
	at := 0
	for _, p := range parts {
		n := p.Memory().Bytes
		copyMemory(out.Memory().Slice(at, at+n), p.Memory())
		at += n
	}
	return out
}

// concat concatenates tensors of any dtype along an axis.
func concat(op string, ts []*tensor.Tensor, axis int) (*tensor.Tensor, error) {
	parts := make([]piece, len(ts))
	for i, t := range ts {
		if t.Memory().Kind == tensor.Device {
			return nil, errorf(op, ErrUnsupported, "component %d is in device memory: copy it to the host first", i)
		}
		parts[i] = piece{t.DType(), t.Shape()}
	}
	at, shape, err := joinedShape(op, parts, axis)
	if err != nil {
		return nil, err
	}
	out := tensor.New(parts[0].dtype, shape...)
	to := 0
	for _, t := range ts {
		copyColumns(out, t, product(shape[:at]), to)
		to += product(t.Shape()[at:])
	}
	return out, nil
}

// piece is the dtype and the shape of a tensor to concatenate.
type piece struct {
	dtype tensor.DType
	shape []int
}

// joinedShape returns the axis, counted from the front, and the shape of the concatenation.
func joinedShape(op string, parts []piece, axis int) (at int, shape []int, err error) {
	first := parts[0]
	rank := len(first.shape)
	if at = axis; at < 0 {
		at += rank
	}
	shape = append([]int(nil), first.shape...)
	for i, p := range parts {
		switch {
		case p.dtype != first.dtype:
			return 0, nil, errorf(op, ErrMismatch, "the components differ: component %d was expected to be a %v tensor, as component 0 is, but is a %v tensor", i, first.dtype, p.dtype)
		case len(p.shape) != rank:
			return 0, nil, errorf(op, ErrMismatch, "the components differ: ranks of all input tensors should match: shape[0] = %s vs. shape[%d] = %s", bracketed(first.shape), i, bracketed(p.shape))
		case rank == 0:
			return 0, nil, errorf(op, ErrInvalid, "can't concatenate scalars: want tensors of at least one dimension")
		case at < 0 || at >= rank:
			return 0, nil, errorf(op, ErrInvalid, "expected concatenating dimensions in the range [%d, %d), but got %d", -rank, rank, axis)
		}
		for d, n := range p.shape {
			if d != at && n != first.shape[d] {
				return 0, nil, errorf(op, ErrMismatch, "the components differ: dimension %d in both shapes must be equal: shape[0] = %s vs. shape[%d] = %s", d, bracketed(first.shape), i, bracketed(p.shape))
			}
		}
		if i > 0 {
			shape[at] += p.shape[at]
		}
	}
	return at, shape, nil
}

// bracketed prints a shape as TensorFlow's kernels do: [2,3].
func bracketed(shape []int) string {
	parts := make([]string, len(shape))
	for i, d := range shape {
		parts[i] = strconv.Itoa(d)
	}
	return "[" + strings.Join(parts, ",") + "]"
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// copyColumns treats out as a matrix with the given number of rows and copies part into it, starting at column
// to.
func copyColumns(out, part *tensor.Tensor, rows, to int) {
	if part.Len() == 0 {
		return
	}
	width, columns := out.Len()/rows, part.Len()/rows
	for r := range rows {
		if out.DType() == tensor.String {
			copy(out.StringData()[r*width+to:], part.StringData()[r*columns:(r+1)*columns])
			continue
		}
		size := out.DType().Bytes()
		copyMemory(out.Memory().Slice((r*width+to)*size, (r*width+to+columns)*size), part.Memory().Slice(r*columns*size, (r+1)*columns*size))
	}
}

// columnsOf returns the slice [from, from+n) of t along an axis, the inverse of copyColumns.
func columnsOf(t *tensor.Tensor, axis, from, n int) *tensor.Tensor {
	shape := append([]int(nil), t.Shape()...)
	shape[axis] = n
	out := tensor.New(t.DType(), shape...)
	rows, size := product(shape[:axis]), t.DType().Bytes()
	if out.Len() == 0 {
		return out
	}
	width, columns, lo := t.Len()/rows, out.Len()/rows, from*product(shape[axis+1:])
	for r := range rows {
		copyMemory(out.Memory().Slice(r*columns*size, (r+1)*columns*size), t.Memory().Slice((r*width+lo)*size, (r*width+lo+columns)*size))
	}
	return out
}

// sliceOf returns elements of a tensor as a vector that shares its memory.
func sliceOf(t *tensor.Tensor, lo, hi int) *tensor.Tensor {
	size := t.DType().Bytes()
	return tensor.Wrap(t.Memory().Slice(lo*size, hi*size), t.DType(), hi-lo)
}

// copyMemory copies host bytes between memories of equal length, which may be the same.
func copyMemory(dst, src tensor.Memory) {
	if dst.Ptr != src.Ptr {
		copy(dst.HostBytes(), src.HostBytes())
	}
}
