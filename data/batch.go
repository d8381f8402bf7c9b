package data

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// batches implements Batch.
type batches struct {
	src  Pipeline
	n    int
	full bool
}

// Len implements [Dataset].
func (b *batches) Len() int {
	n := b.src.Len()
	switch {
	case n < 0:
		return -1
	case b.full:
		return n / b.n
	}
	return (n + b.n - 1) / b.n
}

// Iter implements [Dataset].
func (b *batches) Iter(ctx context.Context) iter.Seq2[Element, error] {
	if _, ok := b.src.ds.(*view); ok {
		return iterate(ctx, b)
	}
	return b.stack(ctx)
}

// stack builds batches of elements.
func (b *batches) stack(ctx context.Context) iter.Seq2[Element, error] {
	return func(yield func(Element, error) bool) {
		var s stacker
		at := 0         // index of the element in the dataset, for errors
		var wrong error // of the current batch; ignored if the batch is dropped because it is not full
		for e, err := range b.src.Iter(ctx) {
			if err == nil && wrong == nil {
				if wrong = s.add(e, at, b.n); !b.full {
					err = wrong
				}
			}
			if at++; wrong != nil && at%b.n == 0 {
				err = wrong
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if s.rows == b.n && !yield(s.take(), nil) {
				return
			}
		}
		if s.rows > 0 && !b.full {
			yield(s.take(), nil)
		}
	}
}

// stacker concatenates elements along a new first dimension.
type stacker struct {
	like Element // the first element
	from int     // its position in the dataset
	out  []*tensor.Tensor
	rows int
	in   []*tensor.Tensor // scratch
}

// add copies e, element at of its dataset, into the batch of up to n rows.
func (s *stacker) add(e Element, at, n int) error {
	var err error
	if s.in, err = leaves(s.in[:0], e); err != nil {
		return err
	}
	if s.rows == 0 {
		if len(s.in) == 0 {
			return fmt.Errorf("data: Batch: element %d contains no tensor", at)
		}
		s.like, s.from, s.out = e, at, make([]*tensor.Tensor, len(s.in))
		for k, t := range s.in {
			s.out[k] = tensor.New(t.DType(), append([]int{n}, t.Shape()...)...)
		}
	} else if err := checkStructure(s.like, e); err != nil {
		return fmt.Errorf("data: Batch: the structures of element %d, a %T, and element %d, a %T, differ: %w", at, e,
			s.from, s.like, err)
	}
	for k, t := range s.in {
		out := s.out[k]
		if out.DType() != t.DType() || !slices.Equal(out.Shape()[1:], t.Shape()) {
			return fmt.Errorf("data: Batch: tensor %d of element %d is %v%s, of element %d %v%s: they must agree", k, at,
				t.DType(), tensor.FormatShape(t.Shape()), s.from, out.DType(), tensor.FormatShape(out.Shape()[1:]))
		}
		if t.DType() == tensor.String {
			copy(out.StringData()[s.rows*t.Len():], t.StringData())
		} else {
			copy(out.Memory().HostBytes()[s.rows*t.Memory().Bytes:], t.Memory().HostBytes())
		}
	}
	s.rows++
	return nil
}

// take returns the batch and resets s.
func (s *stacker) take() Element {
	for k, t := range s.out {
		s.out[k] = t.Rows(0, s.rows)
	}
	e := rebuild(s.like, s.out)
	*s = stacker{in: s.in}
	return e
}
