package plan

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

// TestDiagram checks, for every algorithm and every problem that it fits, that each step starts after the steps that it
// waits for, that each frame has one sender and one receiver, and that the picture is well-formed XML that names every
// step.
func TestDiagram(t *testing.T) {
	drawn := map[string]bool{}
	for _, a := range Algorithms {
		for op := AllReduce; op <= Send; op++ {
			for _, p := range []Problem{
				{Op: op, Size: 2, Count: 128, Peer: 1},
				{Op: op, Size: 6, Count: 384, Root: 2, Peer: 1, Order: Any},
				{Op: op, Size: 4, Count: 256, Places: shaped(2, 2), Private: true, Stage: 4096, Peer: 3},
			} {
				if op == Barrier {
					p.Count = 0
				}
				if p.Validate() != nil || a.Fits(p) != nil {
					continue
				}
				d, err := Draw(a, p)
				if err != nil {
					t.Fatalf("%s: %v: %v", a.Name, p, err)
				}
				drawn[a.Name] = true
				checkDiagram(t, d)
			}
		}
	}
	for _, a := range Algorithms {
		if !drawn[a.Name] {
			t.Errorf("%s fits none of the problems of this test", a.Name)
		}
	}
}

func checkDiagram(t *testing.T, d *Diagram) {
	t.Helper()
	name := d.Algorithm + ": " + d.Problem.String()
	frames, received := 0, 0
	for rank, steps := range d.Ranks {
		for index, s := range steps {
			if index > 0 && s.Slot <= steps[index-1].Slot {
				t.Errorf("%s: rank %d, step %d is in slot %d, the step before in slot %d", name, rank, index, s.Slot,
					steps[index-1].Slot)
			}
			if s.Kind == Exchange && s.From >= 0 {
				received++
			}
		}
	}
	for _, e := range d.Edges {
		switch e.Kind {
		case FrameEdge:
			frames++
			from, to := d.Ranks[e.From.Rank][e.From.Index], d.Ranks[e.To.Rank][e.To.Index]
			if from.To != e.To.Rank || to.From != e.From.Rank || from.Out.length() != to.In.length() {
				t.Errorf("%s: %v of rank %d is joined with %v of rank %d", name, from.Step, e.From.Rank, to.Step, e.To.Rank)
			}
			if to.Slot < from.Slot && e.From.Index > 0 && to.Slot <= d.Ranks[e.From.Rank][e.From.Index-1].Slot {
				t.Errorf("%s: %v of rank %d is received before it is sent", name, to.Step, e.To.Rank)
			}
		case FlagEdge:
			if from, to := d.Ranks[e.From.Rank][e.From.Index], d.Ranks[e.To.Rank][e.To.Index]; from.Slot >= to.Slot ||
				from.Flag != to.Flag {
				t.Errorf("%s: %v of rank %d in slot %d, %v of rank %d in slot %d", name, from.Step, e.From.Rank, from.Slot, to.Step,
					e.To.Rank, to.Slot)
			}
		}
	}
	if frames != received {
		t.Errorf("%s: %d frame edges, %d receives", name, frames, received)
	}
	titles, decoder := 0, xml.NewDecoder(strings.NewReader(d.SVG()))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%s: SVG: %v", name, err)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == "title" {
			titles++
		}
	}
	want := 1
	for _, steps := range d.Ranks {
		want += len(steps)
	}
	if titles != want {
		t.Errorf("%s: the SVG has %d titles, want %d", name, titles, want)
	}
	if got := strings.Count(d.DOT(), "[label="); got < want-1 {
		t.Errorf("%s: the graph has %d labelled nodes, want at least %d", name, got, want-1)
	}
}
