package plan

import (
	"fmt"
	"slices"
	"strings"
)

// holding prints what elements hold: terms only, if they are whole vectors, else which elements of which
// vectors.
func (x *proof) holding(rank int, list []piece) string {
	const listed = 6
	p := x.problem(rank)
	var b strings.Builder
	for i, v := range list {
		if i == listed && len(list) > listed+2 {
			fmt.Fprintf(&b, " … %d more", len(list)-listed)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		if v.term == 0 {
			b.WriteByte('?')
			continue
		}
		b.WriteString(x.terms.format(v.term))
		if !p.Op.Reduces() && (v.at > 0 || v.length < p.Count) {
			fmt.Fprintf(&b, "[%d:%d)", v.at, v.at+v.length)
		}
	}
	return b.String()
}

// String prints the problem: "all_reduce SUM of 10 elements over 4 ranks, in 2 domains".
func (p Problem) String() string {
	var b strings.Builder
	switch {
	case p.Op == Barrier:
		fmt.Fprintf(&b, "%v of %d ranks", p.Op, p.Size)
	case p.Op == Send:
		fmt.Fprintf(&b, "%v of %d elements from rank %d to rank %d of %d", p.Op, p.Count, p.Root, p.Peer, p.Size)
	case p.Op == Broadcast, p.Op == Scatter:
		fmt.Fprintf(&b, "%v of %d elements from rank %d to %d ranks", p.Op, p.Count, p.Root, p.Size)
	case p.Op == Gather:
		fmt.Fprintf(&b, "%v of %d elements from %d ranks to rank %d", p.Op, p.Count, p.Size, p.Root)
	case p.Op == Reduce:
		fmt.Fprintf(&b, "%v %v of %d elements over %d ranks to rank %d", p.Op, p.Reduce, p.Count, p.Size, p.Root)
	case p.Op.Reduces():
		fmt.Fprintf(&b, "%v %v of %d elements over %d ranks", p.Op, p.Reduce, p.Count, p.Size)
	default:
		fmt.Fprintf(&b, "%v of %d elements over %d ranks", p.Op, p.Count, p.Size)
	}
	if p.Counts != nil && len(p.Counts) <= 12 {
		fmt.Fprintf(&b, ", parts %v", p.Counts)
	} else if p.Counts != nil {
		fmt.Fprintf(&b, ", parts of %d to %d", slices.Min(p.Counts), slices.Max(p.Counts))
	}
	if p.Op.Reduces() && p.Order == Any {
		b.WriteString(" in any order")
	}
	if p.Places != nil {
		b.WriteString(", " + p.placement())
	}
	if p.Private {
		fmt.Fprintf(&b, ", private memory, staging buffers of %d elements", p.Stage)
	}
	return b.String()
}

// placement prints the domains: all ranks if there are few, else the number of domains and their sizes.
func (p Problem) placement() string {
	const listed = 12
	domains := p.domains()
	if p.Size <= listed {
		return fmt.Sprintf("domains %v", domains)
	}
	least, most := p.Size, 0
	for _, ranks := range domains {
		least, most = min(least, len(ranks)), max(most, len(ranks))
	}
	if least == most {
		return fmt.Sprintf("%d domains of %d ranks", len(domains), least)
	}
	return fmt.Sprintf("%d domains of %d to %d ranks", len(domains), least, most)
}

// String prints the step: "exchange work[0:10) with 1, mine left".
func (s Step) String() string {
	switch s.Kind {
	case Exchange:
		return s.exchange()
	case Await:
		if s.From >= 0 {
			return fmt.Sprintf("await %d of %d", s.Flag, s.From)
		}
		return fmt.Sprintf("await %d", s.Flag)
	case Signal:
		return fmt.Sprintf("signal %d", s.Flag)
	case Combine:
		return s.combine()
	case Pull:
		return fmt.Sprintf("pull %v of %d into %v", s.In, s.From, s.Out)
	case Push:
		return fmt.Sprintf("push %v into %v of %d", s.In, s.Out, s.To)
	case Copy:
		return fmt.Sprintf("copy %v to %v", s.In, s.Out)
	case Fold:
		side := "right"
		if s.Side == Left {
			side = "left"
		}
		return fmt.Sprintf("fold %v into %v on the %s", s.In, s.Out, side)
	case Scale:
		return fmt.Sprintf("divide %v by the size", s.Out)
	}
	return s.Kind.String()
}

func (s Step) combine() string {
	var b strings.Builder
	fmt.Fprintf(&b, "combine %v of %d-%d", s.In, s.Ranks.Lo, s.Ranks.Hi-1)
	if s.Own.length() > 0 {
		fmt.Fprintf(&b, " (mine: %v)", s.Own)
	}
	fmt.Fprintf(&b, " into %v", s.Out)
	if s.To < 0 {
		b.WriteString(" of all")
	} else {
		fmt.Fprintf(&b, " of %d", s.To)
	}
	if s.Keep.length() > 0 {
		fmt.Fprintf(&b, " and %v", s.Keep)
	}
	return b.String()
}

func (s Step) exchange() string {
	received := fmt.Sprintf("receive %v from %d", s.In, s.From)
	switch s.Side {
	case Left:
		received += " on the left"
	case Right:
		received += " on the right"
	}
	switch {
	case s.To < 0:
		return received
	case s.From < 0:
		return fmt.Sprintf("send %v to %d", s.Out, s.To)
	case s.To == s.From && s.In == s.Out && s.Side == Right:
		return fmt.Sprintf("exchange %v with %d, mine left", s.In, s.To)
	case s.To == s.From && s.In == s.Out && s.Side == Left:
		return fmt.Sprintf("exchange %v with %d, mine right", s.In, s.To)
	}
	return fmt.Sprintf("send %v to %d, %s", s.Out, s.To, received)
}

// String returns the kind's name in lower case.
func (k StepKind) String() string {
	names := [...]string{
		Exchange: "exchange", Signal: "signal", Await: "await", Combine: "combine", Pull: "pull",
		Push: "push", Copy: "copy", Fold: "fold", Scale: "scale",
	}
	if k > 0 && int(k) < len(names) {
		return names[k]
	}
	return fmt.Sprintf("StepKind(%d)", uint8(k))
}

// String prints the span: "dst[0:64)"; an empty one as "nothing".
func (s Span) String() string {
	if s.Lo == s.Hi {
		return "nothing"
	}
	return fmt.Sprintf("%v[%d:%d)", s.Buffer, s.Lo, s.Hi)
}

// String returns the buffer's name in lower case.
func (b Buffer) String() string {
	names := [...]string{"src", "dst", "work", "scratch", "stage"}
	if int(b) < len(names) {
		return names[b]
	}
	return fmt.Sprintf("Buffer(%d)", uint8(b))
}
