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
	call    collective.Op
	options Options
	tensors []packing.Tensor
	owners  []int
	scalars *scalarSum // reduced with the tensors; nil: none

	dst, src []tensor.Memory // of the call in progress
}

// reducersMax is the size of the cache. A step has few lists of tensors: buckets of gradients, metrics.
const reducersMax = 128

// Bucket lists tensors that are reduced together, such as gradients that a backward pass has completed.
type Bucket struct {
	// Src are this replica's tensors, Dst where the results are stored: Dst[i] has the dtype and the number of
	// elements of Src[i], and either is the same memory or does not overlap it.
	Dst, Src []*tensor.Tensor
	// Names are the tensors' names, for errors; nil: none.
	Names []string
	// Scalars are numbers of this replica that are combined too, and replaced by the result, in float64: loss, metrics,
	// flags on which replicas agree. A few of them need no separate call if the bucket has float32 tensors and is
	// summed.
	Scalars []float64
	// Owners has, for [Replica.StartReduceToOwners] and [Replica.StartGatherFromOwners], the id of the replica that owns
	// each tensor.
	Owners []int
}

// reduction is what a replica does with a bucket.
type reduction struct {
	Bucket
	op      ReduceOp
	call    collective.Op // for the tensors with owners; 0: there are none
	options Options
	lane    lane
}

// described returns the tensors that every replica has.
func (x *reduction) described() []*tensor.Tensor {
	if x.call == collective.AllGather {
		return x.Dst
	}
	return x.Src
}

// of returns the reducer of a reduction, and sets the memories of its call.
func (r *reducers) of(comm collective.Communicator, x *reduction) (*cachedReducer, error) {
	for i, c := range r.cached {
		if c.comm == comm && !c.Busy() && c.fits(x) {
			copy(r.cached[1:i+1], r.cached[:i])
			r.cached[0] = c
			c.set(x)
			return c, nil
		}
	}
	var tensors []packing.Tensor
	for i, t := range x.described() {
		tensors = append(tensors, packing.Tensor{
			Name: nameAt(x.Names, i), Type: t.DType(), Shape: slices.Clone(t.Shape()), Count: t.Len(),
		})
	}
	c := &cachedReducer{
		comm: comm, op: x.op, call: x.call, options: x.options, tensors: tensors, owners: slices.Clone(x.Owners),
	}
	cfg := packing.Config{Reduce: x.op, BytesPerPack: x.options.BytesPerPack, Options: x.options.collective(), Op: x.call}
	if x.call != 0 {
		cfg.Owners = append([]int{}, x.Owners...)
	}
	if len(x.Scalars) > 0 {
		c.scalars = newScalarSum(len(x.Scalars), comm, x.op, x.call, tensors)
		tensors = append(slices.Clone(tensors), c.scalars.tensor())
		if x.call != 0 {
			cfg.Owners = append(cfg.Owners, -1)
		}
	}
	var err error
	if c.Reducer, err = packing.NewReducer(comm, tensors, cfg); err != nil {
		return nil, err
	}
	r.keep(c)
	c.set(x)
	return c, nil
}

// set sets the memories of the next call.
func (c *cachedReducer) set(x *reduction) {
	c.dst, c.src = c.dst[:0], c.src[:0]
	for i := range x.described() {
		c.dst, c.src = append(c.dst, memoryOf(x.Dst[i])), append(c.src, memoryOf(x.Src[i]))
	}
	if c.scalars != nil {
		c.dst, c.src = append(c.dst, c.scalars.memory), append(c.src, c.scalars.memory)
	}
}

// memoryOf returns the memory of a tensor, which is nil where the replica has none.
func memoryOf(t *tensor.Tensor) tensor.Memory {
	if t == nil {
		return tensor.Memory{}
	}
	return t.Memory()
}

// do reduces and waits.
func (c *cachedReducer) do(ctx context.Context) error { return c.Do(ctx, c.dst, c.src) }

// start starts the reduction. Before it begins, before is called, and after its end after.
func (c *cachedReducer) start(ctx context.Context, before func(context.Context) error, after func()) error {
	return c.StartBetween(ctx, c.dst, c.src, before, after)
}

// keep puts a reducer first in the cache and evicts the least recently used one.
func (r *reducers) keep(c *cachedReducer) {
	if len(r.cached) == reducersMax {
		r.cached = r.cached[:reducersMax-1]
	}
	r.cached = slices.Insert(r.cached, 0, c)
}

// fits reports whether the reducer was made for such a reduction.
func (c *cachedReducer) fits(x *reduction) bool {
	tensors := x.described()
	if c.op != x.op || c.call != x.call || c.options != x.options || len(tensors) != len(c.tensors) ||
		len(x.Scalars) != c.scalars.len() || !slices.Equal(c.owners, x.Owners) {
		return false
	}
	for i, t := range tensors {
		of := &c.tensors[i]
		if of.Type != t.DType() || of.Name != nameAt(x.Names, i) || !slices.Equal(of.Shape, t.Shape()) {
			return false
		}
	}
	return true
}
