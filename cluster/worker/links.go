package worker

import (
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/ranges"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// Links describes the transports between this worker's replicas and the others: "shm with worker 1, tcp+tls
// with workers 2-5". It is empty for a single-process job.
func (w *Worker) Links() string { return w.links }

// linksOf determines the transport from the first replica of this worker to the first replica of each other
// worker.
func (w *Worker) linksOf(end transport.Endpoint) string {
	var names []string // in the order of the lowest worker
	of := map[string][]int{}
	for i := range w.members {
		if i == w.job.Worker {
			continue
		}
		name := mixed.By(end, w.members[i].First)
		if of[name] == nil {
			names = append(names, name)
		}
		of[name] = append(of[name], i)
	}
	for i, name := range names {
		names[i] = name + " with " + ranges.Text("worker", of[name])
	}
	return strings.Join(names, ", ")
}

// linksBy is linksOf for the group of a third-party backend.
func (w *Worker) linksBy(g collective.Group) string {
	var others []int
	for i := range w.members {
		if i != w.job.Worker {
			others = append(others, i)
		}
	}
	return g.Local()[0].Properties().Transport + " with " + ranges.Text("worker", others)
}
