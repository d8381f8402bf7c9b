package distribute

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// CrossDeviceOps carries out reductions between the devices of a strategy. The package has [ReductionToOneDevice],
// [HierarchicalCopyAllReduce] and [CollectiveAllReduce], which all give the same bits; users may write their own.
//
// One goroutine at a time calls it, in cross-replica context.
type CrossDeviceOps interface {
	// BatchReduce combines the components of each value, by replica, and returns the results in the order of the batch,
	// each on its destination: a leaf on one device, a [*Mirrored] on several. Components are *tensor.Tensor or
	// *tensor.IndexedSlices and must not be changed.
	BatchReduce(ctx context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error)
	// String names the kind: "ReductionToOneDevice".
	String() string
}

// Reduction is one value to reduce and the devices that get the result, one at least.
type Reduction struct {
	Value *PerReplica
	To    []Device
}

// ReduceWith combines the components of v by ops, outside of a strategy, and puts the result on the destination's
// devices. A tensor alone counts as a value of one component.
func ReduceWith(ctx context.Context, ops CrossDeviceOps, op ReduceOp, v Value, to Destination, opts ...Options) (Value, error) {
	out, err := BatchReduceWith(ctx, ops, op, []ValueTo{{v, to}}, opts...)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// BatchReduceWith is [ReduceWith] of several values at once.
func BatchReduceWith(ctx context.Context, ops CrossDeviceOps, op ReduceOp, batch []ValueTo, opts ...Options) ([]Value, error) {
	name := ops.String()
	if err := checkReduceOp(name, op); err != nil {
		return nil, err
	}
	o, err := Options{}.over(opts)
	if err != nil {
		return nil, err
	}
	reductions := make([]Reduction, len(batch))
	for i, b := range batch {
		if reductions[i].Value, err = perReplica(b.Value); err != nil {
			return nil, errorf(name, ErrInvalid, "value %d: %w", i, err)
		}
		if reductions[i].To, err = b.To.destination(name); err != nil {
			return nil, err
		}
	}
	return ops.BatchReduce(ctx, op, reductions, o)
}

// Broadcast puts a leaf value on the destination's devices: alone on one, mirrored on several.
func Broadcast(v Value, to Destination) (Value, error) {
	devices, err := to.destination("Broadcast")
	if err != nil {
		return nil, err
	}
	leaf, err := operand(v)
	if err != nil {
		return nil, errorf("Broadcast", ErrInvalid, "%w", err)
	}
	return place(leaf, devices), nil
}

// reduceOps selects who reduces one value, by TensorFlow's rules: a user's CrossDeviceOps take part only where value and
// destination are on the same accelerators; with a CPU among the destinations, with other devices, and for int32, it is
// ReductionToOneDevice. Without a user's, the collectives do it wherever they can, which gives the same bits.
func (s *Strategy) reduceOps(r Reduction) CrossDeviceOps {
	if s.ops == nil {
		return s.collective
	}
	from, err := r.Value.destination("")
	onCPU := slices.ContainsFunc(r.To, func(d Device) bool { return d.Kind == "CPU" })
	if err != nil || onCPU || !slices.Equal(from, r.To) || dtypeOf(r.Value.values[0]) == tensor.Int32 {
		return ReductionToOneDevice{}
	}
	return s.ops
}

// batchOps selects who reduces a batch: the user's CrossDeviceOps except for int32, else the collectives.
func (s *Strategy) batchOps(batch []Reduction) CrossDeviceOps {
	switch {
	case s.ops == nil:
		return s.collective
	case dtypeOf(batch[0].Value.values[0]) == tensor.Int32:
		return ReductionToOneDevice{}
	}
	return s.ops
}

// ReductionToOneDevice adds all components on one device and copies the result to the destinations. The zero value is
// ready to use.
type ReductionToOneDevice struct {
	// ReduceTo is the device that adds; default the first destination. Logical CPU devices share the host's memory and
	// cores, so there it changes nothing.
	ReduceTo string
	// AccumulationFn replaces the sum of dense tensors, given in the order of the replicas. Default: the sum along the
	// canonical tree. A mean divides what it returns.
	AccumulationFn func([]*tensor.Tensor) (*tensor.Tensor, error)
}

// String returns "ReductionToOneDevice".
func (ReductionToOneDevice) String() string { return "ReductionToOneDevice" }

// BatchReduce implements [CrossDeviceOps].
func (r ReductionToOneDevice) BatchReduce(_ context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	if r.ReduceTo != "" {
		if _, err := CanonicalDevice(r.ReduceTo); err != nil {
			return nil, errorf(r.String(), ErrInvalid, "ReduceTo: %w", err)
		}
	}
	add := r.AccumulationFn
	if add == nil {
		add = func(ts []*tensor.Tensor) (*tensor.Tensor, error) { return addTree(ts, opts.Accumulate), nil }
	}
	return reduceEach(r.String(), op, batch, func(_ int, ts []*tensor.Tensor) (*tensor.Tensor, error) { return add(ts) })
}

// HierarchicalCopyAllReduce adds in two levels: the components of either half of the devices with each other, then the
// two sums. The packs, parts of equal length of the whole batch, are added at the same time.
type HierarchicalCopyAllReduce struct{ packs int }

// NewHierarchicalCopyAllReduce returns the operations with that many packs; 0: one value after the other.
func NewHierarchicalCopyAllReduce(packs int) (HierarchicalCopyAllReduce, error) {
	if packs < 0 {
		return HierarchicalCopyAllReduce{}, errorf("NewHierarchicalCopyAllReduce", ErrInvalid, "HierarchicalCopy requires num_packs >= 0, but %d is specified", packs)
	}
	return HierarchicalCopyAllReduce{packs}, nil
}

// Packs returns the number of packs.
func (h HierarchicalCopyAllReduce) Packs() int { return h.packs }

// String returns "HierarchicalCopyAllReduce".
func (HierarchicalCopyAllReduce) String() string { return "HierarchicalCopyAllReduce" }

// BatchReduce implements [CrossDeviceOps]. The halves are the two subtrees at the root of the canonical tree, so
// every number of devices is right, also an odd one.
func (h HierarchicalCopyAllReduce) BatchReduce(_ context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	sums := map[int]*tensor.Tensor{}
	var work []packPart
	for i, b := range batch {
		ts, dense, err := denseOperands(h.String(), b.Value.values)
		if err != nil {
			return nil, err
		}
		if dense && len(ts) > 1 {
			sums[i] = tensor.New(ts[0].DType(), ts[0].Shape()...)
			work = append(work, packPart{sums[i], ts, 0, ts[0].Len()})
		}
	}
	var wait sync.WaitGroup
	for _, pack := range splitPacks(work, h.packs) {
		wait.Go(func() {
			for _, part := range pack {
				part.add(opts.Accumulate)
			}
		})
	}
	wait.Wait()
	return reduceEach(h.String(), op, batch, func(i int, _ []*tensor.Tensor) (*tensor.Tensor, error) { return sums[i], nil })
}

// packPart is the elements [lo, hi) of one value's sum.
type packPart struct {
	sum    *tensor.Tensor
	src    []*tensor.Tensor
	lo, hi int
}

func (p packPart) add(acc collective.Accumulate) {
	addRange(p.sum, p.src, p.lo, p.hi, acc == collective.AccumulateFloat32)
}

// splitPacks cuts the concatenation of all parts into n packs, n-1 of total/n elements and the last of the rest; 0 makes
// one pack of everything.
func splitPacks(parts []packPart, n int) [][]packPart {
	if n <= 1 {
		return [][]packPart{parts}
	}
	total := 0
	for _, p := range parts {
		total += p.hi
	}
	packs := make([][]packPart, n)
	pack, room := 0, total/n
	for _, p := range parts {
		for p.lo < p.hi {
			for pack < n-1 && room == 0 {
				pack, room = pack+1, total/n
			}
			take := p.hi - p.lo
			if pack < n-1 {
				take = min(take, room)
				room -= take
			}
			cut := p
			cut.hi = p.lo + take
			packs[pack] = append(packs[pack], cut)
			p.lo = cut.hi
		}
	}
	return packs
}

// CollectiveAllReduce reduces by the library's collectives, in parallel: one rank per component. It is the default.
type CollectiveAllReduce struct {
	devices []Device
	options Options
	logger  *slog.Logger

	mu    sync.Mutex // one batch at a time
	group collective.Group
}

// CollectiveConfig describes a [CollectiveAllReduce].
type CollectiveConfig struct {
	Devices []string // of the group's members, by rank
	Options Options
	Logger  *slog.Logger // default slog.Default()
}

// NewCollectiveAllReduce returns the operations for a group of devices. Close it when it is not needed any more.
func NewCollectiveAllReduce(cfg CollectiveConfig) (*CollectiveAllReduce, error) {
	const op = "NewCollectiveAllReduce"
	if len(cfg.Devices) == 0 {
		return nil, errorf(op, ErrInvalid, "the list of devices is empty")
	}
	if err := cfg.Options.Validate(); err != nil {
		return nil, err
	}
	c := &CollectiveAllReduce{options: cfg.Options, logger: cfg.Logger}
	for _, name := range cfg.Devices {
		d, err := CanonicalDevice(name)
		if err != nil {
			return nil, err
		}
		c.devices = append(c.devices, d)
	}
	return c, nil
}

// String returns "CollectiveAllReduce".
func (*CollectiveAllReduce) String() string { return "CollectiveAllReduce" }

// Close frees the communicators.
func (c *CollectiveAllReduce) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.group == nil {
		return nil
	}
	group := c.group
	c.group = nil
	return group.Close()
}

// BatchReduce implements [CrossDeviceOps]. Values that have not one component per device, and IndexedSlices, are
// reduced on the host.
func (c *CollectiveAllReduce) BatchReduce(ctx context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	opts = c.options.Merge(opts)
	return reduceEach(c.String(), op, batch, func(_ int, ts []*tensor.Tensor) (*tensor.Tensor, error) {
		if len(ts) != len(c.devices) || len(ts) == 1 {
			return addTree(ts, opts.Accumulate), nil
		}
		return c.add(ctx, ts, opts)
	})
}

// add sums one tensor of each rank by a collective call.
func (c *CollectiveAllReduce) add(ctx context.Context, ts []*tensor.Tensor, opts Options) (*tensor.Tensor, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return nil, err
	}
	sum := tensor.New(ts[0].DType(), ts[0].Shape()...)
	o := opts.collective()
	manifest := collective.Manifest{Shape: ts[0].Shape()}
	calls := make([]collective.Call, len(ts))
	for i, t := range ts {
		calls[i] = collective.Call{
			Op: collective.AllReduce, Reduce: Sum, Type: t.DType(),
			Src: t.Memory(), Dst: sum.Memory(), Manifest: &manifest, Options: &o,
		}
	}
	if err := c.group.DoAll(ctx, calls); err != nil {
		return nil, err
	}
	return sum, nil
}

// open makes the communicators on first use, and new ones after a failure.
func (c *CollectiveAllReduce) open(ctx context.Context) error {
	var err error
	switch {
	case c.group == nil:
		c.group, err = collective.Open(mem.New(len(c.devices)), collective.Config{Timeout: c.options.Timeout, Logger: c.logger, Name: "cross-replica"})
	case c.group.Local()[0].Err() != nil:
		c.group, err = c.group.Rebuild(context.WithoutCancel(ctx))
	}
	return err
}

// reduceEach reduces a batch value by value: dense tensors by add, which gets the index in the batch, everything else and
// the division by the rules that all CrossDeviceOps share.
func reduceEach(name string, op ReduceOp, batch []Reduction, add func(i int, ts []*tensor.Tensor) (*tensor.Tensor, error)) ([]Value, error) {
	out := make([]Value, len(batch))
	for i, b := range batch {
		ts, dense, err := denseOperands(name, b.Value.values)
		if err != nil {
			return nil, err
		}
		n := len(b.Value.values)
		switch {
		case n == 1:
			leaf, err := operand(b.Value.values[0])
			if err != nil {
				return nil, errorf(name, ErrInvalid, "%w", err)
			}
			if op == Mean && !isOn(leaf, b.To) {
				if leaf, err = meanOf(name, leaf, 1); err != nil {
					return nil, err
				}
			}
			out[i] = place(leaf, b.To)
		case dense:
			sum, err := add(i, ts)
			if err != nil {
				return nil, errorf(name, nil, "%w", err)
			}
			if op == Mean {
				sum = divide(sum, n)
			}
			out[i] = place(sum, b.To)
		default:
			slices, err := concatSlices(name, b.Value.values)
			if err != nil {
				return nil, err
			}
			leaf := Value(slices)
			if op == Mean {
				if leaf, err = meanOf(name, slices, n); err != nil {
					return nil, err
				}
			}
			out[i] = place(leaf, b.To)
		}
	}
	return out, nil
}

// meanOf returns the sum of n components divided by their number.
func meanOf(name string, sum Value, n int) (Value, error) {
	if d := dtypeOf(sum); !d.IsNumeric() {
		return nil, badDType(name, d)
	}
	if s, ok := sum.(*tensor.IndexedSlices); ok {
		mean := *s
		mean.Values = divide(s.Values, n)
		return &mean, nil
	}
	return divide(sum.(*tensor.Tensor), n), nil
}

// isOn reports whether a value is where its reduction goes, and nowhere else. A single component that is there stays as it
// is, also as the mean of an integer; TensorFlow has it so.
func isOn(v Value, to []Device) bool {
	d, ok := DeviceOf(v)
	return ok && len(to) == 1 && d.Kind == to[0].Kind && d.Index == to[0].Index
}

// addTree returns the sum of tensors of one dtype and shape along the canonical tree.
func addTree(ts []*tensor.Tensor, acc collective.Accumulate) *tensor.Tensor {
	sum := tensor.New(ts[0].DType(), ts[0].Shape()...)
	addRange(sum, ts, 0, sum.Len(), acc == collective.AccumulateFloat32)
	return sum
}

func addRange(sum *tensor.Tensor, ts []*tensor.Tensor, lo, hi int, wide bool) {
	if lo >= hi {
		return
	}
	src := make([]unsafe.Pointer, len(ts))
	for i, t := range ts {
		src[i] = t.Memory().Ptr
	}
	tree := kernel.Tree{Op: kernel.Sum, Type: sum.DType(), Float32: wide}
	tree.Reduce(kernel.NewScratch(len(ts)), []unsafe.Pointer{sum.Memory().Ptr}, src, lo, hi)
}
