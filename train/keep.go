package train

import (
	"errors"

	"github.com/lockstep-ml/lockstep/tensor"
)

// keptGradients is a copy of the gradients of one step.
type keptGradients struct {
	wanted bool             // of the next step
	ready  bool             // values are of a step that was committed
	values []*tensor.Tensor // by parameter
}

// KeepGradients makes the next step of Fit keep a copy of its gradients for [Trainer.KeptGradients]. No method of the
// Trainer may run, but callbacks of Fit may call it. It copies the gradients of one step on this worker only, so the
// other workers need not call it. On an engine that computes gradients and update of a single replica as one program,
// which XLA does, that step is computed as two programs, and may round differently. KeepGradients returns an error with
// a sharded optimizer, which sums each gradient on one replica only.
func (t *Trainer) KeepGradients() error {
	if s, ok := t.exchange.(*sharded); ok && s.toOwners() {
		return errors.New("train: keeping gradients: the optimizer is sharded, so no worker has all sums: set " +
			"Config.Exchange to AllReduce")
	}
	t.kept.wanted, t.kept.ready = true, false
	return nil
}

// KeptGradients returns the gradients of the last step that kept them, and forgets them: one per parameter, summed over
// all replicas, before clipping. With [DiLoCo] they are those of this worker. The result is nil if no step was taken
// since [Trainer.KeepGradients]. The tensors belong to the caller.
func (t *Trainer) KeptGradients() []Weight {
	if !t.kept.ready {
		return nil
	}
	var list []Weight
	for i, v := range t.Parameters() {
		list = append(list, Weight{v.Name, t.kept.values[i]})
	}
	t.kept = keptGradients{}
	return list
}

// keep copies the sums of a bucket.
func (t *Trainer) keep(k int) {
	if t.kept.values == nil {
		t.kept.values = make([]*tensor.Tensor, len(t.Parameters()))
	}
	for i, x := range t.local[0].gradients[k] {
		t.kept.values[t.buckets[k].parameters[i]] = x.Clone()
	}
}
