package cluster

import "strconv"

// flagsSource is the command line of the program.
var flagsSource = source{
	name: sourceFlags, key: "flags", known: "a number of workers and a worker's number on the command line", depth: stated,
	detect: func(d *Discovery) bool { return d.Workers > 0 && d.Worker >= 0 || d.Worker > 0 },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.d.Worker, r.d.Workers
		r.note("--worker", strconv.Itoa(j.Worker))
		if j.Workers > 0 {
			r.note("--workers", strconv.Itoa(j.Workers))
		} else {
			j.Workers = r.workers()
		}
		j.NoStore = "give every worker the same address of worker 0's host: --rdzv-endpoint HOST:PORT"
	},
}

// lockstepSource is lockstep run, which provides all values.
var lockstepSource = source{
	name: sourceLockstep, key: "lockstep", known: EnvWorker, depth: launcher,
	detect: func(d *Discovery) bool { return d.env(EnvWorker) != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need(EnvWorker), r.need(EnvWorkers)
		r.local(j, EnvLocalWorker, EnvLocalWorkers)
		j.ID = r.text(EnvJob)
		j.Epoch = r.epoch(EnvEpoch)
		if text := r.text(EnvStore); text != "" {
			url, err := storeURL(text)
			if err != nil {
				r.wrong(EnvStore, err)
			}
			j.Store, j.Hosted = url, true
		}
		j.NoStore = EnvStore + " is not set"
	},
}

// epoch returns how often a job was restarted.
func (r *reading) epoch(name string) uint32 {
	n := r.number(name)
	if int64(n) > 1<<31 {
		r.fail("%s=%d: want a number of restarts", name, n)
	}
	return uint32(max(0, n))
}
