package distribute

import (
	"context"
	"reflect"
)

// Tests compare the package with TensorFlow, whose functions take and return nests with distributed values at any
// depth. Programs in Go have types for them.
type (
	// Components is a distributed value in a nest.
	Components = perReplica
	// CollectiveConfig describes TensorFlow's CollectiveAllReduce.
	CollectiveConfig = collectiveConfig
	// MergeNest is a merge function of nests.
	MergeNest = mergeFunc
)

// NewComponents returns a distributed value for a nest.
func NewComponents(values ...Value) *Components { return perReplicaOf(values...) }

// Merge is TensorFlow's CommunicationOptions.merge.
func (o Options) Merge(over Options) Options { return o.merge(over) }

// Validate checks options, as every call does.
func (o Options) Validate() error { return o.validate() }

// Values returns the components by replica.
func (p *perReplica) Values() []Value { return p.values }

// Len returns the number of components.
func (p *perReplica) Len() int { return len(p.values) }

// NewCollectiveAllReduce returns TensorFlow's CollectiveAllReduce, outside of a strategy.
func NewCollectiveAllReduce(cfg CollectiveConfig) (*collectiveAllReduce, error) {
	return newCollectiveAllReduce("NewCollectiveAllReduce", cfg, nil)
}

// RunNest is [Run] as TensorFlow has it: distributed values in the arguments are replaced by the replica's component,
// and the results are regrouped.
func RunNest(
	ctx context.Context, s *Strategy, step func(context.Context, *Replica, ...Value) (Value, error), args ...Value,
) (Value, error) {
	if step == nil {
		return Run[[]Value, Value](ctx, s, nil, nil)
	}
	in := make(PerReplica[[]Value], len(s.devices))
	for replica := range in {
		for i, arg := range args {
			mine, err := selectReplica(replica, untyped(arg, false), s.checkLocal)
			if err != nil {
				return nil, errorf("Run", ErrInvalid, "argument %d: %w", i, err)
			}
			in[replica] = append(in[replica], mine)
		}
	}
	out, err := Run(ctx, s, func(ctx context.Context, r *Replica, args []Value) (Value, error) {
		return step(ctx, r, args...)
	}, in)
	if err != nil {
		return nil, err
	}
	return Regrouped(out, func(leaves []any) bool {
		return (leaves[0] == nil || reflect.TypeOf(leaves[0]).Kind() == reflect.Pointer) && sameLeaf(leaves)
	})
}

// Regrouped combines nests into one, where same reports whether a leaf is kept, because it is the same on all replicas.
func Regrouped(replicas []Value, same func(leaves []any) bool) (Value, error) {
	if len(replicas) == 1 {
		return replicas[0], nil
	}
	return regroupAs("Run", replicas, func(leaves []any) Value {
		if v := wholeOf(leaves); v != nil {
			return v
		}
		if same(leaves) {
			return leaves[0]
		}
		return perReplicaOf(leaves...)
	})
}

// MergeNests is [MergeCall] as TensorFlow has it: the merge function gets the replicas' arguments regrouped, and each
// replica its component of the result.
func MergeNests(ctx context.Context, r *Replica, f MergeNest, args ...Value) (Value, error) {
	return r.mergeCall(ctx, mergeCallName, r.strategy.options.Timeout, f, args)
}

// Nested returns the components of all replicas as TensorFlow does: in one nest, whose leaves are distributed values.
func Nested(s *Strategy, p PerReplica[Value]) (Value, error) {
	if s.oneDevice {
		return p[0], nil
	}
	return regroupAs("Nested", p, func(leaves []any) Value { return perReplicaOf(leaves...) })
}
