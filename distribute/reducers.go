package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
)

// reducers caches a replica's most recently used reducers, one per list of tensors.
type reducers struct {
	cached []*cachedReducer
}

// cachedReducer is a reducer and the properties of its tensors.
type cachedReducer struct {
	*packing.Reducer
	comm    collective.Communicator
	op      ReduceOp
	options Options
	tensors []packing.Tensor
	scalars *scalarSum // reduced with the tensors; nil: none

	dst, src []tensor.Memory // of the call in progress
}

// reducersMax is the size of the cache. A step has few lists of tensors: buckets of gradients, metrics.
const reducersMax = 128

// of returns the reducer of these tensors and so many scalars, and sets the memories of its call.
func (r *reducers) of(
	comm collective.Communicator, op ReduceOp, dst, src []*tensor.Tensor, names []string, scalars int, o Options,
) (*cachedReducer, error) {
	for i, c := range r.cached {
		if c.op == op && c.options == o && c.comm == comm && !c.Busy() && c.fits(src, names, scalars) {
			copy(r.cached[1:i+1], r.cached[:i])
			r.cached[0] = c
			c.set(dst, src)
			return c, nil
		}
	}
	tensors := make([]packing.Tensor, len(src))
	for i, t := range src {
		tensors[i] = packing.Tensor{Name: nameAt(names, i), Type: t.DType(), Shape: slices.Clone(t.Shape()), Count: t.Len()}
	}
	c := &cachedReducer{comm: comm, op: op, options: o, tensors: tensors}
	if scalars > 0 {
		c.scalars = newScalarSum(scalars, comm, op, tensors)
		tensors = append(slices.Clone(tensors), c.scalars.tensor())
	}
	var err error
	c.Reducer, err = packing.NewReducer(comm, tensors,
		packing.Config{Reduce: op, BytesPerPack: o.BytesPerPack, Options: o.collective()})
	if err != nil {
		return nil, err
	}
	r.keep(c)
	c.set(dst, src)
	return c, nil
}

// set sets the memories of the next call.
func (c *cachedReducer) set(dst, src []*tensor.Tensor) {
	c.dst, c.src = c.dst[:0], c.src[:0]
	for i, t := range src {
		c.dst, c.src = append(c.dst, dst[i].Memory()), append(c.src, t.Memory())
	}
	if c.scalars != nil {
		c.dst, c.src = append(c.dst, c.scalars.memory), append(c.src, c.scalars.memory)
	}
}

// do reduces and waits.
func (c *cachedReducer) do(ctx context.Context) error { return c.Do(ctx, c.dst, c.src) }

// start starts the reduction.
func (c *cachedReducer) start(ctx context.Context) error { return c.Start(ctx, c.dst, c.src) }

// keep puts a reducer first in the cache and evicts the least recently used one.
func (r *reducers) keep(c *cachedReducer) {
	if len(r.cached) == reducersMax {
		r.cached = r.cached[:reducersMax-1]
	}
	r.cached = slices.Insert(r.cached, 0, c)
}

// fits reports whether the reducer was made for such tensors and so many scalars.
func (c *cachedReducer) fits(src []*tensor.Tensor, names []string, scalars int) bool {
	if len(src) != len(c.tensors) || scalars != c.scalars.len() {
		return false
	}
	for i, t := range src {
		if of := &c.tensors[i]; of.Type != t.DType() || of.Name != nameAt(names, i) || !slices.Equal(of.Shape, t.Shape()) {
			return false
		}
	}
	return true
}
