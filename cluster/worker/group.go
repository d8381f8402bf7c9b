package worker

import (
	"context"
	"fmt"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
)

// group holds the communicators of this worker's replicas. It stays the same across rebuilds: new
// communicators are watched too.
type group struct {
	collective.Group
	of *current
}

// current is the worker's view of its groups, which strategies rebuild.
type current struct {
	mu    sync.Mutex
	group collective.Group // nil: none yet
	cause error            // why no group of this worker can work any more
}

var _ collective.Watchable = (*group)(nil)

// Watch implements [collective.Watchable].
func (g *group) Watch(m collective.Monitor) {
	if w, ok := g.Group.(collective.Watchable); ok {
		w.Watch(m)
	}
}

// Rebuild implements [collective.Group].
func (g *group) Rebuild(ctx context.Context) (collective.Group, error) {
	if cause := g.of.why(); cause != nil {
		return nil, fmt.Errorf("worker: cannot rebuild the group without the lost worker, restart the job: %w", cause)
	}
	next, err := g.Group.Rebuild(ctx)
	if err != nil {
		return nil, err
	}
	g.of.replace(next)
	return &group{next, g.of}, nil
}

// now returns the communicators in use.
func (c *current) now() []collective.Communicator {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.group == nil {
		return nil
	}
	return c.group.Local()
}

func (c *current) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// replace records the group that replaces the previous one.
func (c *current) replace(g collective.Group) {
	c.mu.Lock()
	c.group = g
	cause := c.cause
	c.mu.Unlock()
	if cause != nil {
		abort(g.Local(), cause)
	}
}

// end aborts the current group and all later ones. It reports whether cause is the first one.
func (c *current) end(cause error) bool {
	c.mu.Lock()
	first := c.cause == nil
	if first {
		c.cause = cause
	}
	c.mu.Unlock()
	if first {
		abort(c.now(), cause)
	}
	return first
}

func abort(comms []collective.Communicator, cause error) {
	for _, c := range comms {
		c.Abort(cause)
	}
}
