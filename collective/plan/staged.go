package plan

import (
	"fmt"
	"iter"
	"time"
)

// staged is for ranks of one domain whose sources and destinations are private: they share data through their
// staging buffers, in windows.
//
// For a reduction each rank owns a slice of every window. It copies the slices of the others to its staging
// buffer, combines its own slice from its own source and the staging buffers of the others, stores the result
// in its staging buffer and in its destination, and copies the other slices from their owners' staging
// buffers. So a rank copies S(n-1)/n in and as much out, and no slice that it owns. Data that is not combined
// takes two copies, one in and one out.
//
// A staging buffer has room for three windows. So a rank copies the next window in before it waits for the
// current one, while its peers may still read the previous one. There is one flag per window: it states that
// the window was copied in, the previous one combined, and the one before that copied out.
var staged = Algorithm{
	Name:  "staged",
	Fits:  stagedFits,
	Steps: func(p Problem, rank int) iter.Seq[Step] { return newStager(p, rank).steps },
	Cost:  stagedCost,
}

// stagedWindows is how many windows a staging buffer has room for.
const stagedWindows = 3

func stagedFits(p Problem) error {
	if err := fitsMemory("staged", p); err != nil {
		return err
	}
	if least := stagedWindows * sliceElements * p.Size; p.Stage < least && p.Op != Barrier {
		return fmt.Errorf("staged needs a staging buffer of %d elements at least, it has %d", least, p.Stage)
	}
	return nil
}

// windows returns the number of windows of the problem and the elements per window, of the data that is cut:
// the vector, or each part of it.
func (p Problem) windows() (count, length int) {
	room, total := p.Stage/stagedWindows, p.Count
	switch p.Op {
	case Barrier:
		return 0, 0
	case ReduceScatter, Scatter, AllToAll: // a staging buffer holds a piece for every rank
		room, total = room/p.Size, p.longestPart()
	case AllGather, Gather: // a staging buffer holds the rank's own piece
		total = p.longestPart()
	}
	room = room / sliceElements * sliceElements
	count = (total + room - 1) / room
	if count > 0 {
		length = min(room, granules((total+count-1)/count)*sliceElements)
	}
	return count, length
}

// stager generates one rank's plan.
type stager struct {
	p       Problem
	rank    int
	offsets []int // of the parts
	count   int   // windows
	length  int   // elements of a window
	room    int   // elements of a third of the staging buffer
	piece   int   // distance between the pieces for two ranks in one window
}

func newStager(p Problem, rank int) *stager {
	s := &stager{p: p, rank: rank}
	s.count, s.length = p.windows()
	s.room = p.Stage / stagedWindows / sliceElements * sliceElements
	s.piece = s.length
	if p.Op != AllReduce && p.Op != Reduce {
		s.offsets = p.offsets()
	}
	return s
}

// steps takes the windows through their phases: in, flag, work, flag, out. The phases of three windows
// overlap.
func (s *stager) steps(yield func(Step) bool) {
	if !s.in(0, yield) || !yield(signal(0)) {
		return
	}
	out := s.p.Op == AllReduce || s.p.Op == Reduce // for other operations the work's result is already in place
	for w := range s.count {
		if !s.in(w+1, yield) || !yield(await(w)) || out && !s.out(w-1, yield) || !s.work(w, yield) {
			return
		}
		if (out || w+1 < s.count) && !yield(signal(w+1)) {
			return
		}
	}
	if (out || s.count == 0) && yield(await(s.count)) {
		s.out(s.count-1, yield)
	}
}

// window returns the range of window w of total elements; it is empty before the first and after the last
// window.
func (s *stager) window(w, total int) (lo, hi int) {
	return min(w*s.length, total), min((w+1)*s.length, total)
}

// owned is the slice of a window that a rank owns, relative to the window. It is the same in all windows,
// clipped in the last: so a rank never copies in where a result is that peers may read two windows later.
func (s *stager) owned(length, rank int) (lo, hi int) {
	lo, hi = slice(s.length, s.p.Size, rank)
	return min(lo, length), min(hi, length)
}

// slot is where in the staging buffer a piece of window w is.
func (s *stager) slot(w, at, length int) Span {
	lo := w%stagedWindows*s.room + at
	return Span{Stage, lo, lo + length}
}

// in copies to the staging buffer what peers read of a window.
func (s *stager) in(w int, yield func(Step) bool) bool {
	if w >= s.count {
		return true
	}
	switch s.p.Op {
	case AllReduce, Reduce:
		lo, hi := s.window(w, s.p.Count)
		ownLo, ownHi := s.owned(hi-lo, s.rank)
		return s.copyIn(w, lo, 0, ownLo, yield) && s.copyIn(w, lo, ownHi, hi-lo, yield)
	case Broadcast, Send:
		if s.rank == s.p.Root {
			lo, hi := s.window(w, s.p.Count)
			return s.copyIn(w, lo, 0, hi-lo, yield)
		}
	case AllGather, Gather:
		if s.p.Op == AllGather || s.rank != s.p.Root {
			lo, hi := s.pieceOf(w, s.rank)
			return s.copyIn(w, lo-s.offsets[s.rank], 0, hi-lo, yield)
		}
	case ReduceScatter, Scatter, AllToAll:
		if s.p.Op != Scatter || s.rank == s.p.Root {
			return s.copyPieces(w, yield)
		}
	}
	return true
}

// copyIn copies elements [lo, hi) of a window that begins at an element of the source.
func (s *stager) copyIn(w, begin, lo, hi int, yield func(Step) bool) bool {
	return lo == hi || yield(duplicate(Span{Src, begin + lo, begin + hi}, s.slot(w, lo, hi-lo)))
}

// copyPieces copies the window's pieces of the other ranks' parts.
func (s *stager) copyPieces(w int, yield func(Step) bool) bool {
	for k := 1; k < s.p.Size; k++ {
		peer := (s.rank + k) % s.p.Size
		if lo, hi := s.pieceOf(w, peer); lo < hi && !yield(duplicate(Span{Src, lo, hi}, s.slot(w, peer*s.piece, hi-lo))) {
			return false
		}
	}
	return true
}

// pieceOf returns which elements of a rank's part are in a window.
func (s *stager) pieceOf(w, rank int) (lo, hi int) {
	begin := s.offsets[rank]
	lo, hi = s.window(w, s.offsets[rank+1]-begin)
	return begin + lo, begin + hi
}

// work does a rank's work on a window that all ranks have copied in.
func (s *stager) work(w int, yield func(Step) bool) bool {
	switch s.p.Op {
	case AllReduce, Reduce:
		return s.combineSlice(w, yield)
	case ReduceScatter:
		return s.combinePiece(w, yield)
	case Broadcast, Send:
		lo, hi := s.window(w, s.p.Count)
		if s.rank != s.p.Root {
			return yield(pull(s.p.Root, s.slot(w, 0, hi-lo), Span{Dst, lo, hi}))
		}
		return s.p.Op == Send || yield(duplicate(Span{Src, lo, hi}, Span{Dst, lo, hi}))
	case Scatter:
		lo, hi := s.pieceOf(w, s.rank)
		out := Span{Dst, lo - s.offsets[s.rank], hi - s.offsets[s.rank]}
		if s.rank == s.p.Root {
			return lo == hi || yield(duplicate(Span{Src, lo, hi}, out))
		}
		return lo == hi || yield(pull(s.p.Root, s.slot(w, s.rank*s.piece, hi-lo), out))
	case AllGather, AllToAll:
		return s.takePieces(w, yield)
	case Gather:
		return s.rank != s.p.Root || s.takePieces(w, yield)
	}
	return true
}

// combineSlice combines the slice of a window that the rank owns.
func (s *stager) combineSlice(w int, yield func(Step) bool) bool {
	begin, end := s.window(w, s.p.Count)
	lo, hi := s.owned(end-begin, s.rank)
	if lo == hi {
		return true
	}
	at := s.slot(w, lo, hi-lo)
	c := combine(Ranks{0, s.p.Size}, at, s.rank, at)
	c.Own = Span{Src, begin + lo, begin + hi}
	if s.p.Op == AllReduce || s.rank == s.p.Root {
		c.Keep = Span{Dst, begin + lo, begin + hi}
	}
	return yield(c)
}

// combinePiece combines the rank's part of a window into its destination.
func (s *stager) combinePiece(w int, yield func(Step) bool) bool {
	lo, hi := s.pieceOf(w, s.rank)
	if lo == hi {
		return true
	}
	begin := s.offsets[s.rank]
	c := combine(Ranks{0, s.p.Size}, s.slot(w, s.rank*s.piece, hi-lo), s.rank, Span{Dst, lo - begin, hi - begin})
	c.Own = Span{Src, lo, hi}
	return yield(c)
}

// takePieces copies a piece of every rank's part to the destination, its own from the source.
func (s *stager) takePieces(w int, yield func(Step) bool) bool {
	for k := range s.p.Size {
		owner := (s.rank + k) % s.p.Size
		lo, hi := s.pieceOf(w, owner)
		begin := s.offsets[owner]
		in := s.slot(w, 0, hi-lo)
		if s.p.Op == AllToAll {
			in = s.slot(w, s.rank*s.piece, hi-lo)
			begin = 0
		}
		step := pull(owner, in, Span{Dst, lo, hi})
		if owner == s.rank {
			step = duplicate(Span{Src, lo - begin, hi - begin}, Span{Dst, lo, hi})
		}
		if lo < hi && !yield(step) {
			return false
		}
	}
	return true
}

// out copies what others combined of a window.
func (s *stager) out(w int, yield func(Step) bool) bool {
	if w < 0 || s.p.Op == Reduce && s.rank != s.p.Root {
		return true
	}
	begin, end := s.window(w, s.p.Count)
	for k := 1; k < s.p.Size; k++ {
		owner := (s.rank + k) % s.p.Size
		lo, hi := s.owned(end-begin, owner)
		if lo < hi && !yield(pull(owner, s.slot(w, lo, hi-lo), Span{Dst, begin + lo, begin + hi})) {
			return false
		}
	}
	return true
}

// stagedCost: one synchronisation per window, and one more where results are shared; the rank with the
// largest share copies in, works and copies out. Copies of different windows overlap with waiting, not with
// each other: one processor executes them.
func stagedCost(p Problem, l Links) time.Duration {
	c := l.of(p)
	windows, length := p.windows()
	sync := c.syncs(max(1, windows))
	switch p.Op {
	case AllReduce, Reduce:
		own := min(p.Count, windows*longestSlice(length, p.Size))
		others := p.Count - windows*(granules(length)/p.Size*sliceElements)
		return sync + c.syncs(min(1, windows)) + c.copying(others) + c.combining(p.Size*own) + c.reading(others)
	case ReduceScatter:
		own := p.longestPart()
		return sync + c.copying(p.Count-p.Count/p.Size) + c.combining(p.Size*own)
	case Scatter:
		return sync + max(c.copying(p.Count), c.reading(p.longestPart()))
	case AllToAll:
		return sync + c.copying(p.Count) + c.reading(p.Count-p.Count/p.Size)
	case Broadcast, Send:
		return sync + c.copying(p.Count) + max(c.copying(p.Count), c.reading(p.Count))
	}
	own := p.longestPart()
	return sync + 2*c.copying(own) + c.reading(p.Count-p.Count/p.Size)
}
