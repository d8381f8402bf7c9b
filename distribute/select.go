package distribute

import (
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
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
	Ops            string // its kind: "ReductionToOneDevice", "NcclAllReduce", "CollectiveAllReduce"
	Packs          int    // of NcclAllReduce
	Implementation Implementation
	Warnings       []string // for the user
}

// SelectCrossDeviceOps follows the rule of TensorFlow's function of that name, which its older strategies use.
// It selects ReductionToOneDevice if a device is no GPU, if there are virtual GPUs, or without NCCL; otherwise
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

// selectOps selects the CrossDeviceOps of the strategy.
func (s *Strategy) selectOps(op string) error {
	var err error
	var shared *replicaGroup
	if s.workersInSync > 1 {
		shared = s.group
	}
	cfg := CollectiveConfig{Devices: s.Devices(), GroupSize: s.size, Options: s.options, Logger: s.logger}
	if s.collective, err = newCollectiveAllReduce(op, cfg, shared); err != nil {
		return errorf(op, nil, "%w", err)
	}
	if s.kind != mirroredKind {
		return nil
	}
	chosen, err := DefaultCrossDeviceOps(s.Devices(), Machine{Devices: s.Devices(), PhysicalGPUs: count(s.devices, isGPU)})
	if err != nil {
		return errorf(op, nil, "%w", err)
	}
	if s.options.Implementation == ImplementationAuto {
		s.options.Implementation = chosen.Implementation
	}
	if to := (ReductionToOneDevice{}); s.ops == nil && chosen.Ops == to.String() {
		s.ops = to
	}
	return nil
}

// CrossDeviceOps returns the strategy's CrossDeviceOps: those of its configuration, or the default.
func (s *Strategy) CrossDeviceOps() CrossDeviceOps {
	if s.ops != nil {
		return s.ops
	}
	return s.collective
}

// reduceOps selects the CrossDeviceOps for one value, by TensorFlow's rules. A user's CrossDeviceOps are used
// only if value and destination are on the same accelerators. With a CPU among the destinations, with other
// devices, and for int32, it is ReductionToOneDevice. Without a user's CrossDeviceOps the collectives are used
// wherever possible, which gives the same bits.
func (s *Strategy) reduceOps(r Reduction) CrossDeviceOps {
	if s.ops == nil {
		return s.collective
	}
	from, err := r.Value.destination("")
	if err != nil || slices.ContainsFunc(r.To, isCPU) || !slices.Equal(from, r.To) || dtypeOf(r.Value.values[0]) == tensor.Int32 {
		return ReductionToOneDevice{}
	}
	return s.ops
}

// batchOps selects the CrossDeviceOps for a batch: the user's, except for int32; otherwise the collectives.
func (s *Strategy) batchOps(batch []Reduction) CrossDeviceOps {
	switch {
	case s.ops == nil:
		return s.collective
	case dtypeOf(batch[0].Value.values[0]) == tensor.Int32:
		return ReductionToOneDevice{}
	}
	return s.ops
}
