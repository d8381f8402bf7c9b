package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// session holds an engine, a strategy on its devices, and a trainer that uses both.
type session struct {
	cfg      sessionConfig
	engine   engine.Engine
	devices  []string       // of the replicas; nil: the strategy's default
	worker   *worker.Worker // nil: no job
	strategy *distribute.Strategy
	trainer  *train.Trainer
}

// sessionConfig configures a session.
type sessionConfig struct {
	engine, plugin  string
	oneDevice       bool
	job             *cluster.Job // the job of this worker; nil: none
	workers         *workerFlags // with job
	replicas        int          // 0: all devices
	devices         []string     // instead of replicas
	logicalCPUs     int
	globalBatch     int // or
	batchPerReplica int
	evalBatch       int // 0: as for training
	seed            int64
	bucketBytes     int // 0: the engine's default
	compress        compress.Codec
	diloco          *train.DiLoCo // nil: none
	shard           train.Sharding
	noiseScale      bool
	clipNorm        float64
	clipValue       float64
	trace           *train.Trace // nil: none
}

// openSession opens the engine and, if there is a job, joins the other workers.
func openSession(ctx context.Context, cfg sessionConfig) (s *session, err error) {
	s = &session{cfg: cfg, devices: cfg.devices}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.engine, err = gomlx.Open(cfg.engine, gomlx.Options{Devices: cfg.logicalCPUs, Plugin: cfg.plugin}); err != nil {
		return s, err
	}
	if s.devices == nil && (cfg.replicas > 0 || cfg.job != nil) {
		if s.devices, err = firstDevices(s.engine, cfg.replicas); err != nil {
			return s, err
		}
	}
	if cfg.job != nil {
		s.worker, err = cfg.workers.join(ctx, cfg.job, len(s.devices))
	}
	return s, err
}

// openStrategy creates the strategy, if there is none.
func (s *session) openStrategy() (err error) {
	switch {
	case s.strategy != nil:
	case s.worker != nil:
		s.strategy, err = distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
			Engine: s.engine, Devices: s.devices, Worker: s.worker,
			Options: distribute.Options{Timeout: s.cfg.workers.collectiveTimeout, Implementation: s.cfg.workers.reducer()},
		})
	case s.cfg.oneDevice:
		one := distribute.OneDeviceConfig{Engine: s.engine}
		if len(s.devices) > 0 {
			one.Device = s.devices[0]
		}
		s.strategy, err = distribute.NewOneDeviceStrategy(one)
	default:
		s.strategy, err = distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: s.engine, Devices: s.devices})
	}
	return err
}

// compile compiles the model for the strategy and for rows of these features.
func (s *session) compile(ctx context.Context, m engine.Model, inputs, labels []engine.Feature) (err error) {
	cfg := train.Config{
		GlobalBatch: s.cfg.globalBatch, Seed: s.cfg.seed, BucketBytes: s.cfg.bucketBytes, Compress: s.cfg.compress,
		DiLoCo: s.cfg.diloco, ShardOptimizer: s.cfg.shard,
		NoiseScale: s.cfg.noiseScale,
		ClipNorm:   s.cfg.clipNorm, ClipValue: s.cfg.clipValue, Trace: s.cfg.trace,
	}
	if s.worker != nil {
		cfg.Progress = s.worker.Progress
	}
	if err := s.openStrategy(); err != nil {
		return err
	}
	if s.cfg.batchPerReplica > 0 {
		cfg.GlobalBatch = s.cfg.batchPerReplica * s.strategy.NumReplicasInSync()
	}
	cfg.EvaluationBatch = max(cfg.GlobalBatch, s.cfg.evalBatch)
	cfg.Inputs, cfg.Labels = inputs, labels
	s.trainer, err = train.New(ctx, s.strategy, m, cfg)
	return err
}

// chief reports whether this process prints and writes for all workers.
func (s *session) chief() bool { return s.cfg.job == nil || s.cfg.job.Chief() }

// ofThisWorker explains what the wait time does not include.
func (s *session) ofThisWorker() string {
	if s.worker == nil || len(s.worker.Members()) == 1 {
		return ""
	}
	return " of this worker; waits for other workers count as all-reduce"
}

func (s *session) close() error {
	var errs []error
	if s.trainer != nil {
		errs = append(errs, s.trainer.Close())
	}
	if s.strategy != nil {
		errs = append(errs, s.strategy.Close())
	}
	if s.worker != nil {
		errs = append(errs, s.worker.Close())
	}
	if s.engine != nil {
		errs = append(errs, s.engine.Close())
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
