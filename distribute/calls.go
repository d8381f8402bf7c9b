package distribute

import (
	"context"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// comm returns the replica's communicator.
func (r *Replica) comm() collective.Communicator { return r.home.group.comms[r.local] }

// do makes one collective call of this replica, which has been acquired.
func (r *Replica) do(
	ctx context.Context, run *deadlock.Run, op ReduceOp, dst, src *tensor.Tensor, name string, o Options,
) error {
	r.manifest.Name, r.manifest.Shape = name, src.Shape()
	r.options = o.collective()
	r.call.Op, r.call.Reduce, r.call.Type = collective.AllReduce, op, src.DType()
	r.call.Src, r.call.Dst = src.Memory(), dst.Memory()
	comm, err := r.home.group.comm(ctx, r.local, o.lane())
	if err == nil {
		err = comm.Do(ctx, &r.call)
	}
	if err != nil {
		return run.Fail(err)
	}
	return nil
}

// exchange gathers every replica's numbers on all replicas: all[replica][i]. what describes them in errors, and purpose
// the user's call. The caller has not acquired the replica.
func (r *Replica) exchange(
	ctx context.Context, run *deadlock.Run, mine []int64, what, purpose string, o Options,
) ([][]int64, error) {
	if err := run.Acquire(r.local); err != nil {
		return nil, err
	}
	defer run.Release(r.local)
	r.manifest.Purpose = purpose
	defer func() { r.manifest.Purpose = "" }()
	n := len(mine)
	t := tensor.New(tensor.Int64, r.comm().Size()*n)
	numbers := tensor.Data[int64](t)
	copy(numbers[r.comm().Rank()*n:], mine)
	if err := r.do(ctx, run, Sum, t, t, what, o); err != nil {
		return nil, err
	}
	all := make([][]int64, r.comm().Size())
	for i := range all {
		all[i] = numbers[i*n : (i+1)*n]
	}
	return all, nil
}

// gatherFlat gives every replica the elements of all replicas, concatenated.
func (r *Replica) gatherFlat(
	ctx context.Context, run *deadlock.Run, t *tensor.Tensor, counts []int, name string, o Options,
) (*tensor.Tensor, error) {
	total := 0
	for _, n := range counts {
		total += n
	}
	out := tensor.New(t.DType(), total).OnDevice(r.device.Index)
	if total == 0 {
		return out, nil
	}
	if err := run.Acquire(r.local); err != nil {
		return nil, err
	}
	defer run.Release(r.local)
	options := o.collective()
	call := &collective.Call{
		Op: collective.AllGather, Type: t.DType(), Src: t.Memory(), Dst: out.Memory(), Counts: counts,
		Manifest: &collective.Manifest{Name: name}, Options: &options,
	}
	begin := r.arrive()
	if err := r.comm().Do(ctx, call); err != nil {
		return nil, run.Fail(err)
	}
	r.leave(begin)
	return out, nil
}

// readable is implemented by *Variable.
type readable interface {
	stored
	Read(in Context) (*tensor.Tensor, error)
}

// operand returns a leaf of AllReduce as a tensor or IndexedSlices.
func (r *Replica) operand(leaf any) (any, error) {
	switch leaf := leaf.(type) {
	case *tensor.IndexedSlices:
		return leaf, sparse.Check(leaf)
	case readable:
		return leaf.Read(r)
	}
	return hostTensor(leaf)
}

// mergeLeaves runs f on one goroutine for the leaves of all replicas' nests, which must have the same names.
func (r *Replica) mergeLeaves(
	ctx context.Context, name string, leaves []any, names []string, o Options,
	f func(context.Context, []Reduction) ([]Value, error),
) ([]Value, error) {
	s := r.strategy
	out, err := r.mergeCall(ctx, name, o.Timeout,
		func(ctx context.Context, _ *CrossReplica, args ...Value) (Value, error) {
			leaves := args[:len(args)-1]
			if p, ok := args[len(leaves)].(*perReplica); ok {
				return nil, errorf(name, ErrMismatch, "the structures of the nests differ between the replicas: %q", p.values)
			}
			batch := make([]Reduction, len(leaves))
			for i, leaf := range leaves {
				batch[i] = Reduction{Values: s.onReplicas(leaf), To: s.devices}
			}
			return f(ctx, batch)
		}, append(leaves, strings.Join(names, " ")))
	if err != nil {
		return nil, err
	}
	return out.([]Value), nil
}
