package cluster

import (
	"net"
	"strconv"
	"strings"
)

// petSource is a TrainJob of Kubeflow's Trainer with the torch runtime, which sets torchrun's flags as PET_
// variables. Without torchrun each node is one worker.
var petSource = source{
	name: "Kubeflow Trainer", key: "kubeflow", known: "PET_NNODES and PET_NODE_RANK", depth: allocation,
	detect: func(d *Discovery) bool { return d.env("PET_NNODES") != "" && d.env("PET_NODE_RANK") != "" },
	read: func(r *reading, j *Job) {
		j.Worker = r.need("PET_NODE_RANK")
		least, most, isRange := strings.Cut(r.text("PET_NNODES"), ":")
		n, err := strconv.Atoi(least)
		switch {
		case isRange && least != most:
			r.fail("PET_NNODES=%s:%s is a range, so the number of workers is unknown: give the TrainJob a fixed number of nodes",
				clip(least), clip(most))
		case err != nil || n < 1:
			r.fail("PET_NNODES=%s: want a number from 1", strconv.Quote(clip(least)))
		}
		j.Workers = n
		r.oneProcess("PET_NPROC_PER_NODE")
		r.master(j, "PET_MASTER_ADDR", "PET_MASTER_PORT", false)
	},
}

// jaxSource is a TrainJob of Kubeflow's Trainer with the JAX runtime, or another cluster that sets JAX's
// variables.
var jaxSource = source{
	name: "JAX's variables", key: "jax", known: "JAX_PROCESS_ID and JAX_NUM_PROCESSES", depth: allocation,
	detect: func(d *Discovery) bool { return d.env("JAX_PROCESS_ID") != "" && d.env("JAX_NUM_PROCESSES") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("JAX_PROCESS_ID"), r.need("JAX_NUM_PROCESSES")
		address := r.text("JAX_COORDINATOR_ADDRESS")
		if address == "" {
			j.NoStore = "JAX_COORDINATOR_ADDRESS is not set: " + storeRemedy
			return
		}
		if port := r.text("JAX_COORDINATOR_PORT"); port != "" {
			if _, _, err := net.SplitHostPort(address); err != nil {
				address = net.JoinHostPort(strings.Trim(address, "[]"), port)
			}
		}
		r.address(j, "JAX_COORDINATOR_ADDRESS", address)
	},
}

// awsBatchSource is a node of a multi-node parallel job of AWS Batch. The main node does not get its own
// address.
var awsBatchSource = source{
	name: "AWS Batch", key: "aws-batch", known: "AWS_BATCH_JOB_NODE_INDEX", depth: allocation,
	detect: func(d *Discovery) bool { return d.env("AWS_BATCH_JOB_NODE_INDEX") != "" },
	read: func(r *reading, j *Job) {
		j.Worker, j.Workers = r.need("AWS_BATCH_JOB_NODE_INDEX"), r.workers("AWS_BATCH_JOB_NUM_NODES")
		first := r.number("AWS_BATCH_JOB_MAIN_NODE_INDEX")
		address := r.text("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS")
		if id := r.text("AWS_BATCH_JOB_ID"); id != "" {
			j.ID, _, _ = strings.Cut(id, "#") // JOB#NODE
		}
		switch {
		case first > 0:
			j.NoStore = "the main node is not node 0, and only its address is passed on: " + storeRemedy
		case address != "":
			r.address(j, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", address)
		case j.Worker == 0:
			host, err := r.d.Hostname()
			if err != nil {
				r.wrong("this host's name", err)
				return
			}
			r.note("hostname", host)
			r.address(j, "hostname", host)
		default:
			j.NoStore = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set: " + storeRemedy
		}
	},
}
