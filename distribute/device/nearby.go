package device

import (
	"io/fs"
	"os"

	"github.com/lockstep-ml/lockstep/distribute/internal/numa"
	"github.com/lockstep-ml/lockstep/distribute/internal/twolevel"
)

// Nearby groups nearby devices: it returns the group of each device. GPUs are nearby if they are on one
// NUMA node, by their PCI bus. Logical CPU devices are nearby if the cores with their numbers are on one node.
// If nodes are not known, or all devices are on one node, the groups are the two halves of the list, as in
// TensorFlow.
func Nearby(devices []Spec) []int { return nearby(os.DirFS("/"), devices) }

func nearby(root fs.FS, devices []Spec) []int {
	groups := make([]int, len(devices))
	different := false
	for i, d := range devices {
		node, known := numa.Node(root, d.Kind, d.Index)
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
		for i := twolevel.HalfTree(n); i < n; i++ {
			groups[i] = 1
		}
	}
	return groups
}
