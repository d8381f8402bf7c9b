package distribute

import (
	"errors"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Saved returns what a checkpoint holds of the variable, which a variable of any strategy, or of none, can be restored
// from: the value on replica 0, or the aggregate of a sync-on-read variable, which must have an aggregation.
func (v *Variable) Saved(in *CrossReplica) (*tensor.Tensor, error) {
	const op = "Saved"
	if in == nil {
		return nil, errNoContext(op)
	}
	if err := errors.Join(v.mine(op, in.strategy), in.valid(op)); err != nil {
		return nil, err
	}
	return v.readCross(op, v.devices[0])
}

// Restore sets the variable to what [Variable.Saved] returned: every component gets x, and those of a sync-on-read
// variable that is summed an equal share of it, which of integers is cut off.
func (v *Variable) Restore(in *CrossReplica, x *tensor.Tensor) error {
	const op = "Restore"
	if in == nil {
		return errNoContext(op)
	}
	if err := errors.Join(v.mine(op, in.strategy), in.valid(op)); err != nil {
		return err
	}
	if x == nil {
		return errorf(op, ErrInvalid, "no value given for variable %s", v.Name())
	}
	if v.Kind() == SyncOnReadVariable && v.agg == AggregateSum {
		return v.setShares(op, x)
	}
	set := assign
	set.op = op
	return v.setAll(x, set)
}
