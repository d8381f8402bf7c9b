package distribute

import (
	"slices"
	"strings"
)

// Machine describes the hardware for a choice of CrossDeviceOps.
type Machine struct {
	// Devices are the names of the devices that programs can use. Several GPUs may be parts of one physical
	// GPU.
	Devices []string
	// PhysicalGPUs is the number of physical GPUs.
	PhysicalGPUs int
	// NCCL reports whether the NCCL library is available.
	NCCL bool
}

// Selection is a choice of CrossDeviceOps.
type Selection struct {
	Ops            string         // its kind: "ReductionToOneDevice", "NcclAllReduce", "CollectiveAllReduce"
	Packs          int            // of NcclAllReduce
	Implementation Implementation // of the collectives
	Warnings       []string       // for the user
}

// SelectCrossDeviceOps follows the rule of TensorFlow's function of that name, which its older strategies use.
// It selects ReductionToOneDevice if a device is not a GPU, if there are virtual GPUs, or without NCCL; otherwise
// NcclAllReduce with one pack. A device that does not exist causes a warning only. [DefaultCrossDeviceOps] is
// the rule of TensorFlow 2.21's MirroredStrategy and of the strategies here.
func SelectCrossDeviceOps(devices []string, m Machine) (Selection, error) {
	requested, seen, err := machineDevices(devices, m)
	if err != nil {
		return Selection{}, err
	}
	out := Selection{Ops: ReductionToOneDevice{}.String()}
	if count(seen, isGPU) != m.PhysicalGPUs {
		out.Warnings = []string{"NCCL is not supported when using virtual GPUs, falling back to reduction to one device"}
		return out, nil
	}
	var missing []string
	for _, d := range requested {
		if !slices.Contains(seen, d) && !slices.Contains(missing, d.String()) {
			missing = append(missing, d.String())
		}
	}
	if len(missing) > 0 {
		out.Warnings = append(out.Warnings, "Some requested devices are not visible: "+strings.Join(missing, ","))
	}
	switch {
	case count(requested, isGPU) < len(requested):
		out.Warnings = append(out.Warnings, "There are non-GPU devices, not using NCCL all-reduce")
	case !m.NCCL:
		out.Warnings = append(out.Warnings, "NCCL is not found, not using NCCL all-reduce")
	default:
		out.Ops, out.Packs, out.Implementation = NcclAllReduce{}.String(), 1, ImplementationNCCL
	}
	return out, nil
}

// DefaultCrossDeviceOps follows the rule of TensorFlow 2.21's MirroredStrategy. CPUs together with GPUs reduce
// to one device. Everything else uses collectives: RING if all devices are CPUs, NCCL if all are GPUs and none
// is virtual.
func DefaultCrossDeviceOps(devices []string, m Machine) (Selection, error) {
	requested, seen, err := machineDevices(devices, m)
	if err != nil {
		return Selection{}, err
	}
	cpus, gpus := count(requested, isCPU), count(requested, isGPU)
	out := Selection{Ops: (*CollectiveAllReduce)(nil).String()}
	switch {
	case cpus > 0 && gpus > 0:
		out.Ops = ReductionToOneDevice{}.String()
	case cpus == len(requested):
		out.Implementation = ImplementationRing
	case count(seen, isGPU) == m.PhysicalGPUs:
		out.Implementation = ImplementationNCCL
	}
	return out, nil
}

func isCPU(d Device) bool { return d.Kind == "CPU" }

func isGPU(d Device) bool { return d.Kind == "GPU" }

func count(devices []Device, is func(Device) bool) int {
	n := 0
	for _, d := range devices {
		if is(d) {
			n++
		}
	}
	return n
}

func machineDevices(devices []string, m Machine) (requested, seen []Device, err error) {
	for _, list := range []struct {
		names []string
		to    *[]Device
	}{{devices, &requested}, {m.Devices, &seen}} {
		for _, name := range list.names {
			d, err := CanonicalDevice(name)
			if err != nil {
				return nil, nil, err
			}
			*list.to = append(*list.to, d)
		}
	}
	return requested, seen, nil
}
