package plan

import (
	"fmt"
	"slices"
	"strings"
)

// Explain returns the plans of an algorithm for all ranks as text, a line per step, with what the step leaves behind:
// (0+1) is the combination of what ranks 0 and 1 contributed, in this order. The plans are proven first: an error is
// that of [Check].
func Explain(a Algorithm, p Problem) (string, error) {
	if err := Check(a, p); err != nil {
		return "", err
	}
	plans := make([][]Step, p.Size)
	for rank := range plans {
		plans[rank] = slices.Collect(a.Steps(p, rank))
	}
	x := newProof(p, plans, sharings[0])
	held := map[[2]int]string{}
	x.watch = func(rank, index int, v term) {
		if v != 0 {
			held[[2]int{rank, index}] = x.terms.format(v)
		}
	}
	if f := x.run(); f != nil {
		return "", f
	}
	width := 0
	for _, plan := range plans {
		for _, s := range plan {
			width = max(width, len(s.String()))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %v\n", a.Name, p)
	for rank, plan := range plans {
		fmt.Fprintf(&b, "\nrank %d\n", rank)
		for index, s := range plan {
			if v, ok := held[[2]int{rank, index}]; ok {
				fmt.Fprintf(&b, "%3d  %-*v  holds %s\n", index, width, s, v)
			} else {
				fmt.Fprintf(&b, "%3d  %v\n", index, s)
			}
		}
	}
	return b.String(), nil
}

// String prints the problem: "all_reduce SUM of 10 elements over 4 ranks".
func (p Problem) String() string {
	switch p.Op {
	case Barrier:
		return fmt.Sprintf("%v of %d ranks", p.Op, p.Size)
	case Broadcast:
		return fmt.Sprintf("%v of %d elements from rank %d to %d ranks", p.Op, p.Count, p.Root, p.Size)
	}
	order := ""
	if p.Order == Any {
		order = " in any order"
	}
	return fmt.Sprintf("%v %v of %d elements over %d ranks%s", p.Op, p.Reduce, p.Count, p.Size, order)
}

// String prints the step: "exchange work[0:10) with 1, mine left".
func (s Step) String() string {
	switch s.Kind {
	case Exchange:
		return s.exchange()
	case Signal, Await:
		return fmt.Sprintf("%v %d", s.Kind, s.Mark)
	case Combine:
		return fmt.Sprintf("combine %v of all into %v of all", s.In, s.Out)
	case Pull:
		return fmt.Sprintf("pull %v of %d into %v", s.In, s.From, s.Out)
	case Copy:
		return fmt.Sprintf("copy %v to %v", s.In, s.Out)
	case Scale:
		return fmt.Sprintf("divide %v by the size", s.Out)
	}
	return s.Kind.String()
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
	names := [...]string{Exchange: "exchange", Signal: "signal", Await: "await", Combine: "combine", Pull: "pull", Copy: "copy", Scale: "scale"}
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
	names := [...]string{"src", "dst", "work"}
	if int(b) < len(names) {
		return names[b]
	}
	return fmt.Sprintf("Buffer(%d)", uint8(b))
}
