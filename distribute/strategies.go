package distribute

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/engine"
)

// CentralStorageConfig configures a strategy with one copy of each variable.
type CentralStorageConfig struct {
	// ComputeDevices lists the replicas' devices, by replica id. Default: all accelerators of the engine or,
	// without any, CPU:0.
	ComputeDevices []string
	// ParameterDevice is the device of the variables. Default: the compute device if there is only one, else
	// CPU:0. Package train needs one of the compute devices, because the engine computes the new values there.
	ParameterDevice string
	// Engine, LogicalCPUs, CrossDeviceOps, Options, Stall and Logger are as in [MirroredConfig].
	Engine         engine.Engine
	LogicalCPUs    int
	CrossDeviceOps CrossDeviceOps
	Options        Options
	Stall          time.Duration
	Logger         *slog.Logger
}

// NewCentralStorageStrategy returns a strategy with a replica on each of several devices of this process, and
// one copy of each variable on the parameter device (TensorFlow's CentralStorageStrategy). The replicas' writes
// are combined by the variable's aggregation and applied once.
func NewCentralStorageStrategy(cfg CentralStorageConfig) (*Strategy, error) {
	const op = "NewCentralStorageStrategy"
	known, err := knownDevices(op, cfg.Engine, cfg.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	names := cfg.ComputeDevices
	if len(names) == 0 {
		if names = defaultDevices(known); known[len(known)-1].Kind == "CPU" {
			names = names[:1]
		}
	}
	devices, err := canonicalDevices(op, names, known)
	if err != nil {
		return nil, err
	}
	params := []Device{localCPU}
	switch {
	case cfg.ParameterDevice != "":
		params, err = canonicalDevices(op, []string{cfg.ParameterDevice}, known)
	case len(devices) == 1:
		params = devices
	}
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: centralKind, task: cluster.NoTask, devices: devices, params: params, engine: cfg.Engine, ops: cfg.CrossDeviceOps,
		options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger,
	}
	return s.open(op)
}

// Default returns the strategy of code outside of all scopes: one replica on CPU:0, whose values are never
// wrapped and whose variables are plain (TensorFlow's default strategy). The process has one. It holds no
// resources while no Run is in progress.
func Default() *Strategy { return defaultStrategy().strategy }

// defaultStrategy makes the default strategy and the replica of code outside of a Run.
var defaultStrategy = sync.OnceValue(func() *Replica {
	s, err := (&Strategy{kind: defaultKind, oneDevice: true, devices: []Device{localCPU}, params: []Device{localCPU}, task: cluster.NoTask}).open("Default")
	if err != nil {
		panic(err) // nothing can fail
	}
	r := &Replica{replicaState: newReplicaState(), strategy: s, home: s, device: &s.devices[0]}
	r.frame = frame{strategy: s, replica: r, update: -1}
	r.ctx = stepContext{context.Background(), &r.frame}
	return r
})

// Properties has TensorFlow's properties of a strategy (StrategyExtended's).
type Properties struct {
	ShouldCheckpoint    bool // this worker writes checkpoints
	ShouldSaveSummary   bool // this worker writes summaries
	ShouldInit          bool // this worker initialises variables
	BetweenGraph        bool // each worker runs its own program
	RequireStaticShapes bool // all batches must have one shape
	InMultiWorkerMode   bool // there is more than one worker
	NumReplicasInSync   int
	WorkerDevices       []string // of this worker's replicas
	ParameterDevices    []string // where variables live
	InputDevice         string   // where this worker's input pipeline runs
	DefaultDevice       string   // set by a scope; empty: none, as with one worker
}

// Properties returns TensorFlow's properties of a strategy of this kind (StrategyExtended's properties).
func (s *Strategy) Properties() Properties {
	p := Properties{
		ShouldCheckpoint: s.chief, ShouldSaveSummary: s.chief, ShouldInit: true,
		BetweenGraph:      s.kind == centralKind || s.kind == multiWorkerKind,
		InMultiWorkerMode: s.workersInSync > 1,
		NumReplicasInSync: s.size, WorkerDevices: s.Devices(), ParameterDevices: s.ParameterDevices(),
		InputDevice: s.deviceName(localCPU),
	}
	if p.InMultiWorkerMode {
		p.DefaultDevice = Device{Job: s.task.Type, Replica: 0, Task: s.task.Index, Index: -1}.String()
	}
	return p
}

// ParameterDevices returns the devices of a variable's components, in TensorFlow's full form.
func (s *Strategy) ParameterDevices() []string { return s.deviceNames(s.params) }

// VariableCreatedInScope reports whether a variable belongs to the strategy (TensorFlow's
// variable_created_in_scope).
func (s *Strategy) VariableCreatedInScope(v *Variable) bool { return v != nil && v.strategy == s }

// ClusterResolver returns the resolver that the strategy was made with, or nil.
func (s *Strategy) ClusterResolver() cluster.Resolver { return s.resolver }

// deviceName returns a device's full name. In a cluster it has the job and task of this process.
func (s *Strategy) deviceName(d Device) string {
	if s.task.Known() {
		d.Job, d.Task = s.task.Type, s.task.Index
	}
	return d.String()
}

func (s *Strategy) deviceNames(devices []Device) []string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = s.deviceName(d)
	}
	return names
}
