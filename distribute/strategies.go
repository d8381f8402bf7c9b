package distribute

import (
	"log/slog"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/engine"
)

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
	// CrossDeviceOps implement the reductions. Default: the library's collectives.
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
	names := devicesOr(cfg.Devices, known, len(known))
	if _, err := device.IsSingleWorker(names); err != nil {
		return nil, err
	}
	devices, err := canonicalDevices(op, names, known, false)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: mirroredKind, task: cluster.NoTask, placement: placement{devices: devices, params: devices}, engine: cfg.Engine,
		ops: cfg.CrossDeviceOps, options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger,
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
	if cfg.Device == "" {
		cfg.Device = devicesOr(nil, known, 1)[0]
	}
	devices, err := canonicalDevices(op, []string{cfg.Device}, known, false)
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: oneDeviceKind, oneDevice: true, task: cluster.NoTask, placement: placement{devices: devices, params: devices},
		engine: cfg.Engine, options: cfg.Options, logger: cfg.Logger,
	}
	return s.open(op)
}

// CentralStorageConfig configures a strategy with one copy of each variable.
type CentralStorageConfig struct {
	// ComputeDevices lists the replicas' devices, by replica id. Default: all accelerators of the engine or,
	// without any, CPU:0.
	ComputeDevices []string
	// ParameterDevice is the device of the variables. Default: the compute device if there is only one, else
	// CPU:0. Package train needs one of the compute devices, because the engine computes the new values there.
	ParameterDevice string
	Engine          engine.Engine  // as in [MirroredConfig]
	LogicalCPUs     int            // as in MirroredConfig
	CrossDeviceOps  CrossDeviceOps // as in MirroredConfig
	Options         Options        // as in MirroredConfig
	Stall           time.Duration  // as in MirroredConfig
	Logger          *slog.Logger   // as in MirroredConfig
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
	devices, err := canonicalDevices(op, devicesOr(cfg.ComputeDevices, known, 1), known, false)
	if err != nil {
		return nil, err
	}
	params := []device.Spec{device.CPU(0)}
	switch {
	case cfg.ParameterDevice != "":
		params, err = canonicalDevices(op, []string{cfg.ParameterDevice}, known, false)
	case len(devices) == 1:
		params = devices
	}
	if err != nil {
		return nil, err
	}
	s := &Strategy{
		kind: centralKind, task: cluster.NoTask, placement: placement{devices: devices, params: params}, engine: cfg.Engine,
		ops: cfg.CrossDeviceOps, options: cfg.Options, stall: cfg.Stall, logger: cfg.Logger,
	}
	return s.open(op)
}
