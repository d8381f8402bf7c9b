package distribute

import (
	"context"
	"errors"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/undo"
	"github.com/lockstep-ml/lockstep/tensor"
)

// mutation is one kind of write to a variable.
type mutation struct {
	op string // the method's name: "AssignAdd"
	// fit converts the written value to the operand of apply, or returns an error if it does not fit the
	// variable.
	fit func(v *Variable, op string, x Value) (Value, error)
	// apply computes a component's new value from the old one and what fit returned.
	apply func(old *tensor.Tensor, x Value) *tensor.Tensor
	// inReplicaOrder: a component that all replicas share applies each replica's value in replica order, instead of
	// their aggregate.
	inReplicaOrder bool
}

var (
	assign = mutation{
		op: "Assign", fit: (*Variable).fit,
		apply: func(_ *tensor.Tensor, x Value) *tensor.Tensor { return x.(*tensor.Tensor) },
	}
	assignAdd = mutation{
		op: "AssignAdd", fit: (*Variable).fitNumber,
		apply: func(old *tensor.Tensor, x Value) *tensor.Tensor { return dense.Add(old, x.(*tensor.Tensor)) },
	}
	assignSub = mutation{
		op: "AssignSub", fit: (*Variable).fitNumber,
		apply: func(old *tensor.Tensor, x Value) *tensor.Tensor {
			return dense.Add(old, dense.Negate(x.(*tensor.Tensor)))
		},
	}
)

// Assign sets the value (TensorFlow's assign). In cross-replica context every component is set to x, or to its
// component of a distributed x. In replica context a mirrored variable first combines the replicas' values by its
// aggregation; this is a merge call, which all replicas must make. Without an aggregation, and for sync-on-read
// variables, each replica sets its own component. A variable of [NewCentralStorageStrategy] always combines.
//
// With several workers, values are combined over all replicas of all workers, except with [AggregateFirst],
// which uses the first replica of each worker. In cross-replica context every worker sets its own components.
//
// In cross-replica context a [PerReplica] is an error for a sync-on-read variable and for a variable of a
// strategy with one device. A sync-on-read variable with [AggregateSum] is set to an equal share of x on each
// replica.
func (v *Variable) Assign(in Context, x Value) error { return v.write(in, x, assign) }

// AssignAdd adds x to the value (TensorFlow's assign_add). It combines and distributes x as [Variable.Assign] does.
// In cross-replica context it is an error for a sync-on-read variable with [AggregateSum].
func (v *Variable) AssignAdd(in Context, x Value) error { return v.write(in, x, assignAdd) }

// AssignSub subtracts x from the value, under the conditions of [Variable.AssignAdd] (TensorFlow's assign_sub).
func (v *Variable) AssignSub(in Context, x Value) error { return v.write(in, x, assignSub) }

func (v *Variable) write(in Context, x Value, m mutation) error {
	x = untyped(x, v.strategy.oneDevice)
	switch in := in.(type) {
	case *Replica:
		if err := errors.Join(v.checkOwner(m.op, in.strategy), in.current(m.op)); err != nil {
			return err
		}
		return v.writeReplica(in, x, m)
	case *CrossReplica:
		if err := errors.Join(v.checkOwner(m.op, in.strategy), in.valid(m.op)); err != nil {
			return err
		}
		if p, ok := x.(*perReplica); ok && (v.kind() == syncOnReadVariable || v.kind() == plainVariable) &&
			(v.agg != AggregateSum || m.op == assign.op) {
			return errorf(m.op, ErrInvalid, "variable %s, a %v, takes one tensor in cross-replica context, not %d values: "+
				"reduce them first, or write in the step what each replica has", v.Name(), v.kind(), len(p.values))
		}
		if v.kind() == syncOnReadVariable && v.agg == AggregateSum {
			if m.op != assign.op {
				return errorf(m.op, ErrInvalid, "SyncOnReadVariable does not support %s in cross-replica context when "+
					"aggregation is set to SUM: assign the new sum instead", m.op)
			}
			return v.setShares(in.run, m.op, x)
		}
		return v.setAll(in.run, x, m)
	case *Component:
		if err := in.of(m.op, v); err != nil {
			return err
		}
		if in.update.over.Load() {
			return errorf(m.op, ErrContext, "component %s was written after its update had ended: write it in the update "+
				"function, or write the variable", v.ComponentName(in.index))
		}
		return v.setOne(in.update.run, in.index, x, m)
	}
	return errNoContext(m.op)
}

// combines reports whether the replicas' values are combined before the write.
func (v *Variable) combines() bool {
	switch v.kind() {
	case mirroredVariable:
		return v.agg != AggregateNone && v.strategy.size > 1
	case aggregatingVariable:
		return true
	}
	return false
}

func (v *Variable) writeReplica(r *Replica, x Value, m mutation) error {
	if !v.combines() {
		return v.setOne(r.run, v.on(r.local), x, m)
	}
	inReplicaOrder := m.inReplicaOrder && v.kind() == aggregatingVariable
	if v.agg == AggregateNone && !inReplicaOrder {
		return errorf(m.op, ErrInvalid, "you must specify an aggregation method to update the variable %s of %v in replica "+
			"context: set Aggregation in its config, for example AggregateSum", v.Name(), v.strategy)
	}
	_, err := r.mergeCall(&r.ctx, m.op, r.strategy.options.Timeout,
		func(ctx context.Context, c *CrossReplica, args ...Value) (Value, error) {
			s, value := v.strategy, args[0]
			if _, same := value.(distributed); !same && s.workersInSync > 1 {
				value = perReplicaOf(s.onReplicas(value)...)
			}
			if inReplicaOrder {
				for _, x := range s.onReplicas(value) {
					if err := v.setAll(c.run, x, m); err != nil {
						return nil, err
					}
				}
				return nil, nil
			}
			var err error
			switch v.agg {
			case AggregateFirst:
				value, err = selectReplica(0, value, nil)
			case AggregateSum:
				value, err = s.reduceTo(ctx, m.op, Sum, value, v.devices, s.options)
			case AggregateMean:
				value, err = s.reduceTo(ctx, m.op, Mean, value, v.devices, s.options)
			}
			if err != nil {
				return nil, err
			}
			return nil, v.setAll(c.run, value, m)
		}, []Value{x})
	return err
}

// setAll writes x, or the component's own part of a distributed x, to every component. All values are checked
// before any component changes. run is the Run that the writing code is part of, nil outside of all Runs.
func (v *Variable) setAll(run *deadlock.Run, x Value, m mutation) error {
	values := make([]Value, len(v.components))
	for i := range v.components {
		mine, err := componentOf(i, x)
		if err != nil {
			return errorf(m.op, ErrInvalid, "%w", err)
		}
		if values[i], err = m.fit(v, m.op, mine); err != nil {
			return err
		}
	}
	for i := range v.components {
		if err := v.apply(run, i, values[i], m); err != nil {
			return err
		}
	}
	return nil
}

// setOne changes one component.
func (v *Variable) setOne(run *deadlock.Run, i int, x Value, m mutation) error {
	mine, err := componentOf(i, x)
	if err != nil {
		return errorf(m.op, ErrInvalid, "%w", err)
	}
	value, err := m.fit(v, m.op, mine)
	if err != nil {
		return err
	}
	return v.apply(run, i, value, m)
}

// apply changes one component by a value that fits.
func (v *Variable) apply(run *deadlock.Run, i int, x Value, m mutation) error {
	old, err := v.load(m.op, i)
	if err != nil {
		return err
	}
	return v.store(run, m.op, i, m.apply(old, x).OnDevice(v.devices[i].Index))
}

// store sets a component, unless the Run that the writing code is part of has ended: its writes are committed or
// rolled back, and the component may have a later Run's value.
func (v *Variable) store(run *deadlock.Run, op string, i int, t *tensor.Tensor) error {
	switch err := v.strategy.undo.Store(run, v.components[i], t); {
	case errors.Is(err, undo.ErrEnded):
		return endedRun(op, run)
	case err != nil:
		return errorf(op, nil, "writing %s: %w", v.ComponentName(i), err)
	}
	return nil
}

// setShares gives every component an equal share of x, so that their sum is x. Shares of integers are
// truncated.
func (v *Variable) setShares(run *deadlock.Run, op string, x Value) error {
	if m, ok := x.(*Mirrored); ok {
		x = m.Values[0] // all are the same
	}
	value, err := v.fit(op, x)
	if err != nil {
		return err
	}
	return v.setAll(run, v.share(value.(*tensor.Tensor)), assign)
}

// share returns one component's part of a sum.
func (v *Variable) share(sum *tensor.Tensor) *tensor.Tensor {
	if v.strategy.size == 1 || !sum.DType().IsNumeric() {
		return sum
	}
	share := dense.Divide(sum, v.strategy.size)
	if share.DType() != sum.DType() {
		share = dense.Convert(share, sum.DType())
	}
	return share
}

// fit returns x as a tensor of the variable's dtype and shape.
func (v *Variable) fit(op string, x Value) (Value, error) {
	t, err := hostTensor(x)
	if err != nil {
		return nil, errorf(op, ErrInvalid, "variable %s: %w", v.Name(), err)
	}
	_, isTensor := x.(*tensor.Tensor)
	cut := t.DType().IsFloat() && v.DType().IsInteger() // the fraction would be lost
	if !isTensor && !cut && t.DType() != v.DType() && v.DType().IsNumeric() && t.DType().IsNumeric() {
		t = dense.Convert(t, v.DType()) // a host number is converted to the variable's dtype
	}
	switch {
	case t.DType() != v.DType():
		return nil, errorf(op, ErrInvalid, "variable %s has dtype %v, the value %v", v.Name(), v.DType(), t.DType())
	case !slices.Equal(t.Shape(), v.Shape()):
		return nil, errorf(op, ErrInvalid, "cannot write variable %s: shape mismatch: the variable's shape is %s, the "+
			"value's %s", v.Name(), tensor.FormatShape(v.Shape()), tensor.FormatShape(t.Shape()))
	}
	return t, nil
}

// fitNumber is fit for operations that need numbers.
func (v *Variable) fitNumber(op string, x Value) (Value, error) {
	if d := v.DType(); !d.IsNumeric() {
		return nil, badDType(op, d)
	}
	return v.fit(op, x)
}
