package distribute

import (
	"context"
	"errors"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Component is a variable on one replica, as an update function sees it.
type Component struct {
	variable *Variable
	replica  int
}

// Variable returns the variable.
func (c *Component) Variable() *Variable { return c.variable }

// Replica returns the replica's id.
func (c *Component) Replica() int { return c.replica }

// Name returns the component's name, as TensorFlow writes it: "v/replica_1:0".
func (c *Component) Name() string { return c.variable.ComponentName(c.replica) }

// Device returns the component's device in TensorFlow's full form.
func (c *Component) Device() string { return c.variable.strategy.devices[c.replica].String() }

// Read returns the component's value.
func (c *Component) Read() *tensor.Tensor { return c.variable.components[c.replica].load() }

// Assign sets the component's value.
func (c *Component) Assign(x Value) error { return c.variable.setOne("Assign", c.replica, x, replace) }

// AssignAdd adds to the component's value.
func (c *Component) AssignAdd(x Value) error {
	return c.variable.setOne("AssignAdd", c.replica, x, plus)
}

// AssignSub subtracts from the component's value.
func (c *Component) AssignSub(x Value) error {
	return c.variable.setOne("AssignSub", c.replica, x, minus)
}

// UpdateFunc changes one component of a variable. Its args are those of Update, distributed values replaced by their
// component of the replica.
type UpdateFunc func(ctx context.Context, c *Component, args ...Value) (Value, error)

// Update calls f once for each component of v, in the order of the replicas, and returns its results as a [*Mirrored],
// leaf by leaf for nests; with one replica they come as they are. If a call fails, every component gets its old value
// back.
func (s *Strategy) Update(ctx context.Context, v *Variable, f UpdateFunc, args ...Value) (Value, error) {
	results, err := s.update(ctx, v, f, args)
	if err != nil {
		return nil, err
	}
	if len(results) == 1 {
		return results[0], nil
	}
	return regroupAs("Update", results, func(leaves []any) Value {
		if sameLeaf(leaves) {
			return leaves[0]
		}
		return &Mirrored{components{leaves}}
	})
}

// UpdateUngrouped is [Strategy.Update] that returns, in place of each leaf, the tuple of the components' results.
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

func (s *Strategy) update(ctx context.Context, v *Variable, f UpdateFunc, args []Value) ([]Value, error) {
	const op = "Update"
	if v == nil {
		return nil, errorf(op, ErrInvalid, "you can not update nil: it must be a Variable")
	}
	if err := errors.Join(s.requireCross(ctx, op), v.mine(op, s)); err != nil {
		return nil, err
	}
	before := v.Values()
	results := make([]Value, len(v.components))
	for i := range v.components {
		mine := make([]Value, len(args))
		for j, arg := range args {
			var err error
			if mine[j], err = componentOf(i, arg); err != nil {
				return nil, errorf(op, ErrInvalid, "argument %d: %w", j, err)
			}
		}
		at := &stepContext{ctx, &frame{strategy: s, update: i}}
		var err error
		if results[i], err = f(at, &Component{v, i}, mine...); err != nil {
			for k, c := range v.components[:i+1] {
				s.store(c, before[k].(*tensor.Tensor))
			}
			return nil, errorf(op, nil, "component %d of variable %s: %w", i, v.Name(), err)
		}
	}
	return results, nil
}
