package monitor

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/internal/terminal"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// jobLines describes the state of a job: a head, a table of the workers and, below it, what is wrong. Width and height
// are limits in columns and lines; 0: none.
func jobLines(j *status.Job, width, height int) []string {
	head := wrapParts(jobHead(j), ", ", width)
	var tail []string
	if j.Problem != "" {
		tail = append(tail, cli.WrapWords(printable(j.Problem), limit(width))...)
	}
	if j.Straggler != nil {
		tail = append(tail, cli.WrapWords(printable(j.Straggler.String()), limit(width))...)
	}
	workers := j.Workers
	if height > 0 {
		workers = mostInteresting(j, height-len(head)-len(tail)-2)
	}
	if n := len(j.Workers) - len(workers); n > 0 {
		tail = append([]string{fmt.Sprintf("… and %s", cli.Count(n, "further worker"))}, tail...)
	}
	lines := append(head, fitColumns(workerColumns(j), workers, width)...)
	for _, line := range tail {
		lines = append(lines, clipLine(line, width))
	}
	if height > 0 {
		return clipLines(lines, height)
	}
	return lines
}

// limit returns the width for a text.
func limit(width int) int {
	if width == 0 {
		return 1 << 20
	}
	return width
}

// jobHead returns the parts of the first line.
func jobHead(j *status.Job) []string {
	parts := []string{fmt.Sprintf("%s: step %s", j.Job, cli.Grouped(int(j.Step)))}
	if t := j.Training; t != nil {
		epoch := fmt.Sprintf("epoch %d", t.Epoch)
		if t.Epochs > 0 {
			epoch += fmt.Sprintf("/%d", t.Epochs)
		}
		loss := "loss not finite"
		if t.Loss != nil {
			loss = fmt.Sprintf("loss %.4g", *t.Loss)
		}
		parts = append(parts, epoch, loss)
	}
	unit := "examples"
	if j.Training != nil && j.Training.Unit != "" {
		unit = j.Training.Unit
	}
	if j.ExamplesPerSecond > 0 {
		parts = append(parts, fmt.Sprintf("%s %s/s", cli.Grouped(int(j.ExamplesPerSecond+0.5)), unit),
			fmt.Sprintf("%.1f ms/step", 1e3*j.StepSeconds))
	}
	return append(parts, cli.Count(j.Restarts, "restart"))
}

// wrapParts joins parts into lines of at most width columns; 0: any.
func wrapParts(parts []string, separator string, width int) (lines []string) {
	line := ""
	for i, part := range parts {
		part = printable(part)
		switch longer := line + separator + part; {
		case i == 0:
			line = part
		case cli.TextWidth(longer) <= limit(width):
			line = longer
		default:
			lines, line = append(lines, clipLine(line, width)), "  "+part
		}
	}
	return append(lines, clipLine(line, width))
}

// mostInteresting returns at most n workers: those that are slow or not running, and the first ones.
func mostInteresting(j *status.Job, n int) []status.Worker {
	if len(j.Workers) <= n {
		return j.Workers
	}
	list := slices.Clone(j.Workers)
	rank := func(w status.Worker) int {
		if w.State != "running" || isStraggler(j, w) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(list, func(a, b status.Worker) int { return cmp.Compare(rank(a), rank(b)) })
	list = list[:max(n-1, 1)] // one line has the number of those left out
	slices.SortFunc(list, func(a, b status.Worker) int { return cmp.Compare(a.Worker, b.Worker) })
	return list
}

func isStraggler(j *status.Job, w status.Worker) bool {
	return j.Straggler.Concerns(w.Worker)
}

// workerColumns are the columns of the table of workers.
func workerColumns(j *status.Job) []column[status.Worker] {
	percent := func(x float64) string { return fmt.Sprintf("%.0f%%", 100*x) }
	return []column[status.Worker]{
		{"worker", false, 0, func(w status.Worker) string { return fmt.Sprint(w.Worker) }},
		{"host", true, 4, func(w status.Worker) string { return clipLine(w.Host, 24) }},
		{"state", true, 3, func(w status.Worker) string {
			if w.State == "running" && isStraggler(j, w) {
				return "slow"
			}
			return w.State
		}},
		{"phase", true, 5, func(w status.Worker) string { return fmt.Sprintf("%-8s", w.Phase) }},
		{"step", false, 0, func(w status.Worker) string { return cli.Grouped(int(w.Step)) }},
		{"own work", false, 6, func(w status.Worker) string { return fmt.Sprintf("%.1fms", 1e3*w.OwnSeconds) }},
		{"wait", false, 1, func(w status.Worker) string { return percent(w.Wait) }},
		{"input", false, 7, func(w status.Worker) string { return percent(w.Input) }},
		{"CPUs", false, 9, func(w status.Worker) string { return fmt.Sprintf("%.1f", w.CPUs) }},
		{"memory", false, 8, func(w status.Worker) string { return units.Bytes(int(w.Memory)) }},
		{"heartbeat", false, 2, func(w status.Worker) string {
			return fmt.Sprintf("%.1fs", w.HeartbeatAge)
		}},
	}
}

// Table is the table of a job that lockstep run shows on a terminal, below the output of the workers.
type Table struct {
	Display *display
	stop    func()
}

// OpenTable shows a table of the job on standard error, once it has workers that publish their state; nil: standard
// error is not a terminal.
func OpenTable(t *status.Tracker) *Table {
	if !terminal.CanRedraw(os.Stderr) {
		return nil
	}
	d := newDisplay(os.Stderr, func(columns, rows int) []string {
		j := t.Job()
		if len(j.Workers) == 0 {
			return nil // or a program without Lockstep
		}
		lines := append([]string{strings.Repeat("─", columns)}, jobLines(&j, columns, max(rows/2, 4)-1)...)
		return clipLines(lines, rows-1)
	})
	return &Table{d, periodically(displayEvery, func() { _ = d.redraw() })} // the terminal may be closed
}

// close removes the table. A nil table has nothing to remove.
func (t *Table) close() {
	if t == nil {
		return
	}
	stopped := make(chan struct{})
	go func() { t.stop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(displayEvery): // the terminal accepts nothing
	}
	t.Display.close(false)
}
