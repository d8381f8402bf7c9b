package train

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scalarNames names the vector of loss and metrics in errors.
var scalarNames = []string{"loss and metrics"}

// step runs one training step: it computes gradients, all-reduces and applies them, and then makes the new
// values visible on all replicas or on none. stop reports that a worker requested a stop before this step;
// then no worker took it. problem is not nil if loss or gradients are not finite; then made reports whether
// the step was taken anyway.
func (t *Trainer) step(ctx context.Context, g *globalBatch) (made, stop bool, problem *NotFiniteError, err error) {
	g.stop = t.wantsStop()
	once := func() (stop bool, err error) {
		for i := range t.parts {
			t.parts[i].notFinite = -1
		}
		return t.transact(ctx, g, func(ctx context.Context, r *distribute.Replica) error {
			return t.reduceAndApply(ctx, r, g)
		})
	}
	g.tolerated = t.tolerates(false)
	if stop, err = once(); !errors.Is(err, errNotFinite) {
		if made = err == nil && !stop; made && !t.allFinite() { // not reported, see tolerates
			t.notFinite++
			loss, _ := t.scalars()
			problem = &NotFiniteError{
				Step: t.committed, Loss: loss, Replica: -1, Example: -1,
				Detail: "see the log for the first ones, with their causes",
			}
		}
		return made, stop, problem, err
	}
	if problem, err = t.report(ctx, g, false); err != nil || t.config.NotFinite == SkipNotFinite {
		return false, false, problem, err
	}
	g.tolerated = true // repeat the step: report has recomputed and discarded it
	stop, err = once()
	return err == nil && !stop, stop, problem, err
}

// reduceAndApply applies each pack as soon as its gradients are reduced, while later packs are still being
// reduced.
func (t *Trainer) reduceAndApply(ctx context.Context, r *distribute.Replica, g *globalBatch) error {
	if len(t.packs) == 1 {
		if err := t.reduceGradients(ctx, r, g); err != nil {
			return err
		}
		return t.apply(ctx, r, t.applySums)
	}
	p := &t.parts[r.LocalID()]
	out, err := t.gradients(ctx, r, g)
	if err != nil {
		return err
	}
	p.take(t.packs, out.Tensors)
	p.flatten()
	t.replicaAt(r, PhaseReduce)
	for done, err := range r.AllReducePacks(ctx, distribute.Sum, p.flat.dst, p.flat.src, t.flatNames) {
		if err != nil {
			return err
		}
		t.replicaAt(r, PhasePacks)
		for _, i := range done {
			k := t.flatPacks[i]
			p.checkSums(r.LocalID(), len(t.parts), p.flat.dst[i:i+1], func(int) int { return t.flatParameters[i] })
			if p.flat.left[k]--; p.flat.left[k] > 0 {
				continue
			}
			t.replicaAt(r, PhaseApply)
			if err := t.applySums(ctx, r.LocalID(), k); err != nil {
				return fmt.Errorf("apply: %w", err)
			}
		}
	}
	return t.reduceScalars(ctx, r, g, out.Loss, out.Metrics)
}

// gradients computes the replica's share of the gradients.
func (t *Trainer) gradients(ctx context.Context, r *distribute.Replica, g *globalBatch) (engine.Gradients, error) {
	local := r.LocalID()
	t.replicaAt(r, PhaseCompute)
	t.parts[local].replica = r // for the model's own all-reduces
	out, err := t.program.Gradients(ctx, local, g.shares[local], g.weightSum,
		randomState(t.config.Seed, t.committed, g.pass, r.ID()))
	if err != nil {
		return out, fmt.Errorf("gradients: %w", err)
	}
	return out, nil
}

// flat lists a replica's gradients of all packs, in the order of packs.
type flat struct {
	dst, src []*tensor.Tensor
	left     []int // by pack: number of gradients not reduced yet
}

func (p *part) flatten() {
	f := &p.flat
	f.dst, f.src, f.left = f.dst[:0], f.src[:0], f.left[:0]
	for k, gradients := range p.gradients {
		f.dst, f.src = append(f.dst, p.sums[k]...), append(f.src, gradients...)
		f.left = append(f.left, len(gradients))
	}
}

// take stores the gradients of a step by pack.
func (p *part) take(packs []pack, gradients []*tensor.Tensor) {
	for k, pack := range packs {
		for i, parameter := range pack.parameters {
			p.gradients[k][i] = gradients[parameter]
		}
	}
}

// transact runs f on every replica, then commits on all. If f failed on any replica, or a worker requested a
// stop, it discards on all. g is the batch whose scalars f reduces, or nil if it reduces none. transact
// returns errNotFinite if the scalars are not finite and g does not tolerate that.
func (t *Trainer) transact(ctx context.Context, g *globalBatch,
	f func(context.Context, *distribute.Replica) error,
) (stop bool, err error) {
	err = t.run(ctx, f)
	stop = err == nil && g != nil && t.stopAgreed()
	if err == nil && !stop && g != nil && !g.tolerated && !t.allFinite() {
		err = errNotFinite
	}
	if err != nil || stop {
		t.discard()
		return stop, err
	}
	t.commit()
	t.committed++
	t.passes = 0
	return false, nil
}

func (t *Trainer) commit() {
	for replica := range t.parts {
		t.program.Commit(replica)
	}
}

func (t *Trainer) discard() {
	for replica := range t.parts {
		t.program.Discard(replica)
	}
}

// run runs f on every replica, and returns when every call of f has returned. After a failure, distribute.Run
// waits for the other replicas for a limited time only. f calls only the engine and the reductions, so it
// always returns; until then the engine's variables must not be touched.
func (t *Trainer) run(ctx context.Context, f func(context.Context, *distribute.Replica) error) error {
	_, err := distribute.Run(ctx, t.strategy, func(ctx context.Context, r *distribute.Replica,
		_ ...distribute.Value,
	) (distribute.Value, error) {
		return nil, f(ctx, r)
	})
	if failure, ok := err.(*distribute.StepError); ok { // not wrapped, so of this Run and not of an outer one
		failure.Wait()
	}
	return err
}

// reduceGradients writes the sums of all replicas' gradients, loss and metrics to the replica's part.
func (t *Trainer) reduceGradients(ctx context.Context, r *distribute.Replica, g *globalBatch) error {
	p := &t.parts[r.LocalID()]
	out, err := t.gradients(ctx, r, g)
	if err != nil {
		return err
	}
	t.replicaAt(r, PhaseReduce)
	p.take(t.packs, out.Tensors)
	for k, pack := range t.packs {
		if err := r.AllReduceInto(ctx, distribute.Sum, p.sums[k], p.gradients[k], pack.names); err != nil {
			return err
		}
		p.checkSums(r.LocalID(), len(t.parts), p.sums[k], func(i int) int { return pack.parameters[i] })
	}
	return t.reduceScalars(ctx, r, g, out.Loss, out.Metrics)
}

// sum implements the all-reduces inside a model, which run during the gradients program.
func (t *Trainer) sum(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
	return t.parts[replica].replica.AllReduceInto(ctx, distribute.Sum, dst, src, names)
}

// reduceScalars all-reduces loss and metrics, together with the values that the workers compare.
func (t *Trainer) reduceScalars(ctx context.Context, r *distribute.Replica, g *globalBatch, loss float64,
	metrics []float64,
) error {
	t.replicaAt(r, PhaseReduce)
	p := &t.parts[r.LocalID()]
	local := tensor.Data[float64](p.local[0])
	local[0] = loss
	n := copy(local[1:], metrics)
	t.putAgreement(g, local[1+n:])
	if p.notFinite >= 0 {
		local[1+n+agreedNotFinite] = 1
	}
	if err := r.AllReduceInto(ctx, distribute.Sum, p.global, p.local, scalarNames); err != nil {
		return err
	}
	return t.checkAgreement(ctx, r, g, tensor.Data[float64](p.global[0])[1+n:])
}

// scalars returns the last step's loss and sums of metrics over all replicas. The next step overwrites them.
func (t *Trainer) scalars() (loss float64, sums []float64) {
	s := tensor.Data[float64](t.parts[0].global[0])
	return s[0], s[1 : 1+len(t.metrics)]
}

// apply applies all packs with the given method of the program.
func (t *Trainer) apply(ctx context.Context, r *distribute.Replica,
	pack func(ctx context.Context, replica, pack int) error,
) error {
	t.replicaAt(r, PhaseApply)
	for k := range t.packs {
		if err := pack(ctx, r.LocalID(), k); err != nil {
			return fmt.Errorf("apply: %w", err)
		}
	}
	return nil
}

// Gradients returns the gradients of the mean loss of b, reduced over all replicas, in the order of
// [Trainer.Parameters], and loss and metrics. With [Trainer.ApplyGradients] it forms a custom training loop,
// which may clip, accumulate or record gradients in between. b is a global batch of at most
// Config.GlobalBatch examples, the same on all workers. The caller owns the returned tensors. A batch whose
// weights add up to 0 is an error.
//
// Gradients runs a forward and a backward pass in training mode, as a training=True call in Keras does. So
// each call changes the variables that the model function changes (moving averages of batch normalization,
// counters of learning-rate schedules in the model), and draws new random numbers (dropout). Parameters and
// the optimizer's slots keep their values until ApplyGradients. On error no variable has changed.
func (t *Trainer) Gradients(ctx context.Context, b data.Batch) ([]*tensor.Tensor, Result, error) {
	g, err := t.borrow(true)
	if err != nil {
		return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
	}
	defer t.giveBack(g)
	if err := t.knowsLastStep(); err != nil {
		return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
	}
	if err := g.fill(b); err != nil {
		return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
	}
	if g.weightSum == 0 {
		return nil, Result{}, fmt.Errorf("train: gradients: the weights of the batch's %d examples add up to 0", g.examples)
	}
	g.pass = t.passes
	defer func() { g.pass = 0 }()
	err = t.run(ctx, func(ctx context.Context, r *distribute.Replica) error { return t.reduceGradients(ctx, r, g) })
	if err != nil {
		t.discard()
		return nil, Result{}, fmt.Errorf("train: %w", err)
	}
	out := make([]*tensor.Tensor, len(t.Parameters()))
	for k, pack := range t.packs {
		for i, parameter := range pack.parameters {
			out[parameter] = t.parts[0].sums[k][i].Clone()
		}
	}
	t.commit() // no pack was applied: commits only what the forward pass changed
	t.passes++
	m := newMean(t.metrics)
	m.add(g, t)
	return out, m.result(), nil
}

// ApplyGradients takes the optimizer's step on every replica, with gradients that are already reduced over
// replicas: one per parameter, in the order of [Trainer.Parameters]. It is Keras' apply_gradients without
// aggregation. With several workers, every worker calls it with the same gradients. On error no variable has
// changed, except by an earlier [Trainer.Gradients].
func (t *Trainer) ApplyGradients(ctx context.Context, gradients []*tensor.Tensor) error {
	parameters := t.Parameters()
	if len(gradients) != len(parameters) {
		return fmt.Errorf("train: apply gradients: %d gradients given for %d parameters", len(gradients), len(parameters))
	}
	for i, v := range parameters {
		if err := fits(gradients[i], v.DType, v.Shape); err != nil {
			return fmt.Errorf("train: apply gradients: gradient of %s: %w", v.Name, err)
		}
	}
	_, err := t.transact(ctx, nil, func(ctx context.Context, r *distribute.Replica) error {
		for k, pack := range t.packs {
			for i, parameter := range pack.parameters {
				copy(t.parts[r.LocalID()].inputs[k][i].Memory().HostBytes(), gradients[parameter].Memory().HostBytes())
			}
		}
		return t.apply(ctx, r, t.program.Apply)
	})
	if err != nil {
		return fmt.Errorf("train: apply gradients: %w", err)
	}
	return nil
}
