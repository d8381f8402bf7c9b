package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

var progressModes = []string{"auto", "bar", "plain", "none"}

// trainRun is one run of lockstep train.
type trainRun struct {
	*session
	snapshots

	flags   trainFlags
	out     io.Writer
	in      *interrupter
	set     *examples
	kept    data.Pipeline // of the training data
	held    data.Pipeline // of the training data, for validation
	batch   int           // global
	loaded  train.Loaded  // by --weights
	stopped bool          // a stop was requested, and all workers stopped
	// --early-stopping ended training, on all workers
	stoppedEarly bool
	chief        bool // this worker prints and writes for all
	started      time.Time
	history      *train.History
	test         *train.Result // nil: not evaluated
	weights      []train.Weight
	record       runRecord   // for the report
	written      [][2]string // what, and where
}

func runTrain(ctx context.Context, out io.Writer, o trainFlags) (err error) {
	r := &trainRun{flags: o, out: out, in: catchInterrupts(ctx), chief: true}
	defer r.in.close()
	if err := r.join(); err != nil {
		return r.unlessInterrupted(err)
	}
	defer func() { err = errors.Join(err, r.session.close()) }()
	defer func() {
		if e := r.closeSnapshots(); err == nil { // else err has been reported
			err = e
		}
	}()
	defer r.reportPanic()
	if err := r.train(ctx); err != nil {
		return r.unlessInterrupted(r.fail(err))
	}
	if r.stopped && !r.in.interrupted.Load() {
		fmt.Fprintln(os.Stderr, "lockstep: stopped by an interrupt of another worker")
	}
	return r.unlessInterrupted(nil)
}

// train does everything after the workers have joined.
func (r *trainRun) train(ctx context.Context) (err error) {
	if err := r.open(); err != nil {
		return err
	}
	defer r.in.stopOn(r.trainer)()
	page, err := r.serveDashboard()
	if err != nil {
		return err
	}
	defer page.close()
	if err := r.announce(); err != nil {
		return err
	}
	if dir := r.flags.checkpoint.dir; dir != "" && r.chief { // for eval, generate and predict
		if err := r.writeConfig(filepath.Join(dir, configFile)); err != nil {
			return err
		}
	}
	if err := r.fit(ctx); err != nil {
		return err
	}
	if err := r.evaluate(ctx); err != nil {
		return err
	}
	if r.weights, err = r.trainer.Weights(ctx); err != nil {
		return err
	}
	// The table is printed even if a file cannot be written.
	return errors.Join(r.write(), r.writeReport(ctx), r.report())
}

// unlessInterrupted returns err, or errInterrupted if this or another worker was interrupted.
func (r *trainRun) unlessInterrupted(err error) error {
	if r.in.interrupted.Load() || err == nil && r.stopped {
		return errInterrupted
	}
	return err
}

// join opens the engine and, if this is a worker of a job, joins the other workers.
func (r *trainRun) join() (err error) {
	cfg := sessionConfig{
		engine: r.flags.engine, plugin: r.flags.plugin,
		oneDevice: r.flags.strategy == "one-device", replicas: r.flags.replicas, devices: r.flags.devices,
		logicalCPUs: r.flags.logicalCPUs(),
		globalBatch: r.flags.globalBatch, batchPerReplica: r.flags.batchPerReplica,
		evalBatch: r.flags.evalBatch, seed: r.flags.seed,
		bucketBytes: r.flags.step.bucketBytes.n, compress: r.flags.step.compress.Codec,
		diloco:     r.flags.diloco.config(),
		shard:      r.flags.step.shard.Sharding,
		noiseScale: r.flags.noiseScale,
		clipNorm:   r.flags.clipNorm, clipValue: r.flags.clipValue, trace: r.flags.trace.config(),
	}
	if r.flags.callbacks.gradients && cfg.shard == train.ShardAuto {
		cfg.shard = train.ShardOff // a sharded optimizer leaves each sum on one replica only
	}
	if r.flags.strategy == multiWorker {
		if cfg.job, err = r.flags.workers.discover(); err != nil {
			return err
		}
		cfg.workers, r.chief = &r.flags.workers, cfg.job.Chief()
		if err := r.announceJob(cfg.job); err != nil {
			return err
		}
	}
	tuneGC(cfg.job)
	r.session, err = openSession(r.in, cfg)
	return err
}

// open does everything that can fail before training starts, including the checks of output files.
func (r *trainRun) open() (err error) {
	if err := r.compareOptions(); err != nil {
		return err
	}
	if r.chief {
		if err := r.checkOutputs(); err != nil {
			return err
		}
	}
	if r.worker != nil {
		r.worker.Progress(-1, "reading data")
	}
	if err := r.openData(); err != nil {
		return err
	}
	if err := r.openStrategy(); err != nil {
		return err
	}
	r.batch = r.flags.globalBatch
	if r.flags.batchPerReplica > 0 {
		r.batch = r.flags.batchPerReplica * r.strategy.NumReplicasInSync()
	}
	if w, planned := r.flags.callbacks.warmup, r.plannedSteps(); w > planned {
		return usagef("--warmup-steps %d: the schedule has only %d steps, those of --epochs or --steps: want at most as many",
			w, planned)
	}
	m := r.flags.newModel(r.set, r.optimizer())
	if err := r.flags.callbacks.checkMonitor(m, &r.flags); err != nil {
		return err
	}
	stop := r.reassure("compiling the model")
	inputs, labels := r.set.features()
	err = r.compile(r.in, m, inputs, labels)
	stop()
	if err != nil {
		return err
	}
	if err := r.loadWeights(); err != nil {
		return err
	}
	if err := r.resume(r.in); err != nil {
		return err
	}
	return r.compareModel()
}

// reassure prints progress lines on the chief while something takes long.
func (r *trainRun) reassure(what string) (stop func()) {
	if !r.chief {
		return func() {}
	}
	replicas := len(r.devices)
	if r.strategy != nil {
		replicas = r.strategy.NumReplicasInSync()
	}
	return reassure(os.Stderr, func() string {
		return fmt.Sprintf("%s for %s on %s", what, count(max(replicas, 1), "replica"), count(runtime.GOMAXPROCS(0), "core"))
	})
}

// checkOutputs returns an error if a file of the results cannot be written.
func (r *trainRun) checkOutputs() error {
	if dir := r.flags.out; dir != "" {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		for _, name := range []string{weightsFile, historyFile, summaryFile, configFile, reportFile} {
			if err := checkpoint.CheckWritable(filepath.Join(dir, name)); err != nil {
				return fmt.Errorf("--out %s: %w", dir, err)
			}
		}
	}
	if file := r.flags.summary; file != "" {
		if info, err := os.Stat(filepath.Dir(file)); err != nil || !info.IsDir() {
			return fmt.Errorf("--summary %s: the folder %s does not exist", file, filepath.Dir(file))
		}
		if err := checkpoint.CheckWritable(file); err != nil {
			return fmt.Errorf("--summary %s: %w", file, err)
		}
	}
	return r.flags.trace.checkWritable()
}

// openData loads the data set, and validates the flags against its size.
func (r *trainRun) openData() (err error) {
	if r.set, err = dataSets[r.flags.data.name].load(&r.flags.data, r.flags.positions); err != nil {
		return err
	}
	if side := r.set.shape[0]; r.flags.data.shift >= side && r.set.unit == "images" {
		return usagef("--shift %d: want less than %d, the height of the images", r.flags.data.shift, side)
	}
	r.kept = r.set.train
	n := r.kept.Len()
	if split := r.flags.data.validationSplit; split > 0 {
		r.kept, r.held = r.kept.Split(split, r.flags.seed)
		if r.kept.Len() == 0 || r.held.Len() == 0 {
			return usagef("--validation-split %v: of %s training %s, this leaves %s for training and %s for validation",
				split, grouped(n), r.set.unit, grouped(r.kept.Len()), grouped(r.held.Len()))
		}
	}
	if r.flags.batchByDefault && r.flags.globalBatch > n { // all of a small data set
		r.flags.globalBatch, r.session.cfg.globalBatch = n, n
	}
	for flag, batch := range map[string]int{
		"global-batch":      r.flags.globalBatch,
		"batch-per-replica": r.flags.batchPerReplica,
	} {
		if batch > n {
			return usagef("--%s %d: want at most the %s training %s", flag, batch, grouped(n), r.set.unit)
		}
	}
	return nil
}

// announce prints what the run will do.
func (r *trainRun) announce() error {
	if !r.chief {
		return nil
	}
	replicas := r.strategy.NumReplicasInSync()
	parameters := 0
	for _, v := range r.trainer.Parameters() {
		parameters += tensor.New(v.DType, v.Shape...).Len()
	}
	from := ""
	if r.flags.weights.path != "" {
		from = ", starting from " + r.flags.weights.path
	}
	var t table
	t.row("data", "%s: %s training and %s test %s", r.flags.data.name, grouped(r.set.train.Len()),
		grouped(r.set.test.Len()), r.set.described(r.set.test.Len()))
	if text := r.preparation(); text != "" {
		t.row("training", "%s", text)
	}
	t.row("model", "%s, %s parameters%s", r.flags.model, grouped(parameters), from)
	r.announceWeights(&t)
	t.row("strategy", "%v, %s", r.strategy, count(replicas, "replica"))
	r.announceWorkers(&t)
	accumulated := ""
	if n := r.flags.step.accumulate; n > 1 {
		accumulated = fmt.Sprintf(", as %d batches of %d", n, r.batch)
	}
	t.row("batch", "%s a step, %d on each replica%s", count(r.batch*r.flags.step.accumulate, "example"),
		(r.batch+replicas-1)/replicas*r.flags.step.accumulate, accumulated)
	if d := r.flags.diloco.config(); d != nil {
		t.row("exchange", "%v", d)
	}
	clipped := ""
	switch {
	case r.flags.clipNorm > 0:
		clipped = fmt.Sprintf(", gradients clipped to a norm of %v", r.flags.clipNorm)
	case r.flags.clipValue > 0:
		clipped = fmt.Sprintf(", gradients clipped to ±%v", r.flags.clipValue)
	}
	t.row("optimizer", "%s, learning rate %v (%s)%s, seed %d, %s", r.flags.optimizer, r.flags.learningRate,
		r.flags.schedule, clipped, r.flags.seed, r.length())
	r.announceSnapshots(&t)
	t.row("engine", "%s", r.engine.Description())
	t.row("machine", "%s, %s/%s, %s", count(runtime.GOMAXPROCS(0), "core"), runtime.GOOS, runtime.GOARCH, vectors())
	for _, hint := range []string{simdHint(r.flags.engine), r.separateHint()} {
		if hint != "" {
			t.row("hint", "%s", hint)
		}
	}
	if err := t.print(r.out); err != nil {
		return err
	}
	_, err := fmt.Fprintln(r.out)
	return err
}

// preparation describes the preparation of the training data.
func (r *trainRun) preparation() string {
	var list []string
	if r.flags.data.shift > 0 {
		list = append(list, fmt.Sprintf("images shifted by up to %s", count(r.flags.data.shift, "pixel")))
	}
	if r.flags.data.flip {
		list = append(list, "half of them mirrored")
	}
	if split := r.flags.data.validationSplit; split > 0 {
		list = append(list, fmt.Sprintf("%.4g %% of the %s held out for validation", 100*split, r.set.unit))
	}
	return strings.Join(list, ", ")
}

func (r *trainRun) length() string {
	switch {
	case r.flags.epochs < 0:
		return count(r.flags.steps, "step")
	case r.flags.steps > 0:
		return fmt.Sprintf("%s or %s", count(r.flags.epochs, "epoch"), count(r.flags.steps, "step"))
	}
	return count(r.flags.epochs, "epoch")
}

func (r *trainRun) fit(ctx context.Context) error {
	cfg := train.FitConfig{
		Unit:   r.set.unit,
		Epochs: r.flags.epochs, Steps: r.flags.steps, Accumulate: r.flags.step.accumulate,
		Callbacks: []train.Callback{r.in.callback()},
	}
	if r.flags.data.validationSplit > 0 {
		cfg.Validation = r.evaluated(r.held)
	}
	cfg.Callbacks = append(cfg.Callbacks, r.record.callback(r.trainer.LearningRate))
	cfg.Callbacks = append(cfg.Callbacks, r.backups()...)
	batches := r.batches()
	cfg.Epochs = r.epochs()
	if err := r.callbacks(&cfg); err != nil {
		return err
	}
	if p, ok := r.showProgress(); ok {
		cfg.Callbacks = append(cfg.Callbacks, train.NewProgress(p))
	}
	r.started = time.Now()
	r.history = &train.History{}
	if r.flags.epochs == 0 {
		return nil
	}
	stop := r.reassure("running the first step")
	defer stop()
	cfg.Callbacks = append(cfg.Callbacks, train.Callback{OnStepEnd: func(context.Context, train.Step) error {
		stop()
		return nil
	}})
	var err error
	r.record.times.recorder = r.trainer.Timeline()
	r.history, err = r.trainer.Fit(ctx, batches, cfg)
	if file := r.flags.trace.file; file != "" && err == nil {
		r.written = append(r.written, [2]string{"trace", file})
	}
	r.stopped = r.history.Stopped && !r.stoppedEarly
	return r.flags.data.explain(err) // files of images are read here
}

// batches returns the training data. Changes of images come before Batch, so that a worker changes only its rows.
func (r *trainRun) batches() data.Pipeline {
	examples := r.kept.Shuffle(r.flags.seed)
	if r.flags.data.shift > 0 {
		examples = examples.MapRandom(r.flags.seed, data.RandomShift(r.flags.data.shift))
	}
	if r.flags.data.flip {
		examples = examples.MapRandom(r.flags.seed+1, data.RandomFlip())
	}
	return r.batched(examples, r.batch)
}

// batched returns batches of examples. Images in files are decoded by all cores, and ahead.
func (r *trainRun) batched(examples data.Pipeline, n int) data.Pipeline {
	batches := examples.Batch(n)
	if r.flags.data.name == "images" {
		batches = batches.Workers(runtime.GOMAXPROCS(0)).Prefetch(2)
	}
	return batches
}

// evaluated returns batches of examples for validation and test.
func (r *trainRun) evaluated(examples data.Pipeline) data.Pipeline {
	if n := r.flags.evalBatch; n > 0 {
		return r.batched(examples, n)
	}
	return r.batched(examples, r.batch)
}

// epochs returns the number of epochs: as many as the steps need if only --steps was given.
func (r *trainRun) epochs() int {
	if r.flags.epochs >= 0 {
		return r.flags.epochs
	}
	n := r.batch * r.flags.step.accumulate
	steps := max((r.kept.Len()+n-1)/n, 1)
	return (r.flags.steps + steps - 1) / steps
}

func (r *trainRun) showProgress() (train.ProgressConfig, bool) {
	cfg := train.ProgressConfig{Out: r.out, Unit: r.set.unit}
	var terminal bool
	cfg.Width, terminal = terminalWidth(r.out)
	if r.flags.progress == "bar" || r.flags.progress == "auto" && terminal && os.Getenv("TERM") != "dumb" &&
		!startedByMPI(os.Getenv) {
		cfg.Mode = train.ProgressBar
	}
	return cfg, r.chief && r.flags.progress != "none"
}

// startedByMPI reports whether mpirun or a similar launcher started this process. Then the terminal is not the
// user's: Open MPI creates one for each process, and may write its output to a file.
func startedByMPI(getenv func(string) string) bool {
	return slices.ContainsFunc([]string{"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID"},
		func(name string) bool { return getenv(name) != "" })
}

// evaluate measures loss and accuracy on the test set. After Ctrl-C it does nothing.
func (r *trainRun) evaluate(ctx context.Context) error {
	if r.stopped {
		return nil
	}
	result, err := r.trainer.Evaluate(ctx, r.evaluated(r.set.test))
	switch {
	case err == nil:
		r.test = &result
	case errors.Is(err, train.ErrStop):
		r.stopped = true
		return nil
	}
	return err
}

// report prints the final table.
func (r *trainRun) report() error {
	if !r.chief {
		_, err := fmt.Fprintf(r.out, "%v: %s, weights hash %s\n", r.cfg.job, count(r.history.Steps, "step"),
			train.HashWeights(r.weights))
		return err
	}
	fmt.Fprintln(r.out)
	var t table
	if r.test != nil {
		r.set.rows(&t, "test ", *r.test)
	} else {
		t.row("test", "not measured: interrupted")
	}
	if speed := r.history.Speed; speed.Steps > 0 {
		t.row(r.set.unit+"/s", "%s", grouped(int(math.Round(speed.ExamplesPerSecond))))
		t.row("all-reduce", "%.1f %% of a step", 100*speed.ReduceShare)
		t.row("wait", "%.1f %% of a step, for collective calls%s", 100*speed.WaitShare, r.ofThisWorker())
	}
	t.row("trained", "%s in %s", count(r.history.Steps, "step"), r.trainingTime().Round(10*time.Millisecond))
	t.row("weights hash", "%s", train.HashWeights(r.weights))
	t.row("kernels", "%s", kernels(r.flags.engine))
	for _, what := range r.written {
		t.row(what[0], "%s", what[1])
	}
	return t.print(r.out)
}

// trainingTime returns the time of all epochs, without validation.
func (r *trainRun) trainingTime() (sum time.Duration) {
	for _, e := range r.history.Epochs {
		sum += e.Duration
	}
	return sum
}
