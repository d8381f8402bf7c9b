package monitor

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/timeline"
)

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
			if n := cli.TextWidth(line); width > 0 && n > width {
				t.Errorf("%d columns for %d: %s", n, width, line)
			}
			if i := strings.IndexFunc(line, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
				t.Fatalf("a character that is not printable: %q", line)
			}
		}
		if width == 0 {
			rows := lines[len(lines)-4 : len(lines)-2]
			before := func(row string) int { return cli.TextWidth(row[:strings.Index(row, "0%")]) }
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
