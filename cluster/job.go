package cluster

import (
	"fmt"
	"strings"
)

// Job is what a process was told about the job that it is a worker of, and by whom. A process by itself is a job of one worker.
type Job struct {
	// Source says who told: "lockstep run", "TF_CONFIG", "torchrun", "flags", "nobody", …
	Source string
	// Values are all that was read for it, in the order of reading.
	Values []Value
	// ID names the job. Workers of another are refused. "" is taken for "lockstep".
	ID string
	// Worker is this process's number among the workers, from 0; worker 0 is the chief. Workers is how many there are.
	Worker, Workers int
	// LocalWorker is its number among the workers of its host, and LocalWorkers how many these are; -1 and 0 if not told.
	LocalWorker, LocalWorkers int
	// Store is where the workers meet: "tcp://host:port", "file:///folder", "etcd://host:port,host:port/prefix"; "" if
	// not told. Hosted says that it is there already, as lockstep run's is; else worker 0 opens a TCP store itself. NoStore
	// says, where several workers were told of no store, why, and what to do.
	Store   string
	Hosted  bool
	NoStore string
	// StoreTemporary says that the store is a folder for this job alone, which worker 0 removes when all have left.
	StoreTemporary bool
	// Epoch is how often the job was restarted: its membership.
	Epoch uint32
	// Spec and Task are the cluster as TensorFlow describes it, where the source has one. Otherwise they are made up of Workers
	// and Worker: job "worker", with addresses where these are known.
	Spec Spec
	Task Task
	// Beside is what the others say that were not believed, or had nothing against it.
	Beside []Claim
}

// Chief reports whether this worker has the duties of the chief.
func (j *Job) Chief() bool { return j.Worker == 0 }

// String says in one line who told what: "worker 1 of 4, by torchrun".
func (j *Job) String() string {
	if j.Source == nobody {
		return "a process by itself"
	}
	text := fmt.Sprintf("worker %d of %d", j.Worker, j.Workers)
	if j.Chief() && j.Workers > 1 {
		text += " (the chief)"
	}
	if j.Source != "" { // else the program made the job itself
		text += ", by " + j.Source
	}
	return text
}

// Resolver returns a resolver that answers for this job: its spec, its task, and worker 0's address as the master.
func (j *Job) Resolver() Resolver {
	task := j.Task
	r := &Simple{Cluster: j.Spec, This: &task}
	if leader, ok := strings.CutPrefix(j.Store, "tcp://"); ok && j.Workers > 1 {
		r.MasterAddress = leader
	}
	return r
}

// The environment that lockstep run sets for every worker, beside torchrun's names and TF_CONFIG.
const (
	EnvJob          = "LOCKSTEP_JOB"           // Job.ID
	EnvStore        = "LOCKSTEP_STORE"         // Job.Store; the store is hosted
	EnvWorker       = "LOCKSTEP_WORKER"        // Job.Worker
	EnvWorkers      = "LOCKSTEP_WORKERS"       // Job.Workers
	EnvLocalWorker  = "LOCKSTEP_LOCAL_WORKER"  // Job.LocalWorker
	EnvLocalWorkers = "LOCKSTEP_LOCAL_WORKERS" // Job.LocalWorkers
	EnvEpoch        = "LOCKSTEP_EPOCH"         // Job.Epoch
	EnvSecret       = "LOCKSTEP_SECRET"        // the job's secret
	EnvSecretFile   = "LOCKSTEP_SECRET_FILE"   // a file that holds it
	EnvRecords      = "LOCKSTEP_RECORDS"       // folder for failure and flight records
	EnvSource       = "LOCKSTEP_SOURCE"        // Discovery.Prefer, set by the user
)
