package dashboard

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gofrs/flock"

	"github.com/lockstep-ml/lockstep/cluster/private"
)

// ErrServed is the error of [ListenLocal] for a job that another process serves.
var ErrServed = errors.New("dashboard: another process serves this job")

const (
	localFolder = "jobs" // in the user's private folder
	localSuffix = ".sock"
	localLock   = "lock" // a file that is locked while a socket is created or a stale one removed

	lockMax, lockEvery = 5 * time.Second, 10 * time.Millisecond
)

// localPath returns the folder of the sockets, which it creates if necessary.
func localPath() (string, error) {
	folder, err := private.Folder()
	if err != nil {
		return "", fmt.Errorf("dashboard: %w", err)
	}
	folder = filepath.Join(folder, localFolder)
	if err := private.Make(folder); err != nil {
		return "", fmt.Errorf("dashboard: %w", err)
	}
	return folder, nil
}

// ListenLocal serves a job to other processes of this user on this host, which find it by its name: see [LocalJobs]. It
// listens on a socket in the user's private folder (package private), which no other user can enter. The caller must
// close the server. The error is [ErrServed] if another process serves a job of that name.
func ListenLocal(job string, source Source) (*Server, error) {
	folder, err := localPath()
	if err != nil {
		return nil, err
	}
	name := sha256.Sum256([]byte(job)) // the path of a socket has about 100 bytes
	path := filepath.Join(folder, fmt.Sprintf("%x%s", name[:8], localSuffix))
	// Two processes that find the same stale socket would remove each other's new one.
	lock := flock.New(filepath.Join(folder, localLock))
	ctx, cancel := context.WithTimeout(context.Background(), lockMax)
	defer cancel()
	if _, err := lock.TryLockContext(ctx, lockEvery); err != nil {
		return nil, fmt.Errorf("dashboard: lock %s: %w", lock.Path(), err)
	}
	defer lock.Close()
	l, err := net.Listen("unix", path)
	if err != nil && removeStale(path) {
		l, err = net.Listen("unix", path)
	}
	switch {
	case err == nil:
		return serve(l, source, "", (*Server).pages), nil
	case probe(path) == nil:
		return nil, ErrServed
	}
	return nil, fmt.Errorf("dashboard: %w", err)
}

// probe connects to a socket. The error is nil if a process listens on it, also one that is suspended.
func probe(path string) error {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
	}
	return err
}

// wsaConnRefused is ECONNREFUSED as Windows has it.
const wsaConnRefused = syscall.Errno(10061)

// removeStale removes the socket of a process that has ended without removing it, and reports whether it has. The
// caller holds the lock: between the creation of its file and the call of listen, a new socket looks like a stale
// one.
func removeStale(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket {
		return false
	}
	err = probe(path)
	return (errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, wsaConnRefused)) && os.Remove(path) == nil
}

// LocalJob is a job that a process of this user serves on this host.
type LocalJob struct {
	Name  string
	Query *Query
}

// LocalJobs returns the jobs that processes of this user serve on this host, by name. A process that
// does not answer within a second is left out.
func LocalJobs(ctx context.Context) (list []LocalJob, err error) {
	folder, err := localPath() // checked: another user could have made one of this name
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("dashboard: %w", err)
	}
	jobs := make([]LocalJob, 0, len(entries))
	for _, path := range sockets(folder, entries) {
		jobs = append(jobs, LocalJob{Query: &Query{url: "http://localhost/api/job", client: &http.Client{
			Transport: &http.Transport{
				DisableKeepAlives: true,
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, "unix", path)
				},
			},
		}}})
	}
	short, cancel := context.WithTimeout(ctx, queryMax)
	defer cancel()
	var queries sync.WaitGroup // all at once: those of suspended processes, which do not answer, last as long as they may
	for i := range jobs {
		queries.Go(func() {
			query := *jobs[i].Query
			if m, _, err := query.Read(short, false); err == nil {
				jobs[i].Name = m.Job.Job
			}
		})
	}
	queries.Wait()
	list = slices.DeleteFunc(jobs, func(j LocalJob) bool { return j.Name == "" })
	slices.SortFunc(list, func(a, b LocalJob) int { return strings.Compare(a.Name, b.Name) })
	return list, ctx.Err()
}

// sockets returns the paths of the sockets in the folder. It removes those that are stale, unless another process holds
// the lock: then they are removed another time. It does not wait for a process that serves a job.
func sockets(folder string, entries []os.DirEntry) (paths []string) {
	lock := flock.New(filepath.Join(folder, localLock))
	locked, _ := lock.TryLock()
	defer lock.Close()
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if strings.HasSuffix(path, localSuffix) && !(locked && removeStale(path)) {
			paths = append(paths, path)
		}
	}
	return paths
}

// queryMax bounds the queries of the servers for their jobs.
var queryMax = time.Second // or the tests'
