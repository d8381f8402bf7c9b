package inspect

import (
	"cmp"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/doctor"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/page"
	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// recordsPage is the content of pages/records.html.
type recordsPage struct {
	Style template.CSS
	Title string
	Lead  []string
	Parts []recordsPart
	Data  *diagnosis
}

// recordsPart is a communicator.
type recordsPart struct {
	ID                                     int
	Title, Label                           string
	Text                                   []string
	Lanes                                  []lane
	Ticks                                  []tick
	Width, Height, Top, Bottom, Axis, Left float64
	Rows                                   []recordsRow
}

type recordsRow struct {
	flight.Row
	Waited string
	Blamed bool
}

// lane is a rank.
type lane struct {
	Name, Note string
	TextY      float64
	Blamed     bool
	Calls      []laneCall
}

type laneCall struct {
	X, Y, W, H     float64
	State, Title   string
	Color          template.CSS
	At             bool // the ranks diverge here
	Label          string
	LabelX, LabelY float64
}

type tick struct {
	X    float64
	Text string
}

// Sizes of the lanes, in pixels.
const (
	lanesWidth  = 900.0
	lanesLeft   = 150.0
	laneHeight  = 30.0
	lanesMost   = 64 // ranks
	callsBefore = 12 // calls before the divergence
)

// callColors are the colors of calls by their state.
var callColors = map[flight.State]template.CSS{
	flight.Done: "--line-3", flight.Running: "--line-1", flight.Waiting: "--line-6", flight.Failed: "--line-2",
}

// writeRecordsPage writes the diagnosis with a lane per rank.
func writeRecordsPage(file string, d *diagnosis, files []flight.File) error {
	p := recordsPage{
		Style: page.Style(), Data: d, Title: fmt.Sprintf("Records of job %q, epoch %d", d.Job, d.Epoch),
		Lead: []string{fmt.Sprintf("Records of %d of %s.", d.Workers-len(d.Missing), cli.Count(d.Workers, "worker"))},
	}
	if r := d.Root; r != nil {
		message, _, _ := strings.Cut(r.Message, "\n")
		p.Lead = append(p.Lead, fmt.Sprintf("Worker %d failed first (host %s, pid %d), %s: %s", r.Worker, r.Host, r.PID,
			r.Kind, message))
	}
	for i := range d.Parts {
		p.Parts = append(p.Parts, recordsPartOf(i, &d.Parts[i], files))
	}
	return page.Write(file, "records.html", p)
}

// span is a recorded call with its times: those that the record lacks are filled in.
type span struct {
	*flight.Call
	start, end time.Time
}

// recordsPartOf draws the lanes of a communicator.
func recordsPartOf(id int, part *flight.Part, files []flight.File) recordsPart {
	p := recordsPart{
		ID: id, Title: fmt.Sprintf("Communicator %q, %s", part.Comm, cli.Count(part.Size, "rank")), Text: part.Text,
		Width: lanesWidth, Left: lanesLeft, Top: 4,
		Label: fmt.Sprintf("The last calls of the ranks of communicator %q over time", part.Comm),
	}
	for _, row := range part.Rows {
		p.Rows = append(p.Rows, recordsRow{
			row, time.Duration(row.Waited * float64(time.Second)).Round(time.Millisecond).String(),
			slices.Contains(part.Blamed, row.Rank),
		})
	}
	spans := map[int][]span{}
	var first, last time.Time
	for _, f := range files {
		for i := range f.Ranks {
			r := &f.Ranks[i]
			if r.Comm != part.Comm || r.Epoch != part.Epoch {
				continue
			}
			spans[r.Rank] = spansOf(r, f.At, part)
			for _, s := range spans[r.Rank] {
				if first.IsZero() || s.start.Before(first) {
					first = s.start
				}
				if s.end.After(last) {
					last = s.end
				}
			}
		}
	}
	if first.IsZero() {
		return p // calls without times
	}
	whole := max(last.Sub(first), time.Microsecond)
	x := func(t time.Time) float64 {
		return lanesLeft + (lanesWidth-lanesLeft-60)*float64(t.Sub(first))/float64(whole)
	}
	rows := slices.Clone(part.Rows)
	slices.SortStableFunc(rows, func(a, b flight.Row) int { return cmp.Compare(a.Rank, b.Rank) })
	for i, row := range rows[:min(len(rows), lanesMost)] {
		top := p.Top + float64(i)*laneHeight
		l := lane{
			Name: fmt.Sprintf("rank %d", row.Rank), TextY: top + 19, Blamed: slices.Contains(part.Blamed, row.Rank),
		}
		if len(spans[row.Rank]) == 0 {
			l.Note = row.Text
		}
		for _, s := range spans[row.Rank] {
			c := laneCall{
				X: x(s.start), Y: top + 4, H: laneHeight - 8, State: string(s.State), Color: callColors[s.State],
				Title: fmt.Sprintf("call %d, %v, %s, %v", s.Seq, s.Call, s.State, cli.Round(s.end.Sub(s.start))),
				At:    diverges(part) && s.Seq == part.At && !s.Pair,
			}
			c.W = max(x(s.end)-c.X, 2)
			c.Label, c.LabelX, c.LabelY = fmt.Sprintf("%d", s.Seq), c.X+c.W+4, top+19
			l.Calls = append(l.Calls, c)
		}
		p.Lanes = append(p.Lanes, l)
	}
	if n := len(rows) - lanesMost; n > 0 {
		p.Text = append(slices.Clone(p.Text), fmt.Sprintf("The lanes of the last %s are left out.", cli.Count(n, "rank")))
	}
	p.Bottom = p.Top + float64(len(p.Lanes))*laneHeight
	p.Axis, p.Height = p.Bottom+14, p.Bottom+20
	for i := range 5 {
		t := time.Duration(i) * whole / 4
		p.Ticks = append(p.Ticks, tick{x(first.Add(t)), "+" + cli.Round(t).String()})
	}
	return p
}

// diverges reports whether the ranks diverge at one call.
func diverges(p *flight.Part) bool {
	return slices.Contains([]flight.Kind{flight.Differ, flight.Absent, flight.Inside}, p.Kind)
}

// spansOf returns the calls of a rank that have times, from some calls before the divergence on. A call without an end
// was under way when the record was written.
func spansOf(r *flight.Rank, written time.Time, part *flight.Part) (spans []span) {
	for i := range r.Calls {
		c := &r.Calls[i]
		if c.Start.IsZero() || !c.Pair && c.Seq+callsBefore < part.Common {
			continue
		}
		end := c.End
		if end.IsZero() {
			end = written
		}
		if end.Before(c.Start) {
			end = c.Start // the clock was set
		}
		spans = append(spans, span{c, c.Start, end})
	}
	return spans
}

// pairsPage is the content of pages/pairs.html.
type pairsPage struct {
	Style        template.CSS
	Title, Lead  string
	Wrong, Notes []string
	Maps         []heatMap
	Facts        page.Table
	Data         *doctor.Report
}

// heatMap is a table with a row and a column per worker.
type heatMap struct {
	Caption, About string
	Columns        []string
	Rows           []heatRow
}

type heatRow struct {
	Name  string
	Cells []heatCell
}

type heatCell struct {
	Text     string
	Color    template.CSS
	Strength int // percent of the color; 0: none
	Bad      bool
}

// writePairsPage writes the test of a job with heat maps of the pairs.
func writePairsPage(file string, r *doctor.Report) error {
	p := pairsPage{
		Style: page.Style(), Data: r, Title: fmt.Sprintf("Test of %s", cli.Count(len(r.Workers), "worker")),
		Lead: fmt.Sprintf("Each pair exchanged messages of %s.", units.Bytes(r.Bytes)), Wrong: r.Wrong, Notes: r.Notes,
	}
	p.Maps = append(p.Maps,
		heatMapOf(r, "Bandwidth", "From the worker of the row to that of the column. A stronger color is a faster pair.",
			"--line-3", func(p *doctor.Pair, back bool) (float64, string) {
				rate := p.There
				if back {
					rate = p.Back
				}
				return rate, cli.FormatRate(rate)
			}),
		heatMapOf(r, "Round-trip time", "A stronger color is a slower pair.", "--line-2",
			func(p *doctor.Pair, _ bool) (float64, string) {
				return float64(p.RoundTrip), cli.Round(p.RoundTrip).String()
			}))
	p.Facts.Head = []string{"worker", "host", "pid"}
	for i, w := range r.Workers {
		row := []string{fmt.Sprint(w.Worker), w.Host, fmt.Sprint(w.PID)}
		for _, f := range w.Facts {
			if i == 0 {
				p.Facts.Head = append(p.Facts.Head, f.Name)
			}
			row = append(row, f.Value)
		}
		p.Facts.Rows = append(p.Facts.Rows, row)
	}
	return page.Write(file, "pairs.html", p)
}

// heatMapOf returns the map of a number of the pairs.
func heatMapOf(r *doctor.Report, caption, about string, color template.CSS,
	number func(p *doctor.Pair, back bool) (float64, string),
) heatMap {
	m := heatMap{Caption: caption, About: about}
	most := 0.0
	for i := range r.Pairs {
		for _, back := range []bool{false, true} {
			if x, _ := number(&r.Pairs[i], back); r.Pairs[i].Problem == "" {
				most = max(most, x)
			}
		}
	}
	cells := make([][]heatCell, len(r.Workers))
	for i := range r.Workers {
		name := fmt.Sprintf("worker %d", r.Workers[i].Worker)
		m.Columns = append(m.Columns, name)
		cells[i] = make([]heatCell, len(r.Workers))
		cells[i][i].Text = "–"
		m.Rows = append(m.Rows, heatRow{name, cells[i]})
	}
	const strongest = 70 // percent: the text stays readable
	for i := range r.Pairs {
		p := &r.Pairs[i]
		for _, back := range []bool{false, true} {
			from, to := p.A, p.B
			if back {
				from, to = to, from
			}
			if p.Problem != "" {
				cells[from][to] = heatCell{Text: "no answer", Bad: true}
				continue
			}
			x, text := number(p, back)
			cells[from][to] = heatCell{Text: text + ", " + p.Reach, Color: color, Strength: 1 + int(strongest*x/max(most, 1e-9))}
		}
	}
	return m
}
