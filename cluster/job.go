package cluster

import (
	"fmt"
	"strings"
)

// Job describes the job that this process is a worker of, and the source of that information. A
// single-process job has one worker.
type Job struct {
	// Source is the source of the information: "lockstep run", "TF_CONFIG", "torchrun", "flags", "none", …
	Source string
	// Values are all values that were read for it, in the order of reading.
	Values []Value
	// ID names the job. Workers of other jobs are refused. "" means "lockstep".
	ID string
	// Worker is this process's index among the workers, from 0; worker 0 is the chief. Workers is the number
	// of workers.
	Worker, Workers int
	// LocalWorker is its index among the workers of its host, and LocalWorkers the number of these; -1 and 0
	// if unknown.
	LocalWorker, LocalWorkers int
	// Host is the launcher's name for this host: Slurm's name of the node. "" means the host's own name.
	Host string
	// Store is the URL of the rendezvous store: "tcp://host:port", "file:///folder",
	// "etcd://host:port,host:port/prefix"; "" if unknown. Hosted reports that it is running already, like
	// lockstep run's; else worker 0 serves a TCP store. [StorePMI] is such a store at a free port, whose address
	// the launcher passes on. NoStore explains why several workers have no store,
	// and how to fix it.
	Store   string
	Hosted  bool
	NoStore string
	// StoreTemporary reports that the store is a folder for this job alone, which worker 0 removes when all
	// have left.
	StoreTemporary bool
	// Epoch is how often the job was restarted.
	Epoch uint32
	// Spec and Task are TensorFlow's description of the cluster, if the source has one. Otherwise they are
	// built from Workers and Worker: job "worker", with the known addresses.
	Spec Spec
	Task Task
	// Beside lists the sources of information about a job that were found besides Source: those that agree with
	// it, and those that were not used.
	Beside []Claim
}

// StorePMI is the [Job.Store] of a job whose launcher has a key-value space: worker 0 serves a TCP store at a free port
// and publishes its address there. See package pmi.
const StorePMI = "pmi:"

// Chief reports whether this worker has the duties of the chief.
func (j *Job) Chief() bool { return j.Worker == 0 }

// String returns the worker and the source in one line: "worker 1 of 4, by torchrun".
func (j *Job) String() string {
	if j.Source == noSource {
		return "a single-process job"
	}
	text := fmt.Sprintf("worker %d of %d", j.Worker, j.Workers)
	if j.Chief() && j.Workers > 1 {
		text += " (the chief)"
	}
	if j.Source != "" { // else the program created the job itself
		text += ", by " + j.Source
	}
	return text
}

// Resolver returns a resolver for this job: its spec, its task, and worker 0's address as the master.
func (j *Job) Resolver() Resolver {
	task := j.Task
	r := &Simple{Cluster: j.Spec, This: &task}
	if leader, ok := strings.CutPrefix(j.Store, "tcp://"); ok && j.Workers > 1 {
		r.MasterAddress = leader
	}
	return r
}

// The environment that lockstep run sets for every worker, besides torchrun's variables and TF_CONFIG.
const (
	EnvJob          = "LOCKSTEP_JOB"            // Job.ID
	EnvStore        = "LOCKSTEP_STORE"          // Job.Store; the store is hosted
	EnvWorker       = "LOCKSTEP_WORKER"         // Job.Worker
	EnvWorkers      = "LOCKSTEP_WORKERS"        // Job.Workers
	EnvLocalWorker  = "LOCKSTEP_LOCAL_WORKER"   // Job.LocalWorker
	EnvLocalWorkers = "LOCKSTEP_LOCAL_WORKERS"  // Job.LocalWorkers
	EnvEpoch        = "LOCKSTEP_EPOCH"          // Job.Epoch
	EnvSecret       = "LOCKSTEP_SECRET"         // the job's secret
	EnvSecretFile   = "LOCKSTEP_SECRET_FILE"    // a file that contains it
	EnvRecords      = "LOCKSTEP_RECORDS"        // folder for failure and flight records
	EnvNode         = "LOCKSTEP_NODE"           // number of the node among those of lockstep run
	EnvNodeFile     = "LOCKSTEP_NODE_FILE"      // file by which lockstep run reads the workers' heartbeats
	EnvSource       = "LOCKSTEP_SOURCE"         // Discovery.Prefer, set by the user
	EnvTFConfigFile = "LOCKSTEP_TF_CONFIG_FILE" // file with parts of TF_CONFIG, see TFConfig
)
