package executor

import (
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
)

// combine combines the operands of some ranks of the domain.
func (x *Executor) combine(s *plan.Step) error {
	n := s.In.Hi - s.In.Lo
	if n == 0 {
		return nil
	}
	x.in, x.out = x.in[:0], x.out[:0]
	for r := s.Ranks.Lo; r < s.Ranks.Hi; r++ {
		v := x.of(r, &s.In)
		if r == x.rank && s.Own.Hi > s.Own.Lo {
			v = x.own(&s.Own)
		}
		x.in = append(x.in, v)
	}
	if s.To >= 0 {
		x.out = append(x.out, x.of(s.To, &s.Out))
	} else {
		for _, r := range x.Domain {
			if v := x.of(r, &s.Out); !slices.Contains(x.out, v) {
				x.out = append(x.out, v)
			}
		}
	}
	if s.Keep.Hi > s.Keep.Lo {
		x.out = append(x.out, x.own(&s.Keep))
	}
	tree := kernel.Tree{Op: x.op, Type: x.in[0].t}
	if x.mean && s.Ranks.Lo == 0 && s.Ranks.Hi == x.size {
		tree.Divide = x.size
	}
	other := func(v vector) bool { return v.t != tree.Type }
	var err error
	if slices.ContainsFunc(x.in, other) || slices.ContainsFunc(x.out, other) {
		tree.Type = x.call.Partial
		err = x.convertAndReduce(tree, n)
	} else {
		tree.Float32 = x.call.Partial != tree.Type
		tree.Stream = x.streams(&s.Out)
		err = x.reduceTree(tree, n)
	}
	clear(x.in)
	clear(x.out)
	return err
}

// reduceTree reduces n elements of one type, segment by segment.
func (x *Executor) reduceTree(tree kernel.Tree, n int) error {
	x.src, x.dst = x.src[:0], x.dst[:0]
	for _, v := range x.in {
		x.src = append(x.src, v.p)
	}
	for _, v := range x.out {
		x.dst = append(x.dst, v.p)
	}
	err := x.segments(n, tree.Type.Bytes(), func(lo, hi int) { x.reduceSources(tree, lo, hi) })
	clear(x.src)
	clear(x.dst)
	return err
}

// blockElements is how many elements of each rank are converted at once.
const blockElements = 1024

// convertAndReduce reduces n elements that do not all have the type of partial sums: it converts them block by
// block, reduces them, and converts the result.
func (x *Executor) convertAndReduce(tree kernel.Tree, n int) error {
	size := tree.Type.Bytes()
	base := x.memory.blocks.of((len(x.in) + 1) * blockElements * size)
	x.src, x.dst = x.src[:0], append(x.dst[:0], base)
	for i := range x.in {
		x.src = append(x.src, unsafe.Add(base, (i+1)*blockElements*size))
	}
	return x.segments(n, size, func(lo, hi int) {
		for ; lo < hi; lo += blockElements {
			count := min(blockElements, hi-lo)
			for i, v := range x.in {
				kernel.Convert(tree.Type, v.t, x.src[i], v.at(lo), count)
			}
			x.reduceSources(tree, 0, count)
			for _, v := range x.out {
				kernel.Convert(v.t, tree.Type, v.at(lo), base, count)
			}
		}
	})
}
