package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// replicaGroup holds this worker's communicators between the strategy's replicas. The strategy's deadlock
// detector monitors their calls.
type replicaGroup struct {
	owner   *Strategy
	group   collective.Group
	comms   []collective.Communicator // of this worker's replicas
	monitor *deadlock.Monitor
}

func openReplicaGroup(s *Strategy) (*replicaGroup, error) {
	g := &replicaGroup{owner: s}
	g.monitor = s.detector.Monitor("", nil, g.abort) // no name: a strategy has only this group
	group, err := collective.Open(mem.New(len(s.devices)), collective.Config{
		Timeout: s.options.Timeout, Stall: s.stall, Order: s.options.Order, Accumulate: s.options.Accumulate,
		Monitor: g.monitor, Logger: s.logger, Name: "replicas",
	})
	if err != nil {
		return nil, err
	}
	g.set(group)
	return g, nil
}

// adoptReplicaGroup takes over the group that the strategy was given, and monitors its calls. If the calls of
// this worker's replicas can never match, they fail at once. Replicas of other workers are awaited until the
// deadline.
func adoptReplicaGroup(s *Strategy) *replicaGroup {
	g := &replicaGroup{owner: s}
	g.set(s.given)
	members := make([]int, s.size)
	for rank := range members {
		members[rank] = -1
	}
	for local, c := range g.comms {
		members[c.Rank()] = local
	}
	g.monitor = s.detector.Monitor("", members, g.abort)
	if w, ok := s.given.(collective.Watchable); ok {
		w.Watch(g.monitor)
	}
	return g
}

// share lets the Runs of the inner strategy use the group while the owner's replicas wait. The inner strategy's
// deadlock detector does not see the calls of the owner. A failed Run of the inner strategy aborts the group.
func (g *replicaGroup) share(s *Strategy) { s.detector.Monitor("", nil, g.abort) }

func (g *replicaGroup) set(group collective.Group) { g.group, g.comms = group, group.Local() }

// abort fails the current and later calls of all communicators.
func (g *replicaGroup) abort(cause error) {
	for _, c := range g.comms {
		c.Abort(cause)
	}
}

// rebuild replaces failed communicators by new ones at the next epoch. Each failure reaches every worker once,
// so the epochs stay equal on all workers.
func (g *replicaGroup) rebuild(ctx context.Context) error {
	if g.comms[0].Err() == nil {
		return nil
	}
	group, err := g.group.Rebuild(ctx)
	if err != nil {
		return err
	}
	g.set(group)
	g.monitor.Reset()
	return nil
}

// ready is called before a call for all of this worker's replicas. It replaces communicators that failed since
// the last Run. In a Run it does not: the failure fails the Run.
func (g *replicaGroup) ready(ctx context.Context) error {
	if g.owner.closed.Load() {
		return errorf("Group", ErrClosed, "the strategy was closed")
	}
	if g.owner.running.Load() || g.comms[0].Err() == nil {
		return nil
	}
	return g.rebuild(context.WithoutCancel(ctx))
}

func (g *replicaGroup) close() error { return g.group.Close() }
