package train

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/internal/terminal"
)

// ProgressMode is the output format of [NewProgress].
type ProgressMode uint8

// The modes.
const (
	// ProgressAuto is ProgressBar if the output is the user's terminal, else ProgressPlain. Terminals of TERM=dumb, and
	// those that mpirun creates for its processes, get plain lines.
	ProgressAuto  ProgressMode = iota
	ProgressPlain              // one line per epoch, and one every ten seconds within it: for files and pipes
	ProgressBar                // one line per epoch, redrawn continually, as in Keras: for terminals
)

// ProgressConfig configures [NewProgress].
type ProgressConfig struct {
	Out   io.Writer    // receives the output
	Mode  ProgressMode // default ProgressAuto
	Unit  string       // the name of examples, such as "images"; default "examples"
	Width func() int   // returns the current width in columns; nil: that of the terminal Out, else 80
}

const (
	redrawEvery = 100 * time.Millisecond // ProgressBar
	lineEvery   = 10 * time.Second       // ProgressPlain, within an epoch
	barWidthMin = 6
	barWidthMax = 24
)

// NewProgress returns a callback that prints each epoch's steps, time, examples per second, loss and metrics.
// On a terminal it draws a bar, elsewhere plain lines: cfg.Out is a terminal if it is a file, or has its method Fd, and
// that is one. It ignores write errors of cfg.Out. A callback serves one Fit at a time.
func NewProgress(cfg ProgressConfig) Callback {
	if cfg.Unit == "" {
		cfg.Unit = "examples"
	}
	if cfg.Mode == ProgressAuto {
		cfg.Mode = ProgressPlain
		if terminal.CanRedraw(cfg.Out) && !startedByMPI() {
			cfg.Mode = ProgressBar
		}
	}
	if cfg.Width == nil {
		columns, isTerminal := terminal.Columns(cfg.Out)
		if !isTerminal {
			columns = func() int { return 80 }
		}
		cfg.Width = columns
	}
	p := &progress{cfg: cfg}
	return Callback{
		OnEpochBegin: func(_ context.Context, e EpochBegin) error { p.begin(e); return nil },
		OnStepEnd:    func(_ context.Context, s Step) error { p.step(s); return nil },
		OnEpochEnd:   func(_ context.Context, e Epoch) error { p.end(e); return nil },
		OnTrainEnd:   func(context.Context, *History, error) { p.close() },
	}
}

// startedByMPI reports whether mpirun or a similar launcher started this process. Then the terminal is not the
// user's: Open MPI creates one for each process, and may write its output to a file.
func startedByMPI() bool {
	return slices.ContainsFunc([]string{"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID"},
		func(name string) bool { return os.Getenv(name) != "" })
}

// progress prints the progress of one Fit.
type progress struct {
	cfg      ProgressConfig
	epoch    EpochBegin
	shown    time.Time     // when the last line was written
	duration time.Duration // of the epoch's steps
	open     bool          // the current line has no line end yet
	pending  *Step         // the last step of the epoch, if not shown yet
}

func (p *progress) begin(e EpochBegin) {
	p.epoch, p.duration, p.shown, p.pending = e, e.Elapsed, time.Now(), nil
	if p.cfg.Mode == ProgressBar {
		fmt.Fprintf(p.cfg.Out, "Epoch %d/%d\n", e.Epoch+1, e.Epochs)
		p.shown = time.Time{} // the first step is shown at once
	}
}

func (p *progress) step(s Step) {
	p.duration += s.Duration
	every := lineEvery
	if p.cfg.Mode == ProgressBar {
		every = redrawEvery
	}
	now := time.Now()
	if p.pending = &s; now.Sub(p.shown) < every {
		return
	}
	p.shown = now
	p.show(s)
}

func (p *progress) show(s Step) {
	p.pending = nil
	r := s.Mean()
	if p.cfg.Mode == ProgressPlain {
		fmt.Fprintf(p.cfg.Out, "epoch %d/%d, step %s: %s, %s%s\n", s.Epoch+1, s.Epochs, count(s.Step, s.Steps),
			p.rate(s.Step, r), numbers(r, "", " ", ", "), slow(s, ", "))
		return
	}
	perStep, left := short(p.duration/time.Duration(s.Step))+"/step", ""
	if s.Steps > 0 {
		left = ", " + short((p.duration / time.Duration(s.Step) * time.Duration(s.Steps-s.Step)).Round(time.Second)) + " left"
	}
	nums := numbers(r, "", ": ", " - ") + slow(s, " - ")
	line := p.line(s.Step, s.Steps, p.rate(s.Step, r)+left+" - "+nums, p.rate(s.Step, r)+" - "+nums, perStep+" - "+nums,
		nums)
	fmt.Fprintf(p.cfg.Out, "\r%s\x1b[K", clip(line, p.cfg.Width()-1)) // a line that wraps cannot be drawn again
	p.open = true
}

// slow names the straggler after a separator, or returns "".
func slow(s Step, sep string) string {
	if s.Straggler == nil {
		return ""
	}
	return fmt.Sprintf("%sworker %d slow: %s", sep, s.Straggler.Worker, s.Straggler.Cause)
}

func (p *progress) end(e Epoch) {
	p.pending = nil
	r, val := e.Result, ""
	if p.cfg.Mode == ProgressPlain {
		if e.Validation != nil {
			val = ", " + numbers(*e.Validation, "val_", " ", ", ")
		}
		fmt.Fprintf(p.cfg.Out, "epoch %d/%d: %s in %s, %s, %s%s\n", e.Epoch+1, p.epoch.Epochs, plural(e.Steps, "step"),
			short(e.Duration), p.rate(e.Steps, r), numbers(r, "", " ", ", "), val)
		return
	}
	took, nums := short(e.Duration), numbers(r, "", ": ", " - ")
	rate := took + ", " + p.rate(e.Steps, r)
	texts := []string{rate + " - " + nums, p.rate(e.Steps, r) + " - " + nums, took + " - " + nums, nums}
	steps := max(e.Steps, p.epoch.Steps)
	if e.Validation != nil {
		val = numbers(*e.Validation, "val_", ": ", " - ")
		if full := rate + " - " + nums + " - " + val; p.fits(count(e.Steps, steps) + " " + full) {
			texts, val = []string{full}, ""
		} else {
			val = "\n" + strings.Repeat(" ", len(count(e.Steps, steps))) + " " + val
		}
	}
	fmt.Fprintf(p.cfg.Out, "\r%s\x1b[K%s\n", p.line(e.Steps, steps, texts...), val)
	p.open = false
}

// close shows the last step of an incomplete epoch, and ends an open line.
func (p *progress) close() {
	if p.pending != nil {
		p.show(*p.pending)
	}
	if p.open {
		fmt.Fprintln(p.cfg.Out)
	}
	p.open = false
}

// line returns the count of steps, a bar, and the first of the texts that leaves room for a bar. If none
// does, it omits the bar and uses the first text that fits, else the last one.
func (p *progress) line(step, steps int, texts ...string) string {
	head := count(step, steps) + " "
	for _, text := range texts {
		room := p.cfg.Width() - 2 - utf8.RuneCountInString(head+text) // a space, and the terminal's last column
		if steps > 0 && room >= barWidthMin {
			return head + bar(step, steps, min(room, barWidthMax)) + " " + text
		}
	}
	for _, text := range texts {
		if p.fits(head + text) {
			return head + text
		}
	}
	return head + texts[len(texts)-1]
}

func (p *progress) fits(line string) bool { return utf8.RuneCountInString(line) < p.cfg.Width() }

// clip shortens a line to the given number of columns.
func clip(line string, columns int) string {
	if utf8.RuneCountInString(line) <= columns {
		return line
	}
	return string([]rune(line)[:max(columns-1, 0)]) + "…"
}

func (p *progress) rate(steps int, r Result) string {
	if steps == 0 || p.duration <= 0 {
		return "no step yet"
	}
	return fmt.Sprintf("%s/step, %.0f %s/s", short(p.duration/time.Duration(steps)),
		float64(r.Examples)/p.duration.Seconds(), p.cfg.Unit)
}

func bar(step, steps, width int) string {
	n := min(step*width/steps, width)
	return strings.Repeat("━", n) + strings.Repeat("─", width-n)
}

func count(step, steps int) string {
	if steps < 0 {
		return fmt.Sprint(step)
	}
	total := fmt.Sprint(steps)
	return fmt.Sprintf("%*d/%s", len(total), step, total)
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}

// numbers formats loss and metrics: prefix before each name, is between name and number, and sep between two
// of them.
func numbers(r Result, prefix, is, sep string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%sloss%s%.4g", prefix, is, r.Loss)
	for _, name := range r.names() {
		fmt.Fprintf(&b, "%s%s%s%s%.4f", sep, prefix, name, is, r.Metrics[name])
	}
	return b.String()
}

// short formats a duration with two or three digits: 830µs, 12ms, 4.1s, 2m05s.
func short(d time.Duration) string {
	switch {
	case d == 0:
		return "0s"
	case d < time.Millisecond:
		return fmt.Sprintf("%dµs", d.Microseconds())
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1fms", d.Seconds()*1e3)
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	d = d.Round(time.Second)
	return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
}
