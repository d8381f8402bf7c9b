package rendezvous

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Waiting says what a wait of this process is for. It is for people, who would otherwise see nothing until the wait
// times out.
type Waiting struct {
	// Role is what the processes are called: "worker".
	Role string
	// Missing are those that are waited for, and Workers is how many there are in all.
	Missing []int
	Workers int
	// Store is set in their place while the store at this URL does not answer yet.
	Store string
	// Key is the key of an exchange, a barrier or a comparison; "" for the rendezvous itself.
	Key string
	// Waited is how long the wait has lasted.
	Waited time.Duration

	done string // what those who are not missing have done
}

// String says it: "waiting for worker 1 (1 of 2 joined)".
func (w Waiting) String() string {
	if w.Store != "" {
		return fmt.Sprintf("waiting for the store %s, which does not answer", w.Store)
	}
	return fmt.Sprintf("waiting for %s (%d of %d %s)", numbers(w.Role, w.Missing), w.Workers-len(w.Missing), w.Workers,
		w.done)
}

type waitingKey struct{}

// WithWaiting returns a context whose waits report what they are for: those of [Open], [Meet], [Exchange], [Barrier],
// [Compare] and [Leave]. A wait is reported when it has lasted for 2 seconds, and again whenever it has lasted twice as
// long as at the report before. The function is called by another goroutine than the one that waits, for each wait one
// call after the other; none is under way when the wait has ended.
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

// reportWait reports a wait until it is stopped, if ctx says to whom.
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

// missing notes which are still waited for.
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

// absent returns the numbers below workers of which there is nothing below a prefix, where now has what there is.
func absent(now map[string]Entry, prefix string, workers int) []int {
	var out []int
	for w := range workers {
		if _, here := now[prefix+strconv.Itoa(w)]; !here {
			out = append(out, w)
		}
	}
	return out
}
