package launch

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestOutOfMemory: the report distinguishes a worker that the kernel killed for lack of memory from one that a user
// killed.
func TestOutOfMemory(t *testing.T) {
	t.Parallel() // it waits for a second
	dir := memoryGroup(t)
	// tail keeps what has no end of line in memory
	script := `[ $RANK = 1 ] && exec tail /dev/zero; while :; do sleep 0.05; done`
	cmd := exec.CommandContext(t.Context(), "sh", "-c", `echo 0 > "$0/cgroup.procs" && exec "$1"`, dir, os.Args[0])
	cmd.Env = append(os.Environ(), asAgent+"="+script)
	text, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != 137 ||
		!strings.Contains(string(text), "what    out of memory: killed by the kernel (SIGKILL; ") {
		t.Errorf("%v:\n%s", err, text)
	}
}

// memoryGroup makes a control group of little memory, below this process's own, or skips the test.
func memoryGroup(t *testing.T) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Skipf("cannot find out this process's control group: %v", err)
	}
	const limit = 256 << 20 // far more than an agent with the race detector, so that the kernel kills the worker
	for line := range strings.Lines(string(own)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || f[1] != "" && f[1] != "memory" {
			continue
		}
		dir, file := filepath.Join("/sys/fs/cgroup", f[2]), "memory.max"
		if f[1] == "memory" {
			dir, file = filepath.Join("/sys/fs/cgroup/memory", f[2]), "memory.limit_in_bytes"
		}
		dir = filepath.Join(dir, "lockstep-test-"+strconv.Itoa(os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			eventually(t, "the control group to be empty", func() bool {
				err := os.Remove(dir)
				time.Sleep(10 * time.Millisecond)
				return err == nil
			})
		})
		if os.WriteFile(filepath.Join(dir, file), []byte(strconv.Itoa(limit)), 0o644) == nil {
			return dir
		}
	}
	t.Skip("cannot make a control group with a limit of memory: needs root, and a memory controller")
	return ""
}
