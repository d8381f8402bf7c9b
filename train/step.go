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
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// stepBatches are the global batches of one step: one, or several whose gradients are accumulated.
type stepBatches struct {
	list      []*globalBatch
	examples  int     // of all batches
	weightSum float64 // of all examples
	pass      int64   // of Trainer.Gradients over the step's examples
	stop      bool    // this worker requests a stop
	place     bool    // this worker has a new placement
	tolerated bool    // accept loss and gradients that are not finite
}

// set replaces the batches. It keeps the list's memory.
func (b *stepBatches) set(list ...*globalBatch) {
	*b = stepBatches{list: b.list[:0]}
	for _, g := range list {
		b.add(g)
	}
}

func (b *stepBatches) add(g *globalBatch) {
	b.list = append(b.list, g)
	b.examples += g.examples
	b.weightSum += g.weightSum
}

// step runs one training step: it computes gradients, all-reduces them, updates the variables, and then makes
// the new values visible on all replicas or on none. The request of b to stop is sent with the step.
func (t *Trainer) step(ctx context.Context, b *stepBatches) (result stepResult, err error) {
	once := func() (stop bool, err error) {
		t.stepping = b
		return t.transact(ctx, b, t.takeStep)
	}
	b.tolerated = t.tolerates(false)
	if err = t.verify(ctx); err != nil {
		return stepResult{}, err
	}
	if result.stop, err = once(); errors.Is(err, errNotFinite) && t.overflowed() {
		t.lowerScale("the step is skipped")
		return stepResult{}, nil
	}
	if !errors.Is(err, errNotFinite) {
		if result.taken = err == nil && !result.stop; result.taken && !t.allFinite() { // not reported, see tolerates
			t.notFinite++
			loss, _ := t.scalars()
			result.problem = &NotFiniteError{
				Step: t.committed, Loss: loss, Replica: -1, Example: -1, Batch: -1,
				Detail: "see the log for the first ones, with their causes",
			}
		}
		if result.taken && result.problem == nil {
			t.raiseScale()
		}
		return result, err
	}
	if result.problem, err = t.reportNotFinite(ctx, b, false); err != nil || t.config.NotFinite == SkipNotFinite {
		return result, err
	}
	b.tolerated = true // repeat the step: reportNotFinite has recomputed and discarded it
	result.stop, err = once()
	result.taken = err == nil && !result.stop
	return result, err
}

// transact runs f on every replica, then commits on all. If f failed on any replica, or a worker requested a
// stop, it discards on all. b has the batches whose scalars f reduces, or is nil if it reduces none. transact
// returns errNotFinite if the scalars are not finite and b does not tolerate that, or the loss scale overflowed.
func (t *Trainer) transact(ctx context.Context, b *stepBatches,
	f func(context.Context, *distribute.Replica) error,
) (stop bool, err error) {
	err = t.runOn(ctx, t.inner, f)
	t.norm = t.globalNorm()
	stop = err == nil && b != nil && t.stopAgreed()
	if err == nil && !stop && b != nil && (!b.tolerated || t.overflowed()) && !t.allFinite() {
		err = errNotFinite
	}
	if err != nil || stop {
		t.discard()
		return stop, err
	}
	if t.program.Info().UpdatesInCommit {
		t.begins(0, timeline.Update)
	} else {
		t.begins(0, timeline.Commit)
	}
	t.commit()
	t.begins(0, timeline.Commit)
	t.begins(0, timeline.Callbacks)
	t.committed++
	t.passes = 0
	if t.kept.wanted && b != nil {
		t.kept.wanted, t.kept.ready = false, true
	}
	t.stepEnded(b)
	return false, nil
}

// run runs f on every replica, and returns when every call of f has returned. After a failure, distribute.Run
// waits for the other replicas for a limited time only. f calls only the engine and the reductions, so it
// always returns; until then the engine's variables must not be touched.
func (t *Trainer) run(ctx context.Context, f func(context.Context, *distribute.Replica) error) error {
	return t.runOn(ctx, t.strategy, f)
}

// runOn is run on a strategy with the replicas of this worker.
func (t *Trainer) runOn(ctx context.Context, s *distribute.Strategy,
	f func(context.Context, *distribute.Replica) error,
) error {
	for i := range t.local {
		t.local[i].reset()
	}
	for _, d := range t.devices {
		d.computed.reset()
	}
	t.summed.reset()
	t.running = f
	_, err := distribute.Run(ctx, s, t.onReplica, nil)
	if failure, ok := err.(*distribute.StepError); ok { // not wrapped, so of this Run and not of an outer one
		failure.Wait()
	}
	return err
}

// bucket is a group of parameters whose gradients are reduced by one call.
type bucket struct {
	parameters []int
	names      []string
	hash       string // of the names, in their order
}

// localReplica is the state that a local replica keeps from step to step.
type localReplica struct {
	local     int                // the replica's number on this worker
	first     bool               // it is the first replica of its device, which updates the variables
	gradients [][]*tensor.Tensor // by bucket: of the current step
	// scalars are the loss, the metrics and the values that workers compare: of this replica until they are
	// reduced, then the sums over all replicas. With a sharded optimizer, what only owners know follows.
	scalars   []float64
	squares   []float64 // by parameter, of this replica's gradients, with Config.NoiseScale
	blocks    []float64 // for addSquares
	notFinite int       // the first parameter whose gradient sum is not finite; -1: none

	// Of the step in progress:
	ctx     context.Context
	replica *distribute.Replica
	failure error // of starting a reduction
	updates bool  // the step updates the variables
	// sending are the calls that copy new values between devices, of the first sent buckets: of a sharded optimizer.
	sending []distribute.Handle
	sent    int

	ready  func(bucket int)       // starts the reduction of a bucket, for engine.Program.Gradients
	summed func(bucket int) error // checks the sums of a bucket, and applies them if this is possible
}

func (p *localReplica) reset() {
	p.notFinite, p.failure, p.ctx, p.replica, p.updates = -1, nil, nil, nil, false
	p.sending, p.sent = p.sending[:0], 0 // a failed step has not waited for what it sent
}

// receive waits until the replica's device has all new values.
func (p *localReplica) receive(ctx context.Context) error {
	for _, h := range p.sending {
		if err := h.Wait(ctx); err != nil {
			return err
		}
	}
	p.sending, p.sent = p.sending[:0], 0
	return nil
}

// device is the state of a device of the engine. The first of its replicas updates its variables.
type device struct {
	replicas []int
	updates  [][]int // by bucket: the updates (parts of engine.Program) that use gradients of it
	buckets  []int   // by update: the number of its buckets
	left     []int   // by update: the number of those that are not reduced yet
	computed barrier // all replicas have computed their gradients
}

// makeSteps makes the functions that replicas run: once, because a closure in every step would be allocated.
func (t *Trainer) makeSteps() {
	t.takeStep = func(ctx context.Context, r *distribute.Replica) error {
		return t.reduceGradients(ctx, r, t.stepping, true)
	}
	t.onReplica = func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
		if r.LocalID() == 0 && t.feeding != nil {
			t.feeding.refill()
		}
		return struct{}{}, t.running(ctx, r)
	}
}

// plan derives from the program how gradients are reduced and variables updated.
func (t *Trainer) plan() {
	parameters := t.program.Parameters()
	bucketOf := make([]int, len(parameters))
	for k, b := range t.program.Buckets() {
		names := make([]string, len(b.Parameters))
		for i, parameter := range b.Parameters {
			names[i], bucketOf[parameter] = parameters[parameter].Name, k
		}
		t.buckets = append(t.buckets, bucket{parameters: b.Parameters, names: names, hash: compress.Hash(names)})
	}
	for i, d := range t.devices {
		d.computed.init(len(d.replicas))
		d.updates = make([][]int, len(t.buckets))
		for update, list := range t.program.Parts(i) {
			n := 0
			for _, parameter := range list {
				if k := bucketOf[parameter]; !slices.Contains(d.updates[k], update) {
					d.updates[k] = append(d.updates[k], update)
					n++
				}
			}
			d.buckets = append(d.buckets, n)
		}
		d.left = make([]int, len(d.buckets))
	}
	t.whole = t.program.Info().WholeStep && !t.config.clips()
	t.local = make([]localReplica, len(t.deviceOf))
	t.summed.init(len(t.local))
	if t.config.needsSquares() {
		for _, v := range parameters {
			t.squares = append(t.squares, make([]float64, normBlocks(v.Bytes()/v.DType.Bytes())))
		}
	}
	for replica := range t.local {
		p := &t.local[replica]
		p.local, p.first = replica, t.devices[t.deviceOf[replica]].replicas[0] == replica
		p.scalars = make([]float64, t.summedScalars())
		if t.config.NoiseScale {
			p.squares = make([]float64, len(parameters))
		}
		for _, b := range t.buckets {
			p.gradients = append(p.gradients, make([]*tensor.Tensor, len(b.parameters)))
		}
		p.ready = func(k int) {
			t.reached(replica, k)
			// the scalars, which the last bucket's call also reduces, are complete after Gradients only
			if p.failure != nil || k == len(t.buckets)-1 {
				return
			}
			if p.failure = t.addSquares(p, k); p.failure == nil {
				p.failure = t.startReduction(p, k, nil)
			}
		}
		p.summed = func(k int) error {
			t.exchange.checkSums(p, k)
			if replica == 0 && t.kept.wanted {
				t.keep(k)
			}
			if !p.updates || t.config.needsNorm() { // else the bucket is applied as soon as its gradients are summed
				return nil
			}
			return t.exchange.apply(p.ctx, p, k)
		}
	}
}

// compute computes the replica's gradients, and the sums of its loss and metrics over the step's batches.
func (t *Trainer) compute(ctx context.Context, r *distribute.Replica, b *stepBatches, ready func(bucket int)) error {
	local := r.LocalID()
	p := &t.local[local]
	p.ctx, p.replica = ctx, r // also for the model's own all-reduces
	t.replicaEnters(r, PhaseCompute)
	clear(p.scalars)
	for i := range b.list {
		if b.list[i].weightSum == 0 {
			continue
		}
		if i > 0 {
			t.ends(local, 0)
		}
		s, err := t.program.Gradients(ctx, local, t.micro(r, b, i), ready)
		if err != nil {
			return fmt.Errorf("gradients: %w", err)
		}
		p.add(s)
	}
	return nil
}

// micro returns a replica's share of batch i of a step. Batches whose weights add up to 0 are not computed: all their
// examples may be padding.
func (t *Trainer) micro(r *distribute.Replica, b *stepBatches, i int) engine.Micro {
	return engine.Micro{
		Batch: b.list[i].shares[r.LocalID()], WeightSum: t.config.LossReduction.divisor(b.weightSum, int64(b.examples)),
		RNG:       randomState(t.config.Seed, t.committed, b.pass, i, t.replicaID(r)),
		LossScale: t.scale.Scale,
		Add:       hasWeights(b.list[:i]), Last: !hasWeights(b.list[i+1:]),
	}
}

func hasWeights(list []*globalBatch) bool {
	return slices.ContainsFunc(list, func(g *globalBatch) bool { return g.weightSum > 0 })
}

// add adds loss and metrics of a batch.
func (p *localReplica) add(s engine.Scalars) {
	p.scalars[0] += s.Loss
	for i, m := range s.Metrics {
		p.scalars[1+i] += m
	}
}

// reduceGradients computes the replica's gradients and all-reduces them with loss and metrics. A bucket's
// reduction starts as soon as its gradients are computed. If update is set, the replica's device is updated.
func (t *Trainer) reduceGradients(ctx context.Context, r *distribute.Replica, b *stepBatches, update bool) error {
	defer t.finished(r)
	if update && t.stepsWhole(b) {
		return t.wholeStep(ctx, r, b)
	}
	local := r.LocalID()
	p, d := &t.local[local], t.devices[t.deviceOf[local]]
	p.updates = update
	err := t.compute(ctx, r, b, p.ready)
	d.computed.arrive()
	if err != nil {
		return err
	}
	t.replicaEnters(r, PhaseReduce)
	t.putAgreement(r, b, p.scalars[1+t.sums:])
	if p.failure == nil {
		p.failure = t.addSquares(p, len(t.buckets)-1)
	}
	if p.failure == nil {
		t.putNoise(local, b)
		p.failure = t.startReduction(p, len(t.buckets)-1, p.scalars[:t.summedScalars()])
	}
	if p.failure != nil {
		return p.failure
	}
	if update && p.first {
		if err := d.computed.wait(ctx); err != nil {
			return err
		}
		copy(d.left, d.buckets)
	}
	if err := t.exchange.finish(ctx, p, p.summed); err != nil {
		return err
	}
	if err := t.checkAgreement(ctx, r, b); err != nil {
		return err
	}
	t.summed.arrive()
	if !p.updates {
		return nil
	}
	if t.config.needsNorm() {
		if err := t.summed.wait(ctx); err != nil {
			return err
		}
		for k := range t.buckets {
			if err := t.exchange.apply(ctx, p, k); err != nil {
				return err
			}
		}
	}
	return p.receive(ctx)
}

// summedScalars returns the number of scalars that are reduced with the last bucket.
func (t *Trainer) summedScalars() int {
	if t.config.NoiseScale {
		return 1 + t.sums + agreed + noiseScalars
	}
	return 1 + t.sums + agreed
}

// stepsWhole reports whether a step that updates is computed as one program.
func (t *Trainer) stepsWhole(b *stepBatches) bool {
	return t.whole && t.scale.Scale == 0 && len(b.list) == 1 && !t.kept.wanted
}

// wholeStep computes gradients and updates as one program, for the only replica.
func (t *Trainer) wholeStep(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	p := &t.local[r.LocalID()]
	t.replicaEnters(r, PhaseCompute)
	clear(p.scalars)
	s, finite, err := t.program.Step(ctx, t.micro(r, b, 0))
	if err != nil {
		return fmt.Errorf("gradients and update: %w", err)
	}
	p.add(s)
	if !finite {
		p.notFinite = 0
	}
	t.putAgreement(r, b, p.scalars[1+t.sums:])
	return nil
}

// memory sets the list of a bucket's gradients, in the program's memory.
func (t *Trainer) memory(local, k int) (err error) {
	p, b := &t.local[local], &t.buckets[k]
	for i, parameter := range b.parameters {
		if p.gradients[k][i], err = t.program.Gradient(local, parameter); err != nil {
			return fmt.Errorf("the gradient of %s: %w", b.names[i], err)
		}
	}
	return nil
}

// startReduction starts the all-reduce of a bucket, and of scalars.
func (t *Trainer) startReduction(p *localReplica, k int, scalars []float64) (err error) {
	if err := t.memory(p.replica.LocalID(), k); err != nil {
		return err
	}
	if p.replica.NumReplicas() == 1 {
		return nil
	}
	return t.exchange.start(p, k, scalars)
}

// update clips the gradients of bucket k, which are those of parameters, and executes the updates of
// the replica's device of which it is the last bucket.
func (t *Trainer) update(ctx context.Context, p *localReplica, k int, gradients []*tensor.Tensor, parameters []int,
) error {
	device := t.deviceOf[p.local]
	d := t.devices[device]
	factor := t.clip(gradients, parameters)
	for _, update := range d.updates[k] {
		if d.left[update]--; d.left[update] > 0 {
			continue
		}
		t.replicaEnters(p.replica, PhaseUpdate)
		if err := t.program.Update(ctx, device, p.local, update, factor); err != nil {
			return fmt.Errorf("update: %w", err)
		}
	}
	t.replicaEnters(p.replica, PhaseReduce)
	return nil
}

// sum implements the all-reduces inside a model, which run during the gradients program.
func (t *Trainer) sum(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
	kind := t.clocks[replica].kind
	t.begins(replica, timeline.Wait)
	defer t.begins(replica, kind)
	return t.local[replica].replica.AllReduceInto(ctx, distribute.Sum, dst, src, names,
		distribute.Options{Concurrent: true}) // it does not wait for the buckets whose reduction has started
}

// reduceScalars all-reduces the loss and metrics of an evaluation, together with the values that the workers
// compare.
func (t *Trainer) reduceScalars(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	t.replicaEnters(r, PhaseReduce)
	p := &t.local[r.LocalID()]
	t.putAgreement(r, b, p.scalars[1+t.sums:])
	if r.NumReplicas() > 1 {
		h, err := r.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Scalars: p.scalars[:t.summedScalars()]})
		if err == nil {
			err = h.Wait(ctx)
		}
		if err != nil {
			return err
		}
	}
	return t.checkAgreement(ctx, r, b)
}

// scalars returns the last step's loss and sums of metrics over all replicas. The next step overwrites them.
func (t *Trainer) scalars() (loss float64, sums []float64) {
	s := t.local[0].scalars
	return s[0], s[1 : 1+t.sums]
}

// Gradients returns the gradients of the mean loss of a step's examples, reduced over all replicas, in the order of
// [Trainer.Parameters], and loss and metrics. With [Trainer.ApplyGradients] it forms a custom training loop, which may
// change or record gradients in between. The examples are one or several global batches of at most Config.GlobalBatch
// examples each, the same on all workers. The gradients of several are accumulated, and reduced once. The caller owns
// the returned tensors. Weights that add up to 0 are an error. With Config.ClipNorm the metrics include
// "gradient_norm". ApplyGradients clips, Gradients does not.
//
// Gradients runs a forward and a backward pass over each batch in training mode, as a training=True call in Keras
// does. So each pass changes the variables that the model function changes (moving averages of batch normalization,
// counters of learning-rate schedules in the model), and draws new random numbers (dropout). Parameters and
// the optimizer's slots keep their values until ApplyGradients. If a gradient overflows float16, Gradients computes
// all again with half the loss scale: see [LossScaling]. On error no variable has changed.
func (t *Trainer) Gradients(ctx context.Context, batches ...data.Batch) ([]*tensor.Tensor, Result, error) {
	err := t.knowsLastStep()
	if err == nil {
		err = t.fitOnly()
	}
	if err != nil {
		return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
	}
	var step stepBatches
	defer func() { t.giveBack(step.list...) }()
	for i, b := range batches {
		g, err := t.borrow(true, false)
		if err != nil {
			return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
		}
		if err = g.fill(wholeBatch(b)); err == nil {
			err = t.compileShape(ctx, g.batchShape)
		}
		if err == nil {
			step.add(g)
			continue
		}
		t.giveBack(g)
		if len(batches) > 1 {
			err = fmt.Errorf("batch %d of %d: %w", i+1, len(batches), err)
		}
		return nil, Result{}, fmt.Errorf("train: gradients: %w", err)
	}
	if step.weightSum == 0 {
		return nil, Result{}, fmt.Errorf("train: gradients: the weights of the %s add up to 0",
			plural(step.examples, "example"))
	}
	step.pass = t.passes
	for {
		err := t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
			return t.reduceGradients(ctx, r, &step, false)
		})
		if err != nil {
			t.discard()
			return nil, Result{}, fmt.Errorf("train: %w", err)
		}
		if !t.overflowed() {
			break
		}
		t.discard()
		t.lowerScale("the gradients are computed again")
	}
	if t.allFinite() {
		t.raiseScale()
	}
	out := make([]*tensor.Tensor, len(t.Parameters()))
	for k, bucket := range t.buckets {
		for i, parameter := range bucket.parameters {
			out[parameter] = t.local[0].gradients[k][i].Clone()
		}
	}
	t.commit() // nothing was updated: commits only what the forward pass changed, and what compression keeps
	t.passes++
	t.norm = t.globalNorm()
	m := t.newMean()
	m.add(&step, t)
	return out, m.result(), nil
}

// ApplyGradients takes the optimizer's step on every replica, with gradients that are already reduced over
// replicas: one per parameter, in the order of [Trainer.Parameters]. It is Keras' apply_gradients without
// aggregation. The gradients are clipped as Config says, and a norm that is not finite is an error; the caller's
// tensors keep their values. With several
// workers, every worker calls it with the same gradients. On error no variable has changed, except by an earlier
// [Trainer.Gradients].
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
	if err := t.fitOnly(); err != nil {
		return fmt.Errorf("train: apply gradients: %w", err)
	}
	for parameter, sums := range t.squares {
		for block := range sums {
			sums[block] = blockSquares(gradients[parameter], block)
		}
	}
	if norm := t.notFiniteNorm(); norm != "" {
		return fmt.Errorf("train: apply gradients: clipping: %s is not finite: leave the step out, "+
			"or use a smaller loss", norm)
	}
	_, err := t.transact(ctx, nil, func(ctx context.Context, r *distribute.Replica) error {
		local := r.LocalID()
		p, d := &t.local[local], t.devices[t.deviceOf[local]]
		if !p.first && !t.Sharded() {
			return nil
		}
		if p.first {
			copy(d.left, d.buckets)
		}
		p.ctx, p.replica = ctx, r
		for k, bucket := range t.buckets {
			if err := t.memory(local, k); err != nil {
				return err
			}
			for i, parameter := range bucket.parameters {
				copy(p.gradients[k][i].Memory().HostBytes(), gradients[parameter].Memory().HostBytes())
			}
			if err := t.exchange.apply(ctx, p, k); err != nil {
				return err
			}
		}
		return p.receive(ctx)
	})
	if err != nil {
		return fmt.Errorf("train: apply gradients: %w", err)
	}
	return nil
}
