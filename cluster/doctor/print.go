package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/lockstep-ml/lockstep/internal/units"
)

// matrixMax is the maximum number of workers in a matrix; more are listed by pairs.
const matrixMax = 16

// Print writes the report for display: the workers, matrices of the measurements, and the problems.
func (r *Report) Print(out io.Writer) error {
	var b strings.Builder
	r.printWorkers(&b)
	switch n := len(r.Workers); {
	case n == 1:
		b.WriteString("\none worker: there is no pair to test\n")
	case n > matrixMax:
		b.WriteString("\n")
		r.lines(&b)
	default:
		r.matrix(&b, "\nreach", func(p *Pair, _ bool) string { return p.Reach })
		r.matrix(&b, "\nround trip", func(p *Pair, _ bool) string { return short(p.RoundTrip).String() })
		r.matrix(&b, fmt.Sprintf("\nrate, from the worker of the row to that of the column, in messages of %s",
			units.Bytes(r.Bytes)), func(p *Pair, back bool) string {
			if back {
				return rate(p.Back)
			}
			return rate(p.There)
		})
		r.matrix(&b, "\nclock of the column ahead of the row's", func(p *Pair, back bool) string {
			if back {
				return short(-p.Ahead).String()
			}
			return short(p.Ahead).String()
		})
	}
	b.WriteString("\n")
	for _, s := range r.Wrong {
		fmt.Fprintf(&b, "wrong: %s\n", s)
	}
	for _, s := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", s)
	}
	if r.Healthy() {
		b.WriteString("nothing is wrong\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (r *Report) printWorkers(b *strings.Builder) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "worker\thost\tpid")
	names := r.factNames()
	for _, name := range names {
		fmt.Fprintf(w, "\t%s", name)
	}
	fmt.Fprintln(w)
	for i := range r.Workers {
		p := &r.Workers[i]
		fmt.Fprintf(w, "%d\t%s\t%d", p.Worker, p.Host, p.PID)
		for _, name := range names {
			fmt.Fprintf(w, "\t%s", p.fact(name))
		}
		fmt.Fprintln(w)
	}
	w.Flush() // into a strings.Builder, which does not fail
}

// matrix writes one cell for each two workers; back selects the direction from B.
func (r *Report) matrix(b *strings.Builder, title string, cell func(p *Pair, back bool) string) {
	n := len(r.Workers)
	cells := make([]string, n*n)
	for i := range r.Pairs {
		p := &r.Pairs[i]
		there, back := "?", "?"
		if p.Problem == "" {
			there, back = cell(p, false), cell(p, true)
		}
		cells[p.A*n+p.B], cells[p.B*n+p.A] = there, back
	}
	fmt.Fprintln(b, title)
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for col := range n {
		fmt.Fprintf(w, "\t%d", col)
	}
	fmt.Fprintln(w, "\t")
	for row := range n {
		fmt.Fprintf(w, "%d", row)
		for col := range n {
			text := cells[row*n+col]
			if row == col {
				text = "-"
			}
			fmt.Fprintf(w, "\t%s", text)
		}
		fmt.Fprintln(w, "\t")
	}
	w.Flush()
}

// PrintPlain writes a line for each pair, for other programs, and the problems.
func (r *Report) PrintPlain(out io.Writer) error {
	var b strings.Builder
	r.lines(&b)
	for _, s := range r.Wrong {
		fmt.Fprintf(&b, "wrong %s\n", s)
	}
	for _, s := range r.Notes {
		fmt.Fprintf(&b, "note %s\n", s)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func (r *Report) lines(b *strings.Builder) {
	for i := range r.Pairs {
		p := &r.Pairs[i]
		if p.Problem != "" {
			fmt.Fprintf(b, "pair a=%d b=%d problem=%q\n", p.A, p.B, p.Problem)
			continue
		}
		fmt.Fprintf(b, "pair a=%d b=%d reach=%s us=%.1f there_MBps=%.1f back_MBps=%.1f ahead_us=%.1f\n",
			p.A, p.B, p.Reach, float64(p.RoundTrip)/1e3, p.There/1e6, p.Back/1e6, float64(p.Ahead)/1e3)
	}
}
