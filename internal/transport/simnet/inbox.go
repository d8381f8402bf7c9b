package simnet

import "slices"

// inbox holds the frames that have arrived at an endpoint. It has an entry for each sender whose frames wait, ordered
// by rank: ranks that do not communicate take no memory.
type inbox []waiting

// waiting are the frames of one sender, in order.
type waiting struct {
	from   int
	frames []*flight
}

// find returns the place of a sender's entry, and whether it exists.
func (b inbox) find(from int) (int, bool) {
	return slices.BinarySearchFunc(b, from, func(w waiting, from int) int { return w.from - from })
}

// first returns the first frame of a sender, or nil.
func (b inbox) first(from int) *flight {
	if i, ok := b.find(from); ok {
		return b[i].frames[0]
	}
	return nil
}

// next returns the first sender after one whose frames wait, or -1.
func (b inbox) next(after int) int {
	if i, _ := b.find(after + 1); i < len(b) {
		return b[i].from
	}
	return -1
}

func (b *inbox) add(f *flight) {
	i, ok := b.find(f.from.rank)
	if !ok {
		*b = slices.Insert(*b, i, waiting{from: f.from.rank})
	}
	w := &(*b)[i]
	w.frames = append(w.frames, f)
}

// take removes the first frame of a sender, which must exist.
func (b *inbox) take(from int) *flight {
	i, _ := b.find(from)
	w := &(*b)[i]
	f := w.frames[0]
	if w.frames = slices.Delete(w.frames, 0, 1); len(w.frames) == 0 {
		*b = slices.Delete(*b, i, i+1)
	}
	return f
}
