//go:build unix

package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestGuardRemovesFolderInUse: when an agent dies, its workers lose the store at the same moment, and write their
// records while the guard kills them. No folder is left.
func TestGuardRemovesFolderInUse(t *testing.T) {
	if _, err := fs.Stat(os.DirFS("/"), "proc/self/stat"); err != nil {
		t.Skip("needs /proc to see whether a killed process has ended")
	}
	const rounds = 8
	for round := range rounds {
		folder := filepath.Join(t.TempDir(), recordsPrefix+"1")
		if err := os.Mkdir(folder, 0o700); err != nil {
			t.Fatal(err)
		}
		workers := exec.Command("sh", "-c", `for w in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
	(i=0; while :; do : > $0/$w.$i; i=$((i+1)); done) 2> /dev/null &
done; wait`, folder)
		workers.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if err := workers.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "records", func() bool {
			found, _ := os.ReadDir(folder)
			return len(found) > 50
		})
		guard := exec.Command(os.Args[0])
		guard.Env = append(os.Environ(), asGuard+"=1")
		guard.Stdin = strings.NewReader(fmt.Sprintf("+%s\n+%d\n", folder, workers.Process.Pid))
		text, err := guard.CombinedOutput()
		killGroup(workers.Process.Pid)
		_ = workers.Wait()
		if err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if _, err := os.Stat(folder); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("round %d: the folder is left: %v", round, err)
		}
	}
}
