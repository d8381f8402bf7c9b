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
	// Missing are the workers that are waited for, and Workers is the number of workers. In a job of more than 8
	// workers only a few of them know all that are missing; for the others, Missing has those of these few.
	Missing []int
	Workers int
	// Store is set instead while the store at this URL does not answer yet.
	Store string
	// Key is the key of an exchange or a comparison; "" for the rendezvous itself.
	Key string
	// Waited is how long the wait has lasted.
	Waited time.Duration

	done string // the participle for workers that are not missing
	some bool   // others than those of Missing may be missing too
}

// String returns the description: "waiting for worker 1 (1 of 2 joined)".
func (w Waiting) String() string {
	if w.Store != "" {
		return fmt.Sprintf("waiting for the store %s, which does not answer", w.Store)
	}
	switch {
	case w.some && len(w.Missing) == 0:
		return fmt.Sprintf("waiting for some of the other %d %ss: %s 0 lists them", w.Workers-1, w.Role, w.Role)
	case w.some:
		return fmt.Sprintf("waiting for %s, and perhaps for others of the %d %ss", numbers(w.Role, w.Missing), w.Workers,
			w.Role)
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
	begin  time.Time
	life   context.Context // ends when the report is stopped
	over   context.CancelFunc
	work   sync.WaitGroup

	mu   sync.Mutex
	now  Waiting
	look func(context.Context) []int // returns Missing, when it is reported; nil: it is recorded
}

// reportWait reports a wait until it is stopped, if ctx has a report function.
func reportWait(ctx context.Context, what Waiting) *waitReport {
	report, ok := ctx.Value(waitingKey{}).(func(Waiting))
	if !ok {
		return nil
	}
	r := &waitReport{report: report, begin: time.Now(), now: what}
	r.life, r.over = context.WithCancel(context.WithoutCancel(ctx))
	r.work.Go(func() {
		for after := waitingSince; ; after *= 2 {
			timer := time.NewTimer(time.Until(r.begin.Add(after)))
			select {
			case <-timer.C:
				r.send()
			case <-r.life.Done():
				timer.Stop()
				return
			}
		}
	})
	return r
}

// send reports the wait once.
func (r *waitReport) send() {
	r.mu.Lock()
	now, look := r.now, r.look
	r.mu.Unlock()
	now.Waited = time.Since(r.begin)
	if look != nil {
		now.some, now.Missing = true, look(r.life)
		if r.life.Err() != nil {
			return
		}
	}
	r.report(now)
}

// lookup makes the report look up some of the workers that are missing, each time that it is sent.
func (r *waitReport) lookup(look func(context.Context) []int) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.look = look
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
		r.over()
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
