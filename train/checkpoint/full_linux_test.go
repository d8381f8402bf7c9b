package checkpoint

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestDiskFull saves on a small disk until it is full, in a process with private mounts. It keeps all snapshots, or so
// many that another one does not fit.
func TestDiskFull(t *testing.T) {
	out := onSmallDisk(t, "200k", -1, 0)
	saved := strings.Count(out, "\n") - 2 // lines but for those of the error, and of what is left
	if saved < 3 {
		t.Fatalf("got\n%s", out)
	}
	for _, want := range []string{
		"error: checkpoint: ", "no space left on device",
		fmt.Sprintf("snapshot-%06d-step-%d could not be written (the last one before it is snapshot-%06d-step-%d)", saved+1,
			saved+1, saved, saved),
		fmt.Sprintf("left: snapshot-%06d-step-%d", saved, saved),
	} {
		if !strings.Contains(out, want) {
			t.Errorf("got\n%s\nwant %q", out, want)
		}
	}
	page := os.Getpagesize() // each file has one, and the lock
	if out := onSmallDisk(t, fmt.Sprint(12*page), 3, 9); out != "1\n2\n3\n4\n5\n6\n7\n8\n9\n" {
		t.Errorf("keeping three where there is room for three: %s", out)
	}
	if out := onSmallDisk(t, fmt.Sprint(6*page), 1, 9); !strings.Contains(out, "no space left on device") ||
		!strings.HasSuffix(out, "left: snapshot-000001-step-1\n") {
		t.Errorf("keeping one where there is room for one: %s", out)
	}
}

// onSmallDisk saves on a disk of some bytes, and returns what the process prints.
func onSmallDisk(t *testing.T, size string, keep, saves int) string {
	t.Helper()
	unshare, err := exec.LookPath("unshare")
	if os.Getuid() != 0 || err != nil {
		t.Skip("to mount a small disk one must be root, and have the command unshare")
	}
	dir := t.TempDir()
	if out, err := exec.Command(unshare, "-m", "mount", "-t", "tmpfs", "none", dir).CombinedOutput(); err != nil {
		t.Skipf("this machine permits no mount: %v, %s", err, out)
	}
	cmd := child(t, dir, 0, saves, 0)
	cmd.Env = append(cmd.Env, fmt.Sprintf("%s %d", cmd.Env[len(cmd.Env)-1], keep))
	cmd.Args = []string{
		unshare, "-m", "sh", "-c", `mount -t tmpfs -o size="$2" none "$1" && exec "$0"`, cmd.Path, dir,
		size,
	}
	cmd.Path = unshare
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}
