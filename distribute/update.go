package distribute

import (
	"context"
	"errors"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

// UpdateFunc changes one component of a variable. Its args are those of Update; distributed values, including
// those inside of nests, are replaced by the component of the replica. If all replicas share the component,
// they are replaced by the component of replica 0. Pass TensorFlow's keyword arguments in a map.
type UpdateFunc func(ctx context.Context, c *Component, args ...Value) (Value, error)

// Update calls f once for each component of v, in the order of the replicas, and returns f's results as a
// [*Mirrored], leaf by leaf (update). With one component it returns f's result unchanged; if f returns nil, so does
// Update. If a call fails or panics, every component is restored to its old value. [Variable.Update] has no results.
func (e Extended) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	results, err := e.s.update(ctx, e.s.runOf(ctx), v, f, args)
	if err != nil {
		return nil, err
	}
	if len(results) == 1 {
		return results[0], nil
	}
	return regroupAs("Update", results, func(leaves []any) Value {
		if whole := wholeOf(leaves); whole != nil {
			return whole
		}
		if sameLeaf(leaves) {
			return leaves[0]
		}
		return &Mirrored{leaves}
	})
}

// UpdateUngrouped is Update, except that each leaf of the result is the tuple of the components' results (update with
// group=False).
func (e Extended) UpdateUngrouped(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	results, err := e.s.update(ctx, e.s.runOf(ctx), v, f, args)
	if err != nil {
		return nil, err
	}
	return regroupAs("UpdateUngrouped", results, func(leaves []any) Value { return tensor.Tuple(leaves) })
}

// Update calls f once for each component of the variable, in the order of the replicas (TensorFlow's
// StrategyExtended.update). In a step all replicas call it with the same function, which is executed once for all of
// them. If a call fails or panics, every component is restored to its old value.
func (v *Variable) Update(in Context, f func(context.Context, *Component) error) error {
	const op = "Update"
	each := func(ctx context.Context, c *Component, _ ...Value) (Value, error) { return nil, f(ctx, c) }
	switch in := in.(type) {
	case *Replica:
		_, err := in.mergeCall(&in.ctx, op, in.strategy.options.Timeout,
			func(ctx context.Context, c *CrossReplica, _ ...Value) (Value, error) {
				_, err := c.strategy.update(ctx, c.run, v, each, nil)
				return nil, err
			}, nil)
		return err
	case *CrossReplica:
		if err := in.valid(op); err != nil {
			return err
		}
		_, err := in.strategy.update(in.context(), in.run, v, each, nil)
		return err
	}
	return errNoContext(op)
}

// update calls f for every component. run is the Run that the caller is part of, nil outside of all Runs.
func (s *Strategy) update(
	ctx context.Context, run *deadlock.Run, v *Variable, f UpdateFunc, args []Value,
) ([]Value, error) {
	const op = "Update"
	switch {
	case v == nil:
		return nil, errorf(op, ErrInvalid, "you can not update nil: it must be a Variable")
	case f == nil:
		return nil, errorf(op, ErrInvalid, "the update function is nil")
	}
	if err := errors.Join(s.requireCross(ctx, op), v.checkOwner(op, s)); err != nil {
		return nil, err
	}
	before, u := make([]*tensor.Tensor, len(v.components)), &update{run: run}
	for i := range before {
		var err error
		if before[i], err = v.load(op, i); err != nil {
			return nil, err
		}
	}
	done := false
	defer func() { // also if f panics; the panic is passed on to the caller
		u.over.Store(true)
		for k, t := range before {
			if !done {
				_ = v.store(run, op, k, t) // an ended Run has been rolled back already
			}
		}
	}()
	results := make([]Value, len(v.components))
	for i := range v.components {
		mine := make([]Value, len(args))
		for j, arg := range args {
			var err error
			if mine[j], err = componentOf(i, arg); err != nil {
				return nil, errorf(op, ErrInvalid, "argument %d: %w", j, err)
			}
		}
		c := &Component{v, i, u}
		in := &stepContext{ctx, &frame{strategy: s, run: run, component: c}}
		var err error
		if results[i], err = f(in, c, mine...); err != nil {
			return nil, errorf(op, nil, "component %d of variable %s: %w", i, v.Name(), err)
		}
	}
	done = true
	return results, nil
}
