package distribute

import (
	"context"
	"errors"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Component is one of a variable's components, as an update function sees it: the component of a replica, or
// the one that all replicas share.
type Component struct {
	variable *Variable
	index    int
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

// Read returns the component's value.
func (c *Component) Read() *tensor.Tensor { return c.variable.components[c.index].Load() }

// Assign sets the component's value.
func (c *Component) Assign(x Value) error { return c.variable.setOne(c.index, x, assign) }

// AssignAdd adds to the component's value.
func (c *Component) AssignAdd(x Value) error { return c.variable.setOne(c.index, x, assignAdd) }

// AssignSub subtracts from the component's value.
func (c *Component) AssignSub(x Value) error { return c.variable.setOne(c.index, x, assignSub) }

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
	results, err := s.update(ctx, v, f, args)
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
	results, err := s.update(ctx, v, f, args)
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
	return c.strategy.Update(ctx, v, f, args...)
}

// UpdateUngrouped is [Strategy.UpdateUngrouped].
func (c *CrossReplica) UpdateUngrouped(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	if err := c.valid("UpdateUngrouped"); err != nil {
		return nil, err
	}
	return c.strategy.UpdateUngrouped(ctx, v, f, args...)
}

// Update is [Strategy.Update] inside a step. All replicas call it with the same function, and it is executed
// once for all of them. Each replica gets its part of the results.
func (r *Replica) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	return r.mergeCall(ctx, "Update", r.strategy.options.Timeout,
		func(ctx context.Context, c *CrossReplica, args ...Value) (Value, error) {
			return c.Update(ctx, v, f, args...)
		}, args)
}

func (s *Strategy) update(ctx context.Context, v *Variable, f UpdateFunc, args []Value) ([]Value, error) {
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
	before := v.Values()
	done := false
	defer func() { // also if f panics; the panic is passed on to the caller
		for k, c := range v.components {
			if !done {
				s.undo.Store(c, before[k].(*tensor.Tensor))
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
		in := &frame{strategy: s, update: -1, at: &v.devices[i]}
		if s.kind.mirrors() {
			in.update = i
		}
		var err error
		if results[i], err = f(&stepContext{ctx, in}, &Component{v, i}, mine...); err != nil {
			return nil, errorf(op, nil, "component %d of variable %s: %w", i, v.Name(), err)
		}
	}
	done = true
	return results, nil
}
