package dense

import (
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/tensor"
)

// ConcatRows returns the concatenation of tensors of one dtype and equal rows along the first dimension.
func ConcatRows(parts []*tensor.Tensor) *tensor.Tensor {
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
		CopyMemory(out.Memory().Slice(at, at+n), p.Memory())
		at += n
	}
	return out
}

// Concat concatenates tensors of any dtype along an axis.
func Concat(ts []*tensor.Tensor, axis int) (*tensor.Tensor, error) {
	parts := make([]Part, len(ts))
	for i, t := range ts {
		if t.Memory().Kind == tensor.Device {
			return nil, kinds.Errorf(kinds.Unsupported, "component %d is in device memory: copy it to the host first", i)
		}
		parts[i] = Part{t.DType(), t.Shape()}
	}
	at, shape, err := JoinedShape(parts, axis)
	if err != nil {
		return nil, err
	}
	out := tensor.New(parts[0].DType, shape...)
	to := 0
	for _, t := range ts {
		CopyColumns(out, t, Product(shape[:at]), to)
		to += Product(t.Shape()[at:])
	}
	return out, nil
}

// Part is the dtype and the shape of a tensor to concatenate.
type Part struct {
	DType tensor.DType // of its elements
	Shape []int        // of any rank; not changed
}

// JoinedShape returns the axis, counted from the front, and the shape of the concatenation.
func JoinedShape(parts []Part, axis int) (at int, shape []int, err error) {
	first := parts[0]
	rank := len(first.Shape)
	if at = axis; at < 0 {
		at += rank
	}
	shape = append([]int(nil), first.Shape...)
	for i, p := range parts {
		switch {
		case p.DType != first.DType:
			return 0, nil, kinds.Errorf(kinds.Mismatch, "the components differ: component %d was expected to be a %v tensor, "+
				"as component 0 is, but is a %v tensor", i, first.DType, p.DType)
		case len(p.Shape) != rank:
			return 0, nil, kinds.Errorf(kinds.Mismatch, "the components differ: ranks of all input tensors should match: "+
				"shape[0] = %s vs. shape[%d] = %s", Bracketed(first.Shape), i, Bracketed(p.Shape))
		case rank == 0:
			return 0, nil, kinds.Errorf(kinds.Invalid, "can't concatenate scalars: want tensors of at least one dimension")
		case at < 0 || at >= rank:
			return 0, nil, kinds.Errorf(kinds.Invalid, "expected concatenating dimensions in the range [%d, %d), but got %d",
				-rank, rank, axis)
		}
		for d, n := range p.Shape {
			if d != at && n != first.Shape[d] {
				return 0, nil, kinds.Errorf(kinds.Mismatch, "the components differ: dimension %d in both shapes must be equal: "+
					"shape[0] = %s vs. shape[%d] = %s", d, Bracketed(first.Shape), i, Bracketed(p.Shape))
			}
		}
		if i > 0 {
			shape[at] += p.Shape[at]
		}
	}
	return at, shape, nil
}

// Bracketed prints a shape as TensorFlow's kernels do: [2,3].
func Bracketed(shape []int) string {
	parts := make([]string, len(shape))
	for i, d := range shape {
		parts[i] = strconv.Itoa(d)
	}
	return "[" + strings.Join(parts, ",") + "]"
}

// Product returns the number of elements of a shape.
func Product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// CopyColumns treats out as a matrix with the given number of rows and copies part into it, starting at column
// to.
func CopyColumns(out, part *tensor.Tensor, rows, to int) {
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
		CopyMemory(out.Memory().Slice((r*width+to)*size, (r*width+to+columns)*size),
			part.Memory().Slice(r*columns*size, (r+1)*columns*size))
	}
}

// Columns returns the slice [from, from+n) of t along an axis, the inverse of CopyColumns.
func Columns(t *tensor.Tensor, axis, from, n int) *tensor.Tensor {
	shape := append([]int(nil), t.Shape()...)
	shape[axis] = n
	out := tensor.New(t.DType(), shape...)
	rows, size := Product(shape[:axis]), t.DType().Bytes()
	if out.Len() == 0 {
		return out
	}
	width, columns, lo := t.Len()/rows, out.Len()/rows, from*Product(shape[axis+1:])
	for r := range rows {
		CopyMemory(out.Memory().Slice(r*columns*size, (r+1)*columns*size),
			t.Memory().Slice((r*width+lo)*size, (r*width+lo+columns)*size))
	}
	return out
}

// Slice returns elements of a tensor as a vector that shares its memory.
func Slice(t *tensor.Tensor, lo, hi int) *tensor.Tensor {
	size := t.DType().Bytes()
	return tensor.Wrap(t.Memory().Slice(lo*size, hi*size), t.DType(), hi-lo)
}

// CopyMemory copies host bytes between memories of equal length, which may be the same.
func CopyMemory(dst, src tensor.Memory) {
	if dst.Ptr != src.Ptr {
		copy(dst.HostBytes(), src.HostBytes())
	}
}
