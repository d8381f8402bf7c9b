package worker

import (
	"context"
	"encoding/json"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/timeline"
)

// Every worker publishes a report of its last steps, apart from its heartbeat: heartbeats are small and read by all
// workers, reports only by worker 0, which looks for the straggler, and by those who watch the job.

// reportEvery is the shortest interval between two reports of a worker in a small job.
const reportEvery = 500 * time.Millisecond

// followEvery is the shortest interval between two reads of the reports: less than that between two reports, so that
// few are missed.
const followEvery = 200 * time.Millisecond

// Straggler returns the worker that slows the job down, or nil. Only worker 0 looks for it.
func (w *Worker) Straggler() *timeline.Straggler {
	if w == nil {
		return nil
	}
	return w.straggler.Load()
}

// Status returns the tracker of the job's state; nil on all workers but worker 0.
func (w *Worker) Status() *status.Tracker { return w.tracker }

// report returns the state of this worker with its last steps.
func (w *Worker) report() timeline.Report {
	r := w.timeline.Report()
	me := &w.members[w.job.Worker]
	r.Worker, r.Host, r.PID, r.Replicas = w.job.Worker, me.Host, me.PID, me.Replicas
	return r
}

// reportOverlap is how many earlier reports of a worker its report repeats, because readers see only the latest one at
// the time they read. More would only cost bytes, which a store such as etcd keeps in its history.
const reportOverlap = 1

// publishReports publishes this worker's report whenever it has taken steps, until ctx ends.
func (w *Worker) publishReports(ctx context.Context) error {
	every := max(reportEvery, reportInterval(len(w.members)))
	var before published
	for {
		if r := w.report(); before.add(&r) {
			text, err := json.Marshal(r)
			if err == nil {
				err = w.store.Set(ctx, w.key(status.Reports, w.job.Worker), text)
			}
			if err != nil {
				return err
			}
		}
		if pause.For(ctx, every); ctx.Err() != nil {
			return nil
		}
	}
}

// published knows the reports that a worker has published.
type published struct {
	first bool                             // a report was published
	ends  [reportOverlap + 1]time.Duration // of the last steps of the reports before, oldest first
}

// add removes the steps of a report that the reports before the last one have. It reports whether the report is to be
// published: it is the first one, or has new steps. The numbers of steps begin again with each trainer, their ends do
// not.
func (p *published) add(r *timeline.Report) bool {
	if n := len(r.Steps); n > 0 && r.Steps[n-1].End > p.ends[reportOverlap] {
		for len(r.Steps) > 1 && r.Steps[0].End <= p.ends[0] {
			r.Steps = r.Steps[1:]
		}
		copy(p.ends[:], p.ends[1:])
		p.ends[reportOverlap] = r.Steps[len(r.Steps)-1].End
		p.first = true
		return true
	}
	first := !p.first
	p.first = true
	return first
}

// followStatus keeps the tracker up to date.
func (w *Worker) followStatus(ctx context.Context) error {
	return status.Follow(ctx, w.store, w.job.ID, w.tracker, followEvery)
}

// track makes the tracker of the job, on worker 0.
func (w *Worker) track() {
	w.tracker = status.NewTracker(w.job.ID, func(s timeline.Straggler, named bool) {
		if !named {
			w.straggler.Store(nil)
			w.cfg.Logger.Info("worker: a worker is no longer slow", "worker", s.Worker)
			return
		}
		w.straggler.Store(&s)
		w.cfg.Logger.Warn("worker: "+s.String(), "who", w.name(s.Worker), "cause", s.Cause)
	})
}
