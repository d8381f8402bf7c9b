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

// Pulse is a heartbeat: the state that a worker publishes during training.
type Pulse struct {
	// Step and Phase are the worker's position: the global step, and "compute", "reduce", "apply", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Progress changes when the training goroutines advance. A worker that is alive but stuck has a
	// heartbeat, and no progress.
	Progress uint64 `json:"progress"`
	// Waits reports that the worker is in a collective call, where it may have to wait for others: it is not
	// stuck itself.
	Waits bool `json:"waits,omitempty"`
	// Text is additional information, for display.
	Text string `json:"text,omitempty"`
	// Beat counts the heartbeats, also across several calls of Publish for the same worker. Publish sets it.
	Beat uint64 `json:"beat"`
	// Gone marks the last heartbeat: the worker has stopped publishing on purpose. Publish sets it.
	Gone bool `json:"gone,omitempty"`
}

// Beats configures when heartbeats are published.
type Beats struct {
	Every time.Duration   // the longest interval
	Least time.Duration   // the shortest interval
	News  <-chan struct{} // receives a value when there is news that should not wait for Every; nil: never
	First time.Duration   // delay before the first, so that workers publish at different moments; default 0
}

// Publish writes a worker's heartbeats into the store under "<key>/<worker>", at once (or after when.First)
// and repeatedly, until ctx ends. It then publishes that the worker is gone, and returns nil. An error of the
// store ends it too. Called again for the same worker, it continues the beat count from the store, so that
// watchers can tell new heartbeats from old ones.
func Publish(ctx context.Context, s Store, key string, worker int, when Beats, pulse func() Pulse) error {
	key += "/" + strconv.Itoa(worker)
	last, err := lastBeat(ctx, s, key)
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("rendezvous: reading the last heartbeat of worker %d: %w", worker, err)
	}
	if when.First > 0 {
		select {
		case <-time.After(when.First):
		case <-ctx.Done():
		}
	}
	for beat := last + 1; ; beat++ {
		select {
		case <-when.News: // included in this heartbeat
		default:
		}
		p := pulse()
		p.Beat = beat
		begin := time.Now()
		if err := setJSON(ctx, s, key, &p); err != nil && ctx.Err() == nil {
			return fmt.Errorf("rendezvous: publishing the heartbeat of worker %d: %w", worker, err)
		}
		if !when.wait(ctx, begin) {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
			defer cancel()
			p = pulse() // the state may have advanced
			p.Beat, p.Gone = beat+1, true
			if err := setJSON(last, s, key, &p); err != nil {
				return fmt.Errorf("rendezvous: publishing the last heartbeat of worker %d: %w", worker, err)
			}
			return nil
		}
	}
}

// lastBeat returns the beat count of the heartbeat under a key, 0 if there is none.
func lastBeat(ctx context.Context, s Store, key string) (uint64, error) {
	text, _, err := s.Get(ctx, key)
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			err = nil
		}
		return 0, err
	}
	var p Pulse
	if json.Unmarshal(text, &p) != nil {
		return 0, nil // not a heartbeat: it is replaced
	}
	return p.Beat, nil
}

// wait waits until the next heartbeat is due, given the time of the last one. It reports false if ctx ends
// before.
func (b *Beats) wait(ctx context.Context, last time.Time) bool {
	timer := time.NewTimer(time.Until(last.Add(b.Every)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	case <-b.News:
	}
	timer.Reset(time.Until(last.Add(min(b.Least, b.Every))))
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

// Vital is the known state of a worker.
type Vital struct {
	Worker int
	// Pulse is its latest heartbeat, if Seen.
	Pulse Pulse
	Seen  bool
	// Silent is the time without a new heartbeat, and Still the time in which the worker neither made
	// progress nor waited for others, both by this process's clock.
	Silent, Still time.Duration
	// Excused reports that [Watch.Excuse] was called and that no heartbeat has arrived since.
	Excused bool
}

// String describes the worker's last known state.
func (v Vital) String() string {
	switch {
	case !v.Seen:
		return fmt.Sprintf("worker %d has not been seen for %v", v.Worker, v.Silent.Round(time.Millisecond))
	case v.Pulse.Gone:
		return fmt.Sprintf("worker %d left in %s", v.Worker, v.Pulse.doing())
	}
	return fmt.Sprintf("worker %d was last seen %v ago in %s, without progress for %v", v.Worker, v.Silent.Round(time.Millisecond),
		v.Pulse.doing(), v.Still.Round(time.Millisecond))
}

func (p *Pulse) doing() string {
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
	vitals []vital
}

// vital is the known state of a worker, with the times of its latest changes.
type vital struct {
	pulse       Pulse
	seen        bool
	excused     bool // until its next heartbeat
	beat, moved time.Time
}

// NewWatch returns a watch of the heartbeats published under key. The silence of a worker that has not been
// seen yet counts from now.
func NewWatch(s Store, key string, workers int) *Watch {
	w := &Watch{store: s, prefix: key + "/", workers: workers, vitals: make([]vital, workers)}
	now := time.Now()
	for i := range w.vitals {
		w.vitals[i].beat, w.vitals[i].moved = now, now
	}
	return w
}

// Follow keeps the watch up to date until ctx ends, and then returns nil. It polls at most once per every,
// and reads all changes since.
func (w *Watch) Follow(ctx context.Context, every time.Duration) error {
	err := follow(ctx, w.store, w.prefix, func(now map[string]Entry) (bool, error) {
		w.look(time.Now(), now)
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

// look records the new heartbeats. An invalid one is ignored: its worker becomes silent.
func (w *Watch) look(at time.Time, now map[string]Entry) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, e := range now {
		n, err := strconv.Atoi(name)
		var p Pulse
		if err != nil || n < 0 || n >= w.workers || json.Unmarshal(e.Value, &p) != nil {
			continue
		}
		v := &w.vitals[n]
		if !v.seen || p.Beat != v.pulse.Beat {
			v.beat, v.excused = at, false
		}
		if !v.seen || p.Progress != v.pulse.Progress || p.Waits {
			v.moved = at
		}
		v.pulse, v.seen = p, true
	}
}

// Excuse makes [Watch.Silence] ignore a worker until its next heartbeat: its silence is known, or it has not
// joined yet.
func (w *Watch) Excuse(worker int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.vitals[worker].excused = true
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
	for i := range w.vitals {
		w.vitals[i].beat, w.vitals[i].moved = later(w.vitals[i].beat), later(w.vitals[i].moved)
	}
}

// Vitals returns the known state of all workers, by number.
func (w *Watch) Vitals() []Vital {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	out := make([]Vital, w.workers)
	for i, v := range w.vitals {
		out[i] = Vital{i, v.pulse, v.seen, now.Sub(v.beat), now.Sub(v.moved), v.excused}
	}
	return out
}

// Silence waits until a worker other than self has been silent for limit, and returns the one that has been
// silent longest. It ignores workers that left on purpose or are excused. If self's own heartbeats are not
// seen, the store is lost, and the error is [ErrLost]. A process that was itself stopped, or got no CPU time,
// does not blame the others for that time: their heartbeats may be published but unread. Call [Watch.Follow]
// concurrently.
func (w *Watch) Silence(ctx context.Context, self int, limit time.Duration) (Vital, error) {
	step := max(limit/looks, time.Millisecond)
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
			return Vital{Worker: -1}, context.Cause(ctx)
		}
	}
}

// looks is how many times Silence checks within a limit, so that it notices when this process was stopped or
// got no CPU time.
const looks = 16

// longestSilent returns the worker that has been silent longest, or an error if the store is lost.
func (w *Watch) longestSilent(self int, limit time.Duration) (Vital, error) {
	all := w.Vitals()
	longest := Vital{Worker: -1}
	for _, v := range all {
		if v.Worker != self && !v.Pulse.Gone && !v.Excused && (longest.Worker < 0 || v.Silent > longest.Silent) {
			longest = v
		}
	}
	// Self publishes as often as the others: the store is known to work if self's heartbeat is newer than the
	// missing one.
	own, bound := all[self], limit
	if longest.Worker >= 0 && longest.Silent >= limit {
		bound = limit / 2
	}
	if !own.Pulse.Gone && own.Silent > bound {
		return longest, fmt.Errorf("%w: it has not returned this worker's own heartbeat for %v", ErrLost,
			own.Silent.Round(time.Millisecond))
	}
	return longest, nil
}
