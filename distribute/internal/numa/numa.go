// Package numa finds the NUMA nodes of devices.
package numa

import (
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Node returns the NUMA node of a device, as reported by Linux in the file system root: of a core for the kind "CPU",
// of a GPU for the kind "GPU".
func Node(root fs.FS, kind string, index int) (node int, known bool) {
	switch kind {
	case "CPU":
		return cpuNode(root, index)
	case "GPU":
		return gpuNode(root, index)
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
