package distribute

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

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
