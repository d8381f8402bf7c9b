package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Trainer trains one model over one strategy. Only one goroutine at a time may use it, except for
// [Trainer.Stop], which any goroutine may call. Callbacks of [Trainer.Fit] may use it, but must not call Fit.
// The caller must call [Trainer.Close].
type Trainer struct {
	strategy *distribute.Strategy
	inner    *distribute.Strategy // executes steps: strategy, or with DiLoCo one of this worker's replicas alone
	diloco   *diloco              // nil: gradients are exchanged in each step
	program  engine.Program
	config   Config
	parts    []part // by replica
	spare    []*globalBatch
	shapes   []*batchShape // of global batches; that of the program is first
	buckets  []bucket
	devices  []*device // in the order of engine.Spec.Devices
	deviceOf []int     // by replica
	central  bool      // one copy of the variables serves all replicas
	shards   *shards   // nil: every device updates all parameters

	whole   engine.WholeStep // computes a step of one batch as one program; nil: it cannot, or gradients are clipped
	squares [][]float64      // by parameter and block: of the step's gradients, if Config clips by a norm
	norm    float64          // of the last step's gradients, with Config.ClipNorm
	summed  barrier          // all replicas have added their squares

	stepping  *stepBatches                                     // of the step in progress
	feeding   *feeder                                          // whose batch was taken last; nil: closed
	takeStep  func(context.Context, *distribute.Replica) error // computes and updates by them
	running   func(context.Context, *distribute.Replica) error // what onReplica calls
	onReplica func(context.Context, *distribute.Replica, ...distribute.Value) (distribute.Value, error)

	metrics   []metric
	sums      int // of all metrics
	variables []engine.Variable
	// distributed are the strategy's variables for those of the program, in the same order. access serializes them.
	distributed []*distribute.Variable
	access      sync.Mutex
	committed   int64               // steps whose values are visible
	passes      int64               // calls of Gradients since the last of them
	fitting     atomic.Pointer[fit] // the Fit in progress, or nil
	resume      *fitState           // where the next Fit resumes; nil: at its beginning

	partial *partialSnapshot // the snapshot in progress that several workers write; nil: none

	assigned assigned    // values that variables were set to
	workers  int         // in the job
	firsts   []int       // of each worker, the first replica; nil: there is one worker
	worker   int         // this one's number, in the order of the replicas
	initial  uint64      // with several workers: hash of this worker's own initial values
	stopping atomic.Bool // Stop was called
	// a callback of the current Fit requested a stop, which the other workers have not received yet
	stopRequested bool

	kept keptGradients

	computeDType tensor.DType // of the model's layers; Invalid: not known
	scale        lossScale

	notFinite int // non-finite batches that did not end Fit or Evaluate

	clocks []clock                           // by replica
	number int                               // of this trainer, in the timeline
	took   [timeline.KindCount]time.Duration // by the first replica since the last step was committed
	waited time.Duration                     // by it for collective calls, in the last step
}

// New compiles m for the replicas of s. The strategy must have an engine and must outlive the trainer. With several
// workers, every worker calls New with the same model and configuration, and starts from the chief's initial values;
// only those that differ between workers are sent. New returns an error if the configuration is invalid, the model does
// not compile, or the workers' models differ.
func New(ctx context.Context, s *distribute.Strategy, m engine.Model, cfg Config) (*Trainer, error) {
	if s.Engine() == nil {
		return nil, errors.New("train: the strategy has no engine: set Engine in its configuration")
	}
	t := &Trainer{strategy: s, inner: s, workers: 1, assigned: assigned{variable: -1}, config: cfg}
	t.number = t.Timeline().NewTrainer()
	t.makeSteps()
	if err := t.open(ctx, m); err != nil {
		t.failOthers(ctx, err)
		return nil, errors.Join(err, t.Close())
	}
	t.at(PhaseStart)
	if t.others() {
		if err := t.startEqual(ctx); err != nil {
			return nil, errors.Join(err, t.Close())
		}
	}
	return t, nil
}

// open completes the configuration, compiles the model, and prepares the variables and the buckets.
func (t *Trainer) open(ctx context.Context, m engine.Model) error {
	if err := t.config.complete(ctx, t.strategy.Options().Timeout); err != nil {
		return err
	}
	t.setShapes()
	if err := t.rejectShard(t.config.Data); t.config.Data != nil && err != nil {
		return fmt.Errorf("train: Config.Data: %w", err)
	}
	if err := t.checkNoiseScale(); err != nil {
		return fmt.Errorf("train: Config.NoiseScale: %w", err)
	}
	owners, err := t.compile(ctx, m)
	if err != nil {
		return fmt.Errorf("train: %w", err)
	}
	if err := errors.Join(t.reserve(normMetric, "ClipNorm", t.config.ClipNorm > 0),
		t.reserve(noiseMetric, "NoiseScale", t.config.NoiseScale)); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	if err := t.makeVariables(); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	if err := t.shard(ctx, owners); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	t.computesIn()
	t.plan()
	if err := t.openDiLoCo(); err != nil {
		return fmt.Errorf("train: Config.DiLoCo: %w", err)
	}
	return nil
}

// compile compiles the model for the strategy's devices. owners are the owners of the parameters (see shardSpec).
func (t *Trainer) compile(ctx context.Context, m engine.Model) (owners []int, err error) {
	s := t.strategy
	var devices []engine.Device
	for replica, d := range s.EngineDevices() {
		i := slices.Index(devices, d)
		if i < 0 {
			i, devices, t.devices = len(devices), append(devices, d), append(t.devices, &device{})
		}
		t.clocks = append(t.clocks, clock{idle: true})
		t.devices[i].replicas, t.deviceOf = append(t.devices[i].replicas, replica), append(t.deviceOf, i)
	}
	t.at(PhaseCompile)
	n := s.NumReplicasInSync()
	spec := engine.Spec{
		Rows:           ceilDiv(t.config.GlobalBatch, n),
		Inputs:         t.config.Inputs,
		Labels:         t.config.Labels,
		Devices:        devices,
		ReplicaDevices: t.deviceOf,
		Seed:           t.config.Seed,

		Replicas: n,
		Sum:      t.sum,
		Summed:   t.summedReplicas(),

		BucketBytes: t.config.BucketBytes,
	}
	if d, ok := s.EngineParameterDevice(); ok {
		spec.Central, t.central = &d, true
	}
	if owners, err = t.shardSpec(ctx, &spec); err != nil {
		return nil, err
	}
	program, err := m.Compile(ctx, s.Engine(), spec)
	if err == nil {
		t.program = program
		err = errors.Join(t.keepsCentral(), compressible(t.config.Compress, t.Parameters(), s))
	}
	if err != nil {
		return nil, fmt.Errorf("compiling the model: %w", err)
	}
	if p, ok := t.program.(engine.Advised); ok {
		for _, text := range p.Advice() {
			t.config.Logger.Info("train: " + text)
		}
	}
	t.variables = t.program.Variables()
	t.metrics, t.sums = metricsOf(t.program)
	return owners, nil
}

// keepsCentral returns an error if the strategy keeps one copy of the variables, and the program does not.
func (t *Trainer) keepsCentral() error {
	if p, ok := t.program.(engine.Central); !t.central || ok && p.Central() {
		return nil
	}
	return fmt.Errorf("the engine %s gives every replica its own variables, where %v keeps them on %s: use "+
		"NewMirroredStrategy",
		t.strategy.Engine().Name(), t.strategy, strings.Join(t.strategy.ParameterDevices(), ", "))
}

// reserve returns an error if the model has a metric of the name that a field of Config adds.
func (t *Trainer) reserve(metric, field string, set bool) error {
	if !set || !slices.Contains(t.Metrics(), metric) {
		return nil
	}
	return fmt.Errorf("the model has a metric %q, which Config.%s adds: rename it", metric, field)
}

// at records the phase that begins, and reports it to Config.Progress.
func (t *Trainer) at(phase Phase) {
	t.begins(0, kindOf(phase))
	if t.config.Progress != nil {
		t.config.Progress(t.committed+1, phase)
	}
}

// replicaAt records the phase that a replica begins. Only the worker's first replica reports it.
func (t *Trainer) replicaAt(r *distribute.Replica, phase Phase) {
	if r.LocalID() == 0 {
		t.at(phase)
	} else {
		t.begins(r.LocalID(), kindOf(phase))
	}
}

// IsChief reports whether this worker writes for all: logs, checkpoints, event files.
func (t *Trainer) IsChief() bool { return t.strategy.Properties().ShouldCheckpoint }

// Close frees the program and its variables. The trainer must not be used afterwards.
func (t *Trainer) Close() error {
	t.spare = nil // their memory may belong to the program
	var err error
	if t.program != nil { // else New has failed
		err = t.program.Close()
	}
	if t.inner != t.strategy {
		err = errors.Join(err, t.inner.Close())
	}
	return err
}

// Strategy returns the strategy that the trainer runs on.
func (t *Trainer) Strategy() *distribute.Strategy { return t.strategy }

// Parameters lists the trained variables, sorted by name. Gradients have the same order. The caller must not
// modify the slice.
func (t *Trainer) Parameters() []engine.Variable { return t.program.Parameters() }

// Variables lists all variables, including the optimizer's, sorted by role, then by name. The caller must not
// modify the slice.
func (t *Trainer) Variables() []engine.Variable { return t.variables }

// Metrics lists the names of the model's metrics. The caller must not modify the slice.
func (t *Trainer) Metrics() []string { return t.program.Metrics() }

// Steps returns the number of steps taken so far, by Fit and by ApplyGradients.
func (t *Trainer) Steps() int64 { return t.committed }

func ceilDiv(a, b int) int { return (a + b - 1) / b }
