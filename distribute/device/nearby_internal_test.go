package device

import (
	"fmt"
	"testing"
	"testing/fstest"
)

func devicesNamed(t *testing.T, names ...string) []Spec {
	t.Helper()
	out := make([]Spec, len(names))
	for i, name := range names {
		d, err := Canonical(name)
		if err != nil {
			t.Fatal(err)
		}
		out[i] = d
	}
	return out
}

// TestDeviceGroups: devices are grouped by NUMA node if Linux reports them, else in halves.
func TestDeviceGroups(t *testing.T) {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	gpu := func(minor int) *fstest.MapFile {
		return file(fmt.Sprintf("Model: \t\t H\nBus Location: \t 0000:1b:00.0\nDevice Minor: \t %d\n", minor))
	}
	machine := fstest.MapFS{
		"sys/devices/system/node/node0/cpulist":            file("0-1,4\n"),
		"sys/devices/system/node/node1/cpulist":            file("2-3,5\n"),
		"sys/devices/system/node/has_cpu":                  file("0-1\n"),
		"proc/driver/nvidia/gpus/0000:1b:00.0/information": gpu(0),
		"proc/driver/nvidia/gpus/0000:2b:00.0/information": gpu(1),
		"proc/driver/nvidia/gpus/0000:3b:00.0/information": gpu(2),
		"sys/bus/pci/devices/0000:1b:00.0/numa_node":       file("1\n"),
		"sys/bus/pci/devices/0000:2b:00.0/numa_node":       file("0\n"),
		"sys/bus/pci/devices/0000:3b:00.0/numa_node":       file("-1\n"),
	}
	for _, c := range []struct {
		devices []string
		want    string
	}{
		{[]string{"CPU:0", "CPU:1", "CPU:2", "CPU:5", "CPU:4"}, "[0 0 1 1 0]"},
		{[]string{"CPU:0", "CPU:1", "CPU:4"}, "[0 0 1]"},      // all on one node: halves
		{[]string{"CPU:0", "CPU:2", "CPU:9"}, "[0 0 1]"},      // core 9 does not exist
		{[]string{"GPU:0", "GPU:1", "GPU:0"}, "[1 0 1]"},      // by PCI bus
		{[]string{"GPU:0", "GPU:1", "GPU:2"}, "[0 0 1]"},      // the node of one is unknown
		{[]string{"GPU:0", "CPU:0", "CPU:3"}, "[1 0 1]"},      // mixed
		{[]string{"/device:NPU:0", "/device:NPU:1"}, "[0 1]"}, // of another kind
		{[]string{"CPU:0"}, "[0]"},
	} {
		if got := fmt.Sprint(nearby(machine, devicesNamed(t, c.devices...))); got != c.want {
			t.Errorf("%v: got %s, want %s", c.devices, got, c.want)
		}
	}
	if got := fmt.Sprint(nearby(fstest.MapFS{},
		devicesNamed(t, "CPU:0", "CPU:1", "CPU:2", "CPU:3", "CPU:4", "CPU:5"))); got != "[0 0 0 0 1 1]" {
		t.Errorf("no nodes known: got %s", got)
	}
	if got := len(Nearby(devicesNamed(t, "CPU:0", "CPU:1"))); got != 2 {
		t.Errorf("on this machine: %d groups of 2 devices", got)
	}
}
