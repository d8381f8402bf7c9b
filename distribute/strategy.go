package distribute

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/distribute/internal/undo"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Strategy distributes training over devices (TensorFlow's tf.distribute.Strategy). Its methods may be called
// concurrently; Runs of one strategy are serialized. The caller must close it.
type Strategy struct {
	placement
	kind      strategyKind
	oneDevice bool // one replica, whose values are never wrapped
	size      int  // number of replicas, of all workers
	elastic   bool // Reform follows a failed Run
	reforms   int  // calls of Reform
	member    *clusterworker.Worker
	joined    bool // the strategy created member
	resolver  cluster.Resolver
	task      cluster.Task // this process, if it is one of a cluster
	engine    engine.Engine
	options   Options
	stall     time.Duration
	logger    *slog.Logger
	ops       CrossDeviceOps     // given by the user, or nil
	detector  *deadlock.Detector // serializes Runs and Close, from the start of a Run until its outcome is settled
	closed    atomic.Bool
	self      *Strategy // the one that the user made: see placement.inner
	undo      undo.Log[*deadlock.Run]
	// timeline records the calls between replicas. It belongs to the worker, if the strategy is one of a job.
	timeline *timeline.Recorder

	warnedImplementation sync.Once

	mu sync.Mutex
}

// placement is what follows from which replicas this worker computes, and where. Reform replaces it.
type placement struct {
	devices       []device.Spec    // of this worker's replicas
	params        []device.Spec    // of variables
	engineDevices []engine.Device  // devices
	ids           []int            // of this worker's replicas, ascending
	workersInSync int              // number of workers
	workerID      int              // this one, from 0
	chief         bool             // this worker writes what exactly one worker must write
	replicasOf    [][]int          // ids by worker, if there are several
	userGroup     collective.Group // the communicators between the replicas that the strategy was given, or nil
	group         *replicaGroup    // nil with one replica
	collective    *collectiveAllReduce
	workers       []*worker
	stats         *runStats
	// inner executes the Runs that a merge function starts while the replicas of the outer Run wait; it has separate
	// replicas. Strategy.mu guards it.
	inner *Strategy
}

// Extended has what TensorFlow's StrategyExtended has beyond the functions and methods of this package, on values of
// any type: nests with distributed values at any depth, as TensorFlow's functions take and return them. Programs in Go
// rarely need it. [Strategy.Extended] returns it.
type Extended struct{ s *Strategy }

// Extended returns what TensorFlow's Strategy.extended has.
func (s *Strategy) Extended() Extended { return Extended{s} }

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
	return [...]string{
		"MirroredStrategy", "OneDeviceStrategy", "CentralStorageStrategy", "MultiWorkerMirroredStrategy",
		"DefaultStrategy",
	}[k]
}

// mirrors reports whether variables have a component on each of several replicas' devices.
func (k strategyKind) mirrors() bool { return k == mirroredKind || k == multiWorkerKind }

// NumReplicasInSync returns the number of replicas over which gradients are reduced, of all workers (TensorFlow's
// num_replicas_in_sync).
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

// Timeline returns the recorder of this process: of the calls between replicas and, while a train.Trainer uses the
// strategy, of its steps.
func (s *Strategy) Timeline() *timeline.Recorder { return s.timeline }

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

// inRun reports whether a Run is in progress.
func (s *Strategy) inRun() bool { return s.detector.Running() }

// requireOpen returns an error after Close.
func (s *Strategy) requireOpen(op string) error {
	if s.closed.Load() {
		return errorf(op, ErrClosed, "the strategy was closed")
	}
	return nil
}

// Worker returns this process as a worker of its job: the one in the configuration, or the one that the
// strategy created. It is nil for strategies of one process.
func (s *Strategy) Worker() *clusterworker.Worker { return s.member }

// LocalReplicas returns the ids of this worker's replicas, in ascending order: that with [Replica.LocalID] i has the
// i-th of them. The caller must not change the list.
func (s *Strategy) LocalReplicas() []int { return s.ids }

// ReplicasByWorker returns the ids of each worker's replicas, in ascending order, by the worker's number in the
// cluster. The caller must not change the lists.
func (s *Strategy) ReplicasByWorker() [][]int {
	if s.replicasOf == nil {
		return [][]int{s.ids}
	}
	return s.replicasOf
}

// deviceName returns a device's full name. In a cluster it has the job and task of this process.
func (s *Strategy) deviceName(d device.Spec) string {
	if s.task.Known() {
		d.Job, d.Task = s.task.Type, s.task.Index
	}
	return d.String()
}

func (s *Strategy) deviceNames(devices []device.Spec) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = s.deviceName(d)
	}
	return names
}
