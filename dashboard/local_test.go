//go:build unix

package dashboard

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gofrs/flock"

	"github.com/lockstep-ml/lockstep/cluster/private"
)

// tempFolder makes a folder for temporary files whose path is short, as that of a socket must be.
func tempFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "[j]") // with characters that have a meaning in patterns
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("TMPDIR", dir)
	t.Setenv("XDG_RUNTIME_DIR", "")
	return dir
}

func serveLocal(t *testing.T, job string) *Server {
	t.Helper()
	s, err := ListenLocal(job, running())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func localNames(t *testing.T) (names []string) {
	t.Helper()
	jobs, err := LocalJobs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, j := range jobs {
		names = append(names, j.Name)
	}
	return names
}

// TestLocalJobs checks that a job is served once, and found until its server is closed.
func TestLocalJobs(t *testing.T) {
	tempFolder(t)
	if names := localNames(t); len(names) > 0 {
		t.Errorf("jobs %v, want none", names)
	}
	s := serveLocal(t, "digits")
	if names := localNames(t); !slices.Equal(names, []string{"digits"}) {
		t.Errorf("jobs %v, want digits", names)
	}
	if _, err := ListenLocal("digits", running()); !errors.Is(err, ErrServed) {
		t.Errorf("a job that is served already: error %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if names := localNames(t); len(names) > 0 {
		t.Errorf("jobs %v, want none at the end", names)
	}
}

// TestStaleSocket: the socket of a killed process is replaced by the next job of its name, and removed by processes
// that look for jobs, but not while a job may start now.
func TestStaleSocket(t *testing.T) {
	tempFolder(t)
	s := serveLocal(t, "digits")
	path := s.listener.Addr().String()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	kill := func() {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
	}
	exists := func() bool { _, err := os.Lstat(path); return err == nil }
	kill()
	lock := flock.New(filepath.Join(filepath.Dir(path), localLock))
	if err := lock.Lock(); err != nil {
		t.Fatal(err)
	}
	if names := localNames(t); len(names) > 0 || !exists() {
		t.Errorf("jobs %v, the socket exists while the lock is held: %v", names, exists())
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	again := serveLocal(t, "digits")
	if names := localNames(t); !slices.Equal(names, []string{"digits"}) {
		t.Errorf("jobs %v, want digits again", names)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	kill()
	file := filepath.Join(filepath.Dir(path), "file"+localSuffix)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if names := localNames(t); len(names) > 0 || exists() {
		t.Errorf("jobs %v, the stale socket exists: %v", names, exists())
	}
	if _, err := os.Lstat(file); err != nil {
		t.Errorf("a file that is not a socket: %v", err)
	}
}

// TestStartTogether: of several processes that find the same stale socket, one serves the job, and its socket stays.
func TestStartTogether(t *testing.T) {
	tempFolder(t)
	s := serveLocal(t, "digits")
	path := s.listener.Addr().String()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
		servers := make([]*Server, 8)
		var all sync.WaitGroup
		for i := range servers {
			all.Go(func() {
				var err error
				if servers[i], err = ListenLocal("digits", running()); err != nil && !errors.Is(err, ErrServed) {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if names := localNames(t); !slices.Equal(names, []string{"digits"}) {
			t.Errorf("jobs %v, want digits", names)
		}
		serving := 0
		for _, s := range servers {
			if s != nil {
				serving++
				s.Close()
			}
		}
		if serving != 1 {
			t.Errorf("%d servers of one job", serving)
		}
	}
}

// TestForeignFolder: nothing is read or removed in a folder that another user could have made.
func TestForeignFolder(t *testing.T) {
	dir := tempFolder(t)
	folder, err := private.Folder()
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other")
	if err := os.Rename(folder, other); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(other, folder); err != nil {
		t.Fatal(err)
	}
	if _, err := LocalJobs(t.Context()); err == nil || !strings.Contains(err.Error(), "is a symbolic link") {
		t.Errorf("a link instead of the folder: error %v", err)
	}
	if _, err := os.Lstat(filepath.Join(other, localFolder)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("behind the link: %v", err)
	}
}

// TestLongPath: a folder whose path is too long for a socket is an error, and not a job that is served already.
func TestLongPath(t *testing.T) {
	dir := filepath.Join(tempFolder(t), strings.Repeat("long", 30))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", dir)
	if _, err := ListenLocal("digits", running()); err == nil || errors.Is(err, ErrServed) {
		t.Errorf("error %v", err)
	}
}

// TestLocalJobsTogether: all jobs are queried at the same time, and without the lock that a new job needs.
func TestLocalJobsTogether(t *testing.T) {
	tempFolder(t)
	folder, err := localPath()
	if err != nil {
		t.Fatal(err)
	}
	const jobs = 3
	var asked, ended sync.WaitGroup
	defer ended.Wait() // after all are closed
	asked.Add(jobs)
	want := []string{}
	for i := range jobs {
		name := fmt.Sprint("job ", i)
		want = append(want, name)
		l, err := net.Listen("unix", filepath.Join(folder, fmt.Sprint(i)+localSuffix))
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked.Done()
			asked.Wait() // it answers once all are queried
			if i == 0 {  // one only: they would exclude each other
				lock := flock.New(filepath.Join(folder, localLock))
				defer lock.Close()
				if locked, err := lock.TryLock(); err != nil || !locked {
					t.Errorf("the lock is not free while jobs are queried: %v", err)
				}
			}
			fmt.Fprintf(w, `{"job": {"version": 1, "job": %q}}`, name)
		})}
		ended.Go(func() { s.Serve(l) })
		defer s.Close()
	}
	if names := localNames(t); !slices.Equal(names, want) {
		t.Errorf("jobs %v, want %v", names, want)
	}
}
