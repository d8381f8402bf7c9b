//go:build unix

package rendezvous_test

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestSuspended: a process that is suspended while the job restarts at the next epoch changes nothing in the store when
// it continues.
func TestSuspended(t *testing.T) {
	urls := map[string]string{
		"tcp":  serve(t, rendezvous.ServerConfig{}).URL(),
		"file": "file://" + filepath.ToSlash(filepath.Join(t.TempDir(), "store")),
	}
	for name, url := range urls {
		t.Run(name, func(t *testing.T) {
			s := open(t, url, rendezvous.Config{})
			defer s.Close()
			if err := s.Set(t.Context(), "job/epoch", []byte("1")); err != nil {
				t.Fatal(err)
			}
			c := start(t, "write", url, "1")
			for range 5 {
				if line := <-c.lines; !strings.HasPrefix(line, "wrote") {
					t.Fatalf("the writer says %q", line)
				}
			}
			if err := c.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			next := make(chan error, 1)
			go func() { next <- s.Set(t.Context(), "job/epoch", []byte("2")) }()
			select { // a process that was stopped while it has the lock of a folder keeps it
			case err := <-next:
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(100 * time.Millisecond):
			}
			if err := c.cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			lines, err := c.end()
			if err == nil || len(lines) == 0 || !strings.Contains(lines[len(lines)-1], rendezvous.ErrFenced.Error()) {
				t.Errorf("the writer ended with %v, %q, want ErrFenced", err, lines)
			}
			_, begun, err := s.Get(t.Context(), "job/epoch")
			_, written, e := s.Get(t.Context(), "text")
			if err != nil || e != nil || written > begun {
				t.Errorf("%v, %v: written at revision %d, the next epoch began at %d", err, e, written, begun)
			}
		})
	}
}
