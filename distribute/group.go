package distribute

import (
	"context"
	"errors"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// replicaGroup holds this worker's communicators between the replicas of a strategy. The strategy's deadlock
// detector monitors their calls.
type replicaGroup struct {
	owner   groupOwner // closes the group; nil: the caller does
	group   collective.Group
	comms   []collective.Communicator // of this worker's replicas
	second  []collective.Communicator // of the calls with Options.Concurrent; nil before a replica's first one
	monitor *deadlock.Monitor
}

// groupOwner is the strategy whose replicas a group connects.
type groupOwner interface {
	requireOpen(op string) error
	inRun() bool
}

// openReplicaGroup connects n replicas of this process.
func openReplicaGroup(owner groupOwner, d *deadlock.Detector, n int, cfg collective.Config) (*replicaGroup, error) {
	g := &replicaGroup{owner: owner}
	g.monitor = d.Monitor("", nil, g.abort) // no name: a strategy has only this group
	cfg.Monitor = g.monitor
	group, err := collective.Open(mem.New(n), cfg)
	if err != nil {
		return nil, err
	}
	g.set(group)
	return g, nil
}

// adoptReplicaGroup takes over a group of size ranks, and monitors its calls. If the calls of this worker's
// replicas can never match, they fail at once. Replicas of other workers are awaited until the deadline.
func adoptReplicaGroup(owner groupOwner, d *deadlock.Detector, group collective.Group, size int) *replicaGroup {
	g := &replicaGroup{owner: owner}
	g.set(group)
	members := make([]int, size)
	for rank := range members {
		members[rank] = -1
	}
	for local, c := range g.comms {
		members[c.Rank()] = local
	}
	g.monitor = d.Monitor("", members, g.abort)
	if w, ok := group.(collective.Watchable); ok {
		w.Watch(g.monitor)
	}
	return g
}

// share lets the Runs of an inner strategy, which d monitors, use the group while the owner's replicas wait. d
// does not see the calls of the owner. A failed Run of the inner strategy aborts the group.
func (g *replicaGroup) share(d *deadlock.Detector) { d.Monitor("", nil, g.abort) }

func (g *replicaGroup) set(group collective.Group) {
	g.group, g.comms = group, group.Local()
	g.second = make([]collective.Communicator, len(g.comms))
}

// comm returns the communicator for a replica's calls with these options. The first call with Options.Concurrent makes
// the second communicator: that is a call of all replicas on the first one. The detector monitors both, so it finds
// replicas that wait for each other in calls of different communicators.
func (g *replicaGroup) comm(ctx context.Context, local int, o Options) (collective.Communicator, error) {
	c := g.comms[local]
	if !o.Concurrent {
		return c, nil
	}
	if g.second[local] == nil {
		made, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return nil, err
		}
		g.second[local] = made
	}
	return g.second[local], nil
}

// closeSecond closes the second communicators.
func (g *replicaGroup) closeSecond() (err error) {
	for i, c := range g.second {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
		g.second[i] = nil
	}
	return err
}

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
	_ = g.closeSecond() // they failed with the first ones
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
	if err := g.owner.requireOpen("Group"); err != nil {
		return err
	}
	if g.owner.inRun() || g.comms[0].Err() == nil {
		return nil
	}
	return g.rebuild(context.WithoutCancel(ctx))
}

func (g *replicaGroup) close() error { return errors.Join(g.closeSecond(), g.group.Close()) }
