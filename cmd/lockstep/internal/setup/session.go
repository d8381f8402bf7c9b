// Package setup opens what the commands that train have in common: engine, worker, strategy and trainer. It has the
// flags for them, and the models and optimizers.
package setup

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/spf13/pflag"
)

// Session holds an engine, a strategy on its devices, and a trainer that uses both.
type Session struct {
	Config   SessionConfig
	Engine   engine.Engine
	Devices  []string       // of the replicas; nil: the strategy's default
	Worker   *worker.Worker // nil: no job
	Strategy *distribute.Strategy
	Trainer  *train.Trainer
}

// SessionConfig configures a session.
type SessionConfig struct {
	Engine          EngineFlags
	OneDevice       bool
	Job             *cluster.Job // the job of this worker; nil: none
	Workers         *WorkerFlags // with job
	Replicas        int          // 0: all devices
	Devices         []string     // instead of replicas
	LogicalCPUs     int
	GlobalBatch     int // or
	BatchPerReplica int
	EvalBatch       int // 0: as for training
	Seed            int64
	BucketBytes     int // 0: the engine's default
	Exchange        train.Exchange
	NoiseScale      bool
	ClipNorm        float64
	ClipValue       float64
	Trace           *train.Trace // nil: none
}

// OpenSession opens the engine and, if there is a job, joins the other workers.
func OpenSession(ctx context.Context, cfg SessionConfig) (s *Session, err error) {
	s = &Session{Config: cfg, Devices: cfg.Devices}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.Engine, err = s.Config.Engine.Open(cfg.LogicalCPUs); err != nil {
		return s, err
	}
	if s.Devices == nil && (cfg.Replicas > 0 || cfg.Job != nil) {
		if s.Devices, err = firstDevices(s.Engine, cfg.Replicas); err != nil {
			return s, err
		}
	}
	if cfg.Job != nil {
		s.Worker, err = cfg.Workers.join(ctx, cfg.Job, len(s.Devices))
	}
	return s, err
}

// OpenStrategy creates the strategy, if there is none.
func (s *Session) OpenStrategy() (err error) {
	switch {
	case s.Strategy != nil:
	case s.Worker != nil:
		s.Strategy, err = distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
			Engine: s.Engine, Devices: s.Devices, Worker: s.Worker,
			Options: distribute.Options{Timeout: s.Config.Workers.collectiveTimeout, Implementation: s.Config.Workers.reducer()},
		})
	case s.Config.OneDevice:
		one := distribute.OneDeviceConfig{Engine: s.Engine}
		if len(s.Devices) > 0 {
			one.Device = s.Devices[0]
		}
		s.Strategy, err = distribute.NewOneDeviceStrategy(one)
	default:
		s.Strategy, err = distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: s.Engine, Devices: s.Devices})
	}
	return err
}

// Compile compiles the model for the strategy and for rows of these features.
func (s *Session) Compile(ctx context.Context, m engine.Model, inputs, labels []engine.Feature) (err error) {
	cfg := train.Config{
		GlobalBatch: s.Config.GlobalBatch, Seed: s.Config.Seed, BucketBytes: s.Config.BucketBytes,
		Exchange: s.Config.Exchange, NoiseScale: s.Config.NoiseScale,
		ClipNorm: s.Config.ClipNorm, ClipValue: s.Config.ClipValue, Trace: s.Config.Trace,
	}
	if s.Worker != nil {
		cfg.Progress = s.Worker.Progress
	}
	if err := s.OpenStrategy(); err != nil {
		return err
	}
	if s.Config.BatchPerReplica > 0 {
		cfg.GlobalBatch = s.Config.BatchPerReplica * s.Strategy.NumReplicasInSync()
	}
	cfg.EvaluationBatch = max(cfg.GlobalBatch, s.Config.EvalBatch)
	cfg.Inputs, cfg.Labels = inputs, labels
	s.Trainer, err = train.New(ctx, s.Strategy, m, cfg)
	return err
}

// Chief reports whether this process prints and writes for all workers.
func (s *Session) Chief() bool { return s.Config.Job == nil || s.Config.Job.Chief() }

// OfThisWorker explains what the wait time does not include.
func (s *Session) OfThisWorker() string {
	if s.Worker == nil || len(s.Worker.Members()) == 1 {
		return ""
	}
	return " of this worker; waits for other workers count as all-reduce"
}

// Close closes what the session has opened.
func (s *Session) Close() error {
	var errs []error
	if s.Trainer != nil {
		errs = append(errs, s.Trainer.Close())
	}
	if s.Strategy != nil {
		errs = append(errs, s.Strategy.Close())
	}
	if s.Worker != nil {
		errs = append(errs, s.Worker.Close())
	}
	if s.Engine != nil {
		errs = append(errs, s.Engine.Close())
	}
	return errors.Join(errs...)
}

// firstDevices returns the engine's first n accelerators or, if it has none, CPUs; all of them if n is 0.
func firstDevices(e engine.Engine, n int) ([]string, error) {
	var cpus, others []string
	for _, d := range e.Devices() {
		name := fmt.Sprintf("%s:%d", d.Kind, d.Index)
		if d.Kind == "CPU" {
			cpus = append(cpus, name)
		} else {
			others = append(others, name)
		}
	}
	list := others
	if len(others) == 0 {
		list = cpus
	}
	if n == 0 {
		n = len(list)
	}
	if n > len(list) {
		return nil, fmt.Errorf("--replicas %d: the engine %s has %d devices (%s), and each carries one replica", n, e.Name(),
			len(list), list)
	}
	return list[:n], nil
}

// ReplicasMax bounds the number of logical CPUs that a typing error can create, and so their memory: every replica
// holds a copy of the model. A step of so many replicas takes minutes on a few cores.
const ReplicasMax = 1024

// EngineFlags choose the engine.
type EngineFlags struct {
	Name   string
	plugin string
	why    string // after Open, for --engine auto: why it is this engine
}

// Add adds the flags.
func (o *EngineFlags) Add(f *pflag.FlagSet) {
	cli.ChoiceVar(f, &o.Name, "engine", "auto", "compute engine: "+cli.OneOf(gomlx.Names), gomlx.Names...)
	f.StringVar(&o.plugin, "xla-plugin", "", "PJRT plugin `file` (default: see lockstep engine list)")
	cli.NotCompared(f, "engine", "xla-plugin") // the engines' descriptions are compared
}

// Check validates the flags.
func (o *EngineFlags) Check() error {
	if o.Name == "go" && o.plugin != "" {
		return cli.Usagef("--xla-plugin is for --engine xla, not %s", o.Name)
	}
	return nil
}

// Open opens the engine with so many CPU devices. A plugin that is named makes "auto" XLA.
func (o *EngineFlags) Open(devices int) (engine.Engine, error) {
	name, plugin := o.Name, o.plugin
	if name == "auto" {
		c := gomlx.Choice{Engine: "xla", Plugin: plugin, Why: "--xla-plugin is given"}
		if plugin == "" {
			c = gomlx.Choose()
		}
		name, plugin, o.why = c.Engine, c.Plugin, c.Why
	}
	e, err := gomlx.Open(name, gomlx.Options{Devices: devices, Plugin: plugin})
	if err != nil && o.why != "" {
		return nil, fmt.Errorf("--engine auto is %s here, since %s: %w. --engine go computes on the processor", name, o.why,
			err)
	}
	return e, err
}

// Describe returns the opened engine's description, with the reason for it if the user has not named it.
func (o *EngineFlags) Describe(e engine.Engine) string {
	if o.why == "" {
		return e.Description()
	}
	return e.Description() + ": " + o.why
}
