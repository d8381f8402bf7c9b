package distribute

import (
	"log/slog"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/timeline"
)

// open sets the defaults and starts the strategy's goroutines and communicators.
func (s *Strategy) open(op string) (*Strategy, error) {
	if err := s.options.validate(); err != nil {
		return nil, err
	}
	if s.options.Timeout == 0 {
		s.options.Timeout = defaultTimeout
	}
	if s.logger == nil {
		s.logger = slog.Default()
	}
	if s.self == nil {
		s.self = s
		if s.kind <= centralKind {
			s.warnSeparate()
		}
	}
	switch {
	case s.member != nil:
		s.timeline = s.member.Timeline()
	case s.self != s:
		s.timeline = s.self.timeline
	default:
		s.timeline = timeline.NewRecorder()
	}
	s.number()
	s.detector = deadlock.New(deadlock.Config{
		Devices: s.shortDevices(), IDs: s.ids, Timeout: s.options.Timeout, Stall: s.stall,
		Logger: s.logger,
	})
	if err := s.openPlacement(op); err != nil {
		return nil, err
	}
	return s, nil
}

// number sets the ids of the replicas, and the engine's devices.
func (s *Strategy) number() {
	for _, d := range s.devices {
		s.engineDevices = append(s.engineDevices, engine.Device{Kind: d.Kind, Index: d.Index})
	}
	for i := 0; len(s.ids) < len(s.devices); i++ {
		s.ids = append(s.ids, i)
	}
	if s.size == 0 {
		s.size, s.workersInSync, s.chief = len(s.devices), 1, true
	}
}

func (s *Strategy) shortDevices() []string {
	short := make([]string, len(s.devices))
	for i, d := range s.devices {
		short[i] = d.Short()
	}
	return short
}

// openPlacement starts the goroutines and communicators of the replicas.
func (s *Strategy) openPlacement(op string) error {
	switch {
	case s.group != nil: // shared with the outer strategy
		s.group.share(s.detector)
	case s.userGroup != nil:
		s.group = adoptReplicaGroup(s, s.detector, s.userGroup, s.size)
		s.userGroup.SetTimeline(s.timeline)
	case s.size > 1:
		group, err := openReplicaGroup(s, s.detector, len(s.devices), s.options.group(s.stall, s.logger, s.timeline))
		if err != nil {
			return errorf(op, nil, "%w", err)
		}
		s.group = group
	}
	if err := s.selectOps(op); err != nil {
		return err
	}
	if err := s.checkImplementation(op); err != nil {
		return err
	}
	s.warnImplementation(s.options)
	s.stats = newRunStats(len(s.devices))
	if s.kind != defaultKind {
		s.startWorkers()
	}
	return nil
}

// selectOps selects the CrossDeviceOps of the strategy, by the rule of TensorFlow 2.21's MirroredStrategy.
func (s *Strategy) selectOps(op string) error {
	var err error
	var shared *replicaGroup
	if s.workersInSync > 1 {
		shared = s.group
	}
	cfg := collectiveConfig{Devices: s.Devices(), GroupSize: s.size, Options: s.options, Logger: s.logger}
	if s.collective, err = newCollectiveAllReduce(op, cfg, shared); err != nil {
		return errorf(op, nil, "%w", err)
	}
	if s.kind != mirroredKind {
		return nil
	}
	cpus, gpus := 0, 0
	for _, d := range s.devices {
		switch d.Kind {
		case "CPU":
			cpus++
		case "GPU":
			gpus++
		}
	}
	switch auto := s.options.Implementation == ImplementationAuto; {
	case cpus > 0 && gpus > 0:
		if s.ops == nil {
			s.ops = reductionToOneDevice{}
		}
	case auto && cpus == len(s.devices):
		s.options.Implementation = ImplementationRing
	case auto:
		s.options.Implementation = ImplementationNCCL
	}
	return nil
}

// Close waits for the Run in progress and frees the strategy's resources. Later Runs return [ErrClosed]; a
// second Close returns nil. Closing the default strategy does nothing. Inside a step Close is an error, because
// it would wait for that step. It does not close the engine.
func (s *Strategy) Close() error {
	if s.kind == defaultKind && s == s.self {
		return nil // it is shared by the whole process and holds no resources
	}
	if replica, inside := s.detector.Here(); inside {
		return located(errorf("Close", ErrContext, "called inside a step function, on replica %d of %v: Close would wait "+
			"for the step to end; call it after the Run", replica, s))
	}
	if s.closed.Swap(true) {
		return nil
	}
	defer s.detector.Hold()()
	err := s.closePlacement()
	if s.joined {
		if e := s.member.Close(); err == nil {
			err = e
		}
	}
	if err != nil {
		return errorf("Close", nil, "%w", err)
	}
	return nil
}

// closePlacement stops the goroutines and closes the communicators of the replicas.
func (s *Strategy) closePlacement() error {
	s.stopWorkers(nil)
	var err error
	if s.inner != nil {
		err = s.inner.Close()
	}
	if e := s.collective.Close(); err == nil {
		err = e
	}
	if s.group != nil && s.group.owner == s {
		if e := s.group.close(); err == nil {
			err = e
		}
	}
	return err
}
