package distribute

import (
	"context"
	"slices"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// job is one Run, as a worker goroutine executes it.
type job struct {
	replica *Replica
	body    func(context.Context, *Replica) error
}

// worker is the goroutine of one replica. It lives as long as the strategy, so that a Run starts no goroutine.
// It is replaced after a failed Run, or after a step that calls runtime.Goexit.
type worker struct {
	state   *replicaState
	jobs    chan job
	current job           // executed by step
	done    chan struct{} // closed when the goroutine has ended
}

// startWorkers starts a worker for each replica.
func (s *Strategy) startWorkers() {
	s.workers = make([]*worker, len(s.devices))
	for i := range s.workers {
		s.workers[i] = &worker{state: newReplicaState(), jobs: make(chan job, 1), done: make(chan struct{})}
		go s.workers[i].work()
	}
}

// stopWorkers stops the workers when they are idle, and waits for those that are not abandoned.
func (s *Strategy) stopWorkers(abandoned []int) {
	for _, w := range s.workers {
		close(w.jobs)
	}
	for i, w := range s.workers {
		if !slices.Contains(abandoned, i) {
			<-w.done
		}
	}
	s.workers = nil
}

func (w *worker) work() {
	defer close(w.done)
	defer w.state.finishStarted() // a step that calls runtime.Goexit ends this goroutine
	goroutine, step := stacks.ID(), w.step
	for w.current = range w.jobs {
		if err := w.current.replica.run.Do(w.current.replica.local, goroutine, step); err != nil {
			w.state.finishStarted()
		}
	}
}

// step executes the replica's part of the current Run.
func (w *worker) step(context.Context) error {
	r, body := w.current.replica, w.current.body
	w.current = job{} // an idle worker keeps nothing alive
	start := r.home.stats.now()
	err := body(&r.ctx, r)
	if err == nil {
		err = r.awaitStarted()
	}
	r.home.stats.step(r.local, start, r.home.stats.now())
	return err
}
