package train

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// combineAverages sets every replica's averages to the values that [Trainer.Weights] returns: their mean over
// the replicas. restore resets each replica to its local values. The caller must call restore once, also
// after an error, while no replica computes.
func (t *Trainer) combineAverages(ctx context.Context) (restore func() error, err error) {
	type write struct {
		replica, variable int
		value             *tensor.Tensor
	}
	var undo []write
	restore = func() error {
		var errs []error
		for _, w := range undo {
			if err := t.program.Write(w.replica, w.variable, w.value); err != nil {
				name := t.variables[w.variable].Name
				errs = append(errs, fmt.Errorf("restoring the local value of %s on replica %d: %w", name, w.replica, err))
			}
		}
		return errors.Join(errs...)
	}
	if t.strategy.NumReplicasInSync() == 1 || t.central {
		return restore, nil
	}
	for i, v := range t.variables {
		if v.Role != engine.Average {
			continue
		}
		combined, err := t.weight(ctx, i)
		if err != nil {
			return restore, fmt.Errorf("combining %s over the replicas: %w", v.Name, err)
		}
		for replica := range t.parts {
			own, err := t.program.Read(replica, i)
			if err == nil {
				undo = append(undo, write{replica, i, own})
				err = t.program.Write(replica, i, combined)
			}
			if err != nil {
				return restore, fmt.Errorf("combining %s over the replicas: replica %d: %w", v.Name, replica, err)
			}
		}
	}
	return restore, nil
}
