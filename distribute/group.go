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
	comms   []collective.Communicator        // of this worker's replicas
	more    [lanes][]collective.Communicator // by lane and replica; nil before a replica's first call of the lane
	monitor *deadlock.Monitor
}

// lane is one of a replica's sequences of calls, each on a separate communicator. The calls of one proceed one after
// the other, in the order in which all replicas start them, and do not wait for those of another.
type lane int

const (
	laneMain       lane = iota // the first communicators, not those in replicaGroup.more
	laneConcurrent             // calls with Options.Concurrent
	laneFollowing              // calls of a Follower
	lanes
)

// groupOwner is the strategy whose replicas a group connects.
type groupOwner interface {
	requireOpen(op string) error
	inRun() bool
	reformed() bool // Reform replaces communicators that have failed
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
	group.Watch(g.monitor)
	return g
}

// share lets the Runs of an inner strategy, which d monitors, use the group while the owner's replicas wait. d
// does not see the calls of the owner. A failed Run of the inner strategy aborts the group.
func (g *replicaGroup) share(d *deadlock.Detector) { d.Monitor("", nil, g.abort) }

func (g *replicaGroup) set(group collective.Group) {
	g.group, g.comms = group, group.Local()
	for l := range g.more {
		g.more[l] = make([]collective.Communicator, len(g.comms))
	}
}

// lane returns the lane of a call with these options.
func (o Options) lane() lane {
	if o.Concurrent {
		return laneConcurrent
	}
	return laneMain
}

// comm returns the communicator for a replica's calls of a lane. The first call of another lane than the main one makes
// the communicator: that is a call of all replicas on the first one. The detector monitors all, so it finds replicas
// that wait for each other in calls of different communicators.
func (g *replicaGroup) comm(ctx context.Context, local int, l lane) (collective.Communicator, error) {
	c := g.comms[local]
	if l == laneMain {
		return c, nil
	}
	if g.more[l][local] == nil {
		made, err := c.Split(ctx, 0, c.Rank())
		if err != nil {
			return nil, err
		}
		g.more[l][local] = made
	}
	return g.more[l][local], nil
}

// closeMore closes the communicators of all lanes but the main one.
func (g *replicaGroup) closeMore() (err error) {
	for _, list := range g.more {
		for i, c := range list {
			if c != nil {
				err = errors.Join(err, c.Close())
			}
			list[i] = nil
		}
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
	_ = g.closeMore() // they failed with the first ones
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
	if err := g.comms[0].Err(); g.owner.inRun() || err == nil {
		return nil
	} else if g.owner.reformed() {
		return err
	}
	return g.rebuild(context.WithoutCancel(ctx))
}

func (g *replicaGroup) close() error { return errors.Join(g.closeMore(), g.group.Close()) }
