package distribute

import (
	"context"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// replicaGroup is the communicators between a strategy's replicas, watched by its ledger.
type replicaGroup struct {
	group collective.Group
	comms []collective.Communicator
}

func openReplicaGroup(s *Strategy) (*replicaGroup, error) {
	g := &replicaGroup{}
	monitor := s.ledger.Monitor("", nil, g.abort) // no name: reports need none to tell it from others
	group, err := collective.Open(mem.New(len(s.devices)), collective.Config{
		Timeout: s.options.Timeout, Stall: s.stall, Order: s.options.Order, Accumulate: s.options.Accumulate,
		Monitor: monitor, Logger: s.logger, Name: "replicas",
	})
	if err != nil {
		return nil, err
	}
	g.group, g.comms = group, group.Local()
	return g, nil
}

// abort poisons the communicators of all replicas.
func (g *replicaGroup) abort(cause error) {
	for _, c := range g.comms {
		c.Abort(cause)
	}
}

// rebuild replaces poisoned communicators by new ones, at the next epoch.
func (g *replicaGroup) rebuild(ctx context.Context) error {
	group, err := g.group.Rebuild(ctx)
	if err != nil {
		return err
	}
	g.group, g.comms = group, group.Local()
	return nil
}

func (g *replicaGroup) close() error { return g.group.Close() }
