package collective

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/timeline"
)

// group is the local ranks of one communicator, and what they share: the configuration, and the failure. The
// first failure of any of them becomes the cause that all of them return.
type group struct {
	cfg     Config
	size    int
	local   int    // number of local ranks
	release func() // frees the monitor that Split made, once all local ranks are closed; or nil
	world   []int  // its ranks as numbered in the group that Open made; nil: the same
	book    *book  // shared with the communicators derived from this one

	fate atomic.Uint32 // sound, failing, failed
	done chan struct{} // closed when the fate is failed
	err  error         // the cause, set before done is closed

	mu      sync.Mutex
	members []*communicator     // the local ranks, in the order in which they joined
	locals  []Communicator      // the same
	closed  int                 // how many of them are closed
	splits  map[splitKey]*group // being split off: not all local ranks have joined yet
	// of a group that is split off: how many local ranks have joined; guarded by its parent's mu
	taken int
}

// splitKey identifies a communicator that is split off.
type splitKey struct {
	number uint64
	color  int
}

const (
	sound uint32 = iota
	failing
	failed
)

var _ Group = (*group)(nil)

// openGroup makes the communicators of the local ranks of a group. The configuration is complete.
func openGroup(backends []Backend, cfg Config, b *book) *group {
	if cfg.Timeout < 0 {
		cfg.Logger.Warn("collective: no deadline: a call may wait for its peers indefinitely", "communicator", cfg.Name)
	}
	g := newGroup(cfg, backends[0].Size(), len(backends), b)
	for _, backend := range backends {
		g.join(backend)
	}
	return g
}

func newGroup(cfg Config, size, local int, b *book) *group {
	return &group{
		cfg: cfg, size: size, local: local, book: b, done: make(chan struct{}), splits: map[splitKey]*group{},
	}
}

// join makes the communicator of a local rank.
func (g *group) join(b Backend) *communicator {
	c := newCommunicator(g, b)
	b.Attach(FrontEnd{c, &g.fate})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.members, g.locals = append(g.members, c), append(g.locals, c)
	g.book.add(c)
	return c
}

func (g *group) Local() []Communicator { return g.locals }

func (g *group) Watch(m Monitor) { g.cfg.Monitor = m }

func (g *group) SetTimeline(r *timeline.Recorder) { g.cfg.Timeline = r }

func (g *group) Flights() []flight.Rank { return g.book.all() }

// cause returns the cause of the failure, or nil if there is none yet.
func (g *group) cause() error {
	if g.fate.Load() != failed {
		return nil
	}
	return g.err
}

// fail makes err the cause of the group's failure, unless there is one already, and returns the cause.
// explainer is the rank for which the monitor explains the failure. The peers do not wait for a slow
// description.
func (g *group) fail(err error, explainer int) error {
	if !g.fate.CompareAndSwap(sound, failing) {
		<-g.done
		return g.err
	}
	spread := g.addDescription(err)
	if monitor := g.cfg.Monitor; monitor != nil {
		if explained := monitor.Explain(explainer, err); explained != nil {
			err = explained
		}
	}
	g.settle(err, spread)
	return err
}

// abort is fail for callers that must not wait for an explanation.
func (g *group) abort(err error) {
	if g.fate.CompareAndSwap(sound, failing) {
		g.settle(err, false)
	}
}

// settle makes err the cause of the failure. The peers may have been notified already.
func (g *group) settle(err error, spread bool) {
	g.err = err
	if !spread {
		// before a call can return: its rank may then close its backend, and the peers would learn nothing
		// more
		g.spread(err)
	}
	g.fate.Store(failed)
	close(g.done)
	g.mu.Lock()
	partial := slices.Collect(maps.Values(g.splits))
	g.mu.Unlock()
	for _, s := range partial {
		s.abort(err) // a rank that failed in Split never calls it
	}
}

// spread notifies the peers of all local ranks why the group has failed.
func (g *group) spread(err error) {
	g.mu.Lock()
	members := slices.Clone(g.members)
	g.mu.Unlock()
	for _, c := range members {
		c.backend.Fail(err)
	}
}

// describeWithin is how long the peers wait for a failure's description. If it is ready by then, it is sent
// with the failure.
const describeWithin = 100 * time.Millisecond

// addDescription sets the error's description of the ranks concerned, if they are not all in this process. If the
// description takes longer than describeWithin, for example because a store does not answer, the peers are
// notified of the failure without it, and spread is true: then they describe it themselves.
func (g *group) addDescription(err error) (spread bool) {
	e := (*Error)(nil)
	if g.cfg.Describe == nil || !errors.As(err, &e) {
		return false
	}
	about := *e
	words := make(chan string, 1)
	go func() { words <- g.cfg.Describe(&about) }() // the caller waits for it below
	timer := time.NewTimer(describeWithin)
	defer timer.Stop()
	who := ""
	select {
	case who = <-words:
	case <-timer.C:
		g.spread(err)
		spread, who = true, <-words
	}
	if e.Who != "" && who != "" {
		who = e.Who + "\n" + who
	}
	if who != "" {
		e.Who = who
	}
	return spread
}

// leave records that a local rank is closed.
func (g *group) leave() {
	g.mu.Lock()
	g.closed++
	last := g.closed == g.local
	g.mu.Unlock()
	if last && g.release != nil {
		g.release()
	}
}

func (g *group) Rebuild(ctx context.Context) (Group, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("collective: rebuilding %q: %w", g.cfg.Name, context.Cause(ctx))
	}
	var backends []Backend
	for _, c := range g.members {
		b, err := c.backend.Rebuild(ctx)
		if err != nil {
			for _, made := range backends {
				_ = made.Close() // the error of Rebuild is more useful
			}
			return nil, fmt.Errorf("collective: rebuilding %q: %w", g.cfg.Name, err)
		}
		backends = append(backends, b)
	}
	if err := g.Close(); err != nil {
		g.cfg.Logger.Warn("collective: closing a group to rebuild it", "communicator", g.cfg.Name, "error", err)
	}
	cfg := g.cfg
	cfg.Epoch++
	return openGroup(backends, cfg, g.book), nil
}

func (g *group) Close() error {
	var errs []error
	for _, c := range g.members {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// within returns the ranks of the group that Open made which correspond to ranks of this group.
func (g *group) within(ranks []int) []int {
	out := slices.Clone(ranks)
	for i, r := range ranks {
		if g.world != nil {
			out[i] = g.world[r]
		}
	}
	return out
}
