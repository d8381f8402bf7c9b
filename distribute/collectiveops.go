package distribute

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// CollectiveAllReduce reduces by the library's collectives, in parallel, with one rank per component (TensorFlow's
// CollectiveAllReduce). It is the default. Its methods may be called concurrently; batches are reduced one at a
// time.
type CollectiveAllReduce struct {
	cfg     CollectiveConfig
	devices []Device
	key     int // of the group

	mu    sync.Mutex // one batch at a time
	group collective.Group

	// shared holds the communicators between the replicas of a multi-worker strategy, or nil. Reductions and
	// the strategy's own calls take turns on them.
	shared *replicaGroup
}

// CollectiveConfig describes a [CollectiveAllReduce].
type CollectiveConfig struct {
	// Devices are the devices of the local members, in the order of their ranks.
	Devices []string
	// GroupSize is the number of members over all workers, a multiple of the number of devices. Default: the
	// number of devices. A larger group needs Group; without it calls wait for members that do not exist, until
	// their timeout.
	GroupSize int
	// Group holds the communicators of the devices. Close closes it. Default: the operations open a group
	// themselves.
	Group collective.Group
	// Keys number the group and its calls in errors and logs. Default: new keys.
	Keys *CollectiveKeys
	// Options are the default options of all reductions.
	Options Options
	// Logger gets stall reports and warnings. Default: slog.Default().
	Logger *slog.Logger
}

// NewCollectiveAllReduce returns the operations for a group of devices. The caller must close it.
func NewCollectiveAllReduce(cfg CollectiveConfig) (*CollectiveAllReduce, error) {
	return newCollectiveAllReduce("NewCollectiveAllReduce", cfg, nil)
}

func newCollectiveAllReduce(op string, cfg CollectiveConfig, shared *replicaGroup) (*CollectiveAllReduce, error) {
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
	if g := cfg.Group; g != nil {
		if local := g.Local(); len(local) != len(cfg.Devices) || local[0].Size() != cfg.GroupSize {
			return nil, errorf(op, ErrInvalid, "the group has %d communicators here, of %d in all: want %d of %d", len(local),
				local[0].Size(), len(cfg.Devices), cfg.GroupSize)
		}
	}
	if err := cfg.Options.Validate(); err != nil {
		return nil, err
	}
	if cfg.Keys == nil {
		cfg.Keys = NewCollectiveKeys(1)
	}
	c := &CollectiveAllReduce{cfg: cfg, group: cfg.Group, shared: shared}
	var names []string
	for _, name := range cfg.Devices {
		d, err := CanonicalDevice(name)
		if err != nil {
			return nil, err
		}
		c.devices = append(c.devices, d)
		names = append(names, d.String())
	}
	c.key = cfg.Keys.GroupKey(names)
	return c, nil
}

// Clone returns operations for the same devices, with an independent copy of the keys (TensorFlow's deepcopy).
// Communicators are not copied: it is an error if the configuration has a Group.
func (c *CollectiveAllReduce) Clone() (*CollectiveAllReduce, error) {
	cfg := c.cfg
	if cfg.Group != nil || c.shared != nil {
		return nil, errorf("Clone", ErrInvalid, "cannot copy the communicators of CollectiveConfig.Group: open another "+
			"Group and call NewCollectiveAllReduce")
	}
	cfg.Keys = cfg.Keys.Clone()
	return NewCollectiveAllReduce(cfg)
}

// String returns "CollectiveAllReduce".
func (*CollectiveAllReduce) String() string { return "CollectiveAllReduce" }

// GroupSize returns the number of members over all workers.
func (c *CollectiveAllReduce) GroupSize() int { return c.cfg.GroupSize }

// Close frees the communicators.
func (c *CollectiveAllReduce) Close() error {
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
func (c *CollectiveAllReduce) open(ctx context.Context) error {
	var err error
	switch {
	case c.shared != nil:
		err = c.shared.ready(ctx)
		c.group = c.shared.group
	case c.group == nil:
		ends := mem.New(c.cfg.GroupSize)
		c.group, err = collective.Open(ends[:len(c.devices)], collective.Config{
			Timeout: c.cfg.Options.Timeout, Logger: c.cfg.Logger, Name: fmt.Sprintf("cross-replica group %d", c.key),
		})
	case c.group.Local()[0].Err() != nil:
		c.group, err = c.group.Rebuild(context.WithoutCancel(ctx))
	}
	return err
}

// others reports whether some members belong to other workers.
func (c *CollectiveAllReduce) others() bool { return c.cfg.GroupSize > len(c.devices) }

// checkComponents returns an error unless a value has one component for each local member.
func (c *CollectiveAllReduce) checkComponents(p *PerReplica) error {
	if n := len(p.values); n != len(c.devices) {
		return errorf(c.String(), ErrInvalid, "a value has %d components on a worker with %d replicas: want one component "+
			"per replica", n, len(c.devices))
	}
	return nil
}

// instance names the group's next call.
func (c *CollectiveAllReduce) instance() string {
	key := 0
	for _, d := range c.devices {
		key, _ = c.cfg.Keys.InstanceKey(c.key, d.String()) // no error: the group and the device exist
	}
	return fmt.Sprintf("instance %d of group %d", key, c.key)
}
