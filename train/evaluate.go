package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Evaluate returns loss and metrics over all examples of ds, which yields global batches as for
// [Trainer.Fit]. It changes no variable. It uses the weights that [Trainer.Weights] returns and
// [Trainer.Export] writes, with averages combined over all replicas. With several workers, every worker calls
// it with the same data. If [Trainer.Stop] ends it, on any worker, it returns [ErrStop]. A loss that is not
// finite is an error, unless Config.NotFinite selects another policy.
func (t *Trainer) Evaluate(ctx context.Context, ds data.Dataset) (Result, error) {
	m := newMean(t.metrics, t.config.LossReduction)
	if err := t.diloco.checkEqual(); err != nil {
		return Result{}, fmt.Errorf("train: evaluate: %w", err)
	}
	var step stepBatches
	err := t.each(ctx, ds, true, func(g *globalBatch) error {
		if !t.others() && t.stopping.Load() {
			return ErrStop
		}
		step.set(g)
		if g.weightSum > 0 {
			step.stop = t.wantsStop()
			if err := t.evaluate(ctx, &step); err != nil {
				return err
			}
			if t.stopAgreed() {
				return ErrStop
			}
			if !t.finiteLoss() {
				if t.tolerates(true) {
					t.notFinite++
				} else if _, err := t.reportNotFinite(ctx, &step, true); err != nil {
					return err
				}
			}
		}
		m.add(&step, t)
		return nil
	})
	if errors.Is(err, ErrStop) && t.fitting.Load() == nil { // within a Fit, that Fit ends too
		t.stopping.Store(false)
	}
	if err != nil {
		return Result{}, fmt.Errorf("train: evaluate: %w", err)
	}
	return m.result(), nil
}

func (t *Trainer) evaluate(ctx context.Context, b *stepBatches) error {
	return t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		t.replicaEnters(r, PhaseEvaluate)
		local, g := r.LocalID(), b.list[0]
		clear(t.local[local].scalars)
		if g.rows[r.ID()] > 0 {
			loss, metrics, err := t.program.Evaluate(ctx, local, g.shares[local],
				t.config.LossReduction.divisor(g.weightSum, int64(g.examples)))
			if err != nil {
				return err
			}
			t.local[local].add(engine.Scalars{Loss: loss, Metrics: metrics})
		}
		return t.reduceScalars(ctx, r, b)
	})
}

// Predict returns the model's outputs for all examples of ds, in order: one tensor per output, with the
// examples along its first dimension. It ignores labels and weights, and uses the weights that
// [Trainer.Weights] returns. The tensors belong to the caller. With several workers, every worker calls it
// with the same data, and gets the outputs for all examples.
func (t *Trainer) Predict(ctx context.Context, ds data.Dataset) ([]*tensor.Tensor, error) {
	if err := t.diloco.checkEqual(); err != nil {
		return nil, fmt.Errorf("train: predict: %w", err)
	}
	var pieces [][]*tensor.Tensor // by batch and replica, then by output
	err := t.each(ctx, ds, false, func(g *globalBatch) error {
		outputs := make([][]*tensor.Tensor, len(t.local))
		err := t.run(ctx, func(ctx context.Context, r *distribute.Replica) (err error) {
			t.replicaEnters(r, PhasePredict)
			local, others := r.LocalID(), r.NumReplicas() > len(t.local)
			if g.rows[r.ID()] == 0 && !others {
				return nil
			}
			if outputs[local], err = t.program.Predict(ctx, local, g.shares[local].Inputs); err == nil && others {
				outputs[local], err = t.gatherOutputs(ctx, r, g, outputs[local])
			}
			return err
		})
		if err != nil {
			return err
		}
		if t.strategy.NumReplicasInSync() > len(t.local) { // every replica has all replicas' rows
			pieces = append(pieces, outputs[0])
			return nil
		}
		for replica, out := range outputs {
			var piece []*tensor.Tensor
			for _, o := range out {
				piece = append(piece, o.Rows(0, g.rows[replica]))
			}
			if piece != nil {
				pieces = append(pieces, piece)
			}
		}
		return nil
	})
	if err == nil && len(pieces) == 0 {
		err = errors.New("the dataset has no examples")
	}
	if err != nil {
		return nil, fmt.Errorf("train: predict: %w", err)
	}
	out := make([]*tensor.Tensor, len(pieces[0]))
	for i := range out {
		for _, p := range pieces {
			if a, b := p[i].Shape()[1:], pieces[0][i].Shape()[1:]; !slices.Equal(a, b) {
				return nil, fmt.Errorf("train: predict: output %d has shape %s for some examples and %s for others, so it does "+
					"not fit in one tensor: predict batches of one length at a time", i, tensor.FormatShape(b),
					tensor.FormatShape(a))
			}
		}
		out[i] = join(pieces, i)
	}
	return out, nil
}

// gatherOutputs returns the rows of all replicas' outputs that belong to examples, including those of other
// workers. It sends the values that workers compare with them, as the all-reduce of loss and metrics does.
func (t *Trainer) gatherOutputs(
	ctx context.Context, r *distribute.Replica, g *globalBatch, outputs []*tensor.Tensor,
) ([]*tensor.Tensor, error) {
	b := &stepBatches{list: []*globalBatch{g}}
	compared := make([]float64, agreed)
	t.putAgreement(r, b, compared)
	mine := []*tensor.Tensor{tensor.From(compared, 1, agreed)}
	for _, o := range outputs {
		mine = append(mine, o.Rows(0, g.rows[r.ID()]))
	}
	all, err := distribute.AllGather(ctx, r, mine, 0)
	if err != nil {
		return nil, err
	}
	clear(compared)
	for i, x := range tensor.Data[float64](all[0]) { // the same on all replicas
		compared[i%agreed] += x
	}
	if err := t.checkAgreed(ctx, r, b, compared); err != nil {
		return nil, err
	}
	return all[1:], nil
}

// each calls f for every global batch of ds, while averages are combined over the replicas.
func (t *Trainer) each(ctx context.Context, ds data.Dataset, labels bool, f func(*globalBatch) error) (err error) {
	feed, err := t.feed(ctx, ds, feedConfig{limit: -1, labels: labels, evaluation: true})
	if err != nil {
		t.failOthers(ctx, err)
		return err
	}
	defer func() { err = t.closeFeed(ctx, feed, err) }()
	restore, err := t.combineAverages(ctx)
	defer func() { err = errors.Join(err, restore()) }()
	if err != nil {
		t.failOthers(ctx, err)
		return err
	}
	for {
		t.enter(PhaseData)
		g, err := feed.next(ctx)
		if err != nil {
			t.failOthers(ctx, err)
		}
		if g == nil || err != nil {
			return err
		}
		if err := f(g); err != nil {
			return err
		}
		feed.release(g)
	}
}

// join concatenates output i of all pieces along the first dimension.
func join(pieces [][]*tensor.Tensor, i int) *tensor.Tensor {
	rows := 0
	for _, p := range pieces {
		rows += p[i].Shape()[0]
	}
	first := pieces[0][i]
	out := tensor.New(first.DType(), append([]int{rows}, first.Shape()[1:]...)...)
	to := out.Memory().HostBytes()
	for _, p := range pieces {
		to = to[copy(to, p[i].Memory().HostBytes()):]
	}
	return out
}
