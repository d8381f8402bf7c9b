package distribute

import (
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/engine"
)

// Strategy distributes training over devices. Its methods may be called concurrently; Runs of one strategy are
// serialized. The caller must close it.
type Strategy struct {
	kind          strategyKind
	oneDevice     bool             // one replica, whose values are never wrapped
	devices       []Device         // of this worker's replicas
	size          int              // number of replicas, of all workers
	first         int              // id of this worker's first replica
	workersInSync int              // number of workers
	workerID      int              // this one, in the order of their replicas
	chief         bool             // this worker writes what exactly one worker must write
	replicasOf    []int            // by worker, if there are several
	given         collective.Group // the communicators between the replicas, from the configuration
	member        *clusterworker.Worker
	joined        bool     // the strategy created member
	params        []Device // devices of variables
	resolver      cluster.Resolver
	task          cluster.Task // this process, if it is one of a cluster
	engine        engine.Engine
	engineDevices []engine.Device
	options       Options
	stall         time.Duration
	logger        *slog.Logger
	ops           CrossDeviceOps // given by the user, or nil
	collective    *CollectiveAllReduce
	detector      *deadlock.Detector
	closed        atomic.Bool
	running       atomic.Bool // a Run is in progress

	// self is the strategy that the user made. Its inner strategy executes the Runs that a merge function
	// starts while the replicas of the outer Run wait; it has separate replicas.
	self  *Strategy
	inner *Strategy // guarded by mu

	// turn is held from the start of a Run until its outcome is settled. It is acquired after the deadlock
	// detector's own turn.
	turn     chan struct{}
	replicas []Replica     // of the last Run
	group    *replicaGroup // nil with one replica
	workers  []*worker
	undo     undoLog
	stats    runStats

	elsewhere sync.Once // the warning of noteImplementation

	mu sync.Mutex
}

// strategyKind is one of TensorFlow's strategies.
type strategyKind uint8

const (
	mirroredKind strategyKind = iota
	oneDeviceKind
	centralKind
	multiWorkerKind
	defaultKind
)

// String returns TensorFlow's name.
func (k strategyKind) String() string {
	return [...]string{"MirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy", "DefaultStrategy"}[k]
}

// mirrors reports whether variables have a component on each of several replicas' devices.
func (k strategyKind) mirrors() bool { return k == mirroredKind || k == multiWorkerKind }

// MirroredConfig configures a mirrored strategy. The zero value is one replica per logical CPU device.
type MirroredConfig struct {
	// Devices lists the replicas' devices, by replica id: "CPU:0", "/gpu:1", or full names. They must exist and
	// differ. Default: all accelerators of the engine or, without any, all logical CPU devices.
	Devices []string
	// Engine computes and lists the devices. Nil: only logical CPU devices exist, and values are host tensors.
	Engine engine.Engine
	// LogicalCPUs is the number of logical CPU devices. Default: the engine's number, or without an engine one
	// per core (GOMAXPROCS). TensorFlow's default is 1.
	LogicalCPUs int
	// CrossDeviceOps implement the reductions. Default: the library's collectives ([CollectiveAllReduce]).
	CrossDeviceOps CrossDeviceOps
	// Options are the default options of all reductions.
	Options Options
	// Stall is how long a call waits for its peers before the wait is logged, once. Default 30 seconds;
	// negative: never.
	Stall time.Duration
	// Logger gets stall reports and warnings. Default: slog.Default().
	Logger *slog.Logger
}

// NewMirroredStrategy returns a strategy with a replica on each of several devices of this process. It keeps
// variables equal on all of them (TensorFlow's MirroredStrategy).
func NewMirroredStrategy(cfg MirroredConfig) (*Strategy, error) {
	const op = "NewMirroredStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	names := cfg.Devices
	if len(names) == 0 {
		names = defaultDevices(known)
	}
	if _, err := IsSingleWorker(names); err != nil {
		return nil, err
	}
	devices, err := canonicalDevices(op, names, known)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: mirroredKind, task: cluster.NoTask, devices: devices, params: devices, engine: cfg.Engine, ops: cfg.CrossDeviceOps,
		options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger,
	}
	return s.open(op)
}

// OneDeviceConfig configures a strategy with one device. The zero value is CPU:0.
type OneDeviceConfig struct {
	// Device is the device. Default: the first accelerator of the engine, else "CPU:0".
	Device string
	// Engine computes and lists the devices. Nil: only logical CPU devices exist, and values are host tensors.
	Engine engine.Engine
	// LogicalCPUs is the number of logical CPU devices, as in [MirroredConfig].
	LogicalCPUs int
	// Options are accepted as by every strategy. They have no effect with one replica.
	Options Options
	// Logger gets warnings. Default: slog.Default().
	Logger *slog.Logger
}

// NewOneDeviceStrategy returns a strategy with one replica on one device, whose values are never wrapped
// (TensorFlow's OneDeviceStrategy). Use it to test a program that is written for several replicas.
func NewOneDeviceStrategy(cfg OneDeviceConfig) (*Strategy, error) {
	const op = "NewOneDeviceStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	name := cfg.Device
	if name == "" {
		name = defaultDevices(known)[0]
	}
	devices, err := canonicalDevices(op, []string{name}, known)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: oneDeviceKind, oneDevice: true, task: cluster.NoTask, devices: devices, params: devices, engine: cfg.Engine,
		options: cfg.Options, logger: cfg.Logger,
	}
	return s.open(op)
}

// open sets the defaults and starts the strategy's goroutines and communicators.
func (s *Strategy) open(op string) (*Strategy, error) {
	if err := s.options.Validate(); err != nil {
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
	}
	s.turn = make(chan struct{}, 1)
	for _, d := range s.devices {
		s.engineDevices = append(s.engineDevices, engine.Device{Kind: d.Kind, Index: d.Index})
	}
	short := make([]string, len(s.devices))
	for i, d := range s.devices {
		short[i] = d.Short()
	}
	if s.size == 0 {
		s.size, s.workersInSync, s.chief = len(s.devices), 1, true
	}
	s.detector = deadlock.New(deadlock.Config{Devices: short, First: s.first, Timeout: s.options.Timeout, Stall: s.stall, Logger: s.logger})
	switch {
	case s.group != nil: // shared with the outer strategy
		s.group.share(s)
	case s.given != nil:
		s.group = adoptReplicaGroup(s)
	case s.size > 1:
		group, err := openReplicaGroup(s)
		if err != nil {
			return nil, errorf(op, nil, "%w", err)
		}
		s.group = group
	}
	if err := s.selectOps(op); err != nil {
		return nil, err
	}
	if err := s.checkImplementation(op); err != nil {
		return nil, err
	}
	s.noteImplementation(s.options)
	s.stats.open(len(s.devices))
	if s.kind != defaultKind {
		s.startWorkers()
	}
	return s, nil
}

// NumReplicasInSync returns the number of replicas over which gradients are reduced, of all workers.
func (s *Strategy) NumReplicasInSync() int { return s.size }

// Devices returns the devices of this worker's replicas, in TensorFlow's full form.
func (s *Strategy) Devices() []string { return s.deviceNames(s.devices) }

// EngineDevices returns the devices of this worker's replicas, in their order, as the engine's devices.
func (s *Strategy) EngineDevices() []engine.Device {
	return append([]engine.Device(nil), s.engineDevices...)
}

// EngineParameterDevice returns the engine's device for the variables of a strategy with one copy of each
// variable ([NewCentralStorageStrategy]). ok is false for strategies with a copy per replica.
func (s *Strategy) EngineParameterDevice() (d engine.Device, ok bool) {
	if s.kind != centralKind {
		return d, false
	}
	return engine.Device{Kind: s.params[0].Kind, Index: s.params[0].Index}, true
}

// Engine returns the engine that the strategy was made with, or nil.
func (s *Strategy) Engine() engine.Engine { return s.engine }

// Options returns the default options of all reductions.
func (s *Strategy) Options() Options { return s.options }

// String returns the kind of strategy and its devices: "MirroredStrategy(CPU:0, CPU:1)".
func (s *Strategy) String() string {
	short := make([]string, len(s.devices))
	for i, d := range s.devices {
		short[i] = d.Short()
	}
	return fmt.Sprintf("%v(%s)", s.kind, strings.Join(short, ", "))
}

// Close waits for the Run in progress and frees the strategy's resources. Later Runs return [ErrClosed]; a
// second Close returns nil. Closing the default strategy does nothing. Inside a step Close is an error, because
// it would wait for that step. It does not close the engine.
func (s *Strategy) Close() error {
	if s.kind == defaultKind && s == s.self {
		return nil // it is shared by the whole process and holds no resources
	}
	if replica, inside := s.detector.Here(); inside {
		return located(errorf("Close", ErrContext, "called inside a step function, on replica %d of %v: Close would wait for the step to end; call it after the Run", replica, s))
	}
	if s.closed.Swap(true) {
		return nil
	}
	s.turn <- struct{}{}
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
	if s.joined {
		if e := s.member.Close(); err == nil {
			err = e
		}
	}
	<-s.turn
	if err != nil {
		return errorf("Close", nil, "%w", err)
	}
	return nil
}

// knownDevices lists the devices that a strategy can use: the logical CPUs first, then the engine's other
// devices.
func knownDevices(op string, e engine.Engine, cpus int) ([]engine.Device, error) {
	var others []engine.Device
	engineCPUs := 0
	if e != nil {
		for _, d := range e.Devices() {
			if strings.EqualFold(d.Kind, "CPU") {
				engineCPUs++
			} else {
				others = append(others, d)
			}
		}
	}
	switch {
	case cpus < 0:
		return nil, errorf(op, ErrInvalid, "LogicalCPUs is %d; want at least 1, or 0 for the default", cpus)
	case e != nil && cpus > engineCPUs:
		return nil, errorf(op, ErrInvalid, "LogicalCPUs is %d but the engine %s was opened with %d CPU devices", cpus, e.Name(), engineCPUs)
	case cpus == 0 && e != nil:
		cpus = engineCPUs
	case cpus == 0:
		cpus = runtime.GOMAXPROCS(0)
	}
	known := make([]engine.Device, cpus, cpus+len(others))
	for i := range known {
		known[i] = engine.Device{Kind: "CPU", Index: i}
	}
	known = append(known, others...)
	if len(known) == 0 {
		return nil, errorf(op, ErrInvalid, "the engine %s reports no device", e.Name())
	}
	return known, nil
}

// defaultDevices returns all accelerators or, without any, all logical CPU devices.
func defaultDevices(known []engine.Device) []string {
	var cpus, others []string
	for _, d := range known {
		name := fmt.Sprintf("/device:%s:%d", d.Kind, d.Index)
		if d.Kind == "CPU" {
			cpus = append(cpus, name)
		} else {
			others = append(others, name)
		}
	}
	if len(others) > 0 {
		return others
	}
	return cpus
}

// requireOpen returns an error after Close.
func (s *Strategy) requireOpen(op string) error {
	if s.closed.Load() {
		return errorf(op, ErrClosed, "the strategy was closed")
	}
	return nil
}
