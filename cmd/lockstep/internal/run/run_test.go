//go:build unix

package run

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
)

// TestRunInterrupted: the first Ctrl-C or SIGTERM is forwarded to the workers, which may finish. The second one, and an
// output without a reader, also end them.
func TestRunInterrupted(t *testing.T) {
	const polite = `trap 'n=$((n+1))' INT TERM; n=0; echo ready; while [ $n = 0 ]; do sleep 0.02; done; echo "ended after $n"`
	const ignoring = `trap 'echo received' INT TERM; echo ready; while :; do sleep 0.02; done`
	for _, c := range []struct {
		name, script string
		signals      []os.Signal
		last         string // what the workers print at the last signal
	}{
		{"Ctrl-C", polite, []os.Signal{os.Interrupt}, "ended after 1"},
		{"SIGTERM", polite, []os.Signal{syscall.SIGTERM}, "ended after 1"},
		{"a terminal that is closed", polite, []os.Signal{syscall.SIGHUP}, "ended after 1"},
		{"twice", ignoring, []os.Signal{os.Interrupt, os.Interrupt}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if signal.Ignored(c.signals[0].(syscall.Signal)) {
				t.Skipf("%v is ignored here, as nohup has it, and so it is by what is started", c.signals[0])
			}
			cmd := clitest.Process(t, "run", "--nproc-per-node", "2", "--max-restarts", "3", "--", "sh", "-c", c.script)
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			out := bufio.NewReader(stdout)
			for i, sig := range c.signals {
				for range 2 { // both workers are ready, or have received the signal before
					if line, err := out.ReadString('\n'); err != nil {
						t.Fatalf("before signal %d: %q, %v", i, line, err)
					}
				}
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
			rest, err := io.ReadAll(out)
			if err != nil {
				t.Fatal(err)
			}
			if code := clitest.ExitCode(cmd.Wait()); code != 130 {
				t.Errorf("exit code %d, want 130:\n%s", code, &stderr)
			}
			if c.last != "" && strings.Count(string(rest), c.last+"\n") != 2 {
				t.Errorf("the workers wrote:\n%s", rest)
			}
			if !strings.Contains(stderr.String(), "to the workers, which may finish their step; a second signal kills them") ||
				strings.Contains(stderr.String(), "starting all") {
				t.Errorf("standard error:\n%s", &stderr)
			}
		})
	}
}

// TestRunStoppedEarly: SIGTERM ends a node that waits for the rendezvous store, and the node prints what this means for
// the other nodes.
func TestRunStoppedEarly(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and does not answer
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	cmd := clitest.Process(t, "run", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", silent.Addr().String(),
		"--rdzv-timeout", "1h", "--", "true")
	cmd.Env = append(cmd.Environ(), "LOCKSTEP_SECRET=correct-horse-battery-staple")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := clitest.ExitCode(cmd.Wait()); code != 130 ||
		!strings.Contains(stderr.String(), "stopped before this node reached the rendezvous store") {
		t.Errorf("exit code %d, want 130:\n%s", code, &stderr)
	}
}

// TestRunWithoutAReader: when the reader of the output is gone, as in `lockstep run … | head`, the job ends.
func TestRunWithoutAReader(t *testing.T) {
	cmd := clitest.Process(t, "run", "--nproc-per-node", "2", "--", "sh", "-c",
		`trap 'exit 0' TERM; while echo line; do sleep 0.02; done`)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	stdout.Close()
	if code := clitest.ExitCode(cmd.Wait()); code != 130 {
		t.Errorf("exit code %d, want 130", code)
	}
}

// TestRunUnreadOrder: an ssh that exits before it has read its order, which breaks the pipe, is reported as this. It is
// not mistaken for an output without a reader.
func TestRunUnreadOrder(t *testing.T) {
	ssh := filepath.Join(t.TempDir(), "ssh")
	if err := os.WriteFile(ssh, []byte("#!/bin/sh\nexec <&-\nsleep 0.3\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	order := strings.Repeat("x", 100<<10) // more than a pipe holds: it is still being written when the pipe breaks
	cmd := clitest.Process(t, "run", "-H", "far1", "--rdzv-endpoint", "127.0.0.1:0", "--ssh", ssh, "--", "echo", order)
	out, err := cmd.CombinedOutput()
	if code := clitest.ExitCode(err); code != 1 || !strings.Contains(string(out),
		"host far1: the agent ended with exit code 1") {
		t.Errorf("exit code %d, want 1:\n%s", code, out)
	}
}

func TestGPUs(t *testing.T) {
	for _, c := range []struct {
		devices []string
		visible string
		want    int
	}{
		{nil, "", 0},
		{nil, "0,1", 0},
		{[]string{"a", "b", "c"}, "", 3},
		{[]string{"a", "b", "c"}, "1,2", 2},
		{[]string{"a", "b", "c"}, "-1", 0},
		{[]string{"a", "b", "c"}, "0,-1,1", 1},
		{[]string{"a"}, "GPU-1,GPU-2", 1},
	} {
		got := gpus(func(string) string { return c.visible }, func(string) ([]string, error) { return c.devices, nil })
		if got != c.want {
			t.Errorf("%v, CUDA_VISIBLE_DEVICES=%q: %d GPUs, want %d", c.devices, c.visible, got, c.want)
		}
	}
}

// TestRunUnread: signals reach the workers although the output is full, as with a paused pager.
func TestRunUnread(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := clitest.Process(t, "run", "--nproc-per-node", "2", "--", "sh", "-c",
		`trap 'touch `+dir+`/got$RANK' INT; while :; do echo line; [ -e `+dir+`/ready$RANK ] || touch `+dir+
			`/ready$RANK; done`)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close() // unread
	cmd.Stdout = write
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	for _, what := range []string{"ready", "got"} {
		for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			if found, _ := filepath.Glob(filepath.Join(dir, what+"*")); len(found) == 2 {
				break
			}
			if time.Since(begin) > 2*time.Minute {
				t.Fatalf("the workers have not %s", what)
			}
		}
		time.Sleep(300 * time.Millisecond) // time to fill the pipe
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
	}
	if code := clitest.ExitCode(cmd.Wait()); code != 130 || !strings.Contains(stderr.String(),
		"of standard output are lost: they were not read") {
		t.Errorf("exit code %d, want 130:\n%s", code, &stderr)
	}
}
