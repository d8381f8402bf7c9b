package rendezvous

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Waiting describes a wait of this process, for display: without it, users would see nothing until the wait
// times out.
type Waiting struct {
	// Role is what the processes are called: "worker".
	Role string
	// Missing are the workers that are waited for, and Workers is the number of workers.
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
	return fmt.Sprintf("waiting for %s (%d of %d %s)", numbers(w.Role, w.Missing), w.Workers-len(w.Missing), w.Workers,
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

// waitReport reports a wait. A nil one does nothing.
type waitReport struct {
	report func(Waiting)
	over   chan struct{}
	work   sync.WaitGroup

	mu  sync.Mutex
	now Waiting
}

// reportWait reports a wait until it is stopped, if ctx has a report function.
func reportWait(ctx context.Context, what Waiting) *waitReport {
	report, ok := ctx.Value(waitingKey{}).(func(Waiting))
	if !ok {
		return nil
	}
	r := &waitReport{report: report, over: make(chan struct{}), now: what}
	begin := time.Now()
	r.work.Go(func() {
		for after := waitingSince; ; after *= 2 {
			timer := time.NewTimer(time.Until(begin.Add(after)))
			select {
			case <-timer.C:
				r.mu.Lock()
				now := r.now
				r.mu.Unlock()
				now.Waited = time.Since(begin)
				r.report(now)
			case <-r.over:
				timer.Stop()
				return
			}
		}
	})
	return r
}

// missing records which workers are still waited for.
func (r *waitReport) missing(workers []int) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Missing = slices.Clone(workers)
}

// stop ends the reports.
func (r *waitReport) stop() {
	if r != nil {
		close(r.over)
		r.work.Wait()
	}
}

// absent returns the numbers below workers that have no entry below a prefix in now.
func absent(now map[string]Entry, prefix string, workers int) []int {
	var out []int
	for w := range workers {
		if _, here := now[prefix+strconv.Itoa(w)]; !here {
			out = append(out, w)
		}
	}
	return out
}
