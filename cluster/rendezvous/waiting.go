package rendezvous

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/pause"
)

// Waiting describes a wait of this process, for display: without it, users would see nothing until the wait
// times out.
type Waiting struct {
	// Missing are the workers that are waited for, and Workers is the number of workers. In a job of more than 64
	// workers only worker 0 looks which are missing; for the others, Missing is empty.
	Missing []int
	Workers int
	// Store is set instead while the store at this URL does not answer yet.
	Store string
	// Key is the key of an exchange or a comparison; "" for the rendezvous itself.
	Key string
	// Waited is how long the wait has lasted.
	Waited time.Duration

	done string // the participle for workers that are not missing
}

// String returns the description: "waiting for worker 1 (1 of 2 joined)".
func (w Waiting) String() string {
	if w.Store != "" {
		return fmt.Sprintf("waiting for the store %s, which does not answer", w.Store)
	}
	if len(w.Missing) == 0 {
		return fmt.Sprintf("waiting for some of the other %d workers: worker 0 lists them", w.Workers-1)
	}
	return fmt.Sprintf("waiting for %s (%d of %d %s)", numbers(w.Missing), w.Workers-len(w.Missing), w.Workers,
		w.done)
}

type waitingKey struct{}

// WithWaiting returns a context whose waits are reported: those of [Open], [Join], [Exchange], [Compare]
// and [Leave]. A wait is reported after 2 seconds, and again whenever its duration has doubled since the last
// report. The function is called on another goroutine than the waiting one; for each wait its
// calls are sequential, and none is running when the wait has ended.
func WithWaiting(ctx context.Context, report func(Waiting)) context.Context {
	return context.WithValue(ctx, waitingKey{}, report)
}

// waitingSince is how long a wait lasts before it is reported.
const waitingSince = 2 * time.Second

// lookersMax is the number of workers up to which each looks who is missing when it reports a wait.
const lookersMax = 64

// looksFor returns a function that looks which workers have no key "<prefix><number>" yet; nil for a worker that leaves
// this to worker 0.
func looksFor(s Store, prefix string, worker, workers int) func(context.Context) []int {
	if worker > 0 && workers > lookersMax {
		return nil
	}
	return func(ctx context.Context) []int {
		entries, _, err := s.List(ctx, prefix)
		if err != nil {
			return nil
		}
		_, missing := byWorker(entries, prefix, workers)
		return missing
	}
}

// waitReport reports a wait. A nil one does nothing.
type waitReport struct {
	over context.CancelFunc
	work sync.WaitGroup
}

// reportWait reports a wait until it is stopped, if ctx has a report function. look returns the missing workers, each
// time; nil: they are unknown.
func reportWait(ctx context.Context, what Waiting, look func(context.Context) []int) *waitReport {
	report, ok := ctx.Value(waitingKey{}).(func(Waiting))
	if !ok {
		return nil
	}
	begin, r := time.Now(), &waitReport{}
	life, over := context.WithCancel(context.WithoutCancel(ctx))
	r.over = over
	r.work.Go(func() {
		for after := waitingSince; pause.For(life, time.Until(begin.Add(after))) == nil; after *= 2 {
			if look != nil {
				what.Missing = look(life)
			}
			if what.Waited = time.Since(begin); life.Err() == nil {
				report(what)
			}
		}
	})
	return r
}

// stop ends the reports.
func (r *waitReport) stop() {
	if r != nil {
		r.over()
		r.work.Wait()
	}
}
