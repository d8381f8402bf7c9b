package launch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
)

// failureText formats the report of a failure: its root cause first, then the consequences. logs is the folder with the
// output of all workers, records that with the records of their last calls; "": there is none.
func (e *epoch) failureText(rep *failure.Report, logs, records string) string {
	var b strings.Builder
	r := rep.Root
	fmt.Fprintf(&b, "lockstep run: the job failed; root cause: worker %d\n", r.Worker)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-7s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("who", "%s", e.who(r))
	row("what", "%s", indent(r.Message))
	row("when", "%s", e.when(r))
	if r.ExitCode > 0 {
		row("code", "%d", r.ExitCode)
	}
	if stack := strings.TrimSpace(r.Stack); stack != "" {
		row("stack", "%s", bounded(stack, stackLines))
	}
	if last := beyond(e.stderrOf(r.Worker), r.Stack); len(last) > 0 {
		row("stderr", "%s", indent(joinLines(last)))
	}
	if logs != "" {
		row("logs", "%s", logs)
	}
	if records != "" {
		row("records", "%s; lockstep doctor %s shows where the workers diverge", records, records)
	}
	others(&b, rep.Others)
	return b.String()
}

const stackLines = 40

func joinLines(lines []string) string { return strings.Join(lines, "\n") }

// indent puts the further lines of a text below its first.
func indent(text string) string {
	return strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n"+strings.Repeat(" ", 10))
}

func bounded(text string, linesMax int) string {
	lines := strings.Split(text, "\n")
	if len(lines) > linesMax {
		lines = append(lines[:linesMax:linesMax], fmt.Sprintf("… %d more lines", len(lines)-linesMax))
	}
	return indent(joinLines(lines))
}

// beyond returns the lines that are not in a stack: the stack has the crash's lines already.
func beyond(lines []string, stack string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return stack != "" && strings.Contains(stack, l) })
}

// who identifies a worker: number, replicas, node, host and process.
func (e *epoch) who(r failure.Record) string {
	out := fmt.Sprintf("worker %d of %d", r.Worker, e.layout.world)
	if len(r.Ranks) > 0 {
		out += fmt.Sprintf(", replicas %v", r.Ranks)
	}
	if node := e.layout.nodeOf(r.Worker); len(e.layout.slots) > 1 && node >= 0 {
		out += fmt.Sprintf(", node %d", node)
	}
	if r.Host != "" {
		out += ", host " + r.Host
	}
	if r.PID > 0 {
		out += fmt.Sprintf(", pid %d", r.PID)
	}
	return out
}

// when formats the time and the position of a failure.
func (e *epoch) when(r failure.Record) string {
	out := r.Time.Local().Format("2006-01-02 15:04:05.000")
	if since := r.Time.Sub(e.began); since >= 0 {
		out += fmt.Sprintf(", %v after the start", since.Round(time.Millisecond))
	}
	if e.number > 0 {
		out += fmt.Sprintf(", restart %d", e.number)
	}
	switch {
	case r.Step >= 0 && r.Phase != "":
		out += fmt.Sprintf(", in step %d (%s)", r.Step, r.Phase)
	case r.Phase != "":
		out += ", in " + r.Phase
	}
	return out
}

// stderrOf returns the last lines of a worker's standard error.
func (e *epoch) stderrOf(rank int) []string {
	for _, end := range e.ends {
		for _, f := range end.Failures {
			if f.Worker == rank {
				return f.Stderr
			}
		}
	}
	return nil
}

// othersMax is how many consequences are listed individually.
const othersMax = 8

// others lists the consequences briefly; those with equal messages together.
func others(b *strings.Builder, records []failure.Record) {
	type row struct {
		message string
		workers []string
	}
	var rows []*row
	for _, r := range records {
		message := short(r.Message)
		i := slices.IndexFunc(rows, func(o *row) bool { return o.message == message })
		if i < 0 {
			i, rows = len(rows), append(rows, &row{message: message})
		}
		rows[i].workers = append(rows[i].workers, strconv.Itoa(r.Worker))
	}
	for i, r := range rows {
		if i == othersMax {
			fmt.Fprintf(b, "  and %d more\n", len(rows)-i)
			break
		}
		noun := "worker"
		if len(r.workers) > 1 {
			noun = "workers"
		}
		fmt.Fprintf(b, "  then    %s %s: %s\n", noun, strings.Join(r.workers, ", "), indent(r.message))
	}
}

// short returns the first line of a worker's message, which is the cause, and the lines with the last known
// state of the worker it lost.
func short(message string) string {
	const lineMax = 240
	var out []string
	for line := range strings.Lines(strings.TrimSpace(message)) {
		line = strings.TrimRight(line, "\n")
		if len(out) > 0 && (!strings.HasPrefix(line, "  worker ") || !strings.Contains(line, " was last seen ")) {
			continue
		}
		if line = strings.TrimSpace(line); len(line) > lineMax {
			line = strings.ToValidUTF8(line[:lineMax], "") + "…"
		}
		out = append(out, line)
	}
	return joinLines(out)
}
