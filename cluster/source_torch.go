package cluster

import (
	"strconv"
	"strings"
)

// torchrunSource is torchrun, or torch.distributed.launch.
var torchrunSource = source{
	name: "torchrun", key: "torchrun", known: "TORCHELASTIC_RUN_ID", depth: launcher,
	detect: func(d *Discovery) bool { return d.env("TORCHELASTIC_RUN_ID") != "" && d.env("RANK") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("RANK"), r.need("WORLD_SIZE")
		r.local(j, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
		if id := r.text("TORCHELASTIC_RUN_ID"); id != "none" { // torchrun's default name
			j.ID = "torchrun-" + id
		}
		j.Epoch = r.epoch("TORCHELASTIC_RESTART_COUNT")
		// Torchrun's own store listens on MASTER_PORT, unless rank 0 is configured to do that.
		r.master(j, "MASTER_ADDR", "MASTER_PORT", !strings.EqualFold(r.text("TORCHELASTIC_USE_AGENT_STORE"), "false"))
	},
}

// envSource is a launcher that sets torchrun's variables for every process, as torch.distributed's env://
// expects.
var envSource = source{
	name: "RANK and WORLD_SIZE", key: "env", known: "RANK, WORLD_SIZE and LOCAL_RANK", depth: launcher,
	detect: func(d *Discovery) bool {
		return d.env("TORCHELASTIC_RUN_ID") == "" && d.env("RANK") != "" && d.env("WORLD_SIZE") != "" &&
			d.env("LOCAL_RANK") != ""
	},
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("RANK"), r.need("WORLD_SIZE")
		r.local(j, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
		r.master(j, "MASTER_ADDR", "MASTER_PORT", false)
	},
}

// nodeEnvSource is an operator that sets RANK and WORLD_SIZE for every host: Kubeflow's PyTorchJob, Alibaba's
// PAI. Then each host is one worker, unless several processes per host were requested.
var nodeEnvSource = source{
	name: "RANK and WORLD_SIZE of hosts", key: "env-hosts", known: "RANK and WORLD_SIZE without LOCAL_RANK",
	depth: allocation,
	detect: func(d *Discovery) bool {
		return d.env("RANK") != "" && d.env("WORLD_SIZE") != "" && d.env("LOCAL_RANK") == "" &&
			d.env("TORCHELASTIC_RUN_ID") == ""
	},
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("RANK"), r.need("WORLD_SIZE")
		r.oneProcess("NPROC_PER_NODE")
		r.oneProcess("PET_NPROC_PER_NODE")
		r.master(j, "MASTER_ADDR", "MASTER_PORT", false)
	},
}

// oneProcess rejects a number of processes per host other than one.
func (r *reading) oneProcess(name string) {
	switch value := strings.ToLower(r.text(name)); value {
	case "", "auto", "gpu", "cpu", "1": // torchrun decides the number; without it there is one process
	default:
		r.fail("%s=%s requests several processes on each host, and no variable numbers them: start them by lockstep run "+
			"--nnodes N --node-rank I --nproc-per-node %s", name, clip(value), clip(value))
	}
}

// master builds a store's address from a host and a port. If the port is taken by another store, it uses the
// next one.
func (r *reading) master(j *Job, host, port string, taken bool) {
	address := r.text(host)
	n := r.number(port)
	switch {
	case address == "":
		j.NoStore = host + " is not set: " + storeRemedy
		return
	case n > 65535 || n == 0:
		r.fail("%s=%d: want a port", port, n)
		return
	case n < 0:
		n = StorePort
	case taken && n == 65535:
		n--
	case taken:
		n++
	}
	address = strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")
	if !isHost(address) {
		r.fail("%s=%s: want a host", host, strconv.Quote(clip(address)))
		return
	}
	j.Store = tcp(address, n)
}

// storeRemedy is the remedy if no source has a store for workers of several hosts.
const storeRemedy = "set " + EnvStore + ", the same for every worker, to tcp://HOST:PORT with the host that worker 0 " +
	"runs on, or to file:///FOLDER with " +
	"a folder that all hosts share"
