package distribute

import (
	"errors"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Saved returns the variable's value for a checkpoint: the value on replica 0, or the aggregate of a
// sync-on-read variable, which must have an aggregation. A variable of any strategy can be restored from it,
// and so can one without a strategy.
func (v *Variable) Saved(in *CrossReplica) (*tensor.Tensor, error) {
	const op = "Saved"
	if in == nil {
		return nil, errNoContext(op)
	}
	if err := errors.Join(v.checkOwner(op, in.strategy), in.valid(op)); err != nil {
		return nil, err
	}
	return v.readCross(in.context(), op, v.devices[0])
}

// Restore sets the variable to a value that [Variable.Saved] returned. Every component is set to x. For a
// sync-on-read variable with [AggregateSum] every component is set to an equal share of x; shares of integers
// are truncated.
func (v *Variable) Restore(in *CrossReplica, x *tensor.Tensor) error {
	const op = "Restore"
	if in == nil {
		return errNoContext(op)
	}
	if err := errors.Join(v.checkOwner(op, in.strategy), in.valid(op)); err != nil {
		return err
	}
	if x == nil {
		return errorf(op, ErrInvalid, "no value given for variable %s", v.Name())
	}
	if v.kind() == syncOnReadVariable && v.agg == AggregateSum {
		return v.setShares(in.run, op, x)
	}
	set := assign
	set.op = op
	return v.setAll(in.run, x, set)
}
