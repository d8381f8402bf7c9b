package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/tensor"
)

// printer writes the results of some measurements in the format of the first. In the table, measurements of one
// operation after each other have one head and one summary.
type printer struct {
	w    io.Writer
	list []Options
	now  *Options // the measurement whose results follow

	section []Result // of the table, so far
}

// begin announces a measurement.
func (p *printer) begin(o *Options) error {
	table, before := p.list[0].Format == "table", p.now
	if table && before != nil && before.Op != o.Op {
		if err := p.end(); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(p.w); err != nil {
			return err
		}
	}
	if p.now = o; !table || before != nil && before.Op == o.Op {
		return nil
	}
	return p.head()
}

func (p *printer) print(r Result) error {
	p.section = append(p.section, r)
	switch p.list[0].Format {
	case "json":
		text, err := json.Marshal(r)
		if err == nil {
			_, err = fmt.Fprintf(p.w, "%s\n", text)
		}
		return err
	case "table":
		_, err := fmt.Fprintln(p.w, row(r))
		return err
	}
	_, err := fmt.Fprintln(p.w, p.plain(r))
	return err
}

// plain formats a line for other programs.
func (p *printer) plain(r Result) string {
	line := fmt.Sprintf("%s ranks=%d bytes=%d us=%.1f average=%s", p.list[0].Name, r.Ranks, r.Bytes, micros(r.Median),
		r.Average)
	if len(p.list) > 1 {
		line += fmt.Sprintf(" op=%s dtype=%s", r.Op, r.Type)
		if r.Reduce != "" {
			line += " reduce=" + r.Reduce
		}
	}
	if r.Overlap != nil {
		line += fmt.Sprintf(" compute_us=%.1f overall_us=%.1f overlap=%.1f%%", micros(r.Overlap.Compute),
			micros(r.Overlap.Overall), 100*r.Overlap.Share)
	}
	return line
}

// The widths of the table's columns: those that every measurement has, which fill 80 characters, and further ones.
const (
	columns        = "%8s %8s %8s %5s %8s %8s %8s %6s %6s %6s"
	overlapColumns = " %8s %8s %7s"
	limitColumns   = " %8s %5s"
)

// row formats a result as a row of the table.
func row(r Result) string {
	dtype, reduce, wrong := r.Type, r.Reduce, "N/A"
	elements := 0
	if r.Op == collective.Barrier.String() {
		dtype = "none"
	} else if t, err := tensor.ParseDType(r.Type); err == nil {
		elements = r.Bytes / t.Bytes()
	}
	if reduce == "" {
		reduce = "none"
	}
	if r.Wrong != nil {
		wrong = fmt.Sprint(*r.Wrong)
	}
	us := func(d time.Duration) string { return fmt.Sprintf("%.1f", micros(d)) }
	line := fmt.Sprintf(columns, fmt.Sprint(r.Bytes), fmt.Sprint(elements), dtype, reduce, us(r.Median), us(r.Best),
		us(r.P99), fmt.Sprintf("%.2f", r.AlgBW), fmt.Sprintf("%.2f", r.BusBW), wrong)
	if r.Overlap != nil {
		line += fmt.Sprintf(overlapColumns, us(r.Overlap.Compute), us(r.Overlap.Overall),
			fmt.Sprintf("%.1f", 100*r.Overlap.Share))
	}
	if r.Limit > 0 {
		line += fmt.Sprintf(limitColumns, fmt.Sprintf("%.*f", decimals(r.Limit), micros(r.Limit)),
			fmt.Sprintf("%.0f", 100*r.Share()))
	}
	return line
}

// decimals returns the number of decimals of a time: one, but three for less than a microsecond.
func decimals(d time.Duration) int {
	if d < time.Microsecond {
		return 3
	}
	return 1
}

// head writes what is measured, and the columns.
func (p *printer) head() error {
	o := p.now
	what := o.Op.String()
	if o.Op.Rooted() && o.Op != collective.Send {
		what += fmt.Sprintf(", root %d", o.Root)
	}
	algorithm := o.Algorithm
	if algorithm == "" {
		algorithm = "chosen by size"
	}
	over := o.Transport
	if o.TLS {
		over += " with TLS"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# %s, %d ranks in %d %s over %s, algorithm %s, %d processors\n", what, o.Ranks, o.Processes,
		plural("process", "processes", o.Processes), over, algorithm, cores())
	if bound := affinity.Read().Of(o.Bind, o.Processes, 0); o.Processes > 1 && len(bound) > 0 {
		fmt.Fprintf(&b, "# each process is bound to its CPUs (%s), the first to %s\n", o.Bind, affinity.Text(bound))
	}
	if sizes := o.Split.Sizes(o.Ranks); o.Split.By != "" {
		fmt.Fprintf(&b, "# %d %s at the same time (split %v); rank 0's has %d %s\n", len(sizes),
			plural("group", "groups", len(sizes)), o.Split, sizes[0], plural("rank", "ranks", sizes[0]))
	}
	if o.Op != collective.Barrier {
		fmt.Fprintf(&b, "# %s buffers", o.Buffers)
		if o.Unaligned > 0 {
			fmt.Fprintf(&b, ", %d %s after a %d-byte boundary", o.Unaligned, plural("byte", "bytes", o.Unaligned), alignment)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "# times are %s\n", o.Average.text())
	names, units := "", ""
	if o.Overlap {
		names += fmt.Sprintf(overlapColumns, "compute", "overall", "overlap")
		units += fmt.Sprintf(overlapColumns, "us", "us", "%")
	}
	if o.Limit && o.Op != collective.Barrier {
		names += fmt.Sprintf(limitColumns, "limit", "share")
		units += fmt.Sprintf(limitColumns, "us", "%")
	}
	line := func(more string, texts ...any) {
		b.WriteString("#" + strings.TrimRight(fmt.Sprintf(columns, texts...)[1:]+more, " ") + "\n")
	}
	line(names, "size", "count", "type", "redop", "time", "best", "p99", "algbw", "busbw", "#wrong")
	line(units, "bytes", "elements", "", "", "us", "us", "us", "GB/s", "GB/s", "")
	_, err := io.WriteString(p.w, b.String())
	return err
}

// end writes the summary of a table's section.
func (p *printer) end() error {
	results := p.section
	p.section = nil
	if p.list[0].Format != "table" || len(results) == 0 || p.now.Op == collective.Barrier {
		return nil
	}
	sum, wrong, checks := 0.0, int64(0), 0
	for _, r := range results {
		sum += r.BusBW
		if checks += r.Checks; r.Wrong != nil {
			wrong += *r.Wrong
		}
	}
	text := "not checked"
	if checks > 0 {
		text = fmt.Sprintf("%d in %d checked %s", wrong, checks, plural("call", "calls", checks))
	}
	_, err := fmt.Fprintf(p.w, "# wrong elements: %s\n# average bus bandwidth: %.3f GB/s\n", text,
		sum/float64(len(results)))
	return err
}

func plural(one, many string, n int) string {
	if n == 1 {
		return one
	}
	return many
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
