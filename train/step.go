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
// the new values visible on all replicas or on none. stop reports that a worker requested a stop before this
// step; then no worker took it. problem is not nil if loss or gradients are not finite; then made reports
// whether the step was taken anyway.
func (t *Trainer) step(ctx context.Context, b *stepBatches) (made, stop bool, problem *NotFiniteError, err error) {
	b.stop = t.diloco == nil && t.wantsStop() // with DiLoCo the workers agree on it before a round
	once := func() (stop bool, err error) {
		t.stepping = b
		return t.transact(ctx, b, t.takeStep)
	}
	b.tolerated = t.tolerates(false)
	if stop, err = once(); errors.Is(err, errNotFinite) && t.overflowed() {
		t.lowerScale("the step is skipped")
		return false, false, nil, nil
	}
	if !errors.Is(err, errNotFinite) {
		if made = err == nil && !stop; made && !t.allFinite() { // not reported, see tolerates
			t.notFinite++
			loss, _ := t.scalars()
			problem = &NotFiniteError{
				Step: t.committed, Loss: loss, Replica: -1, Example: -1, Batch: -1,
				Detail: "see the log for the first ones, with their causes",
			}
		}
		if made && problem == nil {
			t.raiseScale()
		}
		return made, stop, problem, err
	}
	if problem, err = t.report(ctx, b, false); err != nil || t.config.NotFinite == SkipNotFinite {
		return false, false, problem, err
	}
	b.tolerated = true // repeat the step: report has recomputed and discarded it
	stop, err = once()
	return err == nil && !stop, stop, problem, err
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
	t.begins(0, timeline.Commit)
	t.commit()
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
	for i := range t.parts {
		t.parts[i].reset()
	}
	for _, d := range t.devices {
		d.computed.reset()
	}
	t.summed.reset()
	t.running = f
	_, err := distribute.Run(ctx, s, t.onReplica)
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

	// With a sharded optimizer:
	shares     []engine.Share
	sharesOf   []int    // the parameter of each share
	inBucket   []int    // the place of each share's parameter in parameters
	pieceNames []string // of the shares
	owners     []int    // of the shares: the replica that updates each
}

// part is the state that a local replica keeps from step to step.
type part struct {
	gradients [][]*tensor.Tensor // by bucket: of the current step
	reducing  []reduction        // by bucket
	// exchanging are those with Config.Compress: reducing, or the exchanges of DiLoCo's outer steps.
	exchanging []reduction
	// With a sharded optimizer, by bucket and share: the gradients, those that this replica owns (others are nil), and
	// the memory for the new values.
	pieces, sums, values [][]*tensor.Tensor
	gathering            []distribute.Handle // of the new values
	// scalars are the loss, the metrics and the values that workers compare: of this replica until they are
	// reduced, then the sums over all replicas. With a sharded optimizer, what only owners know follows.
	scalars   []float64
	squares   []float64 // by parameter, of this replica's gradients, with Config.NoiseScale
	blocks    []float64 // for addSquares
	notFinite int       // the first parameter whose gradient sum is not finite; -1: none

	// Of the step in progress:
	ctx     context.Context
	replica *distribute.Replica
	failure error            // of starting a reduction
	owners  bool             // gradients are reduced to their owners
	ready   func(bucket int) // starts the reduction of a bucket, for engine.Program.Gradients
}

func (p *part) reset() {
	p.notFinite, p.failure, p.ctx, p.replica, p.owners = -1, nil, nil, nil, false
	p.gathering = p.gathering[:0]
}

// device is the state of a device of the engine. The first of its replicas updates its variables.
type device struct {
	replicas []int
	partsOf  [][]int // by bucket: the parts with gradients in it
	buckets  []int   // by part: the number of its buckets
	left     []int   // by part: the number of those that are not reduced yet
	computed barrier // all replicas have computed their gradients
}

// makeSteps makes the functions that replicas run: once, because a closure in every step would be allocated.
func (t *Trainer) makeSteps() {
	t.takeStep = func(ctx context.Context, r *distribute.Replica) error {
		return t.reduceGradients(ctx, r, t.stepping, true)
	}
	t.onReplica = func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
		if r.LocalID() == 0 && t.feeding != nil {
			t.feeding.refill()
		}
		return nil, t.running(ctx, r)
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
		made := bucket{parameters: b.Parameters, names: names, hash: compress.Hash(names)}
		if t.shards != nil {
			for _, s := range t.shards.shares {
				at, found := slices.BinarySearch(b.Parameters, s.Parameter)
				if !found {
					continue
				}
				name := parameters[s.Parameter].Name
				if !t.isWhole(s) {
					name = pieceName(name, s.From, s.To)
				}
				made.shares, made.sharesOf = append(made.shares, s), append(made.sharesOf, s.Parameter)
				made.inBucket = append(made.inBucket, at)
				made.pieceNames, made.owners = append(made.pieceNames, name), append(made.owners, s.Owner)
			}
		}
		t.buckets = append(t.buckets, made)
	}
	for i, d := range t.devices {
		d.computed.init(len(d.replicas))
		d.partsOf = make([][]int, len(t.buckets))
		for part, list := range t.program.Parts(i) {
			n := 0
			for _, parameter := range list {
				if k := bucketOf[parameter]; !slices.Contains(d.partsOf[k], part) {
					d.partsOf[k] = append(d.partsOf[k], part)
					n++
				}
			}
			d.buckets = append(d.buckets, n)
		}
		d.left = make([]int, len(d.buckets))
	}
	if w, ok := t.program.(engine.WholeStep); ok && w.Whole() && !t.config.clips() {
		t.whole = w
	}
	t.parts = make([]part, len(t.deviceOf))
	first, _ := t.strategy.LocalReplicas()
	t.summed.init(len(t.parts))
	if t.config.needsSquares() {
		for _, v := range parameters {
			t.squares = append(t.squares, make([]float64, normBlocks(v.Bytes()/v.DType.Bytes())))
		}
	}
	for replica := range t.parts {
		p := &t.parts[replica]
		p.scalars = make([]float64, t.summedScalars()+t.shards.scalars())
		if t.config.NoiseScale {
			p.squares = make([]float64, len(parameters))
		}
		p.reducing = make([]reduction, len(t.buckets))
		p.exchanging = p.reducing
		if t.config.DiLoCo != nil {
			p.exchanging = make([]reduction, len(t.buckets))
		}
		for k, codec := range t.exchanges(first + replica) {
			p.exchanging[k].codec, p.exchanging[k].next = codec, codec.Next
		}
		for _, b := range t.buckets {
			p.gradients = append(p.gradients, make([]*tensor.Tensor, len(b.parameters)))
			p.pieces = append(p.pieces, make([]*tensor.Tensor, len(b.shares)))
			p.sums = append(p.sums, make([]*tensor.Tensor, len(b.shares)))
			p.values = append(p.values, make([]*tensor.Tensor, len(b.shares)))
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
	}
}

// compute computes the replica's gradients, and the sums of its loss and metrics over the step's batches.
func (t *Trainer) compute(ctx context.Context, r *distribute.Replica, b *stepBatches, ready func(bucket int)) error {
	local := r.LocalID()
	p := &t.parts[local]
	p.ctx, p.replica = ctx, r // also for the model's own all-reduces
	t.replicaAt(r, PhaseCompute)
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
		Batch: b.list[i].shares[r.LocalID()], WeightSum: b.weightSum,
		RNG:       randomState(t.config.Seed, t.committed, b.pass, i, t.replicaID(r)),
		LossScale: t.scale.Scale,
		Add:       hasWeights(b.list[:i]), Last: !hasWeights(b.list[i+1:]),
	}
}

func hasWeights(list []*globalBatch) bool {
	return slices.ContainsFunc(list, func(g *globalBatch) bool { return g.weightSum > 0 })
}

// add adds loss and metrics of a batch.
func (p *part) add(s engine.Scalars) {
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
	p, d := &t.parts[local], t.devices[t.deviceOf[local]]
	p.owners = update && t.toOwners()
	gather := update && t.shards != nil
	err := t.compute(ctx, r, b, p.ready)
	d.computed.arrive()
	if err != nil {
		return err
	}
	t.replicaAt(r, PhaseReduce)
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
	if update = update && d.replicas[0] == local; update {
		if err := d.computed.wait(ctx); err != nil {
			return err
		}
		copy(d.left, d.buckets)
	}
	early := !t.config.needsNorm() // update each part as soon as its gradients are summed
	gathered := 0
	apply := func(k int) (err error) { // what follows when the gradients of bucket k are summed and can be applied
		if update {
			if err = t.update(ctx, r, k); err != nil {
				return err
			}
			t.replicaAt(r, PhaseReduce)
		}
		if gather {
			gathered, err = t.startGathers(ctx, r, gathered, k+1)
		}
		return err
	}
	err = finishAll(ctx, p.reducing, func(k int) error {
		t.checkSums(local, k)
		if local == 0 && t.kept.wanted {
			t.keep(k)
		}
		if !early {
			return nil
		}
		return apply(k)
	})
	if err != nil {
		return err
	}
	if p.owners {
		if err := t.exchange(ctx, r); err != nil {
			return err
		}
	}
	if err := t.checkAgreement(ctx, r, b); err != nil {
		return err
	}
	t.summed.arrive()
	if !early && (update || gather) {
		if err := t.summed.wait(ctx); err != nil {
			return err
		}
		for k := range t.buckets {
			if err := apply(k); err != nil {
				return err
			}
		}
	}
	return p.finishGathers(ctx)
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
	return t.whole != nil && t.scale.Scale == 0 && len(b.list) == 1 && !t.kept.wanted
}

// wholeStep computes gradients and updates as one program, for the only replica.
func (t *Trainer) wholeStep(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	p := &t.parts[r.LocalID()]
	t.replicaAt(r, PhaseCompute)
	clear(p.scalars)
	s, finite, err := t.whole.Step(ctx, t.micro(r, b, 0))
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
	p, b := &t.parts[local], &t.buckets[k]
	for i, parameter := range b.parameters {
		if p.gradients[k][i], err = t.program.Gradient(local, parameter); err != nil {
			return fmt.Errorf("the gradient of %s: %w", b.names[i], err)
		}
	}
	first, _ := t.strategy.LocalReplicas()
	for j, s := range b.shares {
		whole := p.gradients[k][b.inBucket[j]]
		p.pieces[k][j] = t.shareOf(s, whole, p.pieces[k][j])
		if s.Owner == first+local {
			p.sums[k][j] = p.pieces[k][j]
		}
	}
	return nil
}

// startReduction starts the all-reduce of a bucket, and of scalars.
func (t *Trainer) startReduction(p *part, k int, scalars []float64) (err error) {
	if err := t.memory(p.replica.LocalID(), k); err != nil {
		return err
	}
	if p.replica.NumReplicas() == 1 {
		return nil
	}
	if p.owners { // the scalars follow
		return t.startToOwners(p, k)
	}
	return p.reducing[k].start(p.ctx, p.replica, t.committed,
		distribute.Bucket{Dst: p.gradients[k], Src: p.gradients[k], Names: t.buckets[k].names, Scalars: scalars})
}

// update clips the gradients of bucket k, and computes new values of the parts of the replica's device of which it
// is the last bucket.
func (t *Trainer) update(ctx context.Context, r *distribute.Replica, k int) error {
	local := r.LocalID()
	d := t.devices[t.deviceOf[local]]
	gradients, parameters := t.parts[local].gradients[k], t.buckets[k].parameters
	if t.shards != nil {
		gradients, parameters = t.parts[local].sums[k], t.buckets[k].sharesOf
	}
	factor := t.clip(gradients, parameters)
	for _, part := range d.partsOf[k] {
		if d.left[part]--; d.left[part] > 0 {
			continue
		}
		t.replicaAt(r, PhaseUpdate)
		if err := t.program.Update(ctx, t.deviceOf[local], local, part, factor); err != nil {
			return fmt.Errorf("update: %w", err)
		}
	}
	return nil
}

// sum implements the all-reduces inside a model, which run during the gradients program.
func (t *Trainer) sum(ctx context.Context, replica int, dst, src []*tensor.Tensor, names []string) error {
	kind := t.clocks[replica].kind
	t.begins(replica, timeline.Wait)
	defer t.begins(replica, kind)
	return t.parts[replica].replica.AllReduceInto(ctx, distribute.Sum, dst, src, names,
		distribute.Options{Concurrent: true}) // it does not wait for the buckets whose reduction has started
}

// reduceScalars all-reduces the loss and metrics of an evaluation, together with the values that the workers
// compare.
func (t *Trainer) reduceScalars(ctx context.Context, r *distribute.Replica, b *stepBatches) error {
	t.replicaAt(r, PhaseReduce)
	p := &t.parts[r.LocalID()]
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
	s := t.parts[0].scalars
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
			out[parameter] = t.parts[0].gradients[k][i].Clone()
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
		p, d := &t.parts[local], t.devices[t.deviceOf[local]]
		update := d.replicas[0] == local
		if !update && t.shards == nil {
			return nil
		}
		if update {
			copy(d.left, d.buckets)
		}
		gathered := 0
		for k, bucket := range t.buckets {
			if err := t.memory(local, k); err != nil {
				return err
			}
			for i, parameter := range bucket.parameters {
				copy(p.gradients[k][i].Memory().HostBytes(), gradients[parameter].Memory().HostBytes())
			}
			var err error
			if update {
				err = t.update(ctx, r, k)
			}
			if err == nil && t.shards != nil {
				gathered, err = t.startGathers(ctx, r, gathered, k+1)
			}
			if err != nil {
				return err
			}
		}
		return p.finishGathers(ctx)
	})
	if err != nil {
		return fmt.Errorf("train: apply gradients: %w", err)
	}
	return nil
}
