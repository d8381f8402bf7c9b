package private

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const namespaceParent = "LOCKSTEP_TEST_NAMESPACE_PARENT"

// TestFolderInNamespace: a user namespace shows the folders of unmapped users, such as / usually, as those of one user.
// They are accepted if only their owner may write to them.
func TestFolderInNamespace(t *testing.T) {
	if parent := os.Getenv(namespaceParent); parent != "" {
		t.Setenv("TMPDIR", parent)
		t.Setenv("XDG_RUNTIME_DIR", "")
		folder, err := Folder()
		t.Log("folder", folder, "error", err)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("left out: only root can give a folder to another user")
	}
	for _, c := range []struct {
		name string
		mode os.FileMode
		ok   bool
	}{{"closed", 0o755, true}, {"open", 0o777 | os.ModeSticky, false}} {
		t.Run(c.name, func(t *testing.T) {
			top := t.TempDir()
			must(t, os.Chmod(top, 0o700)) // under any umask
			foreign := filepath.Join(top, "foreign")
			parent := filepath.Join(foreign, "own")
			must(t, os.MkdirAll(parent, 0o700))
			must(t, os.Chown(foreign, 12345, 12345))
			must(t, os.Chmod(foreign, c.mode))
			cmd := exec.Command(os.Args[0], "-test.run=^TestFolderInNamespace$", "-test.v")
			cmd.Env = append(os.Environ(), namespaceParent+"="+parent)
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWUSER,
				UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
			}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Skipf("this system lets the test make no namespace: %v\n%s", err, out)
			}
			if ok := strings.Contains(string(out), "error <nil>"); ok != c.ok {
				t.Errorf("accepted: %v, want %v:\n%s", ok, c.ok, out)
			}
		})
	}
}
