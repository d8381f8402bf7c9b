package flight

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/internal/ranges"
)

// Print writes the report as text.
func (r *Report) Print(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "job %q, epoch %d: records of %d of %d workers\n", r.Job, r.Epoch, r.Workers-len(r.Missing), r.Workers)
	for i := range r.Missing {
		fmt.Fprintf(&b, "  none of %v\n", &r.Missing[i])
	}
	for i := range r.Parts {
		r.Parts[i].print(&b)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// rowsMax is how many ranks are listed one by one.
const rowsMax = 64

func (p *Part) print(b *strings.Builder) {
	fmt.Fprintf(b, "\ncommunicator %q", p.Comm)
	if p.Epoch > 0 {
		fmt.Fprintf(b, ", epoch %d", p.Epoch)
	}
	fmt.Fprintf(b, ", %s\n", plural(uint64(p.Size), "rank"))
	switch {
	case p.Common > 0 && p.Last != "":
		fmt.Fprintf(b, "  all have completed call %d, %s\n", p.Common-1, p.Last)
	case p.Common > 0:
		fmt.Fprintf(b, "  all have completed call %d\n", p.Common-1)
	}
	if p.Kind == Differ {
		fmt.Fprintf(b, "  they diverge at call %d:\n", p.At)
	}
	for _, s := range p.Text {
		fmt.Fprintf(b, "  %s\n", s)
	}
	width := 0
	shown := p.Rows[:min(len(p.Rows), rowsMax)]
	for i := range shown {
		width = max(width, len(shown[i].Who))
	}
	digits := len(fmt.Sprint(p.Size - 1))
	for i := range shown {
		row := &shown[i]
		fmt.Fprintf(b, "    rank %-*d  %-*s  %s\n", digits, row.Rank, width, row.Who, row.Text)
	}
	if n := len(p.Rows) - len(shown); n > 0 {
		fmt.Fprintf(b, "    and %s\n", plural(uint64(n), "more rank"))
	}
}

// text describes what a rank did last. A call that described reports as described before is named by its number
// only.
func (v *view) text(described func(*Call) bool) string {
	numbered := func(c *Call) string {
		if described(c) {
			return fmt.Sprintf("call %d", c.Seq)
		}
		return c.numbered()
	}
	queued := ""
	if v.Queued > 0 {
		queued = ", with " + plural(uint64(v.Queued), "call") + " behind it"
	}
	c := v.now
	if c == nil {
		text := "has called nothing"
		if n := len(v.Calls); n > 0 {
			last := &v.Calls[n-1]
			text = "is in no call; its last was " + numbered(last)
			if !last.End.IsZero() && v.file.At.After(last.End) {
				text += fmt.Sprintf(", %v before it wrote this", short(v.file.At.Sub(last.End)))
			}
		}
		if v.Err != "" {
			text += "; " + clip(v.Err)
		}
		return text
	}
	until, ago := v.file.At, "for"
	text := "is in"
	switch c.State {
	case Failed:
		text, until, ago = "failed in", c.End, "after"
	case Waiting:
		text = "waits in"
	}
	text += " " + numbered(c)
	if c.Start.Before(until) && !c.Start.IsZero() {
		text += fmt.Sprintf(", %s %v", ago, short(until.Sub(c.Start)))
	}
	if len(c.WaitsFor) > 0 {
		text += ", for " + ranges.Text("rank", c.WaitsFor)
	}
	text += queued
	if c.Err != "" {
		text += ": " + clip(c.Err)
	}
	return text
}

// clip shortens a rank's error: those of the other ranks are similar.
func clip(s string) string {
	const most = 160
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// numbered describes a call with its number.
func (c *Call) numbered() string {
	if c.Pair {
		return fmt.Sprintf("%v, number %d of these", c, c.Seq)
	}
	return fmt.Sprintf("call %d, %v", c.Seq, c)
}

func short(d time.Duration) time.Duration {
	switch {
	case d > time.Second:
		return d.Round(100 * time.Millisecond)
	case d > time.Millisecond:
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(100 * time.Nanosecond)
}

func plural(n uint64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

func calls(r []int) string {
	if len(r) == 1 {
		return ranges.Text("rank", r) + " calls"
	}
	return ranges.Text("rank", r) + " call"
}

func have(r []int) string {
	if len(r) == 1 {
		return ranges.Text("rank", r) + " has"
	}
	return ranges.Text("rank", r) + " have"
}

func are(r []int) string {
	if len(r) == 1 {
		return ranges.Text("rank", r) + " is"
	}
	return ranges.Text("rank", r) + " are"
}
