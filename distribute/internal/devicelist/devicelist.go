// Package devicelist has TensorFlow's rules about the devices of several workers, for the cases that are recorded of
// them. A strategy has the devices of one worker.
package devicelist

import (
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
)

// ByTask returns the device strings of several workers by job and task (TensorFlow's _group_device_list).
// A task without devices has an empty list. It is an error if all devices belong to a single worker.
func ByTask(devices []string) (map[string][][]string, error) {
	const op = "ByTask"
	single, err := device.IsSingleWorker(devices)
	if err != nil {
		return nil, err
	}
	if single {
		return nil, kinds.OpErrorf(op, kinds.Invalid, "the devices are those of a single worker: %q", devices)
	}
	groups := map[string][][]string{}
	for _, name := range devices {
		d, err := device.Parse(name)
		switch {
		case err != nil:
			return nil, err
		case d.Task < 0:
			return nil, kinds.OpErrorf(op, kinds.Invalid,
				"device %s has no task: want one as in /job:worker/task:0/device:CPU:0", name)
		}
		for len(groups[d.Job]) <= d.Task {
			groups[d.Job] = append(groups[d.Job], []string{})
		}
		groups[d.Job][d.Task] = append(groups[d.Job][d.Task], name)
	}
	return groups, nil
}

// GPUsPerWorker returns the number of GPUs of each worker (TensorFlow's _infer_num_gpus_per_worker). It is an
// error unless all workers have the same number, with indices 0, 1, 2, ….
func GPUsPerWorker(devices []string) (int, error) {
	const op = "GPUsPerWorker"
	single, err := device.IsSingleWorker(devices)
	if err != nil {
		return 0, err
	}
	if single {
		return len(gpuIndices(devices)), nil
	}
	groups, err := ByTask(devices)
	if err != nil {
		return 0, err
	}
	count := -1
	for _, tasks := range groups {
		for _, names := range tasks {
			gpus := gpuIndices(names)
			switch {
			case count >= 0 && len(gpus) != count:
				return 0, kinds.OpErrorf(op, kinds.Invalid,
					"all workers should have the same number of GPUs: one has %d, another %d", count, len(gpus))
			case slices.ContainsFunc(gpus, func(i int) bool { return i >= len(gpus) }):
				return 0, kinds.OpErrorf(op, kinds.Invalid,
					"GPU `device_index` on a worker should be consecutive and start from 0: %q", names)
			}
			count = len(gpus)
		}
	}
	return max(count, 0), nil
}

// gpuIndices returns the indices of the GPUs among devices; device.Parse has accepted all of them.
func gpuIndices(devices []string) []int {
	var indices []int
	for _, name := range devices {
		if d, err := device.Parse(name); err == nil && d.Kind == "GPU" {
			indices = append(indices, d.Index)
		}
	}
	return indices
}
