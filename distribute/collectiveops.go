package distribute

import (
	"context"
	"log/slog"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// collectiveAllReduce reduces by the library's collectives, in parallel, with one rank per component (TensorFlow's
// CollectiveAllReduce). It is the default. Its methods may be called concurrently; batches are reduced one at a
// time.
type collectiveAllReduce struct {
	cfg     collectiveConfig
	devices []device.Spec

	mu         sync.Mutex // one batch at a time
	group      collective.Group
	reductions int // so far

	// shared holds the communicators between the replicas of a multi-worker strategy, or nil. Reductions and
	// the strategy's own calls take turns on them.
	shared *replicaGroup
}

// collectiveConfig describes a [collectiveAllReduce].
type collectiveConfig struct {
	// Devices are the devices of the local members, in the order of their ranks.
	Devices []string
	// GroupSize is the number of members over all workers, a multiple of the number of devices. Default: the
	// number of devices.
	GroupSize int
	// Options are the default options of all reductions.
	Options Options
	// Logger gets stall reports and warnings. Default: slog.Default().
	Logger *slog.Logger
}

// newCollectiveAllReduce returns the operations for a group of devices, over the communicators of shared or, if that is
// nil, over a group of this process.
func newCollectiveAllReduce(op string, cfg collectiveConfig, shared *replicaGroup) (*collectiveAllReduce, error) {
	if len(cfg.Devices) == 0 {
		return nil, errorf(op, ErrInvalid, "the list of devices is empty")
	}
	if cfg.GroupSize == 0 {
		cfg.GroupSize = len(cfg.Devices)
	}
	if cfg.GroupSize < 0 || cfg.GroupSize%len(cfg.Devices) != 0 && shared == nil {
		return nil, errorf(op, ErrInvalid, "group_size must be divisible by the number of devices.: %d by %d", cfg.GroupSize,
			len(cfg.Devices))
	}
	if err := cfg.Options.validate(); err != nil {
		return nil, err
	}
	c := &collectiveAllReduce{cfg: cfg, shared: shared}
	for _, name := range cfg.Devices {
		d, err := device.Canonical(name)
		if err != nil {
			return nil, err
		}
		c.devices = append(c.devices, d)
	}
	return c, nil
}

// String returns "CollectiveAllReduce".
func (*collectiveAllReduce) String() string { return "CollectiveAllReduce" }

// Close frees the communicators.
func (c *collectiveAllReduce) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.group == nil || c.shared != nil {
		return nil
	}
	group := c.group
	c.group = nil
	return group.Close()
}

// open creates the communicators on first use and recreates them after a failure.
func (c *collectiveAllReduce) open(ctx context.Context) error {
	var err error
	switch {
	case c.shared != nil:
		err = c.shared.ready(ctx)
		c.group = c.shared.group
	case c.group == nil:
		ends := mem.New(c.cfg.GroupSize)
		c.group, err = collective.Open(ends[:len(c.devices)], collective.Config{
			Timeout: c.cfg.Options.Timeout, Logger: c.cfg.Logger, Name: "cross-replica group",
		})
	case c.group.Local()[0].Err() != nil:
		c.group, err = c.group.Rebuild(context.WithoutCancel(ctx))
	}
	return err
}

// others reports whether some members belong to other workers.
func (c *collectiveAllReduce) others() bool { return c.cfg.GroupSize > len(c.devices) }

// checkComponents returns an error unless a value has one component for each local member.
func (c *collectiveAllReduce) checkComponents(values []Value) error {
	if n := len(values); n != len(c.devices) {
		return errorf(c.String(), ErrInvalid, "a value has %d components on a worker with %d replicas: want one component "+
			"per replica", n, len(c.devices))
	}
	return nil
}
