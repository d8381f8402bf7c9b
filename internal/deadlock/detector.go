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

// Config describes the replicas that a [Detector] watches. A zero field has the default that it names.
type Config struct {
	// Devices holds the device of each local replica, by its number here: "CPU:0". Its length is the number of replicas, which
	// is at least 1.
	Devices []string
	// First is the id of the first local replica: those of other processes come before it. Reports name replicas by id.
	First int
	// Timeout is how long a merge call waits for the other replicas. Default 10 minutes; negative: for ever.
	Timeout time.Duration
	// Stall is how long a merge call waits before it says so in the log, once. Default 30 seconds; negative: never.
	Stall time.Duration
	// Grace is how long [Run.Wait] lets the replicas end after the run has failed or its context has ended, before it
	// leaves those behind that are blocked outside the library. Default 10 seconds; negative: it waits for ever.
	Grace time.Duration
	// Logger gets the stall reports. Default: slog.Default().
	Logger *slog.Logger
}

// defaults of [Config].
const (
	timeoutDefault = 10 * time.Minute
	stallDefault   = 30 * time.Second
	graceDefault   = 10 * time.Second
)

// Detector knows the state of all local replicas of one strategy. Its methods may be called from any goroutine.
type Detector struct {
	cfg     Config
	turn    chan struct{}       // holds one token while a run is in progress
	current atomic.Pointer[Run] // that run, or nil
	// reporting is true while a report reads the calls that are in flight; see [Monitor.Leave].
	reporting atomic.Bool

	mu       sync.Mutex
	monitors []*Monitor
	merge    *rendezvous // of the next run; a failed one leaves its own behind
	dirty    bool        // a run failed since the monitors' counts were last reset
	search   searcher    // scratch
}

// New returns a detector for len(cfg.Devices) replicas, all of them idle. It panics if there is none.
func New(cfg Config) *Detector {
	if len(cfg.Devices) == 0 {
		panic("deadlock: New without replicas")
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

// Begin starts a run of all replicas, waiting for the end of the one in progress if there is one; ending ctx ends that
// wait, and none begins with a ctx that has ended. step is the user's function, which reports name where a replica returned from; nil if there is none.
//
// A run begun inside a replica of a run in progress would wait for ever: it is an error that matches [ErrNested] and
// names the replica. That is found by the context, by the goroutine, or by the goroutine that started it.
//
// The caller then starts one goroutine per replica that calls [Run.Do], and calls [Run.Wait].
func (l *Detector) Begin(ctx context.Context, step any) (*Run, error) {
	if outer, _ := ctx.Value(runKey{}).(*Run); outer != nil && outer.detector == l && l.current.Load() == outer {
		return nil, outer.nested(-1)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("deadlock: before the run began: %w", endOf(ctx))
	}
	select {
	case l.turn <- struct{}{}:
	default:
		if outer := l.current.Load(); outer != nil {
			if replica := outer.replicaHere(); replica >= 0 {
				return nil, outer.nested(replica)
			}
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

// Monitor returns a monitor for a communicator between the local replicas. members[rank] is the replica at that rank,
// or -1 for one of another process; nil means that rank i is replica i. abort must poison the communicator on all
// local ranks with the error it is given and return without waiting for them; it is never called with the detector's
// lock held.
//
// When a run has failed all its communicators are aborted. A monitor may then be used again for the communicator that
// takes the old one's place, whose calls count from 0 again.
func (l *Detector) Monitor(name string, members []int, abort func(error)) *Monitor {
	m := newMonitor(l, name, members, abort)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.monitors = append(l.monitors, m)
	return m
}

// Here returns the replica of the run in progress on whose behalf the calling goroutine runs: its own goroutine, or one
// that this one started.
func (l *Detector) Here() (replica int, inside bool) {
	r := l.current.Load()
	if r == nil {
		return 0, false
	}
	replica = r.replicaHere()
	return replica, replica >= 0
}

// awaitReport waits until the report that is being made has been.
func (l *Detector) awaitReport() {
	l.mu.Lock()
	defer l.mu.Unlock()
}

// Replicas returns the number of local replicas.
func (l *Detector) Replicas() int { return len(l.cfg.Devices) }

// name returns a replica as reports name it: "replica 1 (CPU:1)".
func (l *Detector) name(replica int) string {
	return fmt.Sprintf("replica %d (%s)", l.cfg.First+replica, l.cfg.Devices[replica])
}

func (l *Detector) logger() *slog.Logger {
	if l.cfg.Logger != nil {
		return l.cfg.Logger
	}
	return slog.Default()
}

// replicaHere returns the replica on whose behalf the calling goroutine runs: its own goroutine, or one that this
// goroutine started. It returns -1 if there is none.
func (r *Run) replicaHere() int {
	self := stacks.Self()
	for i := range r.replicas {
		if id := r.replicas[i].goroutine.Load(); id != 0 && (id == self.ID || id == self.Creator) {
			return i
		}
	}
	return -1
}
