package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

// OnePack as [Options.BytesPerPack] puts all tensors of a dtype into one pack. 0 lets the library choose.
const OnePack = packing.OnePack

// reduceInto reduces tensors in packs and waits for all of them. The caller has acquired the replica.
func (r *Replica) reduceInto(ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options) error {
	if len(src) == 1 {
		if op == Mean && !src[0].DType().IsFloat() {
			op = Sum // as in packs
		}
		return r.do(ctx, run, op, dst[0], src[0], nameAt(names, 0), o)
	}
	if o.BytesPerPack == 0 && r.comm().Properties().Memory {
		o.BytesPerPack = OnePack // the caller waits for all results, so overlapping copies and transfers gains nothing
	}
	p, err := r.packed(op, dst, src, names, o)
	if err == nil {
		err = p.Do(ctx, r.packDst, r.packSrc)
	}
	if err != nil {
		return run.Fail(err)
	}
	return nil
}

// reducePacks reduces tensors in packs and yields each pack when it completes.
func (r *Replica) reducePacks(ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options, yield func([]int, error) bool) {
	if err := run.Acquire(r.local); err != nil {
		yield(nil, err)
		return
	}
	begin := r.stats.arrive(r)
	p, err := r.packed(op, dst, src, names, o)
	if err == nil {
		// The reduction owns these memories until it ends, and the loop may make other calls.
		err = p.Start(ctx, slices.Clone(r.packDst), slices.Clone(r.packSrc))
	}
	run.Release(r.local)
	if err != nil {
		yield(nil, run.Fail(err))
		return
	}
	defer func() {
		// Also after an early break or a panic in the loop: nothing may be in flight when the step ends. A
		// failed pack has been yielded already, or the loop has ended and the Run's failure reports it.
		if err := p.Finish(ctx); err != nil {
			_ = run.Fail(err)
		}
	}()
	for k, pack := range p.Packs() {
		if err := run.Acquire(r.local); err != nil {
			yield(nil, err)
			return
		}
		err := p.Wait(ctx, k)
		run.Release(r.local)
		if err != nil {
			yield(nil, run.Fail(err))
			return
		}
		if k == len(p.Packs())-1 {
			r.stats.leave(r, begin)
		}
		if !yield(pack.Tensors, nil) {
			return
		}
	}
}

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
func (r *Replica) packed(op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options) (*packing.Reducer, error) {
	r.packDst, r.packSrc = r.packDst[:0], r.packSrc[:0]
	for i, t := range src {
		r.packDst, r.packSrc = append(r.packDst, dst[i].Memory()), append(r.packSrc, t.Memory())
	}
	comm := r.comm()
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
	made, err := packing.NewReducer(comm, tensors, packing.Config{Reduce: op, BytesPerPack: o.BytesPerPack, Options: o.collective()})
	if err != nil {
		return nil, err
	}
	r.keep(&cachedReducer{Reducer: made, comm: comm, op: op, options: o, tensors: tensors})
	return made, nil
}

// keep puts a reducer first in the cache and evicts the least recently used one.
func (r *Replica) keep(c *cachedReducer) {
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

func nameAt(names []string, i int) string {
	if names == nil {
		return ""
	}
	return names[i]
}
