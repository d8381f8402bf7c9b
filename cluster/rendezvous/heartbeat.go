package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// Heartbeat is the state that a worker publishes during training.
type Heartbeat struct {
	// Step and Phase are the worker's position: the global step, and "compute", "reduce", "apply", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Progress changes when the training goroutines advance. A worker that is alive but stuck has a
	// heartbeat, and no progress.
	Progress uint64 `json:"progress"`
	// Waiting reports that the worker is in a collective call, where it may have to wait for others: it is not
	// stuck itself.
	Waiting bool `json:"waits,omitempty"`
	// Text is additional information, for display.
	Text string `json:"text,omitempty"`
	// Count counts the heartbeats, also across several calls of Publish for the same worker. Publish sets it.
	Count uint64 `json:"beat"`
	// Final marks the last heartbeat: the worker has stopped publishing on purpose. Publish sets it.
	Final bool `json:"gone,omitempty"`
}

// HeartbeatTiming configures when heartbeats are published.
type HeartbeatTiming struct {
	Every time.Duration   // the longest interval
	Min   time.Duration   // the shortest interval
	Wake  <-chan struct{} // receives a value when there is news that should not wait for Every; nil: never
	Delay time.Duration   // delay before the first, so that workers publish at different moments; default 0
}

// Publish writes a worker's heartbeats into the store under "<key>/<worker>", at once (or after timing.Delay)
// and repeatedly, until ctx ends. It then publishes that the worker is gone, and returns nil. An error of the
// store ends it too. Called again for the same worker, it continues the count from the store, so that
// watchers can tell new heartbeats from old ones.
func Publish(
	ctx context.Context, s Store, key string, worker int, timing HeartbeatTiming, current func() Heartbeat,
) error {
	key += "/" + strconv.Itoa(worker)
	last, err := lastCount(ctx, s, key)
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("rendezvous: reading the last heartbeat of worker %d: %w", worker, err)
	}
	if timing.Delay > 0 {
		select {
		case <-time.After(timing.Delay):
		case <-ctx.Done():
		}
	}
	for count := last + 1; ; count++ {
		select {
		case <-timing.Wake: // included in this heartbeat
		default:
		}
		p := current()
		p.Count = count
		begin := time.Now()
		if err := setJSON(ctx, s, key, &p); err != nil && ctx.Err() == nil {
			return fmt.Errorf("rendezvous: publishing the heartbeat of worker %d: %w", worker, err)
		}
		if !timing.wait(ctx, begin) {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
			defer cancel()
			p = current() // the state may have advanced
			p.Count, p.Final = count+1, true
			if err := setJSON(last, s, key, &p); err != nil {
				return fmt.Errorf("rendezvous: publishing the last heartbeat of worker %d: %w", worker, err)
			}
			return nil
		}
	}
}

// lastCount returns the count of the heartbeat under a key, 0 if there is none.
func lastCount(ctx context.Context, s Store, key string) (uint64, error) {
	text, _, err := s.Get(ctx, key)
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			err = nil
		}
		return 0, err
	}
	var p Heartbeat
	if json.Unmarshal(text, &p) != nil {
		return 0, nil // not a heartbeat: it is replaced
	}
	return p.Count, nil
}

// wait waits until the next heartbeat is due, given the time of the last one. It reports false if ctx ends
// before.
func (b *HeartbeatTiming) wait(ctx context.Context, last time.Time) bool {
	timer := time.NewTimer(time.Until(last.Add(b.Every)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	case <-b.Wake:
	}
	timer.Reset(time.Until(last.Add(min(b.Min, b.Every))))
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

func setJSON(ctx context.Context, s Store, key string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.Set(ctx, key, text)
}

// WorkerState is the known state of a worker.
type WorkerState struct {
	Worker int
	// Heartbeat is its latest heartbeat, if Seen.
	Heartbeat Heartbeat
	Seen      bool
	// Silent is the time without a new heartbeat, and Stalled the time in which the worker neither made
	// progress nor waited for others, both by this process's clock.
	Silent, Stalled time.Duration
	// Ignored reports that [Watch.Ignore] was called and that no heartbeat has arrived since.
	Ignored bool
}

// String describes the worker's last known state.
func (v WorkerState) String() string {
	switch {
	case !v.Seen:
		return fmt.Sprintf("worker %d has not been seen for %v", v.Worker, v.Silent.Round(time.Millisecond))
	case v.Heartbeat.Final:
		return fmt.Sprintf("worker %d left in %s", v.Worker, v.Heartbeat.position())
	}
	return fmt.Sprintf("worker %d was last seen %v ago in %s, without progress for %v", v.Worker,
		v.Silent.Round(time.Millisecond),
		v.Heartbeat.position(), v.Stalled.Round(time.Millisecond))
}

func (p *Heartbeat) position() string {
	text := fmt.Sprintf("step %d", p.Step)
	if p.Phase != "" {
		text += ", " + p.Phase
	}
	if p.Text != "" {
		text += " (" + p.Text + ")"
	}
	return text
}

// Watch follows the heartbeats of all workers.
type Watch struct {
	store   Store
	prefix  string
	workers int

	mu     sync.Mutex
	states []tracked
}

// tracked is the known state of a worker, with the times of its latest changes.
type tracked struct {
	latest             Heartbeat
	seen               bool
	ignored            bool // until its next heartbeat
	received, advanced time.Time
}

// NewWatch returns a watch of the heartbeats published under key. The silence of a worker that has not been
// seen yet counts from now.
func NewWatch(s Store, key string, workers int) *Watch {
	w := &Watch{store: s, prefix: key + "/", workers: workers, states: make([]tracked, workers)}
	now := time.Now()
	for i := range w.states {
		w.states[i].received, w.states[i].advanced = now, now
	}
	return w
}

// Follow keeps the watch up to date until ctx ends, and then returns nil. It polls at most once per every,
// and reads all changes since.
func (w *Watch) Follow(ctx context.Context, every time.Duration) error {
	err := follow(ctx, w.store, w.prefix, func(now map[string]Entry) (bool, error) {
		w.record(time.Now(), now)
		select {
		case <-time.After(every):
			return false, nil
		case <-ctx.Done():
			return true, nil
		}
	})
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("rendezvous: watching the workers: %w", err)
	}
	return nil
}

// record records the new heartbeats. An invalid one is ignored: its worker becomes silent.
func (w *Watch) record(at time.Time, now map[string]Entry) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, e := range now {
		n, err := strconv.Atoi(name)
		var p Heartbeat
		if err != nil || n < 0 || n >= w.workers || json.Unmarshal(e.Value, &p) != nil {
			continue
		}
		v := &w.states[n]
		if !v.seen || p.Count != v.latest.Count {
			v.received, v.ignored = at, false
		}
		if !v.seen || p.Progress != v.latest.Progress || p.Waiting {
			v.advanced = at
		}
		v.latest, v.seen = p, true
	}
}

// Ignore makes [Watch.Silence] ignore a worker until its next heartbeat: its silence is known, or it has not
// joined yet.
func (w *Watch) Ignore(worker int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.states[worker].ignored = true
}

// slept subtracts a time from every silence: this process did not run then and could not receive heartbeats.
func (w *Watch) slept(now time.Time, gone time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	later := func(t time.Time) time.Time {
		if t = t.Add(gone); t.After(now) {
			return now
		}
		return t
	}
	for i := range w.states {
		w.states[i].received, w.states[i].advanced = later(w.states[i].received), later(w.states[i].advanced)
	}
}

// States returns the known state of all workers, by number.
func (w *Watch) States() []WorkerState {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	out := make([]WorkerState, w.workers)
	for i, v := range w.states {
		out[i] = WorkerState{i, v.latest, v.seen, now.Sub(v.received), now.Sub(v.advanced), v.ignored}
	}
	return out
}

// Silence waits until a worker other than self has been silent for limit, and returns the one that has been
// silent longest. It ignores workers that left on purpose or are ignored. If self's own heartbeats are not
// seen, the store is lost, and the error is [ErrLost]. A process that was itself stopped, or got no CPU time,
// does not blame the others for that time: their heartbeats may be published but unread. Call [Watch.Follow]
// concurrently.
func (w *Watch) Silence(ctx context.Context, self int, limit time.Duration) (WorkerState, error) {
	step := max(limit/checksPerLimit, time.Millisecond)
	for {
		v, err := w.longestSilent(self, limit)
		if v.Worker >= 0 && v.Silent >= limit || err != nil {
			return v, err
		}
		wait := min(max(limit-v.Silent, time.Millisecond), step)
		due := time.Now().Add(wait)
		select {
		case <-time.After(wait):
			if now := time.Now(); now.Sub(due) > step {
				w.slept(now, now.Sub(due))
			}
		case <-ctx.Done():
			return WorkerState{Worker: -1}, context.Cause(ctx)
		}
	}
}

// checksPerLimit is how many times Silence checks within a limit, so that it notices when this process was stopped or
// got no CPU time.
const checksPerLimit = 16

// longestSilent returns the worker that has been silent longest, or an error if the store is lost.
func (w *Watch) longestSilent(self int, limit time.Duration) (WorkerState, error) {
	all := w.States()
	longest := WorkerState{Worker: -1}
	for _, v := range all {
		if v.Worker != self && !v.Heartbeat.Final && !v.Ignored && (longest.Worker < 0 || v.Silent > longest.Silent) {
			longest = v
		}
	}
	// Self publishes as often as the others: the store is known to work if self's heartbeat is newer than the
	// missing one.
	own, bound := all[self], limit
	if longest.Worker >= 0 && longest.Silent >= limit {
		bound = limit / 2
	}
	if !own.Heartbeat.Final && own.Silent > bound {
		return longest, fmt.Errorf("%w: it has not returned this worker's own heartbeat for %v", ErrLost,
			own.Silent.Round(time.Millisecond))
	}
	return longest, nil
}
