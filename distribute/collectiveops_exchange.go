package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/wire"
	"github.com/lockstep-ml/lockstep/tensor"
)

// exchange gathers the numbers of all members on every worker: all[rank][i]. mine has those of the local
// members, all of the same length. what describes them in errors and must be the same on all workers.
func (c *collectiveAllReduce) exchange(
	ctx context.Context, what string, mine [][]int64, opts Options,
) ([][]int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exchangeLocked(ctx, what, mine, opts)
}

func (c *collectiveAllReduce) exchangeLocked(
	ctx context.Context, what string, mine [][]int64, opts Options,
) ([][]int64, error) {
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	n := len(mine[0])
	sum := tensor.New(tensor.Int64, c.cfg.GroupSize*n)
	o := opts.collective()
	calls := make([]collective.Call, len(c.devices))
	for i, comm := range c.group.Local() {
		own := tensor.New(tensor.Int64, sum.Len())
		copy(tensor.Data[int64](own)[comm.Rank()*n:], mine[i])
		calls[i] = collective.Call{
			Op: collective.AllReduce, Reduce: Sum, Type: tensor.Int64, Src: own.Memory(), Dst: sum.Memory(),
			Manifest: &collective.Manifest{Name: what, Shape: sum.Shape()}, Options: &o,
		}
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(tensor.Data[int64](sum), n)), nil
}

// gatherValues gathers the values of all members on every worker, by rank. They are leaves, or nests of lists,
// tuples and dictionaries. They are transferred as bytes, so their types and shapes may differ, and strings are
// allowed.
func (c *collectiveAllReduce) gatherValues(
	ctx context.Context, what string, mine []Value, opts Options,
) ([]Value, error) {
	texts, lengths := make([][]byte, len(mine)), make([][]int64, len(mine))
	for i, v := range mine {
		var err error
		if texts[i], err = wire.Encode(v); err != nil {
			return nil, errorf(c.String(), ErrInvalid, "%s: component %d: %w", what, i, failed("Gather", err))
		}
		lengths[i] = []int64{int64(len(texts[i]))}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	all, err := c.exchangeLocked(ctx, "lengths of "+what, lengths, opts)
	if err != nil {
		return nil, err
	}
	counts, total := make([]int, len(all)), 0
	for rank, n := range all {
		counts[rank] = int(n[0])
		total += counts[rank]
	}
	joined := tensor.New(tensor.Uint8, total)
	o := opts.collective()
	calls := make([]collective.Call, len(mine))
	for i, text := range texts {
		calls[i] = collective.Call{
			Op: collective.AllGather, Type: tensor.Uint8, Src: tensor.From(text).Memory(), Dst: joined.Memory(), Counts: counts,
			Manifest: &collective.Manifest{Name: what}, Options: &o,
		}
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return nil, err
	}
	out, rest := make([]Value, len(counts)), tensor.Data[uint8](joined)
	for rank, n := range counts {
		if out[rank], err = wire.Decode(rest[:n]); err != nil {
			return nil, errorf(c.String(), ErrMismatch, "%s: the value of replica %d: %w", what, rank, err)
		}
		rest = rest[n:]
	}
	return out, nil
}

// broadcast sends the tensor of member 0 to every worker. All workers' tensors must have the same dtype, shape
// and name.
func (c *collectiveAllReduce) broadcast(
	ctx context.Context, name string, t *tensor.Tensor, opts Options,
) (*tensor.Tensor, error) {
	if t.DType() == tensor.String {
		mine := make([]Value, len(c.devices))
		for i := range mine {
			mine[i] = t
		}
		all, err := c.gatherValues(ctx, name, mine, opts)
		if err != nil {
			return nil, err
		}
		for rank, v := range all {
			if other, ok := v.(*tensor.Tensor); !ok || other.DType() != t.DType() || !other.SameShape(t) {
				return nil, errorf(c.String(), ErrMismatch, "%s differs between the workers: replica %d has %v, this one %v", name,
					rank, v, t)
			}
		}
		return all[0].(*tensor.Tensor), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	out, o := tensor.New(t.DType(), t.Shape()...), opts.collective()
	calls := make([]collective.Call, len(c.devices))
	for i := range calls {
		calls[i] = collective.Call{
			Op: collective.Broadcast, Type: t.DType(), Src: t.Memory(), Dst: out.Memory(),
			Manifest: &collective.Manifest{Name: name, Shape: t.Shape()}, Options: &o,
		}
	}
	return out, c.group.DoAll(ctx, calls)
}
