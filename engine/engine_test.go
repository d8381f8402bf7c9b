package engine_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestRole(t *testing.T) {
	got := fmt.Sprint([]engine.Role{engine.Parameter, engine.Slot, engine.Average, engine.Frozen, 9})
	if want := "[parameter optimizer's slot average frozen Role(9)]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestOwners checks that every parameter has an owner, that shards are balanced, and that the order among equals is
// fixed.
func TestOwners(t *testing.T) {
	variables := func(lengths ...int) (list []engine.Variable) {
		for _, n := range lengths {
			list = append(list, engine.Variable{DType: tensor.Float32, Shape: []int{n}})
		}
		return list
	}
	for _, test := range []struct {
		lengths []int
		shards  int
		want    []int
	}{
		{[]int{1, 2, 3}, 1, []int{0, 0, 0}},
		{[]int{5, 5, 5, 5}, 2, []int{0, 1, 0, 1}},
		{[]int{1, 2, 3, 4, 10}, 2, []int{1, 1, 1, 1, 0}},
		{[]int{7, 1}, 4, []int{0, 1}},
		{nil, 3, []int{}},
	} {
		if got := engine.Owners(variables(test.lengths...), test.shards); !slices.Equal(got, test.want) {
			t.Errorf("parameters of lengths %v in %d shards: owners %v, want %v", test.lengths, test.shards, got, test.want)
		}
	}
}

// TestPlacement checks which device a replica computes on.
func TestPlacement(t *testing.T) {
	s := engine.Spec{Devices: make([]engine.Device, 3)}
	if s.LocalReplicas() != 3 || s.DeviceOf(2) != 2 {
		t.Errorf("%d replicas, the last on device %d: want one per device", s.LocalReplicas(), s.DeviceOf(2))
	}
	s.ReplicaDevices = []int{2, 0, 1, 2}
	if s.LocalReplicas() != 4 || s.DeviceOf(3) != 2 {
		t.Errorf("%d replicas, the last on device %d: want 4, on device 2", s.LocalReplicas(), s.DeviceOf(3))
	}
}
