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
	program  engine.Program
	config   Config
	metrics  []metric
	sums     int  // of all metrics
	central  bool // one copy of the variables serves all replicas

	engineDevices []engine.Device // of the program: those of the first local replicas
	shards        bool            // the optimizer is sharded

	replicasOf [][]int // by worker, the ids of its replicas, ascending
	worker     int     // this one's number

	stepper
	fitter
	state
}

// stepper is what steps need.
type stepper struct {
	inner    *distribute.Strategy // executes steps: strategy, or with DiLoCo one of this worker's replicas alone
	exchange exchange             // of gradients
	// compression is that of the exchange, or with DiLoCo of outer steps.
	compression compression
	diloco      *diloco        // inner and outer steps; nil: every step is one of all workers
	local       []localReplica // the replicas of this worker
	buckets     []bucket
	devices     []*device     // in the order of engine.Spec.Devices
	deviceOf    []int         // by replica
	shapes      []*batchShape // of global batches; that of the program is first
	spare       []*globalBatch

	whole   bool        // the program computes a step of one batch as one program; no gradients are clipped
	squares [][]float64 // by parameter and block: of the step's gradients, if Config clips by a norm
	norm    float64     // of the last step's gradients, with Config.ClipNorm
	summed  barrier     // all replicas have added their squares
	kept    keptGradients

	stepping  *stepBatches                                     // of the step in progress
	takeStep  func(context.Context, *distribute.Replica) error // computes and updates by them
	running   func(context.Context, *distribute.Replica) error // what onReplica calls
	onReplica func(context.Context, *distribute.Replica, struct{}) (struct{}, error)

	clocks []clock                           // by replica
	number int                               // of this trainer, in the timeline
	took   [timeline.KindCount]time.Duration // by the first replica since the last step was committed
	waited time.Duration                     // by it for collective calls, in the last step
}

// fitter is what Fit needs between steps.
type fitter struct {
	fitting  atomic.Pointer[fit] // the Fit in progress, or nil
	feeding  *feeder             // whose batch was taken last; nil: closed
	stopping atomic.Bool         // Stop was called
	// a callback of the current Fit requested a stop, which the other workers have not received yet
	stopRequested bool
	partial       *partialSnapshot // the snapshot in progress that several workers write; nil: none
	notFinite     int              // non-finite batches that did not end Fit or Evaluate
}

// state is what changes with the steps, and with what programs set between them.
type state struct {
	variables []engine.Variable
	table     []*stateValue // the state table of the variables, in the same order
	// distributed are the strategy's variables for those of the program, in the same order. access serializes them.
	distributed []*distribute.Variable
	access      sync.Mutex

	committed int64     // steps whose values are visible
	passes    int64     // calls of Gradients since the last of them
	outer     int64     // outer steps of DiLoCo
	resume    *fitState // where the next Fit resumes; nil: at its beginning
	assigned  assigned  // values that variables were set to
	initial   uint64    // with several workers: hash of this worker's own initial values
	verified  uint64    // hash of the mirrored variables before the step in progress; 0: they are not compared

	computeDType tensor.DType // of the model's layers; Invalid: not known

	started bool // the values are those of the job, not only initial ones of this worker
	// copies has values that only one replica has, while replicas are placed anew: by replica id (or ofAll) and name.
	copies map[int]map[string]*tensor.Tensor
	scale  lossScale
}

// New compiles m for the replicas of s. The strategy must have an engine and must outlive the trainer. With several
// workers, every worker calls New with the same model and configuration, and starts from the chief's initial values;
// only those that differ between workers are sent. New returns an error if the configuration is invalid, the model does
// not compile, or the workers' models differ.
func New(ctx context.Context, s *distribute.Strategy, m engine.Model, cfg Config) (*Trainer, error) {
	if s.Engine() == nil {
		return nil, errors.New("train: the strategy has no engine: set Engine in its configuration")
	}
	t := &Trainer{strategy: s, config: cfg, replicasOf: s.ReplicasByWorker()}
	t.worker = t.workerOf(s.LocalReplicas()[0])
	t.inner, t.assigned.variable = s, -1
	t.number = t.Timeline().NewTrainer()
	t.makeSteps()
	if err := t.open(ctx, m); err != nil {
		t.failOthers(ctx, err)
		return nil, errors.Join(err, t.Close())
	}
	t.enter(PhaseStart)
	if t.others() {
		if err := t.startEqual(ctx); err != nil {
			return nil, errors.Join(err, t.Close())
		}
		t.started = true
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
	sharded, err := t.compile(ctx, m)
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
	if sharded, err = t.shardsChosen(ctx, sharded); err != nil {
		return fmt.Errorf("train: %w", err)
	}
	t.makeTable()
	if sharded {
		if err := t.divideSlots(ctx); err != nil {
			return fmt.Errorf("train: %w", err)
		}
	}
	t.computesIn()
	t.shards = sharded
	t.plan()
	return t.openExchange(ctx)
}

// locate sets which devices of the program the strategy's local replicas use.
func (t *Trainer) locate() error {
	for range t.engineDevices {
		t.devices = append(t.devices, &device{})
	}
	for replica, d := range t.strategy.EngineDevices() {
		i := slices.Index(t.engineDevices, d)
		if i < 0 {
			return fmt.Errorf("replica %d is placed on %s:%d, for which the model is not compiled: want one of %v",
				t.ids()[replica], d.Kind, d.Index, t.engineDevices)
		}
		t.clocks = append(t.clocks, clock{idle: true})
		t.devices[i].replicas, t.deviceOf = append(t.devices[i].replicas, replica), append(t.deviceOf, i)
	}
	return nil
}

// compile compiles the model for the strategy's devices. sharded reports whether the optimizer can be sharded.
func (t *Trainer) compile(ctx context.Context, m engine.Model) (sharded bool, err error) {
	s := t.strategy
	for _, d := range s.EngineDevices() {
		if !slices.Contains(t.engineDevices, d) {
			t.engineDevices = append(t.engineDevices, d)
		}
	}
	if err := t.locate(); err != nil {
		return false, err
	}
	t.enter(PhaseCompile)
	n := s.NumReplicasInSync()
	spec := engine.Spec{
		Rows:           ceilDiv(t.config.GlobalBatch, n),
		Inputs:         t.config.Inputs,
		Labels:         t.config.Labels,
		Devices:        t.engineDevices,
		ReplicaDevices: t.deviceOf,
		Seed:           t.config.Seed,

		Replicas: n,
		Sum:      t.sum,

		BucketBytes: t.config.BucketBytes,
	}
	if t.config.diloco() != nil {
		spec.Summed = len(t.deviceOf)
	}
	if d, ok := s.EngineParameterDevice(); ok {
		spec.Central, t.central = &d, true
	}
	if sharded, err = t.shardSpec(ctx, &spec); err != nil {
		return false, err
	}
	program, err := m.Compile(ctx, s.Engine(), spec)
	if err == nil {
		t.program = program
		err = errors.Join(t.keepsCentral(), compressible(t.config.Exchange.codec(), t.Parameters(), s))
	}
	if err != nil {
		return false, fmt.Errorf("compiling the model: %w", err)
	}
	t.variables = t.program.Variables()
	t.metrics, t.sums = metricsOf(t.program)
	return sharded, nil
}

// keepsCentral returns an error if the strategy keeps one copy of the variables, and the program does not.
func (t *Trainer) keepsCentral() error {
	if !t.central || t.program.Info().Central {
		return nil
	}
	return fmt.Errorf("the engine %s gives every replica its own variables, where %v keeps them on %s: use "+
		"NewMirroredStrategy",
		t.strategy.Engine().Name(), t.strategy, strings.Join(t.strategy.Properties().ParameterDevices, ", "))
}

// reserve returns an error if the model has a metric of the name that a field of Config adds.
func (t *Trainer) reserve(metric, field string, set bool) error {
	if !set || !slices.Contains(t.Metrics(), metric) {
		return nil
	}
	return fmt.Errorf("the model has a metric %q, which Config.%s adds: rename it", metric, field)
}

// enter records the phase that begins, and reports it to Config.Progress.
func (t *Trainer) enter(phase Phase) {
	t.begins(0, kindOf(phase))
	if t.config.Progress != nil {
		t.config.Progress(t.committed+1, phase)
	}
}

// replicaEnters records the phase that a replica begins. Only the worker's first replica reports it.
func (t *Trainer) replicaEnters(r *distribute.Replica, phase Phase) {
	if r.LocalID() == 0 {
		t.enter(phase)
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
