package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// DiLoCo is the [Exchange] of training with rare exchanges (Douillard and others, "DiLoCo: Distributed
// Low-Communication Training of Language Models", 2023). The workers take InnerSteps steps, each by itself: the
// replicas of one worker share their gradients, the workers exchange nothing. Then the mean over all replicas of what
// these steps have subtracted from the parameters is the gradient of one outer step, by SGD with Nesterov's momentum
// (PyTorch's SGD with nesterov=True). All workers continue with its result. So the results depend on how replicas are
// divided among workers.
//
// An outer step also follows the last step of an epoch and of a training. Between two outer steps the parameters
// differ between workers, so [Trainer.Snapshot], [Trainer.Evaluate] and [Trainer.Predict] are errors there, and a stop
// request waits; see [Step].Outer. The optimizer's slots always differ between workers, and snapshots hold those of
// each.
//
// Compress applies to the exchange of an outer step. Not supported are [Trainer.Gradients], ApplyGradients,
// central storage, float16 (Config.LossScaling), moving averages of the weights (optimizer.EMA), and another
// Config.NotFinite than [FailNotFinite].
type DiLoCo struct {
	// InnerSteps is the number of steps between two outer steps (H in the paper), at least 1.
	InnerSteps int `json:"inner_steps"`
	// LearningRate is that of the outer steps. Default: 0.7, as in the paper.
	LearningRate float64 `json:"learning_rate"`
	// Momentum is that of the outer steps, less than 1. Default: 0.9, as in the paper. Negative: none. Without momentum
	// and with a learning rate of 1 an outer step takes the mean of the parameters: local SGD, or federated averaging.
	Momentum float64 `json:"momentum"`
	// Compress specifies how the changes of the parameters are exchanged in an outer step, as that of AllReduce.
	Compress compress.Codec `json:"-"`
}

// The paper's best outer optimizer.
const (
	outerLearningRate = 0.7
	outerMomentum     = 0.9
)

// String describes the configuration.
func (d DiLoCo) String() string {
	return fmt.Sprintf("DiLoCo with %s, outer learning rate %v and outer momentum %v", plural(d.InnerSteps, "inner step"),
		d.LearningRate, max(d.Momentum, 0))
}

func (d DiLoCo) codec() compress.Codec { return d.Compress }

func (d DiLoCo) complete(c *Config) (_ Exchange, err error) {
	if d.LearningRate == 0 {
		d.LearningRate = outerLearningRate
	}
	if d.Momentum == 0 {
		d.Momentum = outerMomentum
	}
	if err := d.check(); err != nil {
		return d, err
	}
	if c.NotFinite != FailNotFinite {
		return d, fmt.Errorf("DiLoCo with Config.NotFinite %q: a worker may skip a step that others take: leave NotFinite "+
			"out", c.NotFinite)
	}
	d.Compress, err = completeCodec(d.Compress)
	return d, err
}

// check returns an error if the configuration is invalid.
func (d *DiLoCo) check() error {
	switch {
	case d.InnerSteps < 1:
		return fmt.Errorf("InnerSteps is %d: want the number of steps between two exchanges, at least 1", d.InnerSteps)
	case !(d.LearningRate > 0) || math.IsInf(d.LearningRate, 1):
		return fmt.Errorf("LearningRate is %v: want a positive number, or 0 for %v", d.LearningRate, outerLearningRate)
	case !(d.Momentum < 1) || math.IsInf(d.Momentum, -1):
		return fmt.Errorf("the Momentum is %v: want less than 1, 0 for %v, or a negative number for none", d.Momentum,
			outerMomentum)
	}
	return nil
}

// diloco takes the steps of DiLoCo: inner steps all-reduce gradients over the replicas of this worker, by
// Trainer.exchange, and outer steps sum the changes of the parameters over all. A round is the inner steps up to an
// outer step, and that step. Of a Trainer without DiLoCo it is nil: then the workers' parameters are always equal.
type diloco struct {
	t *Trainer
	DiLoCo
	changes     *allReduce       // of outer steps
	compression compression      // of changes
	momentum    []*tensor.Tensor // of the outer steps, by parameter

	// Of the round in progress:
	steps   int              // taken, of InnerSteps
	begun   int64            // Trainer.committed at its beginning
	weights []*tensor.Tensor // at its beginning, by parameter
	mean    *mean            // of this worker's loss and metrics; its examples are those of all workers
	states  []stepState      // of its batches, for the workers to compare
	rows    [][]float64      // by local replica: of the rows read twice, as the values that workers compare
	scalars [][]float64      // by replica: mean and the values that workers compare; then their sums
}

// newDiLoCo makes the exchange, and with several workers the strategy for inner steps.
func (t *Trainer) newDiLoCo(cfg DiLoCo) (*diloco, error) {
	if err := t.supportsDiLoCo(); err != nil {
		return nil, err
	}
	d := &diloco{t: t, DiLoCo: cfg, mean: t.newMean()}
	for _, v := range t.Parameters() {
		d.momentum = append(d.momentum, tensor.New(v.DType, v.Shape...))
	}
	for range t.local {
		d.scalars = append(d.scalars, make([]float64, 2+len(d.mean.sums)+agreed))
		d.rows = append(d.rows, make([]float64, agreed))
	}
	if !t.others() {
		t.config.Logger.Warn(fmt.Sprintf("train: DiLoCo on a single worker exchanges nothing: an outer step every %s "+
			"only changes how it trains; leave DiLoCo out, or start more workers", plural(d.InnerSteps, "step")))
	} else {
		var devices []string
		for _, x := range t.strategy.EngineDevices() {
			devices = append(devices, fmt.Sprintf("%s:%d", x.Kind, x.Index))
		}
		o := t.strategy.Options()
		inner, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
			Devices: devices, Engine: t.strategy.Engine(), Logger: t.config.Logger,
			Options: distribute.Options{Timeout: o.Timeout, Accumulate: o.Accumulate, Order: o.Order},
		})
		if err != nil {
			return nil, err
		}
		t.inner = inner
	}
	d.compression = t.compressions(cfg.Compress)
	d.changes = t.newAllReduce(d.compression)
	return d, nil
}

// supportsDiLoCo returns an error if the strategy or the model does not support DiLoCo.
func (t *Trainer) supportsDiLoCo() error {
	switch {
	case t.central:
		return errors.New("central storage has no other workers: use NewMirroredStrategy or NewMultiWorkerMirroredStrategy")
	case t.scale.Scale != 0:
		return errors.New("a worker with an overflow in float16 would skip a step that others take: compute in bfloat16 or " +
			"float32")
	}
	if list, err := t.ema(); err == nil && list != nil {
		return errors.New("the optimizer keeps moving averages of the weights, which would differ between workers: leave " +
			"out optimizer.EMA")
	}
	for _, m := range t.metrics {
		if m.Stream != nil {
			return fmt.Errorf("the metric %q follows the order of the global batches, and each worker takes its own steps: "+
				"want a mean over all examples", m.name)
		}
	}
	for _, v := range t.Parameters() {
		if v.DType != tensor.Float32 && v.DType != tensor.Float64 {
			return fmt.Errorf("the parameter %s is %v: want float32 or float64", v.Name, v.DType)
		}
	}
	return nil
}

// kept lists the momentum of outer steps, as values of the state table.
func (d *diloco) kept() (list []*stateValue) {
	if d == nil {
		return nil
	}
	for i, v := range d.t.Parameters() {
		momentum := &stateValue{
			name: "outer momentum of " + v.Name, kind: kindMomentum, dtype: v.DType, shape: v.Shape, mirrored: true,
			read: func(int) (*tensor.Tensor, error) { return d.momentum[i].Clone(), nil },
			write: func(_ int, value *tensor.Tensor) error {
				copy(d.momentum[i].Memory().HostBytes(), value.Memory().HostBytes())
				return nil
			},
		}
		list = append(list, d.t.addEntries(momentum))
	}
	return list
}

// replicaID returns the id of a replica among those of all workers, also in an inner step.
func (t *Trainer) replicaID(r *distribute.Replica) int {
	return t.ids()[r.LocalID()]
}

// fitOnly returns an error if only Fit can train.
func (t *Trainer) fitOnly() error {
	if t.config.diloco() == nil {
		return nil
	}
	return errors.New("Config.Exchange is DiLoCo: only Fit takes inner and outer steps; use another exchange")
}

// checkEqual returns an error that says why the workers' parameters differ, or nil if they are equal.
func (d *diloco) checkEqual() error {
	if d == nil || d.steps == 0 {
		return nil
	}
	return fmt.Errorf("after %d of %d inner steps of DiLoCo the workers' parameters differ: call it after an outer step "+
		"(Step.Outer), or at the end of an epoch", d.steps, d.InnerSteps)
}

// fitStep is [Trainer.fitStep]: it takes an inner step, and the outer step if the round is complete.
func (d *diloco) fitStep(ctx context.Context, b *stepBatches, mean *mean) (result stepResult, err error) {
	if b.weightSum == 0 {
		return stepResult{round: d.mean}, nil
	}
	if result.stop, err = d.innerStep(ctx, b); err == nil && !result.stop {
		result.taken = true
		if d.steps >= d.InnerSteps {
			result.outer, err = true, d.endRound(ctx, mean)
		}
	}
	result.round = d.mean
	return result, err
}

// endEpoch takes an outer step after the last step of an epoch, unless one has just been taken, and completes mean.
func (d *diloco) endEpoch(ctx context.Context, mean *mean) error {
	if d == nil || d.steps == 0 {
		return nil
	}
	return d.endRound(ctx, mean)
}

// restrict restricts a step to this worker's share of its batches.
func (d *diloco) restrict(b *stepBatches) {
	b.weightSum = 0
	for _, g := range b.list {
		g.weightSum = 0
		for _, share := range g.shares {
			for _, w := range share.Weights {
				g.weightSum += float64(w)
			}
		}
		b.weightSum += g.weightSum
	}
}

// beginRound begins a round before an inner step, unless one is in progress. The workers compare their states. stop
// reports that one of them requested a stop.
func (d *diloco) beginRound(ctx context.Context, b *stepBatches) (stop bool, err error) {
	t := d.t
	if d.steps > 0 {
		return false, nil
	}
	if !t.others() {
		stop = t.stopRequested
	} else {
		b.stop = t.wantsStop()
		err = t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
			clear(t.local[r.LocalID()].scalars)
			return t.reduceScalars(ctx, r, b)
		})
		stop, b.stop = err == nil && t.stopAgreed(), false
	}
	if err != nil || stop {
		return stop, err
	}
	d.begun = t.committed
	if d.weights, err = t.readParameters(0); err != nil {
		t.failOthers(ctx, err)
	}
	return false, err
}

func (t *Trainer) readParameters(local int) ([]*tensor.Tensor, error) {
	list := make([]*tensor.Tensor, len(t.Parameters()))
	for i, v := range t.Parameters() {
		var err error
		if list[i], err = t.program.Read(local, i); err != nil {
			return nil, fmt.Errorf("reading %s on replica %d: %w", v.Name, t.ids()[local], err)
		}
	}
	return list, nil
}

// innerStep takes an inner step, on this worker alone. It counts even if none of its examples are this worker's.
func (d *diloco) innerStep(ctx context.Context, b *stepBatches) (stop bool, err error) {
	t := d.t
	if t.others() {
		d.restrict(b)
	}
	if stop, err = d.beginRound(ctx, b); stop || err != nil {
		return stop, err
	}
	if t.others() {
		for _, g := range b.list {
			d.states = append(d.states, t.stepState(g))
			for local, sums := range d.rows {
				g.identity.put(t.ids()[local], local, sums)
			}
		}
	}
	if b.weightSum == 0 {
		t.committed++
	} else if _, err = t.step(ctx, b); err != nil {
		t.failOthers(ctx, err)
		return false, err
	}
	d.steps++
	d.mean.add(b, t)
	return false, nil
}

// endRound takes the outer step. It adds the loss and metrics of all workers to mean.
func (d *diloco) endRound(ctx context.Context, mean *mean) error {
	t := d.t
	for i, to := range d.scalars {
		clear(to)
		if i == 0 { // all replicas of a worker have the same
			to[0], to[1] = d.mean.loss, d.mean.weight
			copy(to[2:], d.mean.sums)
		}
		if t.others() {
			var hash uint64
			for _, s := range d.states {
				hash = s.addHash(hash)
			}
			compared := to[2+len(d.mean.sums):]
			putHash(hash, t.strategy.NumReplicasInSync(), compared)
			copy(compared[agreedRow:agreedWriting], d.rows[i][agreedRow:])
		}
	}
	err := t.run(ctx, d.exchangeChanges)
	if err == nil {
		err = d.finiteChanges()
	}
	if err != nil {
		t.discard()
		return fmt.Errorf("outer step: %w", err)
	}
	if err := d.descend(); err != nil {
		t.failOthers(ctx, err)
		return fmt.Errorf("outer step: %w", err)
	}
	d.compression.each(compress.Exchange.Commit)
	t.program.Discard() // the sums are in the memory of gradients
	all := d.scalars[0]
	d.mean.loss, d.mean.weight = all[0], all[1]
	copy(d.mean.sums, all[2:])
	mean.merge(d.mean)
	t.outer++
	d.newRound()
	return nil
}

// newRound forgets the round in progress.
func (d *diloco) newRound() {
	d.steps, d.mean, d.states, d.weights = 0, d.t.newMean(), d.states[:0], nil
	for _, sums := range d.rows {
		clear(sums)
	}
}

// drop undoes a round that has failed, perhaps in its first step: the parameters get the values that they had at its
// beginning on all workers, and its steps do not count.
func (d *diloco) drop() error {
	if d == nil {
		return nil
	}
	if d.steps > 0 {
		for i, value := range d.weights {
			if err := d.t.write(i, value); err != nil {
				return fmt.Errorf("dropping the inner steps since the last outer step: %w", err)
			}
		}
		d.t.committed, d.t.passes = d.begun, 0
	}
	d.newRound()
	return nil
}

// exchangeChanges sums what the round's inner steps have subtracted from the parameters over all replicas, in the
// memory of the gradients.
func (d *diloco) exchangeChanges(ctx context.Context, r *distribute.Replica) error {
	t, local := d.t, r.LocalID()
	p := &t.local[local]
	t.replicaEnters(r, PhaseOuter)
	now, err := t.readParameters(local)
	if err != nil {
		return err
	}
	for k, b := range t.buckets {
		if err := t.memory(local, k); err != nil {
			return err
		}
		for i, parameter := range b.parameters {
			subtract(p.gradients[k][i], d.weights[parameter], now[parameter])
		}
		if r.NumReplicas() == 1 {
			continue
		}
		call := distribute.Bucket{Dst: p.gradients[k], Src: p.gradients[k], Names: b.names}
		if k == len(t.buckets)-1 {
			call.Scalars = d.scalars[local]
		}
		if err := d.changes.reductions[local][k].start(ctx, r, t.outer, call); err != nil {
			return err
		}
	}
	if r.NumReplicas() == 1 {
		return nil
	}
	if err := d.changes.finish(ctx, p, func(int) error { return nil }); err != nil {
		return err
	}
	if !t.others() {
		return nil
	}
	compared := d.scalars[local][2+len(d.mean.sums):]
	switch {
	case !sameHash(compared, r.NumReplicas()):
		return t.compareStates(ctx, r, d.states)
	case slices.ContainsFunc(compared[agreedRow:agreedWriting], func(x float64) bool { return x != 0 }):
		return errContents
	}
	return nil
}

// finiteChanges returns an error if a sum of changes is not finite. It is the same on all workers.
func (d *diloco) finiteChanges() error {
	t := d.t
	for k, b := range t.buckets {
		for i, x := range t.local[0].gradients[k] {
			if at := tensor.FirstNotFinite(x); at >= 0 {
				return fmt.Errorf("the changes of %s in %s, summed over all replicas, are not finite: element %s is %v: use "+
					"smaller learning rates", b.names[i], plural(d.steps, "inner step"), position(x.Shape(), at),
					x.Float64s()[at])
			}
		}
	}
	return nil
}

// descend takes the outer step from the sums of changes, and writes the new parameters on all replicas.
func (d *diloco) descend() error {
	t := d.t
	for k, b := range t.buckets {
		for i, parameter := range b.parameters {
			value := d.weights[parameter]
			d.nesterov(value, d.momentum[parameter], t.local[0].gradients[k][i], t.strategy.NumReplicasInSync())
			if err := t.write(parameter, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// subtract sets to = a - b.
func subtract(to, a, b *tensor.Tensor) {
	if to.DType() == tensor.Float32 {
		subtractAll(tensor.Data[float32](to), tensor.Data[float32](a), tensor.Data[float32](b))
		return
	}
	subtractAll(tensor.Data[float64](to), tensor.Data[float64](a), tensor.Data[float64](b))
}

func subtractAll[T float32 | float64](to, a, b []T) {
	for i := range to {
		to[i] = a[i] - b[i]
	}
}

// nesterov takes a step of SGD with Nesterov's momentum from the sum of n gradients.
func (d *diloco) nesterov(value, momentum, sum *tensor.Tensor, n int) {
	rate, mu := d.LearningRate, max(d.Momentum, 0)
	if value.DType() == tensor.Float32 {
		nesterov(tensor.Data[float32](value), tensor.Data[float32](momentum), tensor.Data[float32](sum), float32(n),
			float32(rate), float32(mu))
		return
	}
	nesterov(tensor.Data[float64](value), tensor.Data[float64](momentum), tensor.Data[float64](sum), float64(n), rate, mu)
}

// nesterov rounds every product, so that no processor fuses it with a sum.
func nesterov[T float32 | float64](value, momentum, sum []T, n, rate, mu T) {
	for i := range value {
		gradient := sum[i] / n
		m := T(mu*momentum[i]) + gradient
		momentum[i] = m
		value[i] -= T(rate * (gradient + T(mu*m)))
	}
}
