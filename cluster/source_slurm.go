package cluster

import (
	"cmp"
	"fmt"
	"strconv"
)

// slurmSource is a step of a Slurm job, started by srun.
var slurmSource = source{
	name: "Slurm", key: "slurm", known: "SLURM_PROCID and SLURM_STEP_NODELIST", depth: allocation,
	detect: inSlurmStep,
	read: func(r *reading, j *Job) {
		r.text("SLURM_JOB_ID")
		j.Worker, j.Workers = r.need("SLURM_PROCID"), r.workers("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
		step := r.text("SLURM_STEP_ID")
		if id := r.d.env("SLURM_JOB_ID"); id != "" {
			j.ID = "slurm-" + id
			if step != "" {
				j.ID += "." + step
			}
		}
		r.slurmLocal(j)
		j.Host = r.text("SLURMD_NODENAME")
		j.Epoch = r.epoch("SLURM_RESTART_COUNT")
		r.slurmStore(j, "SLURM_STEP_NODELIST", "SLURM_JOB_ID", step)
	},
	hint: func(r *reading) string {
		if id := r.d.env("SLURM_JOB_ID"); id != "" {
			return fmt.Sprintf("job %s, but not in a step of it: srun starts one process for each task", visible(clip(id)))
		}
		return ""
	},
}

// inSlurmStep reports whether srun started this process. A batch script, and the shell of salloc, also have a
// SLURM_PROCID.
func inSlurmStep(d *Discovery) bool {
	return d.env("SLURM_PROCID") != "" && (d.env("SLURM_STEP_NODELIST") != "" || d.env("SLURM_STEP_NUM_TASKS") != "")
}

// slurmLocal determines the index on the host: SLURM_LOCALID of the number of tasks of node SLURM_NODEID.
func (r *reading) slurmLocal(j *Job) {
	local, node := r.number("SLURM_LOCALID"), r.number("SLURM_NODEID")
	text := r.text("SLURM_STEP_TASKS_PER_NODE")
	if local < 0 || node < 0 || text == "" {
		return
	}
	counts, err := ExpandTasksPerNode(text)
	switch {
	case err != nil:
		r.wrong("SLURM_STEP_TASKS_PER_NODE", err)
	case node >= len(counts):
		r.fail("SLURM_NODEID=%d, but SLURM_STEP_TASKS_PER_NODE=%s has %d nodes", node, clip(text), len(counts))
	default:
		j.LocalWorker, j.LocalWorkers = local, counts[node]
	}
}

// slurmStore sets the store to the first host of a list, at a port derived from the numbers of the job and
// the step, as JAX does: above the ports that Linux assigns automatically.
func (r *reading) slurmStore(j *Job, list, job, step string) {
	const portFirst, portCount = 61440, 4096
	names := r.text(list)
	if names == "" {
		j.NoStore = list + " is not set: " + storeRemedy
		return
	}
	hosts, err := ExpandHostlist(names)
	if err != nil {
		r.wrong(list, err)
		return
	}
	if len(hosts) == 0 || !isHost(hosts[0]) {
		r.fail("%s=%s names no host", list, clip(names))
		return
	}
	if r.d.env(job) == "" {
		j.NoStore = job + " is not set: " + storeRemedy
		return
	}
	id := r.d.env(job)
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		r.fail("%s=%s: want a number from 0", job, strconv.Quote(clip(id)))
		return
	}
	s, err := strconv.ParseUint(cmp.Or(step, "0"), 10, 32)
	if err != nil {
		r.fail("SLURM_STEP_ID=%s: want a number from 0", strconv.Quote(clip(step)))
		return
	}
	const stepStride = 97 // prime to portCount: concurrent steps of one job on a host get different ports
	j.Store = tcp(hosts[0], int(portFirst+(n+stepStride*s)%portCount))
}
