package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
)

// session is an engine, a strategy on its devices, and a trainer on both.
type session struct {
	engine   engine.Engine
	strategy *distribute.Strategy
	trainer  *train.Trainer
}

// sessionConfig says how to make a session.
type sessionConfig struct {
	engine, plugin  string
	oneDevice       bool
	replicas        int      // 0: all devices
	devices         []string // instead of replicas
	logicalCPUs     int
	globalBatch     int // or
	batchPerReplica int
	seed            int64
	shape           []int // of an image
}

// openSession opens the engine and the strategy, and compiles the model.
func openSession(ctx context.Context, cfg sessionConfig, m engine.Model) (s *session, err error) {
	s = &session{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.engine, err = gomlx.Open(cfg.engine, gomlx.Options{Devices: cfg.logicalCPUs, Plugin: cfg.plugin}); err != nil {
		return s, err
	}
	devices := cfg.devices
	if devices == nil && cfg.replicas > 0 {
		if devices, err = firstDevices(s.engine, cfg.replicas); err != nil {
			return s, err
		}
	}
	if cfg.oneDevice {
		one := distribute.OneDeviceConfig{Engine: s.engine}
		if len(devices) > 0 {
			one.Device = devices[0]
		}
		s.strategy, err = distribute.NewOneDeviceStrategy(one)
	} else {
		s.strategy, err = distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: s.engine, Devices: devices})
	}
	if err != nil {
		return s, err
	}
	inputs, labels := classifierFeatures(cfg.shape)
	batch := cfg.globalBatch
	if cfg.batchPerReplica > 0 {
		batch = cfg.batchPerReplica * s.strategy.NumReplicasInSync()
	}
	s.trainer, err = train.New(ctx, s.strategy, m, train.Config{Inputs: inputs, Labels: labels, GlobalBatch: batch, Seed: cfg.seed})
	return s, err
}

func (s *session) close() error {
	var errs []error
	if s.trainer != nil {
		errs = append(errs, s.trainer.Close())
	}
	if s.strategy != nil {
		errs = append(errs, s.strategy.Close())
	}
	if s.engine != nil {
		errs = append(errs, s.engine.Close())
	}
	return errors.Join(errs...)
}

// firstDevices returns the engine's first n accelerators or, if it has none, CPUs.
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
	if n > len(list) {
		return nil, fmt.Errorf("--replicas %d: the engine %s has %d devices (%s), and each carries one replica", n, e.Name(), len(list), list)
	}
	return list[:n], nil
}
