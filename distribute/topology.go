package distribute

import (
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
)

// DeviceGroups groups nearby devices: it returns the group of each device. GPUs are nearby if they are on one
// NUMA node, by their PCI bus. Logical CPU devices are nearby if the cores with their numbers are on one node.
// If nodes are not known, or all devices are on one node, the groups are the two halves of the list, as in
// TensorFlow.
func DeviceGroups(devices []Device) []int { return deviceGroups(os.DirFS("/"), devices) }

func deviceGroups(root fs.FS, devices []Device) []int {
	groups := make([]int, len(devices))
	different := false
	for i, d := range devices {
		node, known := numaNode(root, d)
		if !known {
			return halves(len(devices))
		}
		groups[i] = node
		different = different || node != groups[0]
	}
	if !different {
		return halves(len(devices))
	}
	return groups
}

// halves groups the devices of the canonical tree's left half, and the others.
func halves(n int) []int {
	groups := make([]int, n)
	if n > 1 {
		for i := halfTree(n); i < n; i++ {
			groups[i] = 1
		}
	}
	return groups
}

// numaNode returns the NUMA node of a device, as reported by Linux.
func numaNode(root fs.FS, d Device) (node int, known bool) {
	switch d.Kind {
	case "CPU":
		return cpuNode(root, d.Index)
	case "GPU":
		return gpuNode(root, d.Index)
	}
	return 0, false
}

// cpuNode returns the node that has the core.
func cpuNode(root fs.FS, core int) (int, bool) {
	lists, _ := fs.Glob(root, "sys/devices/system/node/node*/cpulist")
	for _, name := range lists {
		node, err := strconv.Atoi(strings.TrimPrefix(path.Base(path.Dir(name)), "node"))
		text, readErr := fs.ReadFile(root, name)
		if err == nil && readErr == nil && inList(strings.TrimSpace(string(text)), core) {
			return node, true
		}
	}
	return 0, false
}

// inList reports whether a list of ranges such as "0-3,8" contains the number.
func inList(list string, n int) bool {
	for _, part := range strings.Split(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		lo, err := strconv.Atoi(first)
		hi, err2 := strconv.Atoi(last)
		if err == nil && err2 == nil && lo <= n && n <= hi {
			return true
		}
	}
	return false
}

// gpuNode looks up the GPU's PCI device in NVIDIA's driver, and the NUMA node of that PCI device.
func gpuNode(root fs.FS, minor int) (int, bool) {
	infos, _ := fs.Glob(root, "proc/driver/nvidia/gpus/*/information")
	for _, name := range infos {
		text, err := fs.ReadFile(root, name)
		if err != nil || !hasMinor(string(text), minor) {
			continue
		}
		address := path.Base(path.Dir(name))
		number, err := fs.ReadFile(root, "sys/bus/pci/devices/"+address+"/numa_node")
		if err != nil {
			return 0, false
		}
		node, err := strconv.Atoi(strings.TrimSpace(string(number)))
		return node, err == nil && node >= 0 // -1: the firmware does not report it
	}
	return 0, false
}

func hasMinor(information string, minor int) bool {
	for line := range strings.Lines(information) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "Device Minor" {
			return strings.TrimSpace(value) == strconv.Itoa(minor)
		}
	}
	return false
}
