package distribute

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/engine"
)

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
		return nil, errorf(op, ErrInvalid, "LogicalCPUs is %d but the engine %s was opened with %d CPU devices", cpus,
			e.Name(), engineCPUs)
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

// devicesOr returns names or, if there are none, all accelerators or, without any, at most n logical CPU devices.
func devicesOr(names []string, known []engine.Device, n int) []string {
	if len(names) > 0 {
		return names
	}
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
	return cpus[:min(n, len(cpus))]
}

// canonicalDevices parses a strategy's list of devices. It returns an error unless all are known, local and, if they
// are not shared, distinct.
func canonicalDevices(op string, names []string, known []engine.Device, shared bool) ([]device.Spec, error) {
	if len(names) == 0 {
		return nil, errorf(op, ErrInvalid, "the list of devices is empty: give at least one, or nil for all devices (%s)",
			joinDevices(known))
	}
	devices := make([]device.Spec, len(names))
	for i, name := range names {
		d, err := device.Canonical(name)
		if err != nil {
			return nil, errorf(op, ErrInvalid, "device %d: %w", i, err)
		}
		if !d.Local() {
			return nil, errorf(op, ErrInvalid, "device %v belongs to another worker: in-graph multi-worker training with "+
				"MirroredStrategy is not supported", d)
		}
		for _, other := range devices[:i] {
			if other == d && !shared {
				return nil, errorf(op, ErrInvalid, "no duplicates allowed in the list of devices: %v is given twice in %q", d,
					names)
			}
		}
		if !isKnown(d, known) {
			return nil, errorf(op, ErrInvalid, "device %s does not exist: want one of %s; set LogicalCPUs for more logical "+
				"CPU devices", d.Short(), joinDevices(known))
		}
		devices[i] = d
	}
	return devices, nil
}

func isKnown(d device.Spec, known []engine.Device) bool {
	for _, k := range known {
		if strings.EqualFold(k.Kind, d.Kind) && k.Index == d.Index {
			return true
		}
	}
	return false
}

func joinDevices(devices []engine.Device) string {
	if len(devices) > 8 {
		first, last := devices[0], devices[len(devices)-1]
		return fmt.Sprintf("%s:%d … %s:%d", first.Kind, first.Index, last.Kind, last.Index)
	}
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = fmt.Sprintf("%s:%d", d.Kind, d.Index)
	}
	return strings.Join(names, ", ")
}
