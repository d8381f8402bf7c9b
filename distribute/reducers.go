package distribute

import (
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
)

// reducers caches a replica's most recently used reducers, one per list of tensors.
type reducers struct {
	cached           []*cachedReducer
	packDst, packSrc []tensor.Memory // of the call in progress
}

// cachedReducer is a reducer and the properties of its tensors.
type cachedReducer struct {
	*packing.Reducer
	comm    collective.Communicator
	op      ReduceOp
	options Options
	tensors []packing.Tensor
}

// reducersMax is the size of the cache. A step has few lists of tensors: gradients, metrics.
const reducersMax = 16

// packed returns the reducer of these tensors, and sets the memories of the call.
func (r *reducers) packed(
	comm collective.Communicator, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options,
) (*packing.Reducer, error) {
	r.packDst, r.packSrc = r.packDst[:0], r.packSrc[:0]
	for i, t := range src {
		r.packDst, r.packSrc = append(r.packDst, dst[i].Memory()), append(r.packSrc, t.Memory())
	}
	for i, c := range r.cached {
		if c.op == op && c.options == o && c.comm == comm && !c.Busy() && c.fits(src, names) {
			copy(r.cached[1:i+1], r.cached[:i])
			r.cached[0] = c
			return c.Reducer, nil
		}
	}
	tensors := make([]packing.Tensor, len(src))
	for i, t := range src {
		tensors[i] = packing.Tensor{Name: nameAt(names, i), Type: t.DType(), Shape: slices.Clone(t.Shape()), Count: t.Len()}
	}
	made, err := packing.NewReducer(comm, tensors,
		packing.Config{Reduce: op, BytesPerPack: o.BytesPerPack, Options: o.collective()})
	if err != nil {
		return nil, err
	}
	r.keep(&cachedReducer{Reducer: made, comm: comm, op: op, options: o, tensors: tensors})
	return made, nil
}

// keep puts a reducer first in the cache and evicts the least recently used one.
func (r *reducers) keep(c *cachedReducer) {
	if len(r.cached) == reducersMax {
		last := r.cached[reducersMax-1]
		r.cached = r.cached[:reducersMax-1]
		if !last.Busy() {
			last.Close()
		}
	}
	r.cached = slices.Insert(r.cached, 0, c)
}

// fits reports whether the reducer was made for such tensors.
func (c *cachedReducer) fits(src []*tensor.Tensor, names []string) bool {
	if len(src) != len(c.tensors) {
		return false
	}
	for i, t := range src {
		if of := &c.tensors[i]; of.Type != t.DType() || of.Name != nameAt(names, i) || !slices.Equal(of.Shape, t.Shape()) {
			return false
		}
	}
	return true
}
