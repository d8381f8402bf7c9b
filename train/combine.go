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
	undo := map[int][]*tensor.Tensor{} // by variable: of each replica
	restore = func() (err error) {
		for i, own := range undo {
			if e := t.write(i, own...); e != nil {
				err = errors.Join(err, fmt.Errorf("restoring local values: %w", e))
			}
		}
		return err
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
		own := make([]*tensor.Tensor, len(t.local))
		for local := range own {
			if err == nil {
				own[local], err = t.program.Read(local, i)
			}
		}
		if err == nil {
			undo[i] = own
			err = t.write(i, combined)
		}
		if err != nil {
			return restore, fmt.Errorf("combining %s over the replicas: %w", v.Name, err)
		}
	}
	return restore, nil
}
