package gomlx

import (
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/gomlx/compute"

	planned "github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/engine"
)

// Versions of the GoMLX modules pinned in go.mod.
const (
	gomlxVersion   = "v0.28.8"
	computeVersion = "v0.1.6"
	goXLAVersion   = "v0.4.5"
)

// PluginEnv is the name of the environment variable with the path of the PJRT plugin for [OpenXLA].
// [XLAOptions.Plugin] takes precedence over it, and it over installed plugins.
const PluginEnv = "LOCKSTEP_XLA_PLUGIN"

// Names lists the engines that [Open] supports. "auto" is the one of [Choose].
var Names = []string{"auto", "go", "xla"}

// Options configures [Open]. The zero value is right for most.
type Options struct {
	Devices int    // logical CPU devices to offer; 0: one per core (GOMAXPROCS)
	Plugin  string // xla: path of the PJRT plugin; empty: see XLAOptions.Plugin
}

// Open opens an engine by its name, one of [Names]. The caller must close it.
func Open(name string, o Options) (engine.Engine, error) {
	if name == "auto" {
		c := Choose()
		name, o.Plugin = c.Engine, c.Plugin
	}
	switch name {
	case "go":
		return OpenGo(GoOptions{LogicalCPUs: o.Devices})
	case "xla":
		return OpenXLA(XLAOptions{Plugin: o.Plugin, Devices: o.Devices})
	}
	return nil, fmt.Errorf("gomlx: no engine is called %q: want one of %s", name, strings.Join(Names, ", "))
}

// GoOptions configures [OpenGo]. The zero value works.
type GoOptions struct {
	LogicalCPUs int // devices to offer; 0: one per core (GOMAXPROCS)
}

// OpenGo opens Lockstep's own backend, package backend of this module, in pure Go: it needs no cgo and no installation.
// It offers the CPU as several logical devices, one for each replica. It computes with the same bits with any number of
// cores. Operations that it has no instructions for are executed by GoMLX's Go backend.
func OpenGo(o GoOptions) (engine.Engine, error) {
	n, err := deviceCount(o.LogicalCPUs)
	if err != nil {
		return nil, err
	}
	b, err := planned.New("")
	if err != nil {
		return nil, fmt.Errorf("gomlx: open the Go backend: %w", err)
	}
	return &backend{
		Backend: b,
		name:    "go",
		description: fmt.Sprintf("Lockstep's backend in pure Go (GoMLX %s, compute %s, %s)", gomlxVersion, computeVersion,
			runtime.Version()),
		kind:    "CPU",
		devices: n,
	}, nil
}

// XLAOptions configures [OpenXLA]. The zero value works if a plugin is installed.
type XLAOptions struct {
	Plugin  string // absolute path of the PJRT plugin (a .so file); empty: the first of [Plugins]
	Devices int    // CPU plugins: devices to offer; 0: one per core (GOMAXPROCS)

	// staged, for tests only, makes the engine copy between host and device memory as for an accelerator,
	// although the device is a CPU.
	staged bool
}

// backend adapts a compute backend to engine.Engine.
type backend struct {
	compute.Backend
	name        string
	description string
	kind        string // of its devices
	devices     int
	physical    bool // device i is the backend's device i; otherwise all devices are its device 0
	whole       bool // a step in one program is faster than in two
}

func (b *backend) Name() string        { return b.name }
func (b *backend) Description() string { return b.description }
func (b *backend) String() string      { return b.description }

func (b *backend) Devices() []engine.Device {
	list := make([]engine.Device, b.devices)
	for i := range list {
		list[i] = engine.Device{Kind: b.kind, Index: i}
	}
	return list
}

func (b *backend) Close() error {
	b.Finalize()
	return nil
}

// deviceNum returns the backend's number for a device.
func (b *backend) deviceNum(d engine.Device) (compute.DeviceNum, error) {
	if !slices.Contains(b.Devices(), d) {
		return 0, fmt.Errorf("gomlx: engine %s has no device %s:%d: it has %d of kind %s", b.name, d.Kind, d.Index, b.devices,
			b.kind)
	}
	if !b.physical {
		return 0, nil
	}
	return compute.DeviceNum(d.Index), nil
}

// deviceCount returns the requested number of devices, by default one per core.
func deviceCount(n int) (int, error) {
	switch {
	case n < 0:
		return 0, fmt.Errorf("gomlx: %d devices requested: want 1 or more, or 0 for one per core", n)
	case n == 0:
		return runtime.GOMAXPROCS(0), nil
	}
	return n, nil
}
