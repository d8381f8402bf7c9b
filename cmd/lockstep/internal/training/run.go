package training

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

var progressModes = []string{"auto", "bar", "plain", "none"}

// trainRun is one run of lockstep train.
type trainRun struct {
	*setup.Session
	snapshots

	flags   Flags
	out     io.Writer
	in      *cli.Interrupter
	set     *datasets.Examples
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
	unwritten    error       // of the trace; nil: none
	metadata     map[string]string
}

func runTrain(ctx context.Context, out io.Writer, o Flags) (err error) {
	r := &trainRun{flags: o, out: out, in: cli.CatchInterrupts(ctx), chief: true}
	defer r.in.Close()
	if err := r.join(); err != nil {
		return r.unlessInterrupted(err)
	}
	defer func() { err = errors.Join(err, r.Session.Close()) }()
	defer func() {
		if e := r.closeSnapshots(); err == nil { // else err has been reported
			err = e
		}
	}()
	defer r.reportPanic()
	if err := r.train(ctx); err != nil {
		return r.unlessInterrupted(r.fail(err))
	}
	if r.stopped && !r.in.Interrupted.Load() {
		fmt.Fprintln(os.Stderr, "lockstep: stopped by an interrupt of another worker")
	}
	return r.unlessInterrupted(nil)
}

// train does everything after the workers have joined.
func (r *trainRun) train(ctx context.Context) (err error) {
	if err := r.open(); err != nil {
		return err
	}
	defer r.in.StopOn(r.Trainer)()
	page, err := r.serveDashboard()
	if err != nil {
		return err
	}
	defer page.Close()
	if err := r.announce(); err != nil {
		return err
	}
	if dir := r.flags.checkpoint.dir; dir != "" && r.chief { // for eval, generate and predict
		if err := r.writeConfig(filepath.Join(dir, ConfigFile)); err != nil {
			return err
		}
	}
	if err := r.fit(ctx); err != nil {
		return err
	}
	if err := r.evaluate(ctx); err != nil {
		return err
	}
	if r.weights, err = r.Trainer.Weights(ctx); err != nil {
		return err
	}
	// The table is printed even if a file cannot be written.
	return errors.Join(r.write(), r.writeReport(ctx), r.report(), r.unwritten)
}

// unlessInterrupted returns err, or errInterrupted if this or another worker was interrupted.
func (r *trainRun) unlessInterrupted(err error) error {
	if r.in.Interrupted.Load() || err == nil && r.stopped {
		return cli.ErrInterrupted
	}
	return err
}

// join opens the engine and, if this is a worker of a job, joins the other workers.
func (r *trainRun) join() (err error) {
	cfg := setup.SessionConfig{
		Engine:    r.flags.engine,
		OneDevice: r.flags.strategy == "one-device", Replicas: r.flags.replicas, Devices: r.flags.devices,
		LogicalCPUs: r.flags.logicalCPUs(),
		GlobalBatch: r.flags.GlobalBatch, BatchPerReplica: r.flags.BatchPerReplica,
		EvalBatch: r.flags.evalBatch, Seed: r.flags.seed,
		BucketBytes: r.flags.Step.BucketBytes.N, Exchange: r.flags.exchange(), NoiseScale: r.flags.noiseScale,
		ClipNorm: r.flags.clipNorm, ClipValue: r.flags.clipValue, Trace: r.flags.trace.Config(),
	}
	if r.flags.strategy == multiWorker {
		if cfg.Job, err = r.flags.workers.Discover(); err != nil {
			return err
		}
		cfg.Workers, r.chief = &r.flags.workers, cfg.Job.Chief()
		if err := r.announceJob(cfg.Job); err != nil {
			return err
		}
	}
	machine.TuneGC(cfg.Job)
	r.Session, err = setup.OpenSession(r.in, cfg)
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
	if r.Worker != nil {
		r.Worker.Progress(-1, "reading data")
	}
	if err := r.openData(); err != nil {
		return err
	}
	if err := r.describe(); err != nil {
		return err
	}
	if err := r.OpenStrategy(); err != nil {
		return err
	}
	r.batch = r.flags.GlobalBatch
	if r.flags.BatchPerReplica > 0 {
		r.batch = r.flags.BatchPerReplica * r.Strategy.NumReplicasInSync()
	}
	if w, planned := r.flags.callbacks.warmup, r.plannedSteps(); w > planned {
		return cli.Usagef("--warmup-steps %d: the schedule has only %d steps, those of --epochs or --steps: want at most "+
			"as many", w, planned)
	}
	m := r.flags.NewModel(r.set, r.optimizer())
	if err := r.flags.callbacks.checkMonitor(m, &r.flags); err != nil {
		return err
	}
	stop := r.reassure("compiling the model")
	inputs, labels := r.set.Features()
	err = r.Compile(r.in, m, inputs, labels)
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
	replicas := len(r.Devices)
	if r.Strategy != nil {
		replicas = r.Strategy.NumReplicasInSync()
	}
	return cli.Reassure(os.Stderr, func() string {
		return fmt.Sprintf("%s for %s on %s", what, cli.Count(max(replicas, 1), "replica"), cli.Count(runtime.GOMAXPROCS(0),
			"core"))
	})
}

// checkOutputs returns an error if a file of the results cannot be written.
func (r *trainRun) checkOutputs() error {
	if dir := r.flags.out; dir != "" {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return fmt.Errorf("--out: %w", err)
		}
		for _, name := range []string{WeightsFile, historyFile, summaryFile, ConfigFile, reportFile} {
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
	return r.flags.trace.CheckWritable()
}

// openData loads the data set, and validates the flags against its size.
func (r *trainRun) openData() (err error) {
	if r.set, err = datasets.Kinds[r.flags.Data.Name].Load(&r.flags.Data, r.flags.Positions); err != nil {
		return err
	}
	if side := r.set.Shape[0]; r.flags.Data.Shift >= side && r.set.Unit == "images" {
		return cli.Usagef("--shift %d: want less than %d, the height of the images", r.flags.Data.Shift, side)
	}
	r.kept = r.set.Train
	n := r.kept.Len()
	if split := r.flags.Data.ValidationSplit; split > 0 {
		r.kept, r.held = r.kept.Split(split, r.flags.seed)
		if r.kept.Len() == 0 || r.held.Len() == 0 {
			return cli.Usagef("--validation-split %v: of %s training %s, this leaves %s for training and %s for validation",
				split, cli.Grouped(n), r.set.Unit, cli.Grouped(r.kept.Len()), cli.Grouped(r.held.Len()))
		}
	}
	if r.flags.batchByDefault && r.flags.GlobalBatch > n { // all of a small data set
		r.flags.GlobalBatch, r.Session.Config.GlobalBatch = n, n
	}
	for flag, batch := range map[string]int{
		"global-batch":      r.flags.GlobalBatch,
		"batch-per-replica": r.flags.BatchPerReplica,
	} {
		if batch > n {
			return cli.Usagef("--%s %d: want at most the %s training %s", flag, batch, cli.Grouped(n), r.set.Unit)
		}
	}
	return nil
}

// announce prints what the run will do.
func (r *trainRun) announce() error {
	if !r.chief {
		return nil
	}
	replicas := r.Strategy.NumReplicasInSync()
	parameters := 0
	for _, v := range r.Trainer.Parameters() {
		parameters += tensor.New(v.DType, v.Shape...).Len()
	}
	from := ""
	if r.flags.weights.path != "" {
		from = ", starting from " + r.flags.weights.path
	}
	var t cli.Table
	t.Row("data", "%s: %s training and %s test %s", r.flags.Data.Name, cli.Grouped(r.set.Train.Len()),
		cli.Grouped(r.set.Test.Len()), r.set.Described(r.set.Test.Len()))
	if text := r.preparation(); text != "" {
		t.Row("training", "%s", text)
	}
	t.Row("model", "%s, %s parameters%s", r.flags.Model, cli.Grouped(parameters), from)
	r.announceWeights(&t)
	t.Row("strategy", "%v, %s", r.Strategy, cli.Count(replicas, "replica"))
	r.announceWorkers(&t)
	accumulated := ""
	if n := r.flags.Step.Accumulate; n > 1 {
		accumulated = fmt.Sprintf(", as %d batches of %d", n, r.batch)
	}
	t.Row("batch", "%s a step, %d on each replica%s", cli.Count(r.batch*r.flags.Step.Accumulate, "example"),
		(r.batch+replicas-1)/replicas*r.flags.Step.Accumulate, accumulated)
	if d := r.flags.diloco.config(); d != nil {
		t.Row("exchange", "%v", d)
	}
	clipped := ""
	switch {
	case r.flags.clipNorm > 0:
		clipped = fmt.Sprintf(", gradients clipped to a norm of %v", r.flags.clipNorm)
	case r.flags.clipValue > 0:
		clipped = fmt.Sprintf(", gradients clipped to ±%v", r.flags.clipValue)
	}
	t.Row("optimizer", "%s, learning rate %v (%s)%s, seed %d, %s", r.flags.optimizer, r.flags.learningRate,
		r.flags.schedule, clipped, r.flags.seed, r.length())
	r.announceSnapshots(&t)
	t.Row("engine", "%s", r.Config.Engine.Describe(r.Engine))
	t.Row("machine", "%s, %s/%s, %s", cli.Count(runtime.GOMAXPROCS(0), "core"), runtime.GOOS, runtime.GOARCH,
		machine.Vectors())
	if err := t.Print(r.out); err != nil {
		return err
	}
	_, err := fmt.Fprintln(r.out)
	return err
}

// preparation describes the preparation of the training data.
func (r *trainRun) preparation() string {
	var list []string
	if r.flags.Data.Shift > 0 {
		list = append(list, fmt.Sprintf("images shifted by up to %s", cli.Count(r.flags.Data.Shift, "pixel")))
	}
	if r.flags.Data.Flip {
		list = append(list, "half of them mirrored")
	}
	if split := r.flags.Data.ValidationSplit; split > 0 {
		list = append(list, fmt.Sprintf("%.4g %% of the %s held out for validation", 100*split, r.set.Unit))
	}
	return strings.Join(list, ", ")
}

func (r *trainRun) length() string {
	switch {
	case r.flags.epochs < 0:
		return cli.Count(r.flags.steps, "step")
	case r.flags.steps > 0:
		return fmt.Sprintf("%s or %s", cli.Count(r.flags.epochs, "epoch"), cli.Count(r.flags.steps, "step"))
	}
	return cli.Count(r.flags.epochs, "epoch")
}

func (r *trainRun) fit(ctx context.Context) error {
	cfg := train.FitConfig{
		Unit: r.set.Unit, Settings: r.settings(),
		Epochs: r.flags.epochs, Steps: r.flags.steps, Accumulate: r.flags.Step.Accumulate,
		Callbacks: []train.Callback{r.in.Callback()},
	}
	if r.flags.Data.ValidationSplit > 0 {
		cfg.Validation = r.evaluated(r.held)
	}
	cfg.Callbacks = append(cfg.Callbacks, r.record.callback(r.Trainer.LearningRate))
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
	r.record.times.Recorder = r.Trainer.Timeline()
	r.history, err = r.Trainer.Fit(ctx, batches, cfg)
	if trace, ok := err.(*train.TraceError); ok { // the training itself is complete
		r.unwritten, err = fmt.Errorf("--trace %s: %w", r.flags.trace.File, trace.Err), nil
	} else if file := r.flags.trace.File; file != "" && err == nil {
		r.written = append(r.written, [2]string{"trace", file})
	}
	r.stopped = r.history.Stopped && !r.stoppedEarly
	return r.flags.Data.Explain(err) // files of images are read here
}

// batches returns the training data. Changes of images come before Batch, so that a worker changes only its rows.
func (r *trainRun) batches() data.Pipeline {
	examples := r.kept.Shuffle(r.flags.seed)
	if r.flags.Data.Shift > 0 {
		examples = examples.MapRandom(r.flags.seed, data.RandomShift(r.flags.Data.Shift))
	}
	if r.flags.Data.Flip {
		examples = examples.MapRandom(r.flags.seed+1, data.RandomFlip())
	}
	return r.batched(examples, r.batch)
}

// batched returns batches of examples. Images in files are decoded by all cores, and ahead.
func (r *trainRun) batched(examples data.Pipeline, n int) data.Pipeline {
	batches := examples.Batch(n)
	if r.flags.Data.Name == "images" {
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
	n := r.batch * r.flags.Step.Accumulate
	steps := max((r.kept.Len()+n-1)/n, 1)
	return (r.flags.steps + steps - 1) / steps
}

func (r *trainRun) showProgress() (train.ProgressConfig, bool) {
	cfg := train.ProgressConfig{Out: r.out, Unit: r.set.Unit}
	switch r.flags.progress {
	case "bar":
		cfg.Mode = train.ProgressBar
	case "plain":
		cfg.Mode = train.ProgressPlain
	}
	return cfg, r.chief && r.flags.progress != "none"
}

// evaluate measures loss and accuracy on the test set. After Ctrl-C it does nothing.
func (r *trainRun) evaluate(ctx context.Context) error {
	if r.stopped {
		return nil
	}
	result, err := r.Trainer.Evaluate(ctx, r.evaluated(r.set.Test))
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
		_, err := fmt.Fprintf(r.out, "%v: %s, weights hash %s\n", r.Config.Job, cli.Count(r.history.Steps, "step"),
			train.HashWeights(r.weights))
		return err
	}
	fmt.Fprintln(r.out)
	var t cli.Table
	if r.test != nil {
		r.set.Rows(&t, "test ", *r.test)
	} else {
		t.Row("test", "not measured: interrupted")
	}
	if speed := r.history.Speed; speed.Steps > 0 {
		t.Row(r.set.Unit+"/s", "%s", cli.Grouped(int(math.Round(speed.ExamplesPerSecond))))
		t.Row("all-reduce", "%.1f %% of a step", 100*speed.ReduceShare)
		t.Row("wait", "%.1f %% of a step, for collective calls%s", 100*speed.WaitShare, r.OfThisWorker())
	}
	t.Row("trained", "%s in %s", cli.Count(r.history.Steps, "step"), r.trainingTime().Round(10*time.Millisecond))
	t.Row("weights hash", "%s", train.HashWeights(r.weights))
	t.Row("kernels", "%s", machine.Kernels(r.Engine.Name()))
	for _, what := range r.written {
		t.Row(what[0], "%s", what[1])
	}
	return t.Print(r.out)
}

// trainingTime returns the time of all epochs, without validation.
func (r *trainRun) trainingTime() (sum time.Duration) {
	for _, e := range r.history.Epochs {
		sum += e.Duration
	}
	return sum
}

// serveDashboard serves the state of the training, on the chief.
func (r *trainRun) serveDashboard() (*monitor.Service, error) {
	flags := &r.flags.dashboard
	if !r.chief {
		return &monitor.Service{}, nil
	}
	if r.Worker != nil && r.Worker.Status() != nil {
		return flags.Open(r.Worker.Job().ID, r.Worker.Status())
	}
	job := os.Getenv(cluster.EnvJob)
	if job == "" {
		job = cli.JobID("train")
	}
	source := &status.Local{Tracker: status.NewTracker(job, nil), Recorder: r.Strategy.Timeline()}
	l, err := flags.Open(job, source)
	if err == nil && flags.Given() {
		l.Feed(func(ctx context.Context) { source.Follow(ctx, monitor.Every) })
	}
	return l, err
}

// describe sets what the files of weights and the snapshots of a run say about it.
func (r *trainRun) describe() error {
	text, err := json.Marshal(r.set.Preparation)
	if err != nil { // of a number that is not finite
		return fmt.Errorf("describing the inputs: %w", err)
	}
	r.metadata = map[string]string{
		"program": "lockstep " + cli.Version(), "model": r.flags.Model, "data": r.flags.Data.Name,
		datasets.PreparationKey: string(text),
	}
	return nil
}
