package worker

import (
	"fmt"
	"strconv"
	"strings"
)

// Member is a worker of the job.
type Member struct {
	Worker   int    // the worker's number
	Host     string // name of its host
	PID      int    // its process on that host
	First    int    // rank of its first replica
	Replicas int    // number of replicas, with consecutive ranks
}

// Ranks returns the ranks of its replicas.
func (m *Member) Ranks() []int {
	out := make([]int, m.Replicas)
	for i := range out {
		out[i] = m.First + i
	}
	return out
}

// String identifies the worker in errors: "worker 1 (rank 1, host b, pid 4711)".
func (m *Member) String() string {
	ranks := "rank " + strconv.Itoa(m.First)
	if m.Replicas > 1 {
		ranks = fmt.Sprintf("ranks %d-%d", m.First, m.First+m.Replicas-1)
	}
	return fmt.Sprintf("worker %d (%s, host %s, pid %d)", m.Worker, ranks, m.Host, m.PID)
}

// owners returns the workers that ranks belong to, each once, without this one.
func (w *Worker) owners(ranks []int) []int {
	var out []int
	for i := range w.members {
		m := &w.members[i]
		if m.Worker == w.job.Worker {
			continue
		}
		for _, r := range ranks {
			if r >= m.First && r < m.First+m.Replicas {
				out = append(out, m.Worker)
				break
			}
		}
	}
	return out
}

// name returns a worker as errors identify it.
func (w *Worker) name(worker int) string { return w.members[worker].String() }

// names lists the first few workers.
func (w *Worker) names(workers []int) string {
	const shown = 4
	var out []string
	for _, i := range workers[:min(len(workers), shown)] {
		out = append(out, w.name(i))
	}
	if n := len(workers) - shown; n > 0 {
		out = append(out, fmt.Sprintf("%d more", n))
	}
	return strings.Join(out, ", ")
}
