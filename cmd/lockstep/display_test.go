package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/timeline"
)

// emulator is a slow terminal of so many columns, without a limit of rows. When its size changes, it wraps lines again.
type emulator struct {
	t       *testing.T
	columns int
	lines   []string // without their wraps; the last one is that of the cursor
}

var escape = regexp.MustCompile(`^\x1b\[(\d+)A\r\x1b\[J`)

func (e *emulator) rows(line string) int {
	rows, left := 1, e.columns
	for _, r := range line {
		width := 1
		if r == '漢' {
			width = 2
		}
		if left -= width; left < 0 {
			rows, left = rows+1, e.columns-width
		}
	}
	return rows
}

func (e *emulator) Write(p []byte) (int, error) {
	for text := strings.ReplaceAll(string(p), plainText, ""); text != ""; {
		if m := escape.FindStringSubmatch(text); m != nil {
			up, _ := strconv.Atoi(m[1])
			e.lines = e.lines[:len(e.lines)-1] // the line of the cursor is empty
			for ; up > 0 && len(e.lines) > 0; e.lines = e.lines[:len(e.lines)-1] {
				up -= e.rows(e.lines[len(e.lines)-1])
			}
			if up != 0 {
				e.t.Errorf("the cursor moved to %d rows from the first one of a line", up)
			}
			e.lines = append(e.lines, "")
			text = text[len(m[0]):]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		if text = text[n:]; r == '\n' {
			e.lines = append(e.lines, "")
		} else {
			e.lines[len(e.lines)-1] += string(r)
		}
	}
	return len(p), nil
}

// TestDisplay checks that the lines above a display are complete and in order, and that it is below them once, however
// it, the lines and the terminal change.
func TestDisplay(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		e := &emulator{t: t, columns: 20, lines: []string{""}}
		var table, written []string
		d := &display{
			out: e, size: func() (int, int) { return e.columns, 24 }, foreground: func() bool { return true },
			lines: func(columns, _ int) (out []string) {
				for _, line := range table {
					out = append(out, clipLine(line, columns))
				}
				return out
			},
		}
		for i := range 50 {
			switch r.IntN(4) {
			case 0:
				e.columns = 10 + r.IntN(70)
			case 1:
				table = table[:0:0]
				for range r.IntN(6) {
					table = append(table, strings.Repeat([]string{"━", "漢", "━漢"}[r.IntN(3)], r.IntN(80)))
				}
			case 2:
				line := strings.Repeat(fmt.Sprint(i%10), r.IntN(100))
				written = append(written, line)
				fmt.Fprintln(d, line)
			}
			if err := d.redraw(); err != nil {
				t.Fatal(err)
			}
			want := append(slices.Clone(written), d.lines(e.columns, 24)...)
			if got := e.lines[:len(e.lines)-1]; !slices.Equal(got, want) {
				t.Fatalf("%d columns: got\n%s\nwant\n%s", e.columns, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
		d.close(false)
		fmt.Fprintln(d, "end")
		if want := append(written, "end", ""); !slices.Equal(e.lines, want) {
			t.Fatalf("at the end: got\n%q\nwant\n%q", e.lines, want)
		}
	}
}

// TestDisplayInTheBackground: while the terminal is the shell's, output is written as it is, and nothing is erased.
func TestDisplayInTheBackground(t *testing.T) {
	e := &emulator{t: t, columns: 20, lines: []string{""}}
	foreground, table := true, "table"
	d := &display{
		out: e, size: func() (int, int) { return e.columns, 24 }, foreground: func() bool { return foreground },
		lines: func(int, int) []string { return []string{table} },
	}
	redraw := func() {
		t.Helper()
		if err := d.redraw(); err != nil {
			t.Fatal(err)
		}
	}
	redraw()
	foreground, table = false, "newer"
	fmt.Fprint(e, "$ a command\n")
	redraw()
	fmt.Fprintln(d, "output")
	fmt.Fprint(e, "$ fg\n")
	foreground = true
	redraw()
	fmt.Fprintln(d, "\x1b[31mred")
	want := []string{"table", "$ a command", "output", "$ fg", "\x1b[31mred", "newer", ""}
	if !slices.Equal(e.lines, want) {
		t.Errorf("got\n%q\nwant\n%q", e.lines, want)
	}
	foreground = false
	d.close(false)
	if !slices.Equal(e.lines, want) {
		t.Errorf("the end in the background: got\n%q\nwant\n%q", e.lines, want)
	}
}

// TestDisplayContinued: after the process was suspended, the lines are drawn below what the shell has written.
func TestDisplayContinued(t *testing.T) {
	e := &emulator{t: t, columns: 20, lines: []string{""}}
	continued, table := make(chan os.Signal, 1), "─ table…"
	d := &display{
		out: e, size: func() (int, int) { return e.columns, 24 }, foreground: func() bool { return true },
		continued: continued, lines: func(int, int) []string { return []string{table} }, ascii: true,
	}
	redraw := func() {
		t.Helper()
		if err := d.redraw(); err != nil {
			t.Fatal(err)
		}
	}
	redraw()
	fmt.Fprint(e, "[1]+  Stopped\n$ fg\n")
	continued <- syscall.SIGINT // any
	redraw()
	table = "newer"
	redraw()
	want := []string{"- table.", "[1]+  Stopped", "$ fg", "newer", ""}
	if !slices.Equal(e.lines, want) {
		t.Errorf("got\n%q\nwant\n%q", e.lines, want)
	}
}

func TestUTF8Locale(t *testing.T) {
	for _, c := range []struct {
		environment map[string]string
		want        bool
	}{
		{nil, true},
		{map[string]string{"LANG": "C.UTF-8"}, true},
		{map[string]string{"LANG": "de_DE.utf8", "LC_ALL": "C"}, false},
		{map[string]string{"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, true},
		{map[string]string{"LANG": "de_DE.ISO-8859-1"}, false},
	} {
		if got := utf8Locale(func(name string) string { return c.environment[name] }); got != c.want {
			t.Errorf("%v: %v", c.environment, got)
		}
	}
}

// TestDisplayReuse checks that output does not compute the lines again: it may be much.
func TestDisplayReuse(t *testing.T) {
	calls := 0
	d := &display{
		out: io.Discard, size: func() (int, int) { return 80, 24 }, foreground: func() bool { return true },
		lines: func(int, int) []string { calls++; return []string{"table"} },
	}
	if err := d.redraw(); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		fmt.Fprintln(d, "output")
	}
	if calls != 1 {
		t.Errorf("the lines were computed %d times: want once", calls)
	}
}

// TestJobLinesOfStrangers checks that names and errors of other processes cannot control the terminal, and that wide
// characters are counted.
func TestJobLinesOfStrangers(t *testing.T) {
	loss := 0.25
	j := &status.Job{
		Job: "job\x1b[2J", Problem: "lost:\nfirst\x1b]0;title\x07\u009b2J",
		Training:          &timeline.Training{Loss: &loss, Unit: "\x1b[31mimages"},
		ExamplesPerSecond: 1, Straggler: &timeline.Straggler{Cause: "\x1b[Ainput"},
		Workers: []status.Worker{
			{Host: "漢字漢字漢字漢字漢字漢字漢字漢字", State: "\x1b[5mrunning", Phase: "\rcompute"},
			{Worker: 1, Host: "b\x00\x7f\xff", State: "running"},
		},
	}
	for width := 0; width <= 120; width++ {
		lines := jobLines(j, width, 0)
		for _, line := range lines {
			if n := textWidth(line); width > 0 && n > width {
				t.Errorf("%d columns for %d: %s", n, width, line)
			}
			if i := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
				t.Fatalf("a character that is not printable: %q", line)
			}
		}
		if width == 0 {
			rows := lines[len(lines)-4 : len(lines)-2]
			before := func(row string) int { return textWidth(row[:strings.Index(row, "0%")]) }
			if before(rows[0]) != before(rows[1]) {
				t.Errorf("columns that are not aligned:\n%s", strings.Join(lines, "\n"))
			}
		}
	}
}

// TestJobLines checks the table of a job in terminals of every size.
func TestJobLines(t *testing.T) {
	loss := 0.25
	j := &status.Job{
		Job: "run-20260102-150405-4711", Step: 1234567, ExamplesPerSecond: 12345.6, StepSeconds: 0.0123,
		Training:  &timeline.Training{Epoch: 2, Epochs: 5, Loss: &loss, Unit: "images"},
		Straggler: &timeline.Straggler{Worker: 7, Cause: "input", Own: 93e6, Others: 63e6, Excess: 0.48},
	}
	for i := range 12 {
		j.Workers = append(j.Workers, status.Worker{
			Worker: i, Host: "a-host-with-a-long-name.example", State: "running", Phase: "compute", Step: 1234567,
		})
	}
	j.Workers[9].State = "silent"
	all := strings.Join(jobLines(j, 0, 0), "\n")
	for _, want := range []string{
		"step 1,234,567, epoch 2/5, loss 0.25, 12,346 images/s, 12.3 ms/step, 0 restarts\n", "own work", "  slow  ",
		"  silent  ", "worker 7 is slow", "heartbeat",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in\n%s", want, all)
		}
	}
	link := *j
	link.Straggler = &timeline.Straggler{Worker: 7, Cause: "link to worker 8", Link: &[2]int{7, 8}}
	if all := strings.Join(jobLines(&link, 0, 0), "\n"); strings.Count(all, "  slow  ") != 2 ||
		!strings.Contains(all, "the network link from worker 7 to worker 8 is slow") {
		t.Errorf("both ends of a slow link are not marked in\n%s", all)
	}
	for width := 1; width <= 160; width++ {
		for _, height := range []int{1, 4, 9, 12, 40} {
			lines := jobLines(j, width, height)
			if len(lines) > height {
				t.Errorf("%d lines for %d", len(lines), height)
			}
			for _, line := range lines {
				if n := utf8.RuneCountInString(line); n > width {
					t.Errorf("%d columns for %d: %s", n, width, line)
				}
			}
		}
	}
	narrow := strings.Join(jobLines(j, 60, 12), "\n")
	for _, want := range []string{"wait", "heartbeat", "slow", "silent", "further workers"} {
		if !strings.Contains(narrow, want) {
			t.Errorf("%q is missing in 60 columns:\n%s", want, narrow)
		}
	}
	if strings.Contains(narrow, "memory") {
		t.Errorf("60 columns hold too much:\n%s", narrow)
	}
}
