package plan

// A plan is executed slightly differently from how it is written: [Fuse] saves a copy, and [Turns]
// interleaves two exchanges. Both produce plans again, which [Check] also proves.

// Fuse removes copies of Src that only the next step reads, where that step is an exchange that combines the
// copy with received data: the exchange then reads Src directly. That saves one pass over the memory during
// which nothing is transferred. Fuse works in place.
func Fuse(steps []Step) []Step {
	out := steps[:0]
	for _, s := range steps {
		if n := len(out); n > 0 && fuses(&out[n-1], &s) {
			c := out[n-1]
			s.Own = c.In
			if s.Out == c.Out {
				s.Out = c.In
			}
			out = out[:n-1]
		}
		out = append(out, s)
	}
	return out
}

// fuses reports whether an exchange overwrites everything that the copy before it has written, and reads it
// only as its own operand.
func fuses(c, s *Step) bool {
	return c.Kind == Copy && c.In.Buffer == Src && c.Out.Buffer == Work && c.Out.Lo < c.Out.Hi &&
		s.Kind == Exchange && s.From >= 0 && s.Side != Replace && s.In == c.Out &&
		(s.To < 0 || s.Out == c.Out || s.Out.Buffer == Src)
}

// InTurns returns how many steps, from the first on, are a reduce-scatter between two ranks followed by the
// all-gather of its result; 0 if the steps are something else. The segments of these two are interleaved:
// each combined segment is sent on while it is still in the caches and others still arrive, and no rank is
// idle between the two phases.
func InTurns(size int, steps []Step) int {
	if size != 2 || len(steps) < 2 {
		return 0
	}
	a, n := &steps[0], 2
	if steps[1].Kind == Scale && steps[1].Out == a.In && len(steps) > 2 {
		n = 3
	}
	b := &steps[n-1]
	both := func(s *Step) bool { return s.Kind == Exchange && s.To >= 0 && s.To == s.From }
	if !both(a) || !both(b) || a.Side == Replace || b.Side != Replace || b.Out != a.In || a.In.Buffer != Work ||
		b.In.Buffer != Work || a.Out.Buffer != Src || a.Out.Lo != b.In.Lo || a.Out.Hi != b.In.Hi ||
		a.In.Lo < b.In.Hi && b.In.Lo < a.In.Hi {
		return 0
	}
	return n
}

// Turns is the order in which the segments of two interleaved exchanges are transferred, the same on both
// ranks.
type Turns struct {
	Each int // segments of either exchange: the longer of what it sends and what it receives
	Lead int // by how many segments the reduce-scatter is ahead, at most Each
}

// TurnsLead is by how many segments the reduce-scatter is ahead if there are enough: about half of what may
// be in flight.
const TurnsLead = 4

// At returns which segment is at a position in the order, from 0 to 2·Each-1, and whether it belongs to the
// all-gather.
func (t Turns) At(place int) (gather bool, segment int) {
	switch behind := place - t.Lead; {
	case place < t.Lead:
		return false, place
	case place >= 2*t.Each-t.Lead:
		return true, place - t.Each
	case behind%2 == 0:
		return false, t.Lead + behind/2
	default:
		return true, behind / 2
	}
}

// Ready reports whether the segment at a position can be sent once this many positions are done: segment i of
// the all-gather is the result of segment i of the reduce-scatter.
func (t Turns) Ready(place, done int) bool {
	gather, i := t.At(place)
	return !gather || done > i && done > 2*i-t.Lead
}

// segments returns the number of segments of a span. An empty span has one, which is also sent.
func (s Span) segments(length int) int { return max(1, (s.length()+length-1)/length) }

// segment returns a segment of a span.
func (s Span) segment(i, length int) Span {
	return Span{s.Buffer, min(s.Lo+i*length, s.Hi), min(s.Lo+(i+1)*length, s.Hi)}
}

// cut returns segment i of an exchange. Where a half has no such segment, the step leaves out that half.
func (s *Step) cut(i, length int) Step {
	c := *s
	c.Out, c.In = s.Out.segment(i, length), s.In.segment(i, length)
	if s.Own.length() > 0 {
		c.Own = s.Own.segment(i, length)
	}
	if i >= s.Out.segments(length) {
		c.To, c.Out = -1, Span{}
	}
	if i >= s.In.segments(length) {
		c.From, c.In, c.Own, c.Side = -1, Span{}, Span{}, Replace
	}
	return c
}

// interleaved writes two interleaved exchanges as they are executed in segments of this many elements: one step
// for each, in turns.
func interleaved(steps []Step, length, lead int) (out []Step) {
	a, b := &steps[0], &steps[len(steps)-1]
	each := max(a.Out.segments(length), a.In.segments(length))
	t := Turns{Each: each, Lead: min(each, lead)}
	for place := range 2 * each {
		gather, i := t.At(place)
		if gather {
			out = append(out, b.cut(i, length))
			continue
		}
		s := a.cut(i, length)
		if out = append(out, s); len(steps) > 2 && s.From >= 0 {
			out = append(out, scale(s.In))
		}
	}
	return out
}

// executed returns a rank's plan as it is executed, with segments of this many elements where exchanges are
// interleaved.
func executed(p Problem, steps []Step, length, lead int) (out []Step) {
	for steps = Fuse(steps); len(steps) > 0; {
		n := InTurns(p.Size, steps)
		if n == 0 {
			out, steps = append(out, steps[0]), steps[1:]
			continue
		}
		out, steps = append(out, interleaved(steps[:n], length, lead)...), steps[n:]
	}
	return out
}
