package plan

// A plan is carried out a little differently from how it is written: [Fuse] saves a copy, and [Turns] mixes two exchanges. Both give
// plans again, which [Check] proves as well.

// Fuse leaves out the copies of what is given that only the next step reads, an exchange that combines it with what comes: the
// exchange reads it where it lies, and saves a pass over the memory while nothing travels. It works in place.
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

// fuses reports whether an exchange overwrites all that the copy before it has written, having read it only as its own part.
func fuses(c, s *Step) bool {
	return c.Kind == Copy && c.In.Buffer == Src && c.Out.Buffer == Work && c.Out.Lo < c.Out.Hi &&
		s.Kind == Exchange && s.From >= 0 && s.Side != Replace && s.In == c.Out &&
		(s.To < 0 || s.Out == c.Out || s.Out.Buffer == Src)
}

// InTurns returns how many steps, from the first on, are a reduce-scatter among two ranks and the all-gather of its result: it is 0 if
// they are something else. Such segments go in turns: each that is combined is sent on while it is in the caches and others
// still come, and no rank stands still between the two.
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
		b.In.Buffer != Work || a.Out.Buffer != Src || a.Out.Lo != b.In.Lo || a.Out.Hi != b.In.Hi || a.In.Lo < b.In.Hi && b.In.Lo < a.In.Hi {
		return 0
	}
	return n
}

// Turns is the order in which the segments of such a pair of exchanges go, the same on both ranks.
type Turns struct {
	Each int // segments of either, the longer of what it sends and what it receives
	Lead int // by how many the reduce-scatter is ahead, at most Each
}

// TurnsLead is by how many segments the reduce-scatter is ahead where there are as many: about half of what may be under way.
const TurnsLead = 4

// At returns which segment comes at a place in the order, from 0 to 2·Each-1, and whether it is the all-gather's.
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

// Ready reports whether the segment at a place can be sent once so many places are done: the all-gather's is what the
// reduce-scatter's of that number has become.
func (t Turns) Ready(place, done int) bool {
	gather, i := t.At(place)
	return !gather || done > i && done > 2*i-t.Lead
}

// segments returns into how many segments a span is cut. An empty one is sent too.
func (s Span) segments(length int) int { return max(1, (s.length()+length-1)/length) }

// segment returns a segment of a span.
func (s Span) segment(i, length int) Span {
	return Span{s.Buffer, min(s.Lo+i*length, s.Hi), min(s.Lo+(i+1)*length, s.Hi)}
}

// cut returns segment i of an exchange: of a half that has none the step leaves out that half.
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

// turned writes such a pair of exchanges as it is carried out in segments of so many elements: a step for each, in turns.
func turned(steps []Step, length, lead int) (out []Step) {
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

// carried returns a rank's plan as it is carried out, with segments of so many elements where they go in turns.
func carried(p Problem, steps []Step, length, lead int) (out []Step) {
	for steps = Fuse(steps); len(steps) > 0; {
		n := InTurns(p.Size, steps)
		if n == 0 {
			out, steps = append(out, steps[0]), steps[1:]
			continue
		}
		out, steps = append(out, turned(steps[:n], length, lead)...), steps[n:]
	}
	return out
}
