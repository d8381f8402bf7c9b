//go:build unix

package private

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// place gives a test separate folders for temporary files and for the session, and returns this user's folders in them.
func place(t *testing.T) (temporary, session string) {
	t.Helper()
	tmp, runtime := t.TempDir(), t.TempDir()
	for _, folder := range []string{tmp, runtime} {
		must(t, os.Chmod(folder, 0o700)) // under any umask
	}
	t.Setenv("TMPDIR", tmp)
	t.Setenv("XDG_RUNTIME_DIR", runtime)
	return filepath.Join(tmp, "lockstep-"+strconv.Itoa(os.Getuid())), filepath.Join(runtime, "lockstep")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// giveParent changes the owner of the folder above path.
func giveParent(t *testing.T, folder string, mode os.FileMode) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("left out: only root can give a folder to another user")
	}
	above := filepath.Dir(folder)
	must(t, os.Chown(above, 12345, 12345))
	must(t, os.Chmod(above, mode))
}

// TestFolder: the folder is made for this user alone; a folder that others made in its place, or can change, is not
// used.
func TestFolder(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, folder string)
		want  string // in the error; "": the folder is used
	}{
		{name: "not there", spoil: func(*testing.T, string) {}},
		{name: "ours", spoil: func(t *testing.T, folder string) { must(t, os.Mkdir(folder, 0o700)) }},
		{name: "another user's", want: "belongs to user 12345", spoil: func(t *testing.T, folder string) {
			if os.Geteuid() != 0 {
				t.Skip("left out: only root can give a folder to another user")
			}
			must(t, os.Mkdir(folder, 0o700))
			must(t, os.Chown(folder, 12345, 12345))
		}},
		{name: "a link", want: "is a symbolic link", spoil: func(t *testing.T, folder string) {
			must(t,
				os.Symlink(t.TempDir(), folder))
		}},
		{name: "a file", want: "folder", spoil: func(t *testing.T, folder string) {
			must(t, os.WriteFile(folder, nil,
				0o600))
		}},
		{name: "open to all", want: "other users may write to the folder", spoil: func(t *testing.T, folder string) {
			must(t, os.Mkdir(folder, 0o700))
			must(t, os.Chmod(folder, 0o722))
		}},
		{name: "another user's parent", want: "user 12345 may rename the folder", spoil: func(t *testing.T, folder string) {
			giveParent(t, folder, 0o755)
		}},
		{name: "another user's sticky parent", want: "user 12345 may rename", spoil: func(t *testing.T, folder string) {
			giveParent(t, folder, 0o777|os.ModeSticky)
		}},
		{name: "a sticky parent", spoil: func(t *testing.T, folder string) {
			must(t, os.Chmod(filepath.Dir(folder), 0o777|os.ModeSticky))
		}},
		{name: "can be renamed by the group", want: "other users may rename", spoil: func(t *testing.T, folder string) {
			must(t, os.Chmod(filepath.Dir(folder), 0o770))
		}},
		{name: "can be renamed", want: "other users may rename the folder", spoil: func(t *testing.T, folder string) {
			must(t, os.Chmod(filepath.Dir(folder), 0o777))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			temporary, session := place(t)
			c.spoil(t, temporary)
			path := Path()
			got, err := Folder()
			must(t, err)
			want := temporary
			if c.want != "" {
				want = session
			}
			if got != want || path != want {
				t.Errorf("%s, %s; want %s", path, got, want)
			}
			if info, err := os.Stat(got); err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("%v, %v", info, err)
			}
			if c.want == "" {
				return
			}
			must(t, os.RemoveAll(session))
			t.Setenv("XDG_RUNTIME_DIR", "")
			if got, err := Folder(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q, %v; want an error with %q", got, err, c.want)
			}
		})
	}
}

// TestKeyWithoutLinks: on a file system without hard links, too, processes that start at the same time have the same
// key. A lock file whose process has ended is an error that names it.
func TestKeyWithoutLinks(t *testing.T) {
	oldLink, oldWait := link, lockWait
	t.Cleanup(func() { link, lockWait = oldLink, oldWait })
	link = func(from, to string) error { return &os.LinkError{Op: "link", Old: from, New: to, Err: syscall.EPERM} }
	for range 20 {
		temporary, _ := place(t)
		keys := make([]string, 8)
		var work sync.WaitGroup
		for i := range keys {
			work.Go(func() {
				var err error
				if keys[i], err = Key(); err != nil {
					t.Error(err)
				}
			})
		}
		work.Wait()
		for _, k := range keys {
			if k != keys[0] || len(k) != keyBytes {
				t.Fatalf("different keys: %d and %d bytes", len(k), len(keys[0]))
			}
		}
		files, err := os.ReadDir(temporary)
		must(t, err)
		if len(files) != 1 {
			t.Errorf("%v, want the key only", files)
		}
	}
	temporary, _ := place(t)
	lockWait = 50 * time.Millisecond
	must(t, os.Mkdir(temporary, 0o700))
	lock := filepath.Join(temporary, keyName+".lock")
	must(t, os.WriteFile(lock, nil, 0o600))
	if _, err := Key(); err == nil || !strings.Contains(err.Error(), lock) {
		t.Errorf("a lock file whose process has ended: %v", err)
	}
	must(t, os.Remove(lock))
	if _, err := Key(); err != nil {
		t.Error(err)
	}
}

// TestKey: processes that start at the same time have the same key, which no other user can read; a key that others can
// read is refused.
func TestKey(t *testing.T) {
	temporary, _ := place(t)
	keys := make([]string, 16)
	var work sync.WaitGroup
	for i := range keys {
		work.Go(func() {
			var err error
			if keys[i], err = Key(); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	for _, k := range keys {
		if k != keys[0] || len(k) != keyBytes {
			t.Fatalf("different keys: %d and %d bytes", len(k), len(keys[0]))
		}
	}
	files, err := os.ReadDir(temporary)
	must(t, err)
	if len(files) != 1 {
		t.Errorf("%v, want the key only", files)
	}
	path := filepath.Join(temporary, keyName)
	must(t, os.Chmod(path, 0o644))
	if _, err := Key(); err == nil || !strings.Contains(err.Error(), "no other user may read") {
		t.Errorf("a key that others can read: %v", err)
	}
	must(t, os.Remove(path))
	must(t, os.Symlink("/etc/hostname", path))
	if _, err := Key(); err == nil {
		t.Error("a key that is a link")
	}
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, []byte("short"), 0o600))
	if _, err := Key(); err == nil || !strings.Contains(err.Error(), "5 bytes") {
		t.Errorf("a short key: %v", err)
	}
}
