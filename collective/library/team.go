package library

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/flight"
)

// team is what the local ranks of one communicator share. The first failure of any of them becomes the cause
// that all of them return.
type team struct {
	cfg     collective.Config
	backend Backend
	ranks   [][]int // by process
	at      []place // by rank
	size    int
	members []*member
	world   []int                 // the ranks as numbered in the group that Open made; nil: the same
	book    *flight.Book[*member] // of that group

	fate atomic.Bool   // it has failed, or is about to fail
	done chan struct{} // closed when it has failed
	err  error         // the cause, set before done is closed

	stage   stage // used by the rank that executes a collective
	release func()

	mu      sync.Mutex
	monitor collective.Monitor
	rounds  map[uint64]*round // rounds that not all local ranks have joined
	pairs   map[pair]*meeting // pairs of local ranks of which one has arrived
	closed  int               // closed members
}

// place is the location of a rank.
type place struct{ process, local int }

func newTeam(b Backend, ranks [][]int, cfg collective.Config, world []int, d *flight.Book[*member]) *team {
	t := &team{cfg: cfg, backend: b, ranks: ranks, done: make(chan struct{}), rounds: map[uint64]*round{}, pairs: map[pair]*meeting{}, monitor: cfg.Monitor, world: world, book: d}
	for _, own := range ranks {
		t.size += len(own)
	}
	t.at = make([]place, t.size)
	for p, own := range ranks {
		for i, r := range own {
			t.at[r] = place{p, i}
		}
	}
	for _, r := range ranks[b.Rank()] {
		m := newMember(t, r, len(t.members))
		t.members = append(t.members, m)
		d.Add(m)
	}
	return t
}

// cause returns the cause of the failure, or nil if there is none yet.
func (t *team) cause() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// fail makes err the cause of the failure, unless there is one already, and returns the cause. The monitor
// explains it for the rank explainer.
func (t *team) fail(err error, explainer int) error {
	if t.fate.Swap(true) {
		<-t.done
		return t.err
	}
	if e := (*collective.Error)(nil); t.cfg.Describe != nil && errors.As(err, &e) {
		e.Who = t.cfg.Describe(e)
	}
	if m := t.watcher(); m != nil {
		if explained := m.Explain(explainer, err); explained != nil {
			err = explained
		}
	}
	t.settle(err)
	return err
}

// abort is fail for callers that must not wait for an explanation.
func (t *team) abort(err error) {
	if !t.fate.Swap(true) {
		t.settle(err)
	}
}

func (t *team) settle(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = err
	close(t.done)
}

// others returns the ranks of other processes.
func (t *team) others() []int {
	var out []int
	for r, at := range t.at {
		if at.process != t.backend.Rank() {
			out = append(out, r)
		}
	}
	return out
}

// bounded returns a context with the deadline of a call.
func (t *team) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.cfg.Timeout < 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, t.cfg.Timeout)
}

// sound returns a context that also ends when the team fails.
func (t *team) sound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := t.bounded(ctx)
	ctx, end := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		select {
		case <-t.done:
			end(t.err)
		case <-over:
		}
	}()
	return ctx, func() { close(over); end(nil); cancel() }
}

// leave records that a local rank is closed: the last one closes the backend.
func (t *team) leave() error {
	t.mu.Lock()
	t.closed++
	last := t.closed == len(t.members)
	t.mu.Unlock()
	if !last {
		return nil
	}
	if t.release != nil {
		t.release()
	}
	if t.cause() != nil {
		return t.backend.Close(context.Background(), false)
	}
	ctx, cancel := t.sound(context.Background())
	defer cancel()
	return t.backend.Close(ctx, true)
}

func (t *team) watch(m collective.Monitor) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.monitor, t.cfg.Monitor = m, m
}

func (t *team) watcher() collective.Monitor {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.monitor
}

func (t *team) watchEnter(rank int, tk ticket, call *collective.Call) {
	m := t.watcher()
	if !pairwise(call) {
		if m != nil {
			m.Enter(rank, tk.seq, call)
		}
	} else if p, ok := m.(collective.PairMonitor); ok {
		p.EnterPair(rank, tk.seq, call)
	}
}

// watchPark returns the monitor to notify of the end of the wait, or nil.
func (t *team) watchPark(rank int, tk ticket, call *collective.Call) (collective.Monitor, error) {
	m := t.watcher()
	if !pairwise(call) {
		if m == nil {
			return nil, nil
		}
		return m, m.Park(rank, tk.seq)
	}
	if p, ok := m.(collective.PairMonitor); ok {
		return m, p.ParkPair(rank, tk.seq, call)
	}
	return nil, nil
}

func (t *team) watchLeave(rank int, tk ticket, call *collective.Call, err error) {
	m := t.watcher()
	if !pairwise(call) {
		if m != nil {
			m.Leave(rank, tk.seq, err)
		}
	} else if p, ok := m.(collective.PairMonitor); ok {
		p.LeavePair(rank, tk.seq, call, err)
	}
}

func pairwise(c *collective.Call) bool { return c.Op == collective.Send || c.Op == collective.Recv }
