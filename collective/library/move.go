package library

import (
	"fmt"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// pieceMax is how many elements of a vector are transferred at once: libraries count in 32 bits, and the
// staging buffer must have room.
const pieceMax = 1 << 26

// move executes a collective on which all ranks agree.
func (t *team) move(w *wait, r *round) error {
	t.stage.reset()
	c, count := r.calls[0], w.Count
	switch c.Op {
	case collective.Barrier:
		return nil // the comparison of the calls was the barrier
	case collective.AllReduce, collective.Reduce:
		return t.pieces(count, func(lo, hi int) error { return t.reduce(w, r, lo, hi) })
	case collective.Broadcast:
		return t.pieces(count, func(lo, hi int) error { return t.broadcast(w, r, lo, hi) })
	case collective.ReduceScatter:
		return t.reduceScatter(w, r)
	case collective.AllGather, collective.Gather:
		return t.gather(w, r)
	case collective.Scatter:
		return t.scatter(w, r)
	case collective.AllToAll:
		return t.allToAll(w, r)
	}
	return fmt.Errorf("%v is not a collective", c.Op)
}

// pieces calls one for each piece of a vector.
func (t *team) pieces(count int, one func(lo, hi int) error) error {
	for lo := 0; lo < count; lo += pieceMax {
		if err := one(lo, min(count, lo+pieceMax)); err != nil {
			return err
		}
		t.stage.reset()
	}
	return nil
}

// wideType is the type in which elements are added.
func wideType(d tensor.DType) tensor.DType {
	if d == tensor.Float16 || d == tensor.BFloat16 {
		return tensor.Float32
	}
	return d
}

// word returns an unsigned integer type of an element's size, as which elements are transferred, and how many
// of them make an element.
func word(d tensor.DType) tensor.DType {
	return [...]tensor.DType{1: tensor.Uint8, 2: tensor.Uint16, 4: tensor.Uint32, 8: tensor.Uint64}[d.Bytes()]
}

var kernelOps = [...]kernel.Op{
	collective.Sum: kernel.Sum, collective.Mean: kernel.Sum,
	collective.Min: kernel.Min, collective.Max: kernel.Max, collective.Prod: kernel.Prod,
}

// added returns the sum of the local ranks' elements lo to hi, in the wide type.
func (t *team) added(r *round, lo, hi int) []byte {
	c := r.calls[0]
	wide, n := wideType(c.Type), hi-lo
	srcs := make([]unsafe.Pointer, len(r.calls))
	for i, call := range r.calls {
		srcs[i] = at(call.Src.Ptr, lo*c.Type.Bytes())
		if wide != c.Type || len(r.calls) == 1 {
			copied := start(t.stage.take(n * wide.Bytes()))
			kernel.Convert(wide, c.Type, copied, srcs[i], n)
			srcs[i] = copied
		}
	}
	if len(srcs) == 1 {
		return unsafe.Slice((*byte)(srcs[0]), n*wide.Bytes())
	}
	sum := t.stage.take(n * wide.Bytes())
	tree := kernel.Tree{Op: kernelOps[c.Reduce], Type: wide}
	tree.Reduce(kernel.NewScratch(len(srcs)), []unsafe.Pointer{start(sum)}, srcs, 0, n)
	return sum
}

// operator returns the driver's reduction.
func operator(c *collective.Call) collective.ReduceOp {
	if c.Reduce == collective.Mean {
		return collective.Sum
	}
	return c.Reduce
}

// finish divides a sum of n elements if the call is a Mean, and stores it.
func (t *team) finish(c *collective.Call, sum, to unsafe.Pointer, n int) {
	wide := wideType(c.Type)
	if c.Reduce == collective.Mean && t.size > 1 {
		kernel.Scale(wide, sum, sum, n, t.size)
	}
	kernel.Convert(c.Type, wide, to, sum, n)
}

func (t *team) reduce(w *wait, r *round, lo, hi int) error {
	c, n := r.calls[0], hi-lo
	sum := t.added(r, lo, hi)
	if len(t.ranks) > 1 {
		in := sum
		sum = t.stage.take(len(in))
		o := Operation{Op: c.Op, Reduce: operator(c), Type: wideType(c.Type), Src: start(in), Dst: start(sum), Count: n}
		if c.Op == collective.Reduce {
			o.Root = t.at[c.Root].process
		}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	var first unsafe.Pointer
	for i, call := range r.calls {
		if c.Op == collective.Reduce && t.members[i].rank != c.Root {
			continue
		}
		to := at(call.Dst.Ptr, lo*c.Type.Bytes())
		if first == nil {
			t.finish(c, start(sum), to, n)
			first = to
		} else if to != first {
			kernel.Convert(c.Type, c.Type, to, first, n)
		}
	}
	return nil
}

func (t *team) broadcast(w *wait, r *round, lo, hi int) error {
	c := r.calls[0]
	size := c.Type.Bytes()
	data := t.stage.take((hi - lo) * size)
	root := t.at[c.Root]
	if root.process == t.driver.Rank() {
		copy(data, r.calls[root.local].Src.HostBytes()[lo*size:hi*size])
	}
	if len(t.ranks) > 1 {
		o := Operation{Op: c.Op, Type: word(c.Type), Dst: start(data), Count: hi - lo, Root: root.process}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	for _, call := range r.calls {
		copy(call.Dst.HostBytes()[lo*size:hi*size], data)
	}
	return nil
}

// parts returns the byte range of each rank's part in a vector ordered by rank, and the number of elements of
// each process's ranks together.
func (t *team) parts(c *collective.Call, count int) (part []span, ofProcess []int) {
	problem := plan.Problem{Size: t.size, Count: count, Counts: c.Counts}
	part, ofProcess = make([]span, t.size), make([]int, len(t.ranks))
	for r := range part {
		lo, hi := problem.Part(r)
		ofProcess[t.at[r].process] += hi - lo
		part[r] = span{lo * c.Type.Bytes(), hi * c.Type.Bytes()}
	}
	return part, ofProcess
}

// span is bytes [lo, hi).
type span struct{ lo, hi int }

// byProcess calls f for each rank, process by process, with the range of its part in a vector in that order.
func (t *team) byProcess(part []span, f func(rank int, in span)) {
	at := 0
	for _, own := range t.ranks {
		for _, r := range own {
			n := part[r].hi - part[r].lo
			f(r, span{at, at + n})
			at += n
		}
	}
}

func (t *team) reduceScatter(w *wait, r *round) error {
	c, count := r.calls[0], w.Count
	sum := t.added(r, 0, count)
	wide := wideType(c.Type).Bytes()
	part, counts := t.parts(c, count)
	for i := range part { // of the wide type
		part[i] = span{part[i].lo / c.Type.Bytes() * wide, part[i].hi / c.Type.Bytes() * wide}
	}
	mine := sum
	if len(t.ranks) > 1 {
		in := t.stage.take(len(sum))
		t.byProcess(part, func(rank int, to span) { copy(in[to.lo:to.hi], sum[part[rank].lo:part[rank].hi]) })
		mine = t.stage.take(counts[t.driver.Rank()] * wide)
		o := Operation{Op: c.Op, Reduce: operator(c), Type: wideType(c.Type), Src: start(in), Dst: start(mine), Out: counts}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	lo := 0
	for i, m := range t.members {
		n := part[m.rank].hi - part[m.rank].lo
		if n > 0 {
			t.finish(c, start(mine[lo:]), r.calls[i].Dst.Ptr, n/wide)
		}
		lo += n
	}
	return nil
}

func (t *team) gather(w *wait, r *round) error {
	c, count := r.calls[0], w.Count
	part, counts := t.parts(c, count)
	var all []byte
	if c.Op == collective.AllGather || t.at[c.Root].process == t.driver.Rank() {
		all = t.stage.take(count * c.Type.Bytes())
	}
	in := all
	if len(t.ranks) > 1 {
		in = t.stage.take(counts[t.driver.Rank()] * c.Type.Bytes())
	}
	lo := 0
	for i, m := range t.members {
		n := part[m.rank].hi - part[m.rank].lo
		copy(in[lo:lo+n], r.calls[i].Src.HostBytes()) // without elements there is no memory
		lo += n
	}
	if len(t.ranks) > 1 {
		o := Operation{Op: c.Op, Type: word(c.Type), Src: start(in), Dst: start(all), In: counts}
		if c.Op == collective.Gather {
			o.Root = t.at[c.Root].process
		}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	for i, call := range r.calls {
		if c.Op == collective.Gather && t.members[i].rank != c.Root {
			continue
		}
		dst := call.Dst.HostBytes()
		t.byProcess(part, func(rank int, from span) { copy(dst[part[rank].lo:part[rank].hi], all[from.lo:from.hi]) })
	}
	return nil
}

func (t *team) scatter(w *wait, r *round) error {
	c, count := r.calls[0], w.Count
	part, counts := t.parts(c, count)
	root := t.at[c.Root]
	var all []byte
	if root.process == t.driver.Rank() {
		src := r.calls[root.local].Src.HostBytes()
		all = t.stage.take(count * c.Type.Bytes())
		t.byProcess(part, func(rank int, to span) { copy(all[to.lo:to.hi], src[part[rank].lo:part[rank].hi]) })
	}
	mine := all
	if len(t.ranks) > 1 {
		mine = t.stage.take(counts[t.driver.Rank()] * c.Type.Bytes())
		o := Operation{Op: c.Op, Type: word(c.Type), Src: start(all), Dst: start(mine), Out: counts, Root: root.process}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	for i, m := range t.members {
		n := part[m.rank].hi - part[m.rank].lo
		copy(r.calls[i].Dst.HostBytes(), mine[:n])
		mine = mine[n:]
	}
	return nil
}

// allToAll: the message from one process to another holds, for each rank of the sender, its block for each
// rank of the receiver.
func (t *team) allToAll(w *wait, r *round) error {
	c := r.calls[0]
	block := w.Count / t.size
	bytes := block * c.Type.Bytes()
	own := len(t.members)
	in, counts := t.stage.take(own*t.size*bytes), make([]int, len(t.ranks))
	lo := 0
	for p, theirs := range t.ranks {
		counts[p] = own * len(theirs) * block
		for _, call := range r.calls {
			for _, to := range theirs {
				lo += copy(in[lo:], call.Src.HostBytes()[to*bytes:(to+1)*bytes])
			}
		}
	}
	out := in
	if len(t.ranks) > 1 {
		out = t.stage.take(len(in))
		o := Operation{Op: c.Op, Type: word(c.Type), Src: start(in), Dst: start(out), Out: counts, In: counts}
		if err := t.run(w, o); err != nil {
			return err
		}
	}
	lo = 0
	for _, theirs := range t.ranks {
		for _, from := range theirs {
			for _, call := range r.calls {
				lo += copy(call.Dst.HostBytes()[from*bytes:(from+1)*bytes], out[lo:])
			}
		}
	}
	return nil
}

// at returns a pointer advanced by this many bytes.
func at(p unsafe.Pointer, bytes int) unsafe.Pointer {
	if p == nil || bytes == 0 {
		return p
	}
	return unsafe.Add(p, bytes)
}
