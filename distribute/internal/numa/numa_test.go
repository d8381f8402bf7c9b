package numa

import (
	"testing"
	"testing/fstest"
)

func TestNode(t *testing.T) {
	root := fstest.MapFS{
		"sys/devices/system/node/node0/cpulist":            {Data: []byte("0-1,4\n")},
		"sys/devices/system/node/node1/cpulist":            {Data: []byte("2-3\n")},
		"proc/driver/nvidia/gpus/0000:1b:00.0/information": {Data: []byte("Device Minor: \t 0\n")},
		"sys/bus/pci/devices/0000:1b:00.0/numa_node":       {Data: []byte("1\n")},
	}
	for _, c := range []struct {
		kind        string
		index, node int
		known       bool
	}{
		{"CPU", 1, 0, true},
		{"CPU", 3, 1, true},
		{"CPU", 4, 0, true},
		{"CPU", 5, 0, false},
		{"GPU", 0, 1, true},
		{"GPU", 1, 0, false},
		{"TPU", 0, 0, false},
	} {
		if node, known := Node(root, c.kind, c.index); node != c.node || known != c.known {
			t.Errorf("%s:%d: got node %d, %v, want %d, %v", c.kind, c.index, node, known, c.node, c.known)
		}
	}
}
