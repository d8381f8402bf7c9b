//go:build linux || darwin

package checkpoint

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestLocked checks that only one process may write into a folder, except for a later start of the same job. That ends
// the writing of the earlier start, and loses no snapshot. The lock of a killed process is free.
func TestLocked(t *testing.T) {
	dir := t.TempDir()
	first := child(t, dir, 0, 0, 0)
	out, err := first.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if _, err := lines.ReadString('\n'); err != nil { // it has saved one
		t.Fatal(err)
	}
	for _, cfg := range []Config{{}, {Job: "another"}, {Job: "child"}, {Job: "another", Epoch: 1}} {
		cfg.Dir = dir
		_, err := Open(cfg)
		locked := (*LockedError)(nil)
		if !errors.As(err, &locked) || locked.Holder.PID != first.Process.Pid ||
			!strings.Contains(err.Error(), fmt.Sprintf("pid %d, job \"child\", since ", first.Process.Pid)) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	m := open(t, Config{Dir: dir, Keep: 2, Job: "child", Epoch: 1})
	text, err := io.ReadAll(lines) // it ends
	if err != nil || !strings.Contains(string(text), "error: checkpoint: the snapshot ") ||
		!strings.Contains(string(text), fmt.Sprintf("another start of this training (host %s, pid %d, job \"child\"",
			m.lock.me.Host, os.Getpid())) {
		t.Errorf("the first one says %s, %v", text, err)
	}
	_ = first.Wait()
	before, _ := latest(t, dir)
	save(t, m, 1000)
	if s, refused := latest(t, dir); before == nil || s.Step != 1000 || refused != nil {
		t.Errorf("before there was %v, then %v, refused %v", before, s, refused)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestClearedWhileWritten checks that a later start can remove a folder that an earlier start is still writing.
func TestClearedWhileWritten(t *testing.T) {
	for range 20 {
		dir := t.TempDir()
		unfinished := filepath.Join(dir, ".snapshot-000007-step-7")
		if err := os.Mkdir(unfinished, 0o700); err != nil {
			t.Fatal(err)
		}
		begun, over := make(chan struct{}), make(chan error)
		go func() {
			for i := 0; ; i++ {
				err := os.WriteFile(filepath.Join(unfinished, fmt.Sprint(i)), nil, 0o600)
				if i == 20 {
					close(begun)
				}
				if err != nil {
					over <- err
					return
				}
			}
		}()
		<-begun
		m, err := Open(Config{Dir: dir})
		if err != nil {
			_ = os.Rename(unfinished, unfinished+".test") // the writer ends
		}
		if wrote := <-over; err != nil || !errors.Is(wrote, os.ErrNotExist) {
			t.Fatalf("got %v, and who was writing %v", err, wrote)
		}
		save(t, m, 8)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if got, want := bases(t, dir), []string{"snapshot-000008-step-8"}; !slices.Equal(got, want) {
			t.Errorf("left are %v, want %v", got, want)
		}
	}
}

// TestLockRemoved checks that removing the lock of a running process does no harm.
func TestLockRemoved(t *testing.T) {
	dir := t.TempDir()
	m := open(t, Config{Dir: dir})
	save(t, m, 1)
	if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
		t.Fatal(err)
	}
	save(t, m, 2)
	if _, err := os.Stat(filepath.Join(dir, lockName)); err != nil {
		t.Error(err)
	}
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	if err := m.Save(contents(3)); err == nil || !strings.Contains(err.Error(), "the manager is closed") {
		t.Errorf("after Close got %v", err)
	}
}

// TestLockNeverStays checks that a lock that is another file at every look is an error, not an endless loop.
func TestLockNeverStays(t *testing.T) {
	l := &lock{dir: t.TempDir(), me: Holder{Host: "here", PID: 1}}
	l.try = func(f *os.File) (bool, error) { return true, os.Remove(f.Name()) }
	if err := l.take(); err == nil || !strings.Contains(err.Error(), "is a different file each time it is opened") {
		t.Errorf("got %v", err)
	}
}

// TestNoLocks checks that on a disk without locks the content of the file decides.
func TestNoLocks(t *testing.T) {
	ended := exec.Command(os.Args[0], "-test.run", "^$")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	me := Holder{Host: "here", PID: os.Getpid(), Job: "mine", Epoch: 2, Since: time.Now()}
	for name, c := range map[string]struct {
		text string // of the file
		h    Holder
		want string // of the error; "": it is taken
	}{
		"no holder":          {text: ""},
		"torn":               {text: `{"host":"there","pi`},
		"this process":       {h: me},
		"one that has ended": {h: Holder{Host: "here", PID: ended.Process.Pid, Job: "other"}},
		"one that runs": {
			h:    Holder{Host: "here", PID: os.Getppid(), Job: "other"},
			want: fmt.Sprintf("another process (host here, pid %d, job \"other\"", os.Getppid()),
		},
		"one elsewhere": {
			h:    Holder{Host: "there", PID: 1, Job: "other"},
			want: "This file system has no locks: if that process no longer runs, remove ",
		},
		"an earlier start, elsewhere": {h: Holder{Host: "there", PID: 1, Job: "mine", Epoch: 1}},
		"a later start": {
			h:    Holder{Host: "there", PID: 1, Job: "mine", Epoch: 3},
			want: "another process (host there, pid 1, job \"mine\"",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			text := []byte(c.text)
			if c.h.PID != 0 {
				var err error
				if text, err = json.Marshal(&c.h); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(dir, lockName), text, 0o600); err != nil {
				t.Fatal(err)
			}
			l := &lock{dir: dir, me: me, try: func(*os.File) (bool, error) { return false, errors.ErrUnsupported }}
			err := l.take()
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %s", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if h, err := readHolder(l.path()); err != nil || h.Job != "mine" || h.Epoch != 2 {
				t.Errorf("the lock says %+v, %v", h, err)
			}
			if err := errors.Join(l.held(), l.release()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLeftBehind checks that the next writer of a file removes temporary files of a killed writer, but not those that
// are being written, nor other files.
func TestLeftBehind(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "weights")
	for _, name := range []string{"weights.17.tmp", "weights.x.tmp", "weights.tmp", "others.17.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("torn"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := WriteFile(path, func(w io.Writer) error { // and another at the same time
		_, err := w.Write([]byte("one"))
		return errors.Join(err, WriteFile(path, func(w io.Writer) error {
			_, err := w.Write([]byte("two"))
			return err
		}))
	}); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "one" {
		t.Errorf("got %s, %v", text, err)
	}
	if got, want := bases(t, dir), []string{"others.17.tmp", "weights", "weights.tmp", "weights.x.tmp"}; !slices.Equal(got,
		want) {
		t.Errorf("left are %v, want %v", got, want)
	}
}
