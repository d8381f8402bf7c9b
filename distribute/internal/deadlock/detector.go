package deadlock

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/internal/stacks"
)

// Config describes the replicas that a [Detector] tracks. Zero fields have the documented defaults.
type Config struct {
	// Devices holds the device of each local replica: "CPU:0". Its length is the number of local replicas, at least 1.
	Devices []string
	// IDs are the ids of the local replicas, by which reports name them; others are in other processes. Default: 0, 1, ….
	IDs []int
	// Timeout bounds the wait of a merge call for the other replicas. Default 10 minutes; negative: no limit.
	Timeout time.Duration
	// Stall is the wait after which a merge call logs a warning, once. Default 30 seconds; negative: never.
	Stall time.Duration
	// Grace is how long [Run.Wait] waits for the replicas after the run has failed or its context has ended. Then it
	// abandons those that are blocked outside the library. Default 10 seconds; negative: no limit.
	Grace time.Duration
	// Logger receives the stall warnings. Default: slog.Default().
	Logger *slog.Logger
}

// defaults of [Config].
const (
	timeoutDefault = 10 * time.Minute
	stallDefault   = 30 * time.Second
	graceDefault   = 10 * time.Second
)

// Detector tracks the state of all local replicas of one strategy. Its methods may be called concurrently.
type Detector struct {
	cfg     Config
	turn    chan struct{}            // holds one token from Begin to Run.Close, and during Hold
	current atomic.Pointer[Run]      // the run in progress, or nil
	inner   atomic.Pointer[Detector] // see Nest
	// reporting is true while a report reads the calls in flight; see [Monitor.Leave].
	reporting atomic.Bool

	mu       sync.Mutex
	monitors []*Monitor
	merge    *rendezvous // of the next run; a failed run keeps its rendezvous
	dirty    bool        // a run failed since the monitors' counts were last reset
	search   searcher    // scratch
}

// New returns a detector for len(cfg.Devices) replicas, all idle. It panics if cfg.Devices is empty.
func New(cfg Config) *Detector {
	if len(cfg.Devices) == 0 {
		panic("deadlock: New: Config.Devices is empty")
	}
	for i := len(cfg.IDs); i < len(cfg.Devices); i++ {
		cfg.IDs = append(cfg.IDs, i)
	}
	cfg.Timeout = orDefault(cfg.Timeout, timeoutDefault)
	cfg.Stall = orDefault(cfg.Stall, stallDefault)
	cfg.Grace = orDefault(cfg.Grace, graceDefault)
	l := &Detector{cfg: cfg, turn: make(chan struct{}, 1)}
	l.merge = newRendezvous(l)
	return l
}

// orDefault returns d, the default if d is zero, and 0 (none) if d is negative.
func orDefault(d, otherwise time.Duration) time.Duration {
	switch {
	case d == 0:
		return otherwise
	case d < 0:
		return 0
	}
	return d
}

// Begin starts a run of all replicas. It waits until the previous run, if any, is closed, or ctx ends; with an ended
// ctx it starts no run. step is the user's function or nil; reports show its location for replicas that have
// returned.
//
// A run started inside a replica of a run in progress would never start: Begin returns an error that matches
// [ErrNested] and names the replica. It detects this by the context, by the goroutine, or by the goroutine that
// started it.
//
// After Begin the caller starts one goroutine per replica, which calls [Run.Do], and calls [Run.Wait]. It must call
// [Run.Close].
func (l *Detector) Begin(ctx context.Context, step any) (*Run, error) {
	if outer, _ := ctx.Value(runKey{}).(*Run); outer != nil && outer.detector == l && l.current.Load() == outer {
		_, replica := l.here()
		return nil, outer.nested(replica)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("deadlock: before the run started: %w", endOf(ctx))
	}
	select {
	case l.turn <- struct{}{}:
	default:
		if outer, replica := l.here(); outer != nil {
			return nil, outer.nested(replica)
		}
		select {
		case l.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, fmt.Errorf("deadlock: waiting for the run in progress to end: %w", endOf(ctx))
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dirty {
		l.dirty = false
		l.merge = newRendezvous(l)
		for _, m := range l.monitors {
			m.reset()
		}
	}
	r := newRun(ctx, l, step)
	l.current.Store(r)
	return r, nil
}

// Hold waits until no run is in progress, and prevents the next one until release is called.
func (l *Detector) Hold() (release func()) {
	l.turn <- struct{}{}
	return func() { <-l.turn }
}

// Place replaces the local replicas, by their devices and ids as in [Config]. The monitors and the nested detector are
// those of the earlier replicas, and are dropped. The caller holds the turn ([Detector.Hold]).
func (l *Detector) Place(devices []string, ids []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cfg.Devices, l.cfg.IDs, l.monitors, l.dirty = devices, ids, nil, false
	l.merge = newRendezvous(l)
	l.inner.Store(nil)
}

// Running reports whether a run is in progress: begun, and not returned from [Run.Wait].
func (l *Detector) Running() bool { return l.current.Load() != nil }

// Monitor returns a monitor for a communicator of the local replicas. members[rank] is the replica at that rank, or
// -1 for one of another process; nil means that rank i is replica i. abort must abort the communicator on all local
// ranks with the given error and return without waiting for them. It is never called with the detector's lock held.
//
// A failed run aborts all its communicators. Afterwards a monitor may be reused for the communicator that replaces
// the old one, whose calls are numbered from 0 again.
func (l *Detector) Monitor(name string, members []int, abort func(error)) *Monitor {
	m := newMonitor(l, name, members, abort)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.monitors = append(l.monitors, m)
	return m
}

// Nest records the detector of the runs that this one's merge functions start: code in them is inside the run in
// progress here too. The goroutines of their replicas may be older than those of this detector's replicas.
func (l *Detector) Nest(inner *Detector) { l.inner.Store(inner) }

// Here returns the replica of the run in progress, or of one inside of it, for which the calling goroutine runs: it is
// the replica's goroutine, or was started by it.
func (l *Detector) Here() (replica int, inside bool) {
	r, replica := l.here()
	return replica, r != nil
}

// here returns the run and its replica for which the calling goroutine runs, or nil and -1.
func (l *Detector) here() (r *Run, replica int) {
	for self := stacks.Self(); l != nil; l = l.inner.Load() {
		if r := l.current.Load(); r != nil {
			if replica := r.replicaOf(self); replica >= 0 {
				return r, replica
			}
		}
	}
	return nil, -1
}

// awaitReport waits until the report in progress is complete.
func (l *Detector) awaitReport() {
	l.mu.Lock()
	defer l.mu.Unlock()
}

// Replicas returns the number of local replicas.
func (l *Detector) Replicas() int { return len(l.cfg.Devices) }

// name returns the name of a replica in reports: "replica 1 (CPU:1)".
func (l *Detector) name(replica int) string {
	return fmt.Sprintf("replica %d (%s)", l.cfg.IDs[replica], l.cfg.Devices[replica])
}

func (l *Detector) logger() *slog.Logger {
	if l.cfg.Logger != nil {
		return l.cfg.Logger
	}
	return slog.Default()
}

// replicaOf returns the replica for which a goroutine runs, or -1: the goroutine is the replica's, or was started by
// it.
func (r *Run) replicaOf(self stacks.Goroutine) int {
	for i := range r.replicas {
		if id := r.replicas[i].goroutine.Load(); id != 0 && (id == self.ID || id == self.Creator) {
			return i
		}
	}
	return -1
}
