package data

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"github.com/lockstep-ml/lockstep/tensor"
)

// table reads tensors in memory by rows.
type table struct {
	like    Element // the structure of an element
	columns []column
	rows    int

	hashOnce sync.Once
	hash     uint64 // see Fingerprint
}

// rowsOfRows returns the common first dimension of the tensors of a row, or 0 if there is none, or t is nil.
func (t *table) rowsOfRows() int {
	if t == nil {
		return 0
	}
	rows := 0
	for i, c := range t.columns {
		shape := c.shape
		if len(shape) == 0 || i > 0 && shape[0] != rows {
			return 0
		}
		rows = shape[0]
	}
	return rows
}

// column is one tensor of a table. Its rows may be converted on read, so that pixels stay bytes in memory.
type column struct {
	rows  *tensor.Tensor
	dtype tensor.DType  // of the rows after conversion
	shape []int         // of a row
	value *[256]float32 // of each byte, for a column of uint8 read as float32; else nil
}

func newTable(e Element) (*table, error) {
	ts, err := leaves(nil, e)
	if err != nil {
		return nil, err
	}
	if len(ts) == 0 {
		return nil, errors.New("data: an element without tensors has no rows")
	}
	t := &table{like: e}
	for i, c := range ts {
		if c.Rank() == 0 {
			return nil, fmt.Errorf("data: tensor %d is a scalar: rows are along the first dimension", i)
		}
		if i == 0 {
			t.rows = c.Shape()[0]
		} else if n := c.Shape()[0]; n != t.rows {
			return nil, fmt.Errorf("data: tensor %d has %d rows, the first one %d", i, n, t.rows)
		}
		t.columns = append(t.columns, column{rows: c, dtype: c.DType(), shape: c.Shape()[1:]})
	}
	return t, nil
}

// Len implements [Dataset].
func (t *table) Len() int { return t.rows }

// Iter implements [Dataset].
func (t *table) Iter(ctx context.Context) iter.Seq2[Element, error] { return newView(t).Iter(ctx) }

// At implements [Indexed].
func (t *table) At(_ context.Context, i int) (Element, error) {
	out := make([]*tensor.Tensor, len(t.columns))
	for k := range t.columns {
		c := &t.columns[k]
		if c.value != nil {
			out[k] = c.gather([]int{i}).Reshape(c.shape...)
		} else {
			out[k] = c.rows.Rows(i, i+1).Reshape(c.shape...)
		}
	}
	return rebuild(t.like, out), nil
}

// Gather implements [Gatherer]. Consecutive rows share the memory of the table.
func (t *table) Gather(_ context.Context, indices []int) (Element, error) {
	lo, hi, run := consecutive(indices)
	out := make([]*tensor.Tensor, len(t.columns))
	for k := range t.columns {
		c := &t.columns[k]
		if run && c.value == nil {
			out[k] = c.rows.Rows(lo, hi)
		} else {
			out[k] = c.gather(indices)
		}
	}
	return rebuild(t.like, out), nil
}

// gather returns the rows with the given indices as a new tensor.
func (c *column) gather(indices []int) *tensor.Tensor {
	shape := append([]int{len(indices)}, c.shape...)
	out := tensor.New(c.dtype, shape...)
	if len(indices) == 0 || out.Len() == 0 {
		return out
	}
	row := out.Len() / len(indices)
	switch {
	case c.value != nil:
		gatherBytes(tensor.Data[float32](out), tensor.Data[uint8](c.rows), indices, row, c.value)
	case c.dtype == tensor.String:
		gatherRows(out.StringData(), c.rows.StringData(), indices, row)
	default:
		gatherRows(out.Memory().HostBytes(), c.rows.Memory().HostBytes(), indices, row*c.dtype.Bytes())
	}
	return out
}

// gatherRows copies rows of n elements: dst[i*n+j] = src[indices[i]*n+j].
func gatherRows[T any](dst, src []T, indices []int, n int) {
	for i, at := range indices {
		copy(dst[i*n:(i+1)*n], src[at*n:])
	}
}

// gatherBytes converts rows of n bytes: dst[i*n+j] = value[src[indices[i]*n+j]].
func gatherBytes(dst []float32, src []uint8, indices []int, n int, value *[256]float32) {
	for i, at := range indices {
		from := src[at*n : (at+1)*n]
		to := dst[i*n : (i+1)*n]
		for j, b := range from {
			to[j] = value[b]
		}
	}
}

// consecutive returns the range of indices if they are consecutive.
func consecutive(indices []int) (lo, hi int, ok bool) {
	for i, at := range indices {
		if at != indices[0]+i {
			return 0, 0, false
		}
	}
	if len(indices) == 0 {
		return 0, 0, true
	}
	return indices[0], indices[0] + len(indices), true
}
