package device

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
		d, err := Parse(name)
		if err != nil {
			return false, err
		}
		workers[worker{d.Job, d.Task, d.Replica}] = true
		if d.Job == "" || d.Job == CPU(0).Job {
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
		return false, invalid(op, "local device should have only 'localhost' in the job field, as in "+
			"/job:localhost/replica:0/task:0/device:CPU:0; devices of this process and of other jobs cannot be mixed: %q",
			devices)
	case len(workers) == 1 && open != "":
		return false, invalid(op, "remote device string must have task specified, as in "+
			"/job:worker/task:0/device:CPU:0: %s has none", open)
	}
	return len(workers) == 1, nil
}
