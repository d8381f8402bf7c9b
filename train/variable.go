package train

import (
	"context"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Variable returns a variable of the model or the optimizer by its name, such as "/readout/weights", or nil if there is
// none of that name. It is a variable of the strategy, as model.variables are in TensorFlow: programs read it, assign
// to it and update it between steps, and in functions that they execute by [distribute.Run]. Its components are the
// program's variables: what is written is what the next step trains on.
//
// Averages ([engine.Average]) are sync-on-read, with the mean over the replicas; those that are not floating-point
// numbers are equal on all replicas, so replica 0's value is read. All others are mirrored. What replicas write to them
// is combined: the mean of floating-point numbers, otherwise replica 0's value. Parameters are trainable.
//
// With a sharded optimizer, a slot is read from the device of this worker that has it; if none does, reading it and
// updating it fail with [engine.ErrNotOwned]. [Trainer.SetVariable] sets it on all workers.
//
// With several workers, every worker makes the same writes, as with [Trainer.SetVariable]. A variable must not be used
// while Fit computes a step, or after Close.
func (t *Trainer) Variable(name string) *distribute.Variable {
	i := slices.IndexFunc(t.variables, func(v engine.Variable) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	return t.distributed[i]
}

// makeVariables makes the strategy's variables for the program's.
func (t *Trainer) makeVariables() error {
	for i, v := range t.variables {
		cfg := distribute.VariableConfig{
			Name: v.Name, Aggregation: distribute.AggregateFirst, NotTrainable: v.Role != engine.Parameter,
		}
		if v.DType.IsFloat() {
			cfg.Aggregation = distribute.AggregateMean
		}
		if v.Role == engine.Average {
			cfg.Synchronization = distribute.OnRead
		}
		made, err := t.strategy.VariableIn(&programVariable{t, i}, v.DType, v.Shape, cfg)
		if err != nil {
			return err
		}
		t.distributed = append(t.distributed, made)
	}
	return nil
}

// programVariable is a variable of the trainer's program, as a [distribute.Storage]. A component is a replica's value.
type programVariable struct {
	t        *Trainer
	variable int
}

// Load implements [distribute.Storage].
func (p *programVariable) Load(replica int) (*tensor.Tensor, error) {
	t := p.t
	t.access.Lock()
	defer t.access.Unlock()
	if !t.hasAll(replica, p.variable) {
		slot := t.table[p.variable]
		if !t.others() {
			return t.gather(context.Background(), slot, true)
		}
		if replica = t.localOf(slot.entries[0].owner); replica < 0 || len(slot.entries) > 1 {
			return nil, t.notOwnedError(p.variable)
		}
	}
	return t.program.Read(replica, p.variable)
}

// Store implements [distribute.Storage]. It records what is written to mirrored variables, which workers compare in the
// next step. A write of the value that a variable has is not recorded.
func (p *programVariable) Store(replica int, value *tensor.Tensor) error {
	t := p.t
	t.access.Lock()
	defer t.access.Unlock()
	changes := false
	if t.table[p.variable].divided() { // workers that do not have it cannot compare
		changes = replica == 0
	} else if replica == 0 && t.variables[p.variable].Role != engine.Average {
		old, err := t.program.Read(replica, p.variable)
		if err != nil {
			return err
		}
		changes = !old.Equal(value)
	}
	if err := t.program.Write(replica, p.variable, value); err != nil {
		return err
	}
	if changes {
		t.recordAssigned(p.variable, value)
	}
	return nil
}

// recordAssigned adds a value that was written on every worker to what they compare.
func (t *Trainer) recordAssigned(variable int, value *tensor.Tensor) {
	name := xxh3.HashStringSeed(t.variables[variable].Name, t.assigned.hash)
	t.assigned = assigned{xxh3.HashSeed(value.Memory().HostBytes(), name), variable}
}

// assign sets a variable on every replica, to a value that must be the same on all workers.
func (t *Trainer) assign(variable int, value *tensor.Tensor) error {
	if t.table[variable].divided() { // an assignment reads the old value
		if err := t.write(variable, value); err != nil {
			return err
		}
		t.recordAssigned(variable, value)
		return nil
	}
	in, err := t.strategy.Cross(context.Background())
	if err != nil {
		return err
	}
	if err := t.distributed[variable].Assign(in, value); err != nil {
		return err
	}
	if t.variables[variable].Role == engine.Average {
		t.recordAssigned(variable, value)
	}
	return nil
}

// weight returns one value of a variable for all replicas.
func (t *Trainer) weight(ctx context.Context, variable int) (*tensor.Tensor, error) {
	if v := t.table[variable]; v.divided() {
		return t.gather(ctx, v, true)
	}
	in, err := t.strategy.Cross(ctx)
	if err != nil {
		return nil, err
	}
	return t.distributed[variable].Read(in)
}
