package distribute

import (
	"context"
	"log/slog"
	"sync"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/twolevel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// HierarchicalCopyAllReduce adds in two levels (TensorFlow's HierarchicalCopyAllReduce): the components of nearby
// devices first, then the groups' sums. A batch is concatenated and cut into packs of equal length, which are added
// in parallel.
type HierarchicalCopyAllReduce struct {
	packs  int
	groups func([]Device) []int // of each device
}

// NewHierarchicalCopyAllReduce returns the operations with the given number of packs. TensorFlow's default is
// 1; 0 reduces one value after the other. [DeviceGroups] decides which devices are nearby.
func NewHierarchicalCopyAllReduce(packs int) (HierarchicalCopyAllReduce, error) {
	if packs < 0 {
		return HierarchicalCopyAllReduce{}, errorf("NewHierarchicalCopyAllReduce", ErrInvalid,
			"HierarchicalCopy requires num_packs >= 0, but %d is specified", packs)
	}
	return HierarchicalCopyAllReduce{packs, DeviceGroups}, nil
}

// WithGroups returns the same operations with another grouping of the devices: groups returns the group of each
// of a value's devices, by replica.
func (h HierarchicalCopyAllReduce) WithGroups(groups func([]Device) []int) HierarchicalCopyAllReduce {
	h.groups = groups
	return h
}

// Packs returns the number of packs.
func (h HierarchicalCopyAllReduce) Packs() int { return h.packs }

// String returns "HierarchicalCopyAllReduce".
func (HierarchicalCopyAllReduce) String() string { return "HierarchicalCopyAllReduce" }

// BatchReduce implements [CrossDeviceOps]. A group adds the subtrees of the canonical tree whose leaves are all
// in the group, so every grouping of any number of devices gives the same bits.
func (h HierarchicalCopyAllReduce) BatchReduce(
	_ context.Context, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	return reduceInPacks(h.String(), h.packs, h.groups, op, batch, opts)
}

// NcclAllReduce takes the place of TensorFlow's reduction by NVIDIA's NCCL. It does not use NCCL: it adds on
// the CPU, in packs, and logs that once.
type NcclAllReduce struct {
	packs  int
	logger *slog.Logger
	warned *sync.Once
}

// NewNcclAllReduce returns the operations with the given number of packs. TensorFlow's default is 1; 0 reduces
// one value after the other. A nil logger is slog.Default().
func NewNcclAllReduce(packs int, logger *slog.Logger) (NcclAllReduce, error) {
	if packs < 0 {
		return NcclAllReduce{}, errorf("NewNcclAllReduce", ErrInvalid,
			"NCCL all-reduce requires num_packs >= 0, but %d is specified", packs)
	}
	return NcclAllReduce{packs, logger, &sync.Once{}}, nil
}

// Packs returns the number of packs.
func (n NcclAllReduce) Packs() int { return n.packs }

// String returns "NcclAllReduce".
func (NcclAllReduce) String() string { return "NcclAllReduce" }

// BatchReduce implements [CrossDeviceOps].
func (n NcclAllReduce) BatchReduce(_ context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	if n.warned != nil {
		n.warned.Do(func() {
			logger := n.logger
			if logger == nil {
				logger = slog.Default()
			}
			logger.Warn("distribute: NCCL is not available; the processor adds instead", "operations", n.String())
		})
	}
	together := func(devices []Device) []int { return make([]int, len(devices)) }
	return reduceInPacks(n.String(), n.packs, together, op, batch, opts)
}

// reduceInPacks adds a batch in packs, each in two levels.
func reduceInPacks(
	name string, packs int, groups func([]Device) []int, op ReduceOp, batch []Reduction, opts Options,
) ([]Value, error) {
	sums := map[int]*tensor.Tensor{}
	var work []twolevel.Sum
	for i, b := range batch {
		ts, allDense, err := denseOperands(name, b.Value.values)
		if err != nil {
			return nil, err
		}
		if allDense && len(ts) > 1 {
			devices, err := b.Value.destination(name)
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

// PackSizes returns the lengths of the parts into which TensorFlow's num_packs cuts a concatenated batch: n-1
// parts of total/n elements, and a last part with the rest. It is an error if n is less than 1.
func PackSizes(total, n int) ([]int, error) {
	if n <= 0 {
		return nil, errorf("PackSizes", ErrInvalid, "num_packs must be greater than zero, not %d", n)
	}
	return twolevel.Sizes(total, n), nil
}
