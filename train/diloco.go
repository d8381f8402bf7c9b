package train

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// DiLoCo configures training with rare exchanges (Douillard and others, "DiLoCo: Distributed Low-Communication Training
// of Language Models", 2023). The workers take InnerSteps steps, each by itself: the replicas of one worker share their
// gradients, the workers exchange nothing. Then the mean over all replicas of what these steps have subtracted from the
// parameters is the gradient of one outer step, by SGD with Nesterov's momentum (PyTorch's SGD with nesterov=True). All
// workers continue with its result. So the results depend on how replicas are divided among workers.
//
// An outer step also follows the last step of an epoch and of a training. Between two outer steps the parameters
// differ between workers, so [Trainer.Snapshot], [Trainer.Evaluate] and [Trainer.Predict] are errors there, and a stop
// request waits; see [Step].Outer. The optimizer's slots always differ between workers, and snapshots hold those of
// each.
//
// Config.Compress applies to the exchange of an outer step. Not supported are [Trainer.Gradients], ApplyGradients,
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
}

// The paper's best outer optimizer.
const (
	outerLearningRate = 0.7
	outerMomentum     = 0.9
)

// String describes the configuration.
func (d *DiLoCo) String() string {
	return fmt.Sprintf("DiLoCo with %s, outer learning rate %v and outer momentum %v", plural(d.InnerSteps, "inner step"),
		d.LearningRate, max(d.Momentum, 0))
}

// completeDiLoCo sets the defaults and validates the rest.
func (c *Config) completeDiLoCo() error {
	if c.DiLoCo == nil {
		return nil
	}
	d := *c.DiLoCo
	if d.LearningRate == 0 {
		d.LearningRate = outerLearningRate
	}
	if d.Momentum == 0 {
		d.Momentum = outerMomentum
	}
	if err := d.check(); err != nil {
		return fmt.Errorf("train: Config.DiLoCo: %w", err)
	}
	if c.NotFinite != FailNotFinite {
		return fmt.Errorf("train: Config.DiLoCo with Config.NotFinite %q: a worker may skip a step that others take: leave "+
			"NotFinite out", c.NotFinite)
	}
	c.DiLoCo = &d
	return nil
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

// diloco is the state of a training with DiLoCo. A round is the inner steps up to an outer step, and that step.
type diloco struct {
	DiLoCo
	outer    int64            // outer steps taken
	momentum []*tensor.Tensor // of the outer steps, by parameter

	// Of the round in progress:
	steps   int              // taken, of InnerSteps
	begun   int64            // Trainer.committed at its beginning
	weights []*tensor.Tensor // at its beginning, by parameter
	mean    *mean            // of this worker's loss and metrics; its examples are those of all workers
	states  []stepState      // of its batches, for the workers to compare
	rows    [][]float64      // by local replica: of the rows read twice, as the values that workers compare
	scalars [][]float64      // by replica: mean and the values that workers compare; then their sums
}

// openDiLoCo makes the strategy and the state for DiLoCo, if it is configured.
func (t *Trainer) openDiLoCo() error {
	if t.config.DiLoCo == nil {
		return nil
	}
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
	d := &diloco{DiLoCo: *t.config.DiLoCo, mean: t.newMean()}
	for _, v := range t.Parameters() {
		if v.DType != tensor.Float32 && v.DType != tensor.Float64 {
			return fmt.Errorf("the parameter %s is %v: want float32 or float64", v.Name, v.DType)
		}
		d.momentum = append(d.momentum, tensor.New(v.DType, v.Shape...))
	}
	for range t.parts {
		d.scalars = append(d.scalars, make([]float64, 2+len(d.mean.sums)+agreed))
		d.rows = append(d.rows, make([]float64, agreed))
	}
	if !t.others() {
		t.config.Logger.Warn(fmt.Sprintf("train: Config.DiLoCo on a single worker exchanges nothing: an outer step every %s "+
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
			return err
		}
		t.inner = inner
	}
	t.diloco = d
	return nil
}

// summedReplicas returns engine.Spec.Summed.
func (t *Trainer) summedReplicas() int {
	if t.config.DiLoCo == nil {
		return 0
	}
	return len(t.deviceOf)
}

// replicaID returns the id of a replica among those of all workers, also in an inner step.
func (t *Trainer) replicaID(r *distribute.Replica) int {
	first, _ := t.strategy.LocalReplicas()
	return first + r.LocalID()
}

// fitOnly returns an error if only Fit can train.
func (t *Trainer) fitOnly() error {
	if t.diloco == nil {
		return nil
	}
	return errors.New("Config.DiLoCo is set: only Fit takes inner and outer steps; leave DiLoCo out")
}

// inRound reports whether the workers' parameters differ.
func (t *Trainer) inRound() bool { return t.diloco != nil && t.diloco.steps > 0 }

// betweenRounds returns an error if the workers' parameters differ.
func (t *Trainer) betweenRounds() error {
	if !t.inRound() {
		return nil
	}
	return fmt.Errorf("after %d of %d inner steps of DiLoCo the workers' parameters differ: call it after an outer step "+
		"(Step.Outer), or at the end of an epoch", t.diloco.steps, t.diloco.InnerSteps)
}

// ownShare restricts the step to this worker's share of its batches, if it is an inner step. all reports whether any
// worker's share has examples.
func (t *Trainer) ownShare(b *stepBatches) (all bool) {
	all = b.weightSum > 0
	if t.diloco == nil || !t.others() {
		return all
	}
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
	return all
}

// beginRound begins a round before an inner step, unless one is in progress. The workers compare their states. stop
// reports that one of them requested a stop.
func (t *Trainer) beginRound(ctx context.Context, b *stepBatches) (stop bool, err error) {
	d := t.diloco
	if d.steps > 0 {
		return false, nil
	}
	if !t.others() {
		stop = t.stopRequested
	} else {
		b.stop = t.wantsStop()
		err = t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
			clear(t.parts[r.LocalID()].scalars)
			return t.reduceScalars(ctx, r, b)
		})
		stop = err == nil && t.stopAgreed()
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

func (t *Trainer) readParameters(replica int) ([]*tensor.Tensor, error) {
	list := make([]*tensor.Tensor, len(t.Parameters()))
	for i, v := range t.Parameters() {
		var err error
		if list[i], err = t.program.Read(replica, i); err != nil {
			return nil, fmt.Errorf("reading %s on replica %d: %w", v.Name, replica, err)
		}
	}
	return list, nil
}

// innerStep takes an inner step, on this worker alone. It counts even if none of its examples are this worker's.
func (t *Trainer) innerStep(ctx context.Context, b *stepBatches) (stop bool, err error) {
	if stop, err = t.beginRound(ctx, b); stop || err != nil {
		return stop, err
	}
	d := t.diloco
	if t.others() {
		for _, g := range b.list {
			s := t.stepState(g)
			s[stateIndex] = uint64(len(d.states))
			d.states = append(d.states, s)
			for local, sums := range d.rows {
				g.identity.put(g.first+local, local, sums)
			}
		}
	}
	if b.weightSum == 0 {
		t.committed++
	} else if _, _, _, err = t.step(ctx, b); err != nil {
		t.failOthers(ctx, err)
		return false, err
	}
	d.steps++
	d.mean.add(b, t)
	return false, nil
}

// endRound takes the outer step if the round has so many inner steps. It adds the loss and metrics of all workers to
// mean.
func (t *Trainer) endRound(ctx context.Context, least int, mean *mean) (outer bool, err error) {
	d := t.diloco
	if d == nil || d.steps < max(least, 1) {
		return false, nil
	}
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
	err = t.run(ctx, t.exchangeChanges)
	if err == nil {
		err = t.finiteChanges()
	}
	if err != nil {
		t.discard()
		return false, fmt.Errorf("outer step: %w", err)
	}
	if err := t.descend(); err != nil {
		t.failOthers(ctx, err)
		return false, fmt.Errorf("outer step: %w", err)
	}
	t.commitExchanges()
	t.program.Discard() // the sums are in the memory of gradients
	all := d.scalars[0]
	d.mean.loss, d.mean.weight = all[0], all[1]
	copy(d.mean.sums, all[2:])
	mean.merge(d.mean)
	d.outer++
	t.newRound()
	return true, nil
}

// roundMean returns the mean over the inner steps of the round in progress, or nil without DiLoCo.
func (t *Trainer) roundMean() *mean {
	if t.diloco == nil {
		return nil
	}
	return t.diloco.mean
}

// newRound drops what belongs to the round in progress.
func (t *Trainer) newRound() {
	if d := t.diloco; d != nil {
		d.steps, d.mean, d.states, d.weights = 0, t.newMean(), d.states[:0], nil
		for _, sums := range d.rows {
			clear(sums)
		}
	}
}

// dropRound drops the round in progress, if there is one, after it has failed: the parameters get the values that they
// had at its beginning on all workers, and its steps do not count. A round may have failed in its first step.
func (t *Trainer) dropRound() error {
	if t.inRound() {
		d := t.diloco
		for i, value := range d.weights {
			for replica := range t.parts {
				if err := t.program.Write(replica, i, value); err != nil {
					return fmt.Errorf("dropping the inner steps since the last outer step: setting %s on replica %d: %w",
						t.Parameters()[i].Name, replica, err)
				}
			}
		}
		t.committed, t.passes = d.begun, 0
	}
	t.newRound()
	return nil
}

// exchangeChanges sums what the round's inner steps have subtracted from the parameters over all replicas, in the
// memory of the gradients.
func (t *Trainer) exchangeChanges(ctx context.Context, r *distribute.Replica) error {
	d, local := t.diloco, r.LocalID()
	p := &t.parts[local]
	t.replicaAt(r, PhaseOuter)
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
		if err := p.exchanging[k].start(ctx, r, d.outer, call); err != nil {
			return err
		}
	}
	if r.NumReplicas() == 1 {
		return nil
	}
	if err := finishAll(ctx, p.exchanging, nil); err != nil {
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
func (t *Trainer) finiteChanges() error {
	for k, b := range t.buckets {
		for i, x := range t.parts[0].gradients[k] {
			if at := tensor.FirstNotFinite(x); at >= 0 {
				return fmt.Errorf("the changes of %s in %s, summed over all replicas, are not finite: element %s is %v: use "+
					"smaller learning rates", b.names[i], plural(t.diloco.steps, "inner step"), position(x.Shape(), at),
					x.Float64s()[at])
			}
		}
	}
	return nil
}

// descend takes the outer step from the sums of changes, and writes the new parameters on all replicas.
func (t *Trainer) descend() error {
	d := t.diloco
	for k, b := range t.buckets {
		for i, parameter := range b.parameters {
			value := d.weights[parameter]
			d.nesterov(value, d.momentum[parameter], t.parts[0].gradients[k][i], t.strategy.NumReplicasInSync())
			for replica := range t.parts {
				if err := t.program.Write(replica, parameter, value); err != nil {
					return fmt.Errorf("setting %s on replica %d: %w", b.names[i], replica, err)
				}
			}
		}
	}
	return nil
}

// slotRows returns the number of different values of a slot: one per worker with DiLoCo, else one.
func (t *Trainer) slotRows() int {
	if t.diloco == nil {
		return 1
	}
	return t.workers
}

// momentumName is the name of a parameter's outer momentum in a snapshot.
func momentumName(parameter string) string { return "outer momentum of " + parameter }

// saveDiLoCo adds the state of DiLoCo to the chief's snapshot.
func (t *Trainer) saveDiLoCo(s *Snapshot) {
	d := t.diloco
	if d == nil {
		return
	}
	cfg := d.DiLoCo
	s.DiLoCo, s.Workers, s.division, s.outer = &cfg, t.workers, t.division(), d.outer
	for i, v := range t.Parameters() {
		s.OuterMomentum = append(s.OuterMomentum, Weight{momentumName(v.Name), d.momentum[i].Clone()})
	}
}

// division returns the number of replicas of each worker.
func (t *Trainer) division() []int {
	n := t.strategy.NumReplicasInSync()
	if t.firsts == nil {
		return []int{n}
	}
	list := make([]int, len(t.firsts))
	for w, first := range t.firsts {
		next := n
		if w+1 < len(t.firsts) {
			next = t.firsts[w+1]
		}
		list[w] = next - first
	}
	return list
}

// restoreDiLoCo sets the state of DiLoCo to that of a snapshot. It returns a reason why bits differ from here on, or
// "".
func (t *Trainer) restoreDiLoCo(s *Snapshot) string {
	describe := func(d *DiLoCo) string {
		if d == nil {
			return "no DiLoCo"
		}
		return d.String()
	}
	if d := t.diloco; d != nil {
		t.newRound()
		d.outer = s.outer
		saved := map[string]*tensor.Tensor{}
		for _, w := range s.OuterMomentum {
			saved[w.Name] = w.Value
		}
		for i, v := range t.Parameters() {
			to := d.momentum[i].Memory().HostBytes()
			clear(to)
			if value := saved[momentumName(v.Name)]; fits(value, v.DType, v.Shape) == nil {
				copy(to, value.Memory().HostBytes())
			}
		}
	}
	then, now := describe(s.DiLoCo), describe(t.config.DiLoCo)
	switch {
	case then != now:
		return fmt.Sprintf("the snapshot was made with %s, this training has %s", then, now)
	case s.DiLoCo != nil && s.Workers != t.workers:
		return fmt.Sprintf("the snapshot was made by %s with an optimizer state each, this training has %s: every worker "+
			"starts with the mean", plural(s.Workers, "worker"), plural(t.workers, "worker"))
	case s.DiLoCo != nil && s.division != nil && !slices.Equal(s.division, t.division()):
		return fmt.Sprintf("the snapshot was made by workers of %v replicas, this training has workers of %v: each "+
			"trains on another share of a batch, and has another weight in the outer step", s.division, t.division())
	}
	return ""
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

// mirrored reports whether the variable is equal on all replicas of all workers, outside of a round.
func (t *Trainer) mirrored(v engine.Variable) bool {
	return v.Role != engine.Average && (t.diloco == nil || v.Role != engine.Slot)
}
