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

// Pulse is what a worker says of itself while it works.
type Pulse struct {
	// Step and Phase are what it is doing: the global step, and "compute", "reduce", "apply", ….
	Step  int64  `json:"step"`
	Phase string `json:"phase,omitempty"`
	// Progress changes when the goroutines that train get on. A worker that is alive but stuck has a pulse, and no progress.
	Progress uint64 `json:"progress"`
	// Waits says that the worker is in a collective call, where it may have to wait for others: it is not stuck by itself.
	Waits bool `json:"waits,omitempty"`
	// Text is anything more, for people.
	Text string `json:"text,omitempty"`
	// Beat counts the pulses, also if Publish is called again for the same worker. Publish sets it.
	Beat uint64 `json:"beat"`
	// Gone says that it is the last one: the worker has stopped publishing on purpose. Publish sets it.
	Gone bool `json:"gone,omitempty"`
}

// Beats says when pulses are published.
type Beats struct {
	Every time.Duration   // the longest time between two
	Least time.Duration   // the shortest
	News  <-chan struct{} // gives a value when there is something new, for which Every is too long to wait; nil: never
	First time.Duration   // how long to wait before the first, so that many workers do not publish at the same moment; default 0
}

// Publish puts a worker's pulse into the store under "<key>/<worker>", at once (or after when.First) and again and
// again, until ctx ends; it then says that the worker is gone, and returns nil. An error of the store ends it too.
// Called again for the same worker, it counts on from the beat in the store: those who watch the worker know the new
// pulses from the old ones.
func Publish(ctx context.Context, s Store, key string, worker int, when Beats, pulse func() Pulse) error {
	key += "/" + strconv.Itoa(worker)
	last, err := lastBeat(ctx, s, key)
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("rendezvous: reading the last pulse of worker %d: %w", worker, err)
	}
	if when.First > 0 {
		select {
		case <-time.After(when.First):
		case <-ctx.Done():
		}
	}
	for beat := last + 1; ; beat++ {
		select {
		case <-when.News: // is in this one
		default:
		}
		p := pulse()
		p.Beat = beat
		begin := time.Now()
		if err := setJSON(ctx, s, key, &p); err != nil && ctx.Err() == nil {
			return fmt.Errorf("rendezvous: publishing the pulse of worker %d: %w", worker, err)
		}
		if !when.wait(ctx, begin) {
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
			defer cancel()
			p = pulse() // it may have come further
			p.Beat, p.Gone = beat+1, true
			if err := setJSON(last, s, key, &p); err != nil {
				return fmt.Errorf("rendezvous: worker %d says that it is gone: %w", worker, err)
			}
			return nil
		}
	}
}

// lastBeat returns the beat of the pulse under a key, 0 if there is none.
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
		return 0, nil // no pulse: it is replaced
	}
	return p.Beat, nil
}

// wait waits for the time of the pulse after one that was published at a time. It reports false if ctx ends before.
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

// Vital is what is known of a worker.
type Vital struct {
	Worker int
	// Pulse is its latest, if Seen.
	Pulse Pulse
	Seen  bool
	// Silent is how long there has been no new pulse, and Still how long it has neither made progress nor waited for others, both by
	// this process's clock.
	Silent, Still time.Duration
	// Excused says that [Watch.Excuse] was called and that no pulse has come since.
	Excused bool
}

// String says what was last seen of the worker.
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

// Watch follows the pulses of all workers.
type Watch struct {
	store   Store
	prefix  string
	workers int

	mu     sync.Mutex
	vitals []vital
}

// vital is what is known of a worker, with the times of its latest changes.
type vital struct {
	pulse       Pulse
	seen        bool
	excused     bool // until its next pulse
	beat, moved time.Time
}

// NewWatch returns a watch of the pulses that are published under key. A worker that has not been seen yet is silent since now.
func NewWatch(s Store, key string, workers int) *Watch {
	w := &Watch{store: s, prefix: key + "/", workers: workers, vitals: make([]vital, workers)}
	now := time.Now()
	for i := range w.vitals {
		w.vitals[i].beat, w.vitals[i].moved = now, now
	}
	return w
}

// Follow keeps the watch up to date until ctx ends, and then returns nil. It looks at most once in every, and reads all that has
// changed since.
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

// look takes note of the pulses that are there. What is none is not taken for one: its worker becomes silent.
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

// Excuse has [Watch.Silence] take no notice of a worker until its next pulse: it is known to be silent, or has not come yet.
func (w *Watch) Excuse(worker int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.vitals[worker].excused = true
}

// slept leaves a time out of all silence: this process was not there to listen.
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

// Vitals returns what is known of all workers, by number.
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

// Silence waits until another worker than self is silent for limit, and returns the one that is so for the longest. One that left on
// purpose, or is excused, is not. If self's own pulse does not come back either, the store is what is gone, and the error is [ErrLost]. A process that
// was itself stopped, or got no time, does not blame the others for it: the pulses may be there and unread. The watch must be followed meanwhile.
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

// looks is how many times Silence looks in a limit, so that it notices when this process was stopped or got no time.
const looks = 16

// longestSilent returns the worker that is silent for the longest, or that it cannot be known.
func (w *Watch) longestSilent(self int, limit time.Duration) (Vital, error) {
	all := w.Vitals()
	longest := Vital{Worker: -1}
	for _, v := range all {
		if v.Worker != self && !v.Pulse.Gone && !v.Excused && (longest.Worker < 0 || v.Silent > longest.Silent) {
			longest = v
		}
	}
	// Self publishes as often as the others: the store is known to work if self's pulse is newer than the one that is missed.
	if longest.Worker >= 0 && longest.Silent >= limit && all[self].Silent > limit/2 {
		return longest, fmt.Errorf("%w: for %v it has shown no new pulse of any worker, this one's own included", ErrLost, all[self].Silent.Round(time.Millisecond))
	}
	return longest, nil
}
