package distribute

import (
	"context"
	"log/slog"
	"math/bits"
	"sync"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// HierarchicalCopyAllReduce adds in two levels: the components of nearby devices first, then the groups' sums.
// A batch is concatenated and cut into packs of equal length, which are added in parallel.
type HierarchicalCopyAllReduce struct {
	packs  int
	groups func([]Device) []int // of each device
}

// NewHierarchicalCopyAllReduce returns the operations with the given number of packs. TensorFlow's default is
// 1; 0 reduces one value after the other. [DeviceGroups] decides which devices are nearby.
func NewHierarchicalCopyAllReduce(packs int) (HierarchicalCopyAllReduce, error) {
	if packs < 0 {
		return HierarchicalCopyAllReduce{}, errorf("NewHierarchicalCopyAllReduce", ErrInvalid, "HierarchicalCopy requires num_packs >= 0, but %d is specified", packs)
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
func (h HierarchicalCopyAllReduce) BatchReduce(_ context.Context, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
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
		return NcclAllReduce{}, errorf("NewNcclAllReduce", ErrInvalid, "NCCL all-reduce requires num_packs >= 0, but %d is specified", packs)
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
func reduceInPacks(name string, packs int, groups func([]Device) []int, op ReduceOp, batch []Reduction, opts Options) ([]Value, error) {
	sums := map[int]*tensor.Tensor{}
	var work []packPart
	for i, b := range batch {
		ts, dense, err := denseOperands(name, b.Value.values)
		if err != nil {
			return nil, err
		}
		if dense && len(ts) > 1 {
			devices, err := b.Value.destination(name)
			if err != nil {
				return nil, err
			}
			sums[i] = tensor.New(ts[0].DType(), ts[0].Shape()...)
			work = append(work, packPart{sum: sums[i], src: ts, group: groups(devices), hi: ts[0].Len(), by: divisor(op, ts)})
		}
	}
	var wait sync.WaitGroup
	for _, pack := range splitPacks(work, packs) {
		wait.Go(func() {
			for _, part := range pack {
				part.add(opts.Accumulate == collective.AccumulateFloat32)
			}
		})
	}
	wait.Wait()
	return reduceEach(name, op, batch, opts, false, func(i int, ts []*tensor.Tensor) (*tensor.Tensor, error) {
		if op == Mean && divisor(op, ts) == 1 {
			return divide(sums[i], len(ts)), nil
		}
		return sums[i], nil
	})
}

// divisor returns the divisor to apply to a sum in place, or none if the quotient has another dtype.
func divisor(op ReduceOp, ts []*tensor.Tensor) int {
	if op == Mean && ts[0].DType().IsFloat() {
		return len(ts)
	}
	return 1
}

// packPart is a range [lo, hi) of the elements of one value's sum.
type packPart struct {
	sum    *tensor.Tensor
	src    []*tensor.Tensor
	group  []int // of each src
	lo, hi int
	by     int // divisor of the sum
}

// PackSizes returns the lengths of the parts into which TensorFlow's num_packs cuts a concatenated batch: n-1
// parts of total/n elements, and a last part with the rest. It is an error if n is less than 1.
func PackSizes(total, n int) ([]int, error) {
	if n <= 0 {
		return nil, errorf("PackSizes", ErrInvalid, "num_packs must be greater than zero, not %d", n)
	}
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = total / n
	}
	sizes[n-1] = total - (n-1)*(total/n)
	return sizes, nil
}

// splitPacks concatenates all parts and cuts them into n packs of [PackSizes]; 0 makes one pack.
func splitPacks(parts []packPart, n int) [][]packPart {
	total := 0
	for _, p := range parts {
		total += p.hi
	}
	sizes, err := PackSizes(total, n)
	if err != nil {
		return [][]packPart{parts}
	}
	packs := make([][]packPart, n)
	pack := 0
	for _, p := range parts {
		for p.lo < p.hi {
			for sizes[pack] == 0 {
				pack++
			}
			cut := p
			cut.hi = p.lo + min(p.hi-p.lo, sizes[pack])
			sizes[pack] -= cut.hi - cut.lo
			packs[pack] = append(packs[pack], cut)
			p.lo = cut.hi
		}
	}
	return packs
}

// add sums the part. The groups add their own nodes of the canonical tree in parallel; then the nodes above are
// added.
func (p packPart) add(wide bool) {
	if p.lo >= p.hi {
		return
	}
	t := &groupedTree{part: p, wide: wide, sums: map[[2]int]*tensor.Tensor{}}
	t.own(0, len(p.src))
	var groups sync.WaitGroup
	for _, nodes := range t.nodes {
		groups.Go(func() {
			for _, n := range nodes {
				t.reduce(n)
			}
		})
	}
	groups.Wait()
	if top := t.combine(0, len(p.src)); top != nil {
		t.round(top)
	}
}

// groupedTree is the canonical tree over a part's sources. A node whose leaves are all in one group is added by
// that group.
type groupedTree struct {
	part  packPart
	wide  bool // half-precision numbers stay float32 until the end
	nodes map[int][][2]int
	sums  map[[2]int]*tensor.Tensor // by node: its first leaf and its number of leaves
}

// own assigns each node whose leaves are all in one group to that group.
func (t *groupedTree) own(lo, n int) {
	group, same := t.part.group[lo], true
	for _, g := range t.part.group[lo : lo+n] {
		same = same && g == group
	}
	if !same {
		half := halfTree(n)
		t.own(lo, half)
		t.own(lo+half, n-half)
		return
	}
	if t.nodes == nil {
		t.nodes = map[int][][2]int{}
	}
	node := [2]int{lo, n}
	t.nodes[group] = append(t.nodes[group], node)
	t.sums[node] = t.place(n == len(t.part.src))
}

// halfTree returns how many of n leaves are in the left subtree: the largest power of two below n.
func halfTree(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

// place returns the destination of a node's sum: the part's sum itself if it is the root.
func (t *groupedTree) place(root bool) *tensor.Tensor {
	p := t.part
	switch {
	case t.isWide() && !root:
		return tensor.New(tensor.Float32, p.hi-p.lo)
	case root:
		return sliceOf(p.sum, p.lo, p.hi)
	}
	return tensor.New(p.sum.DType(), p.hi-p.lo)
}

func (t *groupedTree) isWide() bool {
	d := t.part.sum.DType()
	return t.wide && (d == tensor.Float16 || d == tensor.BFloat16)
}

// sliceOf returns elements of a tensor as a vector that shares its memory.
func sliceOf(t *tensor.Tensor, lo, hi int) *tensor.Tensor {
	size := t.DType().Bytes()
	return tensor.Wrap(t.Memory().Slice(lo*size, hi*size), t.DType(), hi-lo)
}

// reduce adds the leaves of a node.
func (t *groupedTree) reduce(node [2]int) {
	leaves := make([]*tensor.Tensor, node[1])
	for i := range leaves {
		leaves[i] = sliceOf(t.part.src[node[0]+i], t.part.lo, t.part.hi)
	}
	out := t.sums[node]
	if out.DType() == leaves[0].DType() {
		by := 1
		if node[1] == len(t.part.src) {
			by = t.part.by
		}
		addRange(out, leaves, 0, out.Len(), t.wide, by)
		return
	}
	for i, leaf := range leaves { // the sum is float32, and so must be its inputs
		leaves[i] = tensor.New(out.DType(), leaf.Len())
		kernel.Convert(out.DType(), leaf.DType(), leaves[i].Memory().Ptr, leaf.Memory().Ptr, leaf.Len())
	}
	addRange(out, leaves, 0, out.Len(), false, 1)
}

// combine returns the sum of a node whose leaves are in several groups, or nil if it is the root and already in
// place.
func (t *groupedTree) combine(lo, n int) *tensor.Tensor {
	if sum, ok := t.sums[[2]int{lo, n}]; ok {
		if n == len(t.part.src) {
			return nil
		}
		return sum
	}
	half := halfTree(n)
	left, right := t.combine(lo, half), t.combine(lo+half, n-half)
	kernel.Reduce(kernel.Sum, left.DType(), left.Memory().Ptr, left.Memory().Ptr, right.Memory().Ptr, left.Len())
	return left
}

// round divides the root's sum and stores it in the part's sum.
func (t *groupedTree) round(top *tensor.Tensor) {
	p := t.part
	if p.by > 1 {
		kernel.Scale(top.DType(), top.Memory().Ptr, top.Memory().Ptr, top.Len(), p.by)
	}
	at := unsafe.Add(p.sum.Memory().Ptr, p.lo*p.sum.DType().Bytes())
	kernel.Convert(p.sum.DType(), top.DType(), at, top.Memory().Ptr, top.Len())
}
