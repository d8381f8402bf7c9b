package kernel

import (
	"math/bits"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
)

// blockBytes is how much of each vector is combined at a time, so that partial sums, and the result while it is copied
// to the other destinations, stay in the first-level cache.
const blockBytes = 8192

// streamBytes is the same for destinations that are written with streaming stores. It is smaller, so that the processor
// reads the next block while it still writes this one; with larger ones the two take turns, at three quarters of the
// speed.
const streamBytes = 2048

// Tree combines vectors along the canonical tree: level by level neighbours 2j and 2j+1 are combined, the lower always
// the left operand; an odd one out passes up unchanged. Put the other way round: the tree of n vectors is the tree of
// the first 2^k combined with the tree of the rest, where 2^k is the largest power of two below n.
type Tree struct {
	Op      Op
	Type    tensor.DType // of the elements of sources and destinations
	Float32 bool         // float16 and bfloat16: keep partial results in float32 and round once, at the end
	Divide  int          // divide the result by this number (floating-point types only); 0 and 1: do not
	Stream  bool         // write the destinations with streaming stores, as [Stream] does, unless they are sources
}

// Scratch is the memory for the partial results of one [Tree.Reduce] at a time.
type Scratch struct {
	blocks [][blockBytes / 8]uint64
}

// NewScratch returns scratch memory for trees over at most n sources.
func NewScratch(n int) *Scratch {
	return &Scratch{blocks: make([][blockBytes / 8]uint64, bits.Len(uint(n))+2)}
}

// Reduce sets the elements [lo, hi) of every dst to the combination of those elements of every src, in the order of
// src. A dst may be one of the sources; two of dst may be the same. It panics if src or dst is empty.
func (t Tree) Reduce(s *Scratch, dst, src []unsafe.Pointer, lo, hi int) {
	size := t.Type.Bytes()
	r := reducer{src: src, scratch: s.blocks}
	wide := t.Float32 && isHalf(t.Type)
	if wide {
		r.loops = pick(t.Op, tensor.Float32)
	} else {
		r.loops = pick(t.Op, t.Type)
	}
	block := blockBytes
	if t.Stream {
		block = streamBytes
	}
	step := block / size
	if wide {
		step = block / 4
	}
	for at := lo; at < hi; at += step {
		r.offset, r.count = at*size, min(step, hi-at)
		first := unsafe.Add(dst[0], r.offset)
		if t.Stream {
			first = r.block(len(s.blocks) - 1) // no tree needs that one
		}
		switch {
		case wide:
			sum := r.block(0)
			r.wide(t.Type, sum, 0, len(src), 1)
			if t.Divide > 1 {
				divide[float32](sum, sum, r.count, t.Divide)
			}
			narrow(t.Type, first, sum, r.count)
		default:
			r.root(first, size)
			if t.Divide > 1 {
				Scale(t.Type, first, first, r.count, t.Divide)
			}
		}
		if t.Stream {
			r.stream(dst, first, size)
			continue
		}
		for _, d := range dst[1:] {
			move(unsafe.Add(d, r.offset), first, r.count*size)
		}
	}
	if t.Stream {
		fenceFast()
	}
}

// reducer combines count elements that lie offset bytes into each source.
type reducer struct {
	*loops
	src     []unsafe.Pointer
	offset  int
	count   int
	scratch [][blockBytes / 8]uint64
}

// stream writes the result to all destinations. The lines of one that is a source are in the cache already: there they
// are written faster.
func (r *reducer) stream(dst []unsafe.Pointer, result unsafe.Pointer, size int) {
	for _, d := range dst {
		to := unsafe.Add(d, r.offset)
		if slices.Contains(r.src, d) {
			move(to, result, r.count*size)
		} else {
			streamLines(to, result, r.count*size)
		}
	}
}

func (r *reducer) leaf(i int) unsafe.Pointer  { return unsafe.Add(r.src[i], r.offset) }
func (r *reducer) block(i int) unsafe.Pointer { return unsafe.Pointer(&r.scratch[i]) }

// root writes the tree over all sources to out. Only the last loop writes there, because out may be a source.
func (r *reducer) root(out unsafe.Pointer, size int) {
	n := len(r.src)
	switch {
	case n == 1:
		move(out, r.leaf(0), r.count*size)
	case n <= 4:
		r.small(out, 0, n)
	default:
		left := split(n)
		r.node(r.block(0), 0, left, 1)
		r.two(out, r.block(0), r.right(left, n-left, 1), r.count)
	}
}

// node writes the tree over n sources, two at least, from lo on to the block out; blocks from free on are unused.
func (r *reducer) node(out unsafe.Pointer, lo, n, free int) {
	if n <= 4 {
		r.small(out, lo, n)
		return
	}
	left := split(n)
	r.node(out, lo, left, free)
	r.two(out, out, r.right(lo+left, n-left, free), r.count)
}

// right returns where the tree over n sources from lo on lies: a source itself, or a block filled with it.
func (r *reducer) right(lo, n, free int) unsafe.Pointer {
	if n == 1 {
		return r.leaf(lo)
	}
	r.node(r.block(free), lo, n, free+1)
	return r.block(free)
}

// small writes the tree over 2, 3 or 4 sources to out, which may be one of them.
func (r *reducer) small(out unsafe.Pointer, lo, n int) {
	switch n {
	case 2:
		r.two(out, r.leaf(lo), r.leaf(lo+1), r.count)
	case 3:
		r.three(out, r.leaf(lo), r.leaf(lo+1), r.leaf(lo+2), r.count)
	case 4:
		r.four(out, r.leaf(lo), r.leaf(lo+1), r.leaf(lo+2), r.leaf(lo+3), r.count)
	}
}

// wide writes the tree over n sources of half width from lo on, in float32, to the block out.
func (r *reducer) wide(t tensor.DType, out unsafe.Pointer, lo, n, free int) {
	if n == 1 {
		widen(t, out, r.leaf(lo), r.count)
		return
	}
	left := split(n)
	r.wide(t, out, lo, left, free)
	r.wide(t, r.block(free), lo+left, n-left, free+1)
	r.two(out, out, r.block(free), r.count)
}

// split returns how many of n vectors, two at least, stand left of the topmost combination: the largest power of two
// below n.
func split(n int) int { return 1 << (bits.Len(uint(n-1)) - 1) }
