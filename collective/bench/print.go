package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
)

// printer writes results in a format.
type printer struct {
	w    io.Writer
	opts Options
	rows int
}

func newPrinter(w io.Writer, opts Options) *printer { return &printer{w: w, opts: opts} }

func (p *printer) print(r Result) error {
	defer func() { p.rows++ }()
	var err error
	switch p.opts.Format {
	case "plain":
		_, err = fmt.Fprintf(p.w, "%s ranks=%d bytes=%d us=%.1f\n", p.opts.Name, r.Ranks, r.Bytes, micros(r.Median))
	case "json":
		var text []byte
		if text, err = json.Marshal(r); err == nil {
			_, err = fmt.Fprintf(p.w, "%s\n", text)
		}
	case "table":
		if p.rows == 0 {
			if err = p.head(); err != nil {
				return err
			}
		}
		line := fmt.Sprintf("%12d %10d %12.1f %12.1f %8.2f %8.2f", r.Bytes, r.Bytes/p.opts.Type.Bytes(), micros(r.Median),
			micros(r.Best), r.AlgBW, r.BusBW)
		if r.Limit > 0 {
			line += fmt.Sprintf(" %12.*f %6.0f", decimals(r.Limit), micros(r.Limit), 100*r.Share())
		}
		_, err = fmt.Fprintln(p.w, line)
	}
	return err
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
	o := &p.opts
	what := o.Op.String()
	if o.Op.Reduces() {
		what += " " + o.Reduce.String()
	}
	if o.Op.Rooted() && o.Op != collective.Send {
		what += fmt.Sprintf(", root %d", o.Root)
	}
	algorithm := o.Algorithm
	if algorithm == "" {
		algorithm = "chosen by size"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# %s of %v, %d ranks in %d %s over %s, %s buffers, algorithm %s, %d processors\n",
		what, o.Type, o.Ranks, o.Processes, plural("process", "processes", o.Processes), o.Transport, o.Buffers, algorithm,
		cores())
	limit, units := "", ""
	if o.Limit && o.Op != collective.Barrier {
		limit, units = fmt.Sprintf(" %12s %6s", "limit", "share"), fmt.Sprintf(" %12s %6s", "us", "%")
	}
	fmt.Fprintf(&b, "#%11s %10s %12s %12s %8s %8s%s\n", "size", "count", "time", "best", "algbw", "busbw", limit)
	fmt.Fprintf(&b, "#%11s %10s %12s %12s %8s %8s%s\n", "bytes", "elements", "us", "us", "GB/s", "GB/s", units)
	_, err := io.WriteString(p.w, b.String())
	return err
}

func plural(one, many string, n int) string {
	if n == 1 {
		return one
	}
	return many
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
