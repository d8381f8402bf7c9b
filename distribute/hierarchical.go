package distribute

import (
	"context"
	"log/slog"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/twolevel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// hierarchicalCopyAllReduce adds in two levels, first the components on nearby devices.
type hierarchicalCopyAllReduce struct {
	packs  int
	groups func([]device.Spec) []int // of each device
}

// NewHierarchicalCopyAllReduce returns operations that add in two levels, first on nearby devices, in so many packs
// (TensorFlow's HierarchicalCopyAllReduce). TensorFlow's default is 1; 0 reduces one value after the other. groups
// returns the group of each of a value's devices, by replica; nil is [device.Nearby].
func NewHierarchicalCopyAllReduce(packs int, groups func([]device.Spec) []int) (CrossDeviceOps, error) {
	if packs < 0 {
		return nil, errorf("NewHierarchicalCopyAllReduce", ErrInvalid,
			"HierarchicalCopy requires num_packs >= 0, but %d is specified", packs)
	}
	if groups == nil {
		groups = device.Nearby
	}
	return hierarchicalCopyAllReduce{packs, groups}, nil
}

// Packs returns the number of packs.
func (h hierarchicalCopyAllReduce) Packs() int { return h.packs }

// String returns "HierarchicalCopyAllReduce".
func (hierarchicalCopyAllReduce) String() string { return "HierarchicalCopyAllReduce" }

// BatchReduce implements [CrossDeviceOps]. A group adds the subtrees of the canonical tree whose leaves are all
// in the group, so every grouping of any number of devices gives the same bits.
func (h hierarchicalCopyAllReduce) BatchReduce(
	_ context.Context, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	return reduceInPacks(h.String(), h.packs, h.groups, op, batch, opts)
}

// ncclAllReduce adds on the CPU and logs that once.
type ncclAllReduce struct {
	packs  int
	logger *slog.Logger
	warned sync.Once
}

// NewNcclAllReduce returns operations that take the place of TensorFlow's NcclAllReduce, with so many packs. They add
// on the CPU, whether NCCL is installed or not, and log that once. TensorFlow's default is 1 pack; 0 reduces one value
// after the other. A nil logger is slog.Default().
func NewNcclAllReduce(packs int, logger *slog.Logger) (CrossDeviceOps, error) {
	if packs < 0 {
		return nil, errorf("NewNcclAllReduce", ErrInvalid, "NCCL all-reduce requires num_packs >= 0, but %d is specified",
			packs)
	}
	if logger == nil {
		logger = slog.Default()
	}
	return &ncclAllReduce{packs: packs, logger: logger}, nil
}

// Packs returns the number of packs.
func (n *ncclAllReduce) Packs() int { return n.packs }

// String returns "NcclAllReduce".
func (*ncclAllReduce) String() string { return "NcclAllReduce" }

// BatchReduce implements [CrossDeviceOps].
func (n *ncclAllReduce) BatchReduce(_ context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	n.warned.Do(func() {
		n.logger.Warn("distribute: NcclAllReduce adds on the CPU, whether NCCL is installed or not")
	})
	together := func(devices []device.Spec) []int { return make([]int, len(devices)) }
	return reduceInPacks(n.String(), n.packs, together, op, batch, opts)
}

// reduceInPacks adds a batch in packs, each in two levels.
func reduceInPacks(
	name string, packs int, groups func([]device.Spec) []int, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	sums := map[int]*tensor.Tensor{}
	var work []twolevel.Sum
	for i, b := range batch {
		ts, allDense, err := denseOperands(name, b.Values)
		if err != nil {
			return nil, err
		}
		if allDense && len(ts) > 1 {
			devices, err := devicesOf(name, b.Values)
			if err != nil {
				return nil, err
			}
			sums[i] = tensor.New(ts[0].DType(), ts[0].Shape()...)
			work = append(work, twolevel.Sum{To: sums[i], Of: ts, Group: groups(devices), Divide: dense.Divisor(op, ts)})
		}
	}
	twolevel.Add(work, packs, opts.Accumulate == collective.AccumulateFloat32)
	return reduceEach(name, op, batch, opts, false, func(i int, ts []*tensor.Tensor) (*tensor.Tensor, error) {
		if op == Mean && dense.Divisor(op, ts) == 1 {
			return dense.Divide(sums[i], len(ts)), nil
		}
		return sums[i], nil
	})
}
