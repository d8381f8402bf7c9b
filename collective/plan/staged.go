package plan

import (
	"fmt"
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
	Steps: generator(func(p Problem, rank int, w *writer) { newStager(p, rank, w).steps() }),
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
	*writer
	p       Problem
	rank    int
	offsets []int // of the parts
	count   int   // windows
	length  int   // elements of a window
	room    int   // elements of a third of the staging buffer
	piece   int   // distance between the pieces for two ranks in one window
}

func newStager(p Problem, rank int, w *writer) *stager {
	s := &stager{writer: w, p: p, rank: rank}
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
func (s *stager) steps() {
	s.in(0)
	s.put(signal(0))
	out := s.p.Op == AllReduce || s.p.Op == Reduce // for other operations the work's result is already in place
	for w := range s.count {
		s.in(w + 1)
		s.put(await(w))
		if out {
			s.out(w - 1)
		}
		s.work(w)
		if out || w+1 < s.count {
			s.put(signal(w + 1))
		}
	}
	if out || s.count == 0 {
		s.put(await(s.count))
		s.out(s.count - 1)
	}
}

// move puts a step that moves data, unless there is none.
func (s *stager) move(step Step) {
	if step.Out.length() > 0 {
		s.put(step)
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
func (s *stager) in(w int) {
	if w >= s.count {
		return
	}
	switch root := s.rank == s.p.Root; s.p.Op {
	case AllReduce, Reduce:
		lo, hi := s.window(w, s.p.Count)
		ownLo, ownHi := s.owned(hi-lo, s.rank)
		s.copyIn(w, lo, 0, ownLo)
		s.copyIn(w, lo, ownHi, hi-lo)
	case Broadcast, Send:
		if root {
			lo, hi := s.window(w, s.p.Count)
			s.copyIn(w, lo, 0, hi-lo)
		}
	case AllGather, Gather:
		if s.p.Op == AllGather || !root {
			lo, hi := s.pieceOf(w, s.rank)
			s.copyIn(w, lo-s.offsets[s.rank], 0, hi-lo)
		}
	case ReduceScatter, Scatter, AllToAll:
		if s.p.Op != Scatter || root {
			s.copyPieces(w)
		}
	}
}

// copyIn copies elements [lo, hi) of a window that begins at an element of the source.
func (s *stager) copyIn(w, begin, lo, hi int) {
	s.move(duplicate(Span{Src, begin + lo, begin + hi}, s.slot(w, lo, hi-lo)))
}

// copyPieces copies the window's pieces of the other ranks' parts.
func (s *stager) copyPieces(w int) {
	for k := 1; k < s.p.Size; k++ {
		peer := (s.rank + k) % s.p.Size
		lo, hi := s.pieceOf(w, peer)
		s.move(duplicate(Span{Src, lo, hi}, s.slot(w, peer*s.piece, hi-lo)))
	}
}

// pieceOf returns which elements of a rank's part are in a window.
func (s *stager) pieceOf(w, rank int) (lo, hi int) {
	begin := s.offsets[rank]
	lo, hi = s.window(w, s.offsets[rank+1]-begin)
	return begin + lo, begin + hi
}

// work does a rank's work on a window that all ranks have copied in.
func (s *stager) work(w int) {
	switch root := s.rank == s.p.Root; s.p.Op {
	case AllReduce, Reduce:
		s.combineSlice(w)
	case ReduceScatter:
		s.combinePiece(w)
	case Broadcast, Send:
		lo, hi := s.window(w, s.p.Count)
		if !root {
			s.move(pull(s.p.Root, s.slot(w, 0, hi-lo), Span{Dst, lo, hi}))
		} else if s.p.Op == Broadcast {
			s.move(duplicate(Span{Src, lo, hi}, Span{Dst, lo, hi}))
		}
	case Scatter:
		lo, hi := s.pieceOf(w, s.rank)
		out := Span{Dst, lo - s.offsets[s.rank], hi - s.offsets[s.rank]}
		if root {
			s.move(duplicate(Span{Src, lo, hi}, out))
		} else {
			s.move(pull(s.p.Root, s.slot(w, s.rank*s.piece, hi-lo), out))
		}
	case AllGather, AllToAll, Gather:
		if s.p.Op != Gather || root {
			s.takePieces(w)
		}
	}
}

// combineSlice combines the slice of a window that the rank owns.
func (s *stager) combineSlice(w int) {
	begin, end := s.window(w, s.p.Count)
	lo, hi := s.owned(end-begin, s.rank)
	at := s.slot(w, lo, hi-lo)
	c := combine(Ranks{0, s.p.Size}, at, s.rank, at)
	c.Own = Span{Src, begin + lo, begin + hi}
	if s.p.Op == AllReduce || s.rank == s.p.Root {
		c.Keep = Span{Dst, begin + lo, begin + hi}
	}
	s.move(c)
}

// combinePiece combines the rank's part of a window into its destination.
func (s *stager) combinePiece(w int) {
	lo, hi := s.pieceOf(w, s.rank)
	begin := s.offsets[s.rank]
	c := combine(Ranks{0, s.p.Size}, s.slot(w, s.rank*s.piece, hi-lo), s.rank, Span{Dst, lo - begin, hi - begin})
	c.Own = Span{Src, lo, hi}
	s.move(c)
}

// takePieces copies a piece of every rank's part to the destination, its own from the source.
func (s *stager) takePieces(w int) {
	for k := range s.p.Size {
		owner := (s.rank + k) % s.p.Size
		lo, hi := s.pieceOf(w, owner)
		begin := s.offsets[owner]
		in := s.slot(w, 0, hi-lo)
		if s.p.Op == AllToAll {
			in = s.slot(w, s.rank*s.piece, hi-lo)
			begin = 0
		}
		if owner == s.rank {
			s.move(duplicate(Span{Src, lo - begin, hi - begin}, Span{Dst, lo, hi}))
		} else {
			s.move(pull(owner, in, Span{Dst, lo, hi}))
		}
	}
}

// out copies what others combined of a window.
func (s *stager) out(w int) {
	if w < 0 || s.p.Op == Reduce && s.rank != s.p.Root {
		return
	}
	begin, end := s.window(w, s.p.Count)
	for k := 1; k < s.p.Size; k++ {
		owner := (s.rank + k) % s.p.Size
		lo, hi := s.owned(end-begin, owner)
		s.move(pull(owner, s.slot(w, lo, hi-lo), Span{Dst, begin + lo, begin + hi}))
	}
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
