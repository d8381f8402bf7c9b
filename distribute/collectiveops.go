package distribute

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/packing"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// CollectiveAllReduce reduces by the library's collectives, in parallel, with one rank per component. It is the
// default. Its methods may be called concurrently; batches are reduced one at a time.
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
	Keys    *CollectiveKeys
	Options Options
	Logger  *slog.Logger // default slog.Default()
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
		return nil, errorf(op, ErrInvalid, "group_size must be divisible by the number of devices.: %d by %d", cfg.GroupSize, len(cfg.Devices))
	}
	if g := cfg.Group; g != nil {
		if local := g.Local(); len(local) != len(cfg.Devices) || local[0].Size() != cfg.GroupSize {
			return nil, errorf(op, ErrInvalid, "the group has %d communicators here, of %d in all: want %d of %d", len(local), local[0].Size(), len(cfg.Devices), cfg.GroupSize)
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
		return nil, errorf("Clone", ErrInvalid, "cannot copy the communicators of CollectiveConfig.Group: open another Group and call NewCollectiveAllReduce")
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

// BatchReduce implements [CrossDeviceOps]. Dense values are reduced in packs. IndexedSlices are reduced on the
// host, after those of other workers have been gathered. Without other workers, values whose number of
// components is not the number of devices are reduced on the host, too. A value must be dense on all workers or
// on none.
func (c *CollectiveAllReduce) BatchReduce(ctx context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	opts = c.cfg.Options.Merge(opts)
	sums := make([]*tensor.Tensor, len(batch))
	var tensors []packing.Tensor
	var at []int // index in the batch of each of tensors
	sources := make([][]*tensor.Tensor, len(batch))
	batch = slices.Clone(batch)
	for i, b := range batch {
		if c.others() {
			if err := c.checkComponents(b.Value); err != nil {
				return nil, err
			}
		}
		ts, dense, err := denseOperands(c.String(), b.Value.values)
		if err != nil {
			return nil, err
		}
		switch collective := len(ts) == len(c.devices) && c.cfg.GroupSize > 1; {
		case dense && collective:
			if d := ts[0].DType(); !d.IsNumeric() {
				return nil, badDType(c.String(), d)
			}
			sources[i] = ts
			at = append(at, i)
			tensors = append(tensors, packing.Tensor{Type: ts[0].DType(), Shape: ts[0].Shape(), Count: ts[0].Len()})
		case dense && len(ts) > 1:
			sums[i] = reduceTree(op, ts, opts.Accumulate)
		case !dense && c.others():
			all, err := c.gatherValues(ctx, fmt.Sprintf("IndexedSlices %d", i), b.Value.values, opts)
			if err != nil {
				return nil, err
			}
			batch[i].Value = NewPerReplica(all...)
		}
	}
	if err := c.reducePacks(ctx, op, tensors, at, sources, sums, opts); err != nil {
		return nil, err
	}
	return reduceEach(c.String(), op, batch, opts, c.others(), func(i int, _ []*tensor.Tensor) (*tensor.Tensor, error) { return sums[i], nil })
}

// reducePacks sums tensors pack by pack.
func (c *CollectiveAllReduce) reducePacks(ctx context.Context, op ReduceOp, tensors []packing.Tensor, at []int, sources [][]*tensor.Tensor, sums []*tensor.Tensor, opts Options) error {
	if len(tensors) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return err
	}
	size := opts.BytesPerPack
	if size == 0 {
		total := 0
		for _, t := range tensors {
			total += t.Count * t.Type.Bytes()
		}
		size = packing.MemoryCosts.BytesPerPack(total)
	}
	for _, p := range packing.Plan(tensors, size) {
		if err := c.reducePack(ctx, op, p, tensors, at, sources, sums, opts); err != nil {
			return err
		}
	}
	return nil
}

// reducePack sums the tensors of one pack by one collective call. All local ranks share one destination buffer,
// and the sums are slices of it.
func (c *CollectiveAllReduce) reducePack(ctx context.Context, op ReduceOp, p packing.Pack, tensors []packing.Tensor, at []int, sources [][]*tensor.Tensor, sums []*tensor.Tensor, opts Options) error {
	sum := tensor.New(p.Type, p.Count)
	manifest := collective.Manifest{Name: c.instance()}
	o := opts.collective()
	direct := op
	if op == Mean && !p.Type.IsFloat() {
		direct = Sum // the quotient has another dtype
	}
	calls := make([]collective.Call, len(c.devices))
	for rank := range calls {
		calls[rank] = collective.Call{
			Op: collective.AllReduce, Reduce: direct, Type: p.Type,
			Src: packSource(p, rank, at, sources), Dst: sum.Memory(), Manifest: &manifest, Options: &o,
		}
	}
	if len(p.Tensors) == 1 {
		manifest.Shape = tensors[p.Tensors[0]].Shape
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return err
	}
	lo := 0
	for _, t := range p.Tensors {
		hi := lo + tensors[t].Count
		sums[at[t]] = sliceOf(sum, lo, hi).Reshape(tensors[t].Shape...)
		if direct != op {
			sums[at[t]] = divide(sums[at[t]], c.cfg.GroupSize)
		}
		lo = hi
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

// packSource returns a rank's input of a pack: its only tensor, or a buffer with copies of its tensors,
// concatenated.
func packSource(p packing.Pack, rank int, at []int, sources [][]*tensor.Tensor) tensor.Memory {
	if len(p.Tensors) == 1 {
		return sources[at[p.Tensors[0]]][rank].Memory()
	}
	all := tensor.New(p.Type, p.Count).Memory()
	lo := 0
	for _, t := range p.Tensors {
		m := sources[at[t]][rank].Memory()
		if m.Bytes > 0 {
			copyMemory(all.Slice(lo, lo+m.Bytes), m)
		}
		lo += m.Bytes
	}
	return all
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
