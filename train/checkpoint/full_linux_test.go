package checkpoint

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestDiskFull saves on a small disk until it is full, in a process with mounts of its own.
func TestDiskFull(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if os.Getuid() != 0 || err != nil {
		t.Skip("to mount a small disk one must be root, and have the command unshare")
	}
	dir := t.TempDir()
	if out, err := exec.Command(unshare, "-m", "mount", "-t", "tmpfs", "none", dir).CombinedOutput(); err != nil {
		t.Skipf("this machine lets nobody mount: %v, %s", err, out)
	}
	cmd := child(t, dir, 0, 0, 0)
	cmd.Env = append(cmd.Env, cmd.Env[len(cmd.Env)-1]+" -1") // all are kept
	cmd.Args = []string{unshare, "-m", "sh", "-c", `mount -t tmpfs -o size=200k none "$1" && exec "$0"`, cmd.Path, dir}
	cmd.Path = unshare
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	saved := strings.Count(string(out), "\n") - 2 // lines but for those of the error, and of what is left
	if saved < 3 {
		t.Fatalf("got\n%s", out)
	}
	for _, want := range []string{
		"error: checkpoint: ", "no space left on device",
		fmt.Sprintf("snapshot-%06d-step-%d could not be written (the last one before it is snapshot-%06d-step-%d)", saved+1, saved+1, saved, saved),
		fmt.Sprintf("left: snapshot-%06d-step-%d", saved, saved),
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("got\n%s\nwant %q", out, want)
		}
	}
}
