package train

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// screen is a terminal that keeps what is written to it.
type screen struct {
	strings.Builder
	terminal *os.File
}

func (s *screen) Fd() uintptr { return s.terminal.Fd() }

// TestProgressLooksForATerminal checks that a terminal gets a bar of its width, and any other output lines.
func TestProgressLooksForATerminal(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("skipped: it needs a pseudo-terminal: %v", err)
	}
	defer terminal.Close()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 40}); err != nil {
		t.Fatal(err)
	}
	const line, bar = "epoch 1/1: 2 steps in ", "\r2/2 ━━━━━━━━ loss: "
	for name, c := range map[string]struct {
		mode      ProgressMode
		env       [2]string
		file      bool
		want, not string
	}{
		"a terminal":               {ProgressAuto, [2]string{}, false, bar, line},
		"a file":                   {ProgressAuto, [2]string{}, true, line, "\r"},
		"a terminal without moves": {ProgressAuto, [2]string{"TERM", "dumb"}, false, line, "\r"},
		"a terminal of mpirun":     {ProgressAuto, [2]string{"OMPI_COMM_WORLD_RANK", "0"}, false, line, "\r"},
		"lines on a terminal":      {ProgressPlain, [2]string{}, false, line, "\r"},
		"a bar in a file":          {ProgressBar, [2]string{}, true, "\r2/2 ━━━", line},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TERM", "xterm")
			if c.env[0] != "" {
				t.Setenv(c.env[0], c.env[1])
			}
			out := &screen{terminal: terminal}
			if c.file {
				out.terminal, err = os.Create(t.TempDir() + "/out")
				if err != nil {
					t.Fatal(err)
				}
				defer out.terminal.Close()
			}
			trainer, _ := newFake(t, 1, 4, fakeModel{})
			_, err := trainer.Fit(t.Context(), sizes(lineExamples(8), 4, 4), FitConfig{
				Callbacks: []Callback{NewProgress(ProgressConfig{Out: out, Mode: c.mode})},
			})
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), c.want) || strings.Contains(out.String(), c.not) {
				t.Errorf("got %q, want %q and no %q", out.String(), c.want, c.not)
			}
		})
	}
}
