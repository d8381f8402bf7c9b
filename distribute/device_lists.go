package distribute

import (
	"slices"

	"github.com/lockstep-ml/lockstep/cluster"
)

// IsSingleWorker reports whether all device strings belong to one worker: one job, task and replica. It
// compares the strings as written, so a full name and a short name of the same process count as two workers
// (TensorFlow's _is_device_list_single_worker). It is an error to mix local devices with devices of a cluster,
// or to omit the task of a cluster's device.
func IsSingleWorker(devices []string) (bool, error) {
	const op = "IsSingleWorker"
	type worker struct {
		job           string
		task, replica int
	}
	workers := map[worker]bool{}
	local, remote, open := 0, 0, ""
	for _, name := range devices {
		d, err := ParseDevice(name)
		if err != nil {
			return false, err
		}
		workers[worker{d.Job, d.Task, d.Replica}] = true
		if d.Job == "" || d.Job == localCPU.Job {
			local++
			continue
		}
		remote++
		if d.Task < 0 {
			open = name
		}
	}
	switch {
	case local > 0 && remote > 0:
		return false, errorf(op, ErrInvalid, "local device should have only 'localhost' in the job field, as in "+
			"/job:localhost/replica:0/task:0/device:CPU:0; devices of this process and of other jobs cannot be mixed: %q",
			devices)
	case len(workers) == 1 && open != "":
		return false, errorf(op, ErrInvalid, "remote device string must have task specified, as in "+
			"/job:worker/task:0/device:CPU:0: %s has none", open)
	}
	return len(workers) == 1, nil
}

// GroupDevices returns the device strings of several workers by job and task (TensorFlow's _group_device_list).
// A task without devices has an empty list. It is an error if all devices belong to a single worker.
func GroupDevices(devices []string) (map[string][][]string, error) {
	const op = "GroupDevices"
	single, err := IsSingleWorker(devices)
	if err != nil {
		return nil, err
	}
	if single {
		return nil, errorf(op, ErrInvalid, "the devices are those of a single worker: %q", devices)
	}
	groups := map[string][][]string{}
	for _, name := range devices {
		d, err := ParseDevice(name)
		switch {
		case err != nil:
			return nil, err
		case d.Task < 0:
			return nil, errorf(op, ErrInvalid, "device %s has no task: want one as in /job:worker/task:0/device:CPU:0", name)
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
	single, err := IsSingleWorker(devices)
	if err != nil {
		return 0, err
	}
	if single {
		return len(gpuIndices(devices)), nil
	}
	groups, err := GroupDevices(devices)
	if err != nil {
		return 0, err
	}
	count := -1
	for _, tasks := range groups {
		for _, names := range tasks {
			gpus := gpuIndices(names)
			switch {
			case count >= 0 && len(gpus) != count:
				return 0, errorf(op, ErrInvalid, "all workers should have the same number of GPUs: one has %d, another %d", count,
					len(gpus))
			case slices.ContainsFunc(gpus, func(i int) bool { return i >= len(gpus) }):
				return 0, errorf(op, ErrInvalid, "GPU `device_index` on a worker should be consecutive and start from 0: %q", names)
			}
			count = len(gpus)
		}
	}
	return max(count, 0), nil
}

// gpuIndices returns the indices of the GPUs among devices; ParseDevice has accepted all of them.
func gpuIndices(devices []string) []int {
	var indices []int
	for _, name := range devices {
		if d, err := ParseDevice(name); err == nil && d.Kind == "GPU" {
			indices = append(indices, d.Index)
		}
	}
	return indices
}

// InputWorkers describes the hosts of a job's input pipelines and the devices that each one feeds.
type InputWorkers struct {
	// Hosts has one device per worker.
	Hosts []string
	// Devices has the devices that each host feeds.
	Devices [][]string
	// Default is the device that a scope sets: the first worker's with several workers, else empty.
	Default string
}

// InputDevices returns the hosts of the input pipelines of a strategy on these devices: the CPU of a single
// worker, or one host per worker, the chief first (TensorFlow's MirroredStrategy._input_workers_devices and
// _default_device).
func InputDevices(devices []string) (InputWorkers, error) {
	single, err := IsSingleWorker(devices)
	if err != nil {
		return InputWorkers{}, err
	}
	var in InputWorkers
	if single {
		full := make([]string, len(devices))
		for i, name := range devices {
			d, err := CanonicalDevice(name)
			if err != nil {
				return InputWorkers{}, err
			}
			full[i] = d.String()
		}
		host, err := CanonicalDevice("/device:CPU:0", full[0])
		if err != nil {
			return InputWorkers{}, err
		}
		in.Hosts, in.Devices = []string{host.String()}, [][]string{full}
		if host.Job != localCPU.Job {
			in.Default = Device{Job: host.Job, Replica: host.Replica, Task: host.Task}.String()
		}
		return in, nil
	}
	groups, err := GroupDevices(devices)
	if err != nil {
		return InputWorkers{}, err
	}
	for _, job := range []string{cluster.Chief, cluster.Worker} {
		for task, names := range groups[job] {
			in.Hosts = append(in.Hosts, Device{Job: job, Replica: -1, Task: task}.String())
			in.Devices = append(in.Devices, names)
		}
	}
	if len(in.Hosts) > 0 {
		in.Default = in.Hosts[0]
	}
	return in, nil
}
