package distribute

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Component is one of a variable's components, as an update function sees it: the component of a replica, or
// the one that all replicas share. It can be written until its update ends.
type Component struct {
	variable *Variable
	index    int
	update   *update
}

// update is one call of Update.
type update struct {
	run  *deadlock.Run // that the call is part of, or nil
	over atomic.Bool
}

// Variable returns the component's variable (TensorFlow's value container).
func (c *Component) Variable() *Variable { return c.variable }

func (c *Component) partOf() (whole Value, index, parts int) {
	return c.variable, c.index, len(c.variable.components)
}

// Replica returns the index of the component's replica on this worker, or 0 for a component that all replicas
// share.
func (c *Component) Replica() int { return c.index }

// Name returns the component's name, as TensorFlow writes it: "v/replica_1:0".
func (c *Component) Name() string { return c.variable.ComponentName(c.index) }

// Device returns the component's device in TensorFlow's full form.
func (c *Component) Device() string {
	return c.variable.strategy.deviceName(c.variable.devices[c.index])
}

// Read returns the component's value. It panics where [Variable.Values] does.
func (c *Component) Read() *tensor.Tensor { return c.variable.mustLoad(c.index) }

// Assign sets the component's value. After the update it is an error.
func (c *Component) Assign(x Value) error { return c.write(x, assign) }

// AssignAdd adds to the component's value, under the conditions of [Component.Assign].
func (c *Component) AssignAdd(x Value) error { return c.write(x, assignAdd) }

// AssignSub subtracts from the component's value, under the conditions of [Component.Assign].
func (c *Component) AssignSub(x Value) error { return c.write(x, assignSub) }

func (c *Component) write(x Value, m mutation) error {
	if c.update.over.Load() {
		return errorf(m.op, ErrContext, "component %s was written after its update had ended: write it in the update "+
			"function, or write the variable", c.Name())
	}
	return c.variable.setOne(c.update.run, c.index, x, m)
}

// ValueContainer returns the variable of a component, and any other value unchanged (TensorFlow's
// value_container).
func ValueContainer(v Value) Value {
	if c, ok := v.(*Component); ok {
		return c.variable
	}
	return v
}

// UpdateFunc changes one component of a variable. Its args are those of Update; distributed values, including
// those inside of nests, are replaced by the component of the replica. If all replicas share the component,
// they are replaced by the component of replica 0. Pass TensorFlow's keyword arguments in a map.
type UpdateFunc func(ctx context.Context, c *Component, args ...Value) (Value, error)

// Update calls f once for each component of v, in the order of the replicas, and returns f's results as a
// [*Mirrored], leaf by leaf for nests (TensorFlow's StrategyExtended.update). With one component it returns f's
// result unchanged; if f returns nil, so does Update. If a call fails or panics, every component is restored to its
// old value.
func (s *Strategy) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	return regroupUpdate(s.update(ctx, s.runOf(ctx), v, f, args))
}

// regroupUpdate regroups the results of the components' update functions for Update.
func regroupUpdate(results []Value, err error) (Value, error) {
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
		return &Mirrored{components{leaves}}
	})
}

// UpdateUngrouped is [Strategy.Update], except that each leaf of the result is the tuple of the components' results
// (TensorFlow's StrategyExtended.update with group=False).
func (s *Strategy) UpdateUngrouped(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	return tupleUpdate(s.update(ctx, s.runOf(ctx), v, f, args))
}

// tupleUpdate regroups the results of the components' update functions for UpdateUngrouped.
func tupleUpdate(results []Value, err error) (Value, error) {
	if err != nil {
		return nil, err
	}
	return regroupAs("UpdateUngrouped", results, func(leaves []any) Value { return tensor.Tuple(leaves) })
}

// Update is [Strategy.Update].
func (c *CrossReplica) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	if err := c.valid("Update"); err != nil {
		return nil, err
	}
	return regroupUpdate(c.strategy.update(ctx, c.run, v, f, args))
}

// UpdateUngrouped is [Strategy.UpdateUngrouped].
func (c *CrossReplica) UpdateUngrouped(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	if err := c.valid("UpdateUngrouped"); err != nil {
		return nil, err
	}
	return tupleUpdate(c.strategy.update(ctx, c.run, v, f, args))
}

// Update is [Strategy.Update] inside a step. All replicas call it with the same function, and it is executed
// once for all of them. Each replica gets its part of the results.
func (r *Replica) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	return r.mergeCall(ctx, "Update", r.strategy.options.Timeout,
		func(ctx context.Context, c *CrossReplica, args ...Value) (Value, error) {
			return c.Update(ctx, v, f, args...)
		}, args)
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
		in := &frame{strategy: s, run: run, update: -1, at: &v.devices[i]}
		if s.kind.mirrors() {
			in.update = i
		}
		var err error
		if results[i], err = f(&stepContext{ctx, in}, &Component{v, i, u}, mine...); err != nil {
			return nil, errorf(op, nil, "component %d of variable %s: %w", i, v.Name(), err)
		}
	}
	done = true
	return results, nil
}
