package main

import (
	"io"

	"github.com/lockstep-ml/lockstep/cluster"
)

// jobFinding is the job of this process as JSON.
type jobFinding struct {
	Source       string       `json:"source"`
	ID           string       `json:"id,omitempty"`
	Worker       int          `json:"worker"`
	Workers      int          `json:"workers"`
	LocalWorker  int          `json:"local_worker"` // -1: unknown
	LocalWorkers int          `json:"local_workers"`
	Store        string       `json:"store,omitempty"`
	Hosted       bool         `json:"hosted"`
	NoStore      string       `json:"no_store,omitempty"`
	Epoch        uint32       `json:"epoch"`
	Cluster      cluster.Spec `json:"cluster"`
	Task         string       `json:"task"`
	Read         []string     `json:"read"`
	Beside       []string     `json:"beside,omitempty"`
}

// printJob prints the job that this process is a worker of.
func printJob(w io.Writer, format string) error {
	job, err := cluster.Discover(cluster.Discovery{})
	if err != nil {
		return err
	}
	if format == "table" {
		_, err = io.WriteString(w, job.Describe()) // one write: several workers may share a terminal
		return err
	}
	out := jobFinding{
		Source: job.Source, ID: job.ID, Worker: job.Worker, Workers: job.Workers, LocalWorker: job.LocalWorker,
		LocalWorkers: job.LocalWorkers,
		Store:        cluster.Value{Name: "store", Value: job.Store}.Shown(), Hosted: job.Hosted, NoStore: job.NoStore,
		Epoch: job.Epoch, Cluster: job.Spec, Task: job.Task.String(),
	}
	for _, v := range job.Values {
		out.Read = append(out.Read, v.String())
	}
	for _, c := range job.Beside {
		out.Beside = append(out.Beside, c.String())
	}
	return writeJSON(w, out)
}
