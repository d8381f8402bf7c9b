package library

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/collective"
)

// Setup configures a group.
type Setup struct {
	// Driver connects the processes. The group closes it.
	Driver Driver
	// Ranks are the ranks of each process, by the driver's rank: all numbers from 0, each once. Every process
	// has at least one, and lists its ranks in ascending order.
	Ranks [][]int
	// Again makes a new driver of the same processes, for Rebuild. All processes call it.
	Again func(ctx context.Context) (Driver, error)
	// Config configures the communicator. Algorithm and Chooser have no effect here.
	Config collective.Config
}

// Open makes the communicators of this process's ranks. Every process calls it, with setups that agree; it
// does not wait for the others.
func Open(s Setup) (collective.Group, error) {
	if err := checkRanks(s.Ranks, s.Driver); err != nil {
		return nil, fmt.Errorf("collective: %s: %w", s.Driver.Transport(), err)
	}
	if s.Config.Order == collective.Canonical {
		return nil, fmt.Errorf("collective: configuration of %q: %s does not keep the canonical order of sums: "+
			"want Order: Any, or the built-in collectives, which keep it", cmp.Or(s.Config.Name, "world"), s.Driver.Transport())
	}
	s.Config.Order = collective.Any
	return collective.OpenBackends(newTeam(s.Driver, s.Ranks, s.Again).backends(), s.Config)
}

func checkRanks(ranks [][]int, d Driver) error {
	if len(ranks) != d.Size() {
		return fmt.Errorf("ranks of %d processes for %d", len(ranks), d.Size())
	}
	all := slices.Sorted(slices.Values(slices.Concat(ranks...)))
	for i, r := range all {
		if r != i {
			return fmt.Errorf("ranks %v: want all from 0 to %d", ranks, len(all)-1)
		}
	}
	for p, own := range ranks {
		if len(own) == 0 || len(own) > localMax || !slices.IsSorted(own) {
			return fmt.Errorf("ranks %v in process %d: want 1 to %d of them, in their order", own, p, localMax)
		}
	}
	return nil
}

// localMax bounds the ranks of a process: a message's tag holds the local indices of two ranks.
const localMax = 1 << 7
