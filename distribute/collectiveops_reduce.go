package distribute

import (
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// BatchReduce implements [CrossDeviceOps]. Dense values are reduced in packs. IndexedSlices are reduced on the
// host, after those of other workers have been gathered. Without other workers, values whose number of
// components is not the number of devices are reduced on the host, too. A value must be dense on all workers or
// on none.
func (c *collectiveAllReduce) BatchReduce(
	ctx context.Context, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	opts = c.cfg.Options.merge(opts)
	sums := make([]*tensor.Tensor, len(batch))
	var tensors []packing.Tensor
	var at []int // index in the batch of each of tensors
	sources := make([][]*tensor.Tensor, len(batch))
	batch = slices.Clone(batch)
	for i, b := range batch {
		if c.others() {
			if err := c.checkComponents(b.Values); err != nil {
				return nil, err
			}
		}
		ts, allDense, err := denseOperands(c.String(), b.Values)
		if err != nil {
			return nil, err
		}
		switch collective := len(ts) == len(c.devices) && c.cfg.GroupSize > 1; {
		case allDense && collective:
			if d := ts[0].DType(); !d.IsNumeric() {
				return nil, badDType(c.String(), d)
			}
			sources[i] = ts
			at = append(at, i)
			tensors = append(tensors, packing.Tensor{Type: ts[0].DType(), Shape: ts[0].Shape(), Count: ts[0].Len()})
		case allDense && len(ts) > 1:
			sums[i] = dense.Reduce(op, ts, opts.Accumulate)
		case !allDense && c.others():
			all, err := c.gatherValues(ctx, fmt.Sprintf("IndexedSlices %d", i), b.Values, opts)
			if err != nil {
				return nil, err
			}
			batch[i].Values = all
		}
	}
	if err := c.reducePacks(ctx, op, tensors, at, sources, sums, opts); err != nil {
		return nil, err
	}
	return reduceEach(c.String(), op, batch, opts, c.others(),
		func(i int, _ []*tensor.Tensor) (*tensor.Tensor, error) { return sums[i], nil })
}

// reducePacks sums tensors pack by pack.
func (c *collectiveAllReduce) reducePacks(
	ctx context.Context, op ReduceOp, tensors []packing.Tensor, at []int, sources [][]*tensor.Tensor,
	sums []*tensor.Tensor, opts Options,
) error {
	if len(tensors) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return err
	}
	size := opts.BytesPerPack
	if size == 0 {
		total := 0
		for _, t := range tensors {
			total += t.Count * t.Type.Bytes()
		}
		size = packing.MemoryCosts.BytesPerPack(total)
	}
	for _, p := range packing.Plan(tensors, size) {
		if err := c.reducePack(ctx, op, p, tensors, at, sources, sums, opts); err != nil {
			return err
		}
	}
	return nil
}

// reducePack sums the tensors of one pack, where they lie, by one call. All local ranks share one destination buffer,
// and the sums are slices of it.
func (c *collectiveAllReduce) reducePack(
	ctx context.Context, op ReduceOp, p packing.Pack, tensors []packing.Tensor, at []int, sources [][]*tensor.Tensor,
	sums []*tensor.Tensor, opts Options,
) error {
	sum := tensor.New(p.Type, p.Count)
	c.reductions++
	manifest := collective.Manifest{Name: fmt.Sprintf("reduction %d", c.reductions)}
	o := opts.collective()
	direct := op
	if op == Mean && !p.Type.IsFloat() {
		direct = Sum // the quotient has another dtype
	}
	calls := make([]collective.Call, len(c.devices))
	for rank := range calls {
		list := make([]tensor.Memory, len(p.Tensors))
		for i, t := range p.Tensors {
			list[i] = sources[at[t]][rank].Memory()
		}
		calls[rank] = collective.Call{
			Op: collective.AllReduce, Reduce: direct, Type: p.Type, Src: list[0], Dst: sum.Memory(),
			Manifest: &manifest, Options: &o,
		}
		if len(list) > 1 {
			calls[rank].SrcList = list
		}
	}
	if len(p.Tensors) == 1 {
		manifest.Shape = tensors[p.Tensors[0]].Shape
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return err
	}
	lo := 0
	for _, t := range p.Tensors {
		hi := lo + tensors[t].Count
		sums[at[t]] = dense.Slice(sum, lo, hi).Reshape(tensors[t].Shape...)
		if direct != op {
			sums[at[t]] = dense.Divide(sums[at[t]], c.cfg.GroupSize)
		}
		lo = hi
	}
	return nil
}

// BatchGather implements gatherer. With several workers it gathers the components of all of them, in the
// order of the replicas.
func (c *collectiveAllReduce) BatchGather(
	ctx context.Context, batch []Reduction, axis int, opts Options,
) ([]Value, error) {
	if !c.others() {
		return gatherHere(c.String(), batch, axis)
	}
	opts = c.cfg.Options.merge(opts)
	all := slices.Clone(batch)
	for i, b := range batch {
		if err := c.checkComponents(b.Values); err != nil {
			return nil, err
		}
		values, err := c.gatherValues(ctx, fmt.Sprintf("gather %d along axis %d", i, axis), b.Values, opts)
		if err != nil {
			return nil, err
		}
		all[i].Values = values
	}
	return gatherHere(c.String(), all, axis)
}
