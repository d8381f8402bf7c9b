package plan

import (
	"encoding/xml"
	"fmt"
	"strings"
)

// Diagram is the plans of all ranks for one call, proven by [Check], with the dependencies between their
// steps. It prints as text ([Diagram.String]), as a graph for Graphviz ([Diagram.DOT]) and as a picture
// ([Diagram.SVG]).
type Diagram struct {
	Algorithm string
	Problem   Problem
	Ranks     [][]DiagramStep // by rank, in the order of the plan
	Edges     []Edge          // between steps of different ranks
	Proofs    int             // number of symbolic executions: layouts of the buffers times forms of the plan
}

// DiagramStep is a step of a rank's plan.
type DiagramStep struct {
	Step
	// what the written elements hold after the step: (0+1) is the combination of ranks 0 and 1, in this order
	Holds string
	Slot  int // logical time, from 0: the earliest slot after all steps that this one waits for
}

// Edge is a dependency between steps of two ranks: a frame that is received, a flag that is awaited, or
// memory of a peer that a step reads or writes.
type Edge struct {
	From, To Node
	Kind     EdgeKind
	Span     Span // what is transferred: the receiver's elements of a frame; the peer's of a memory access
}

// Node names a step: its rank and its index in that rank's plan. Memory accesses begin or end at a rank, not
// at a step of it: their Index is -1.
type Node struct{ Rank, Index int }

// EdgeKind is the kind of an [Edge].
type EdgeKind uint8

// The kinds of edges.
const (
	FrameEdge EdgeKind = iota // from the sending Exchange to the receiving one
	FlagEdge                  // from the Signal to the Await
	ReadEdge                  // memory of the peer From is read by the step To
	WriteEdge                 // memory of the peer To is written by the step From
)

// Draw proves the plans of an algorithm for all ranks and returns their diagram. The error is that of [Check].
func Draw(a Algorithm, p Problem) (*Diagram, error) {
	proofs, err := checkAll(a, p)
	if err != nil {
		return nil, err
	}
	one := solve(a, p)
	d := &Diagram{Algorithm: a.Name, Problem: p, Ranks: make([][]DiagramStep, len(one.plans)), Proofs: proofs}
	for rank, plan := range one.plans {
		for _, s := range plan {
			d.Ranks[rank] = append(d.Ranks[rank], DiagramStep{Step: s})
		}
	}
	x := newProof([]solved{one}, sharing{}, &arena{})
	x.watch = func(rank, index int, v []piece) { d.Ranks[rank][index].Holds = x.holding(rank, v) }
	if f := x.run(); f != nil {
		return nil, f
	}
	d.connect()
	d.schedule()
	return d, nil
}

// connect finds the edges: the k-th frame from one rank to another is the k-th receive there, and each rank
// sets each flag once.
func (d *Diagram) connect() {
	type pair struct{ from, to int }
	sent, flags := map[pair][]int{}, map[Node]int{} // flags: by rank and number, the index of the Signal
	for rank, steps := range d.Ranks {
		for index, s := range steps {
			switch {
			case s.Kind == Exchange && s.To >= 0:
				sent[pair{rank, s.To}] = append(sent[pair{rank, s.To}], index)
			case s.Kind == Signal:
				flags[Node{rank, s.Flag}] = index
			}
		}
	}
	for rank, steps := range d.Ranks {
		for index, s := range steps {
			to := Node{rank, index}
			switch s.Kind {
			case Exchange:
				if s.From >= 0 {
					from := pair{s.From, rank}
					d.Edges = append(d.Edges, Edge{Node{s.From, sent[from][0]}, to, FrameEdge, s.In})
					sent[from] = sent[from][1:]
				}
			case Await:
				for _, peer := range d.awaited(rank, s.From) {
					d.Edges = append(d.Edges, Edge{Node{peer, flags[Node{peer, s.Flag}]}, to, FlagEdge, Span{}})
				}
			case Pull:
				d.Edges = append(d.Edges, Edge{Node{s.From, -1}, to, ReadEdge, s.In})
			case Push:
				d.Edges = append(d.Edges, Edge{to, Node{s.To, -1}, WriteEdge, s.Out})
			case Combine:
				for peer := s.Ranks.Lo; peer < s.Ranks.Hi; peer++ {
					if peer != rank {
						d.Edges = append(d.Edges, Edge{Node{peer, -1}, to, ReadEdge, s.In})
					}
				}
				for _, peer := range d.awaited(rank, s.To) {
					d.Edges = append(d.Edges, Edge{to, Node{peer, -1}, WriteEdge, s.Out})
				}
			}
		}
	}
}

// awaited returns the other rank that a step names, or for -1 all other ranks of the domain.
func (d *Diagram) awaited(rank, named int) []int {
	var out []int
	for _, domain := range d.Problem.domains() {
		for _, peer := range domain {
			if peer != rank && (peer == named || named < 0 && d.Problem.domain(peer) == d.Problem.domain(rank)) {
				out = append(out, peer)
			}
		}
	}
	return out
}

// schedule assigns each step its slot. A frame is in transit from the slot in which its sender begins; a flag
// is visible in the slot after it was set. The loop ends because the plans are proven free of deadlock.
func (d *Diagram) schedule() {
	after := map[Node][]Edge{}
	for _, e := range d.Edges {
		if e.Kind == FrameEdge || e.Kind == FlagEdge {
			after[e.To] = append(after[e.To], e)
		}
	}
	done := make([]int, len(d.Ranks)) // by rank: the number of steps that have a slot
	began := func(rank, index int) int {
		if index == 0 {
			return 0
		}
		return d.Ranks[rank][index-1].Slot + 1
	}
	for progress := true; progress; {
		progress = false
		for rank, steps := range d.Ranks {
		rank:
			for done[rank] < len(steps) {
				index := done[rank]
				slot := began(rank, index)
				for _, e := range after[Node{rank, index}] {
					switch from := e.From; {
					case e.Kind == FlagEdge && from.Index < done[from.Rank]:
						slot = max(slot, d.Ranks[from.Rank][from.Index].Slot+1)
					case e.Kind == FrameEdge && from.Index <= done[from.Rank]:
						slot = max(slot, began(from.Rank, from.Index))
					default:
						break rank
					}
				}
				steps[index].Slot = slot
				done[rank]++
				progress = true
			}
		}
	}
}

// String prints the plans as text, one line per step, with what the step leaves in memory.
func (d *Diagram) String() string {
	width := 0
	for _, steps := range d.Ranks {
		for _, s := range steps {
			width = max(width, len(s.Step.String()))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %v\n", d.Algorithm, d.Problem)
	for rank, steps := range d.Ranks {
		fmt.Fprintf(&b, "\nrank %d\n", rank)
		for index, s := range steps {
			if s.Holds != "" {
				fmt.Fprintf(&b, "%3d  %-*v  holds %s\n", index, width, s.Step, s.Holds)
			} else {
				fmt.Fprintf(&b, "%3d  %v\n", index, s.Step)
			}
		}
	}
	return b.String()
}

// DOT returns the diagram in Graphviz' language: a cluster for each rank, a node for each step, solid edges
// for frames, dashed ones for flags. Memory accesses appear in the labels of their steps.
func (d *Diagram) DOT() string {
	var b strings.Builder
	fmt.Fprintf(&b, "digraph plan {\n  label=%q; labelloc=t; rankdir=TB; node [shape=box, fontname=monospace, "+
		"fontsize=10];\n",
		fmt.Sprintf("%s: %v", d.Algorithm, d.Problem))
	for rank, steps := range d.Ranks {
		fmt.Fprintf(&b, "  subgraph cluster_%d {\n    label=\"rank %d\";\n", rank, rank)
		for index, s := range steps {
			label := s.Step.String()
			if s.Holds != "" {
				label += "\nholds " + s.Holds
			}
			fmt.Fprintf(&b, "    r%ds%d [label=%q];\n", rank, index, label)
			if index > 0 {
				fmt.Fprintf(&b, "    r%ds%d -> r%ds%d [color=gray];\n", rank, index-1, rank, index)
			}
		}
		b.WriteString("  }\n")
	}
	for _, e := range d.Edges {
		switch e.Kind {
		case FrameEdge:
			fmt.Fprintf(&b, "  r%ds%d -> r%ds%d [constraint=false, label=%q];\n",
				e.From.Rank, e.From.Index, e.To.Rank, e.To.Index, fmt.Sprint(e.Span.length()))
		case FlagEdge:
			fmt.Fprintf(&b, "  r%ds%d -> r%ds%d [constraint=false, style=dashed, color=gray];\n",
				e.From.Rank, e.From.Index, e.To.Rank, e.To.Index)
		}
	}
	b.WriteString("}\n")
	return b.String()
}

// Sizes of the picture, in pixels.
const (
	svgColumn    = 150
	svgRow       = 56
	svgTop       = 70
	svgBox       = 84
	svgBoxHeight = 22
)

// SVG returns the diagram as a picture: a column for each rank, time downwards. Arrows are frames (solid),
// flags (dashed) and accesses to a peer's memory (dotted). Each step shows its text and what it holds when
// the pointer rests on it.
func (d *Diagram) SVG() string {
	slots := 1
	for _, steps := range d.Ranks {
		if n := len(steps); n > 0 {
			slots = max(slots, steps[n-1].Slot+1)
		}
	}
	x := func(rank int) int { return svgColumn/2 + rank*svgColumn }
	y := func(slot int) int { return svgTop + svgRow/2 + slot*svgRow }
	title := fmt.Sprintf("%s: %v", d.Algorithm, d.Problem)
	width, height := max(len(d.Ranks)*svgColumn, 8*len(title)+20), svgTop+slots*svgRow+20
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" role="img" width="%d" height="%d" viewBox="0 0 %d %d" `+
		`font-family="monospace" font-size="12">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, "<title>%s</title>\n", escape(title))
	b.WriteString(`<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" ` +
		`orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="#1f4e79"/></marker></defs>` + "\n")
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/><text x="10" y="20" font-size="13">%s</text>`+"\n",
		width, height, escape(title))
	for rank := range d.Ranks {
		fmt.Fprintf(&b,
			`<text x="%d" y="50" text-anchor="middle">rank %d</text><line x1="%d" y1="58" x2="%d" y2="%d" stroke="#ccc"/>`+"\n",
			x(rank), rank, x(rank), x(rank), height-10)
	}
	for _, e := range d.Edges {
		d.arrow(&b, e, x, y)
	}
	for rank, steps := range d.Ranks {
		for index, s := range steps {
			text := fmt.Sprintf("rank %d, step %d: %v", rank, index, s.Step)
			if s.Holds != "" {
				text += ", holds " + s.Holds
			}
			fmt.Fprintf(&b, `<g><title>%s</title><rect x="%d" y="%d" width="%d" height="%d" rx="4" fill="%s" stroke="#1f4e79"/>`+
				`<text x="%d" y="%d" text-anchor="middle" font-size="11">%s</text></g>`+"\n",
				escape(text), x(rank)-svgBox/2, y(s.Slot)-svgBoxHeight/2, svgBox, svgBoxHeight, fill(s.Kind), x(rank), y(s.Slot)+4,
				escape(short(s.Step)))
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// arrow draws an edge from column to column. The end at a rank's memory is in the slot of the step that
// accesses it.
func (d *Diagram) arrow(b *strings.Builder, e Edge, x, y func(int) int) {
	slot := func(n, other Node) int {
		if n.Index < 0 {
			n = other
		}
		return d.Ranks[n.Rank][n.Index].Slot
	}
	style, text := `stroke="#1f4e79"`, ""
	switch e.Kind {
	case FrameEdge:
		text = fmt.Sprint(e.Span.length())
	case FlagEdge:
		style = `stroke="#999" stroke-dasharray="6 4"`
	default:
		style = `stroke="#b05a00" stroke-dasharray="2 3"`
	}
	// Within a slot, arrows to the right pass below the boxes and arrows to the left above them: no arrow
	// hides another.
	x1, y1, x2, y2 := x(e.From.Rank), y(slot(e.From, e.To)), x(e.To.Rank), y(slot(e.To, e.From))
	side, bend := 1, 0
	if x2 < x1 {
		side = -1
	}
	edge := side * svgBoxHeight / 2
	if y1 == y2 {
		bend = side * min(12+6*abs(e.To.Rank-e.From.Rank), svgRow-svgBoxHeight)
	} else {
		edge = svgBoxHeight / 2
	}
	x1, y1, x2 = x1+side*svgBox/4, y1+edge, x2-side*svgBox/4
	if y1-edge == y2 {
		y2 += edge
	} else {
		y2 -= edge
	}
	middle := [2]int{(x1 + x2) / 2, (y1+y2)/2 + bend}
	fmt.Fprintf(b, `<path d="M%d %dQ%d %d %d %d" fill="none" %s marker-end="url(#head)"/>`+"\n", x1, y1, middle[0],
		middle[1], x2, y2, style)
	if text != "" {
		fmt.Fprintf(b,
			`<text x="%d" y="%d" text-anchor="middle" font-size="10" fill="#1f4e79" `+
				`stroke="white" stroke-width="3" paint-order="stroke">%s</text>`+"\n",
			middle[0], (y1+y2)/2+bend/2+3, text)
	}
}

func abs(n int) int { return max(n, -n) }

// fill is the colour of a step: communication, flags, and work on the rank's memory.
func fill(k StepKind) string {
	switch k {
	case Exchange:
		return "#dbe9f6"
	case Signal, Await:
		return "#eeeeee"
	}
	return "#fdebd3"
}

// short returns the text that fits into the box of a step.
func short(s Step) string {
	switch s.Kind {
	case Exchange:
		switch {
		case s.To < 0:
			return "receive"
		case s.From < 0:
			return "send"
		}
		return "exchange"
	case Signal, Await:
		return fmt.Sprintf("%v %d", s.Kind, s.Flag)
	}
	return s.Kind.String()
}

func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a strings.Builder returns no error
	return b.String()
}
