// Package twolevel adds tensors in two levels: those of nearby devices first, then the sums of these groups.
package twolevel

import (
	"math/bits"
	"sync"
	"unsafe"

	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Sum is a sum of tensors of one dtype and shape.
type Sum struct {
	To     *tensor.Tensor   // gets the sum
	Of     []*tensor.Tensor // its terms, in the order of the replicas
	Group  []int            // of each of Of
	Divide int              // divisor of the sum, or 1
}

// Add computes sums along the canonical tree. It concatenates all sums and cuts them into packs of [Sizes], which are
// added in parallel; 0 packs are one. In each pack the groups add their own nodes of the tree in parallel; then the
// nodes above are added. So every grouping gives the same bits. wide keeps sums of half-precision numbers in float32
// until the end.
func Add(sums []Sum, packs int, wide bool) {
	var wait sync.WaitGroup
	for _, pack := range split(sums, packs) {
		wait.Go(func() {
			for _, part := range pack {
				part.add(wide)
			}
		})
	}
	wait.Wait()
}

// Sizes returns the lengths of n parts of total elements: n-1 parts of total/n elements, and a last part with the rest.
// It is an error if n is less than 1.
func Sizes(total, n int) ([]int, error) {
	if n <= 0 {
		return nil, kinds.Errorf(kinds.Invalid, "num_packs must be greater than zero, not %d", n)
	}
	sizes := make([]int, n)
	for i := range sizes {
		sizes[i] = total / n
	}
	sizes[n-1] = total - (n-1)*(total/n)
	return sizes, nil
}

// part is the range [lo, hi) of the elements of a sum.
type part struct {
	Sum
	lo, hi int
}

// split concatenates all sums and cuts them into n packs of [Sizes]; 0 makes one pack.
func split(sums []Sum, n int) [][]part {
	whole, total := make([]part, len(sums)), 0
	for i, s := range sums {
		whole[i] = part{s, 0, s.To.Len()}
		total += whole[i].hi
	}
	sizes, err := Sizes(total, n)
	if err != nil {
		return [][]part{whole}
	}
	packs, pack := make([][]part, n), 0
	for _, p := range whole {
		for p.lo < p.hi {
			for sizes[pack] == 0 {
				pack++
			}
			next := p
			next.hi = p.lo + min(p.hi-p.lo, sizes[pack])
			sizes[pack] -= next.hi - next.lo
			packs[pack] = append(packs[pack], next)
			p.lo = next.hi
		}
	}
	return packs
}

// add computes the part.
func (p part) add(wide bool) {
	if p.lo >= p.hi {
		return
	}
	t := &groupedTree{part: p, wide: wide, sums: map[[2]int]*tensor.Tensor{}}
	t.own(0, len(p.Of))
	var groups sync.WaitGroup
	for _, nodes := range t.nodes {
		groups.Go(func() {
			for _, n := range nodes {
				t.reduce(n)
			}
		})
	}
	groups.Wait()
	if top := t.combine(0, len(p.Of)); top != nil {
		t.round(top)
	}
}

// groupedTree is the canonical tree over a part's sources. A node whose leaves are all in one group is added by
// that group.
type groupedTree struct {
	part  part
	wide  bool // half-precision numbers stay float32 until the end
	nodes map[int][][2]int
	sums  map[[2]int]*tensor.Tensor // by node: its first leaf and its number of leaves
}

// own assigns each node whose leaves are all in one group to that group.
func (t *groupedTree) own(lo, n int) {
	group, same := t.part.Group[lo], true
	for _, g := range t.part.Group[lo : lo+n] {
		same = same && g == group
	}
	if !same {
		half := HalfTree(n)
		t.own(lo, half)
		t.own(lo+half, n-half)
		return
	}
	if t.nodes == nil {
		t.nodes = map[int][][2]int{}
	}
	node := [2]int{lo, n}
	t.nodes[group] = append(t.nodes[group], node)
	t.sums[node] = t.place(n == len(t.part.Of))
}

// HalfTree returns how many of n leaves are in the left subtree: the largest power of two below n.
func HalfTree(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }

// place returns the destination of a node's sum: the part's sum itself if it is the root.
func (t *groupedTree) place(root bool) *tensor.Tensor {
	p := t.part
	switch {
	case t.isWide() && !root:
		return tensor.New(tensor.Float32, p.hi-p.lo)
	case root:
		return dense.Slice(p.To, p.lo, p.hi)
	}
	return tensor.New(p.To.DType(), p.hi-p.lo)
}

func (t *groupedTree) isWide() bool {
	d := t.part.To.DType()
	return t.wide && (d == tensor.Float16 || d == tensor.BFloat16)
}

// reduce adds the leaves of a node.
func (t *groupedTree) reduce(node [2]int) {
	leaves := make([]*tensor.Tensor, node[1])
	for i := range leaves {
		leaves[i] = dense.Slice(t.part.Of[node[0]+i], t.part.lo, t.part.hi)
	}
	out := t.sums[node]
	if out.DType() == leaves[0].DType() {
		by := 1
		if node[1] == len(t.part.Of) {
			by = t.part.Divide
		}
		dense.AddRange(out, leaves, 0, out.Len(), t.wide, by)
		return
	}
	for i, leaf := range leaves { // the sum is float32, and so must be its inputs
		leaves[i] = tensor.New(out.DType(), leaf.Len())
		kernel.Convert(out.DType(), leaf.DType(), leaves[i].Memory().Ptr, leaf.Memory().Ptr, leaf.Len())
	}
	dense.AddRange(out, leaves, 0, out.Len(), false, 1)
}

// combine returns the sum of a node whose leaves are in several groups, or nil if it is the root and already in
// place.
func (t *groupedTree) combine(lo, n int) *tensor.Tensor {
	if sum, ok := t.sums[[2]int{lo, n}]; ok {
		if n == len(t.part.Of) {
			return nil
		}
		return sum
	}
	half := HalfTree(n)
	left, right := t.combine(lo, half), t.combine(lo+half, n-half)
	kernel.Reduce(kernel.Sum, left.DType(), left.Memory().Ptr, left.Memory().Ptr, right.Memory().Ptr, left.Len())
	return left
}

// round divides the root's sum and stores it in the part's sum.
func (t *groupedTree) round(top *tensor.Tensor) {
	p := t.part
	if p.Divide > 1 {
		kernel.Scale(top.DType(), top.Memory().Ptr, top.Memory().Ptr, top.Len(), p.Divide)
	}
	at := unsafe.Add(p.To.Memory().Ptr, p.lo*p.To.DType().Bytes())
	kernel.Convert(p.To.DType(), top.DType(), at, top.Memory().Ptr, top.Len())
}
