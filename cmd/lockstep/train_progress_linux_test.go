package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

// TestProgressOnATerminal: the bar is drawn on a terminal, but not on the terminal that Open MPI creates for each
// process, whose output may go to a file.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		env []string
		bar bool
	}{
		"terminal": {nil, true},
		"mpirun":   {[]string{"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			terminal, out := openTerminal(t)
			cmd := clitest.Process(t, "train", "--model", "mlp", "--global-batch", "64", "--steps", "2")
			cmd.Env = append(cmd.Environ(), "TERM=xterm")
			cmd.Env = append(cmd.Env, c.env...)
			var stderr strings.Builder
			cmd.Stdout, cmd.Stderr = out, &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			out.Close()
			text, _ := io.ReadAll(terminal) // it ends with EIO when the other end is closed
			if err := cmd.Wait(); err != nil {
				t.Fatalf("%v: %s\n%s", err, text, &stderr)
			}
			if !strings.Contains(string(text), "weights hash") {
				t.Errorf("not trained:\n%s", text)
			}
			if drawn := regexp.MustCompile(`\r[^\r\n]`).Match(text); drawn != c.bar { // moves the cursor back
				t.Errorf("a bar was drawn: %v, want %v:\n%q", drawn, c.bar, text)
			}
		})
	}
}

// openTerminal opens a pseudo-terminal: the side of the user, and that of the program.
func openTerminal(t *testing.T) (terminal, program *os.File) {
	t.Helper()
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("skipped: it needs a pseudo-terminal: %v", err)
	}
	t.Cleanup(func() { terminal.Close() })
	fd := int(terminal.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("skipped: it needs a pseudo-terminal: %v", err)
	}
	return terminal, program
}
