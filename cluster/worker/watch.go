package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// watch is what this worker knows of how the others are. It never compares clocks of two hosts: what counts is when this one saw
// something change.
type watch struct {
	mu    sync.Mutex
	peers []peer    // by worker
	heard time.Time // when the store answered last
}

// peer is a worker as this one sees it.
type peer struct {
	state
	known    bool   // it has published something
	left     bool   // in good order
	revision uint64 // of its key, when it changed last
	changed  time.Time
	moved    time.Time // when it came further last
	told     bool      // that it is stuck, since then
}

func newWatch(workers int) *watch {
	v := &watch{peers: make([]peer, workers), heard: time.Now()}
	for i := range v.peers {
		v.peers[i].changed, v.peers[i].moved = v.heard, v.heard
	}
	return v
}

// sight is what can be said of a worker.
type sight struct {
	peer
	ago time.Duration
}

func (v *watch) seen(worker int) sight {
	v.mu.Lock()
	defer v.mu.Unlock()
	return sight{v.peers[worker], time.Since(v.peers[worker].changed)}
}

// String continues a sentence that begins with the worker's name.
func (s *sight) String() string {
	switch {
	case s.left:
		return "has left the job in good order"
	case !s.known:
		return "was never seen at work"
	}
	return fmt.Sprintf("was last seen %v ago %v", s.ago.Round(100*time.Millisecond), &s.state)
}

// farewell is what a worker publishes last.
const farewell = "left"

// note takes in what stands in the store.
func (v *watch) note(worker int, value []byte, revision uint64, now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := &v.peers[worker]
	if p.known && p.revision == revision {
		return
	}
	p.revision, p.changed = revision, now
	if string(value) == farewell {
		p.left = true
		return
	}
	s, ok := decodeState(value)
	if !ok {
		return
	}
	if !p.known || s.moved(&p.state) {
		p.moved, p.told = now, false
	}
	p.state, p.known = s, true
}

// forgive takes time in which this process did not run off what the others kept silent.
func (v *watch) forgive(d time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.heard = v.heard.Add(d)
	for i := range v.peers {
		p := &v.peers[i]
		p.changed, p.moved = p.changed.Add(d), p.moved.Add(d)
	}
}

// beats publishes how this worker is and looks how the others are, once each beat, until it leaves.
func (w *Worker) beats(ctx context.Context) {
	beat := w.cfg.beat()
	own := state{Step: -1}
	since := time.Now()
	for ctx.Err() == nil {
		began := time.Now()
		now := w.state()
		if now.moved(&own) {
			since = began
		}
		own, own.Same = now, began.Sub(since)
		if !w.leaving.Load() {
			w.within(ctx, func(ctx context.Context) error { return w.store.Set(ctx, w.key("alive", w.job.Worker), own.encode()) })
		}
		if w.within(ctx, w.look) == nil {
			w.watch.mu.Lock()
			w.watch.heard = time.Now()
			w.watch.mu.Unlock()
		}
		w.judge(ctx, &own)
		slept := time.Now()
		pause(ctx, beat)
		if late := time.Since(slept) - 2*beat; late > 0 {
			w.watch.forgive(late)
		}
	}
}

// within gives an operation of the store a part of the time in which it must answer.
func (w *Worker) within(ctx context.Context, f func(context.Context) error) error {
	most := max(w.cfg.HeartbeatTimeout/4, w.cfg.beat())
	began := time.Now()
	short, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	err := f(short)
	if late := time.Since(began) - 2*most; late > 0 {
		w.watch.forgive(late)
	}
	return err
}

// look reads what all workers have published.
func (w *Worker) look(ctx context.Context) error {
	prefix := w.key("alive") + "/"
	entries, _, err := w.store.List(ctx, prefix)
	now := time.Now()
	for _, e := range entries {
		if n, err := strconv.Atoi(strings.TrimPrefix(e.Key, prefix)); err == nil && n >= 0 && n < len(w.members) {
			w.watch.note(n, e.Value, e.Revision, now)
		}
	}
	return err
}

// judge ends the group if the store or a worker is lost, and says in the log who is stuck.
func (w *Worker) judge(ctx context.Context, own *state) {
	patience := w.cfg.HeartbeatTimeout
	if patience < 0 || ctx.Err() != nil {
		return
	}
	w.watch.mu.Lock()
	silent := time.Since(w.watch.heard)
	peers := append([]peer(nil), w.watch.peers...)
	w.watch.mu.Unlock()
	if silent > patience {
		w.loseStore(silent, own)
		return
	}
	for n := range peers {
		p := &peers[n]
		if n == w.job.Worker || p.left {
			continue
		}
		if quiet := time.Since(p.changed); quiet > patience && silent < patience/2 {
			w.lose(ctx, n, fmt.Errorf("it has given no sign of life for %v: its process is stopped or gone, or its host cannot be reached", quiet.Round(100*time.Millisecond)), own, false)
		} else if stuck := time.Since(p.moved); p.known && !p.waits() && stuck > patience && own.waits() && own.Same > patience {
			w.stuck(ctx, n, stuck, own, p.told)
		}
	}
}

// stuck reports a worker that lives, comes no further and waits for nobody.
func (w *Worker) stuck(ctx context.Context, worker int, d time.Duration, own *state, told bool) {
	d = d.Round(time.Second)
	if most := w.cfg.ProgressTimeout; most > 0 && d > most {
		w.lose(ctx, worker, fmt.Errorf("it lives, but has come no further for %v while others wait for it", d), own, true)
		return
	}
	if told {
		return
	}
	w.watch.mu.Lock()
	w.watch.peers[worker].told = true
	w.watch.mu.Unlock()
	w.cfg.Logger.Warn("worker: this worker waits for one that comes no further", "waits", own.String(), "for", w.tellOf(ctx, worker, true), "since", d)
}

// lose ends the group because of another worker.
func (w *Worker) lose(ctx context.Context, worker int, why error, own *state, stacks bool) {
	w.end(&collective.Error{
		Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: -1, Peers: w.members[worker].Ranks(),
		Err: fmt.Errorf("worker %d is lost: %w", worker, why),
		Who: w.tellOf(ctx, worker, stacks) + "\n" + w.self(own),
	})
}

// self says what this worker does meanwhile.
func (w *Worker) self(own *state) string {
	return w.name(w.job.Worker) + ", which says this, is " + own.String()
}

// loseStore ends the group because nobody knows any more how the others are.
func (w *Worker) loseStore(silent time.Duration, own *state) {
	e := &collective.Error{Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: -1, Who: w.self(own)}
	text := fmt.Sprintf("the store %s has not answered for %v", w.job.Store, silent.Round(100*time.Millisecond))
	if w.serves() && w.job.Worker != 0 {
		seen := w.watch.seen(0)
		e.Peers = w.members[0].Ranks()
		text += ": worker 0, which serves it, is stopped or gone, or its host cannot be reached"
		e.Who = w.name(0) + " " + seen.String() + "\n" + e.Who
	}
	e.Err = errors.New(text)
	w.end(e)
}

// end makes cause the end of the group and of all waits of this worker, unless there is one already.
func (w *Worker) end(cause error) {
	if w.current.end(cause) {
		w.fate(cause)
		w.cfg.Logger.Error("worker: the job cannot go on", "error", cause)
	}
}
