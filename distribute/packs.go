package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

// OnePack as [Options.BytesPerPack] makes one pack of all tensors of a dtype, where 0 lets the library choose.
const OnePack = packing.OnePack

// reduceInto reduces tensors in packs and waits for all of them. The replica has been acquired.
func (r *Replica) reduceInto(ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options) error {
	if len(src) == 1 {
		if op == Mean && !src[0].DType().IsFloat() {
			op = Sum // as in packs
		}
		return r.do(ctx, run, op, dst[0], src[0], nameAt(names, 0), o)
	}
	if o.BytesPerPack == 0 && r.comm().Properties().Memory {
		o.BytesPerPack = OnePack // nobody looks at a part of the tensors before all are there, and none travels while others are copied
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

// reducePacks reduces tensors in packs and yields each as it completes.
func (r *Replica) reducePacks(ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src []*tensor.Tensor, names []string, o Options, yield func([]int, error) bool) {
	if err := run.Acquire(r.local); err != nil {
		yield(nil, err)
		return
	}
	begin := r.stats.arrive(r)
	p, err := r.packed(op, dst, src, names, o)
	if err == nil {
		// The memories are the reduction's until it ends, and the loop may make other calls.
		err = p.Start(ctx, slices.Clone(r.packDst), slices.Clone(r.packSrc))
	}
	run.Release(r.local)
	if err != nil {
		yield(nil, run.Fail(err))
		return
	}
	defer func() {
		// Also when the loop was left early, or by a panic: nothing may be in flight when the step ends. If the packs have
		// failed the loop knows, or it does not want to and the run's failure says it.
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

// reducers are those that a replica used last, for as many lists of tensors.
type reducers struct {
	cached           []*cachedReducer
	packDst, packSrc []tensor.Memory // of the call in progress
}

// cachedReducer is a reducer and what it was made for.
type cachedReducer struct {
	*packing.Reducer
	comm    collective.Communicator
	op      ReduceOp
	options Options
	tensors []packing.Tensor
}

// reducersMax is how many lists of tensors a replica reduces without making a reducer anew. A step has a few: gradients, metrics.
const reducersMax = 16

// packed returns the reducer of such tensors, and sets the memories of the call.
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

// keep puts a reducer in front, in the place of the one that was not used for the longest time.
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

// fits reports whether the reducer is one of such tensors.
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
