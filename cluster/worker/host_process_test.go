//go:build unix

package worker_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// TestOtherUsers: the store of a job on one host without a secret accepts only this user's processes, and none with
// another user's key or without a key.
func TestOtherUsers(t *testing.T) {
	t.Parallel()
	store := freeStore(t)
	c := child{Workers: 2, Replicas: 1, Store: store, Job: "others", Steps: 2, At: -1, TCP: true, Rendezvous: testWait}
	first := start(t, c)
	first.logged(t, "joining")
	other, err := secret.Parse(rand.Text())
	if err != nil {
		t.Fatal(err)
	}
	stranger := rendezvous.Config{Authenticate: other.Authenticate(secret.Store, c.Job, 0)}
	if stranger.TLS, err = other.TLS(c.Job, 0); err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]rendezvous.Config{"no key": {}, "another key": stranger} {
		ctx, cancel := context.WithTimeout(t.Context(), testWait)
		s, err := rendezvous.Open(ctx, store, cfg)
		cancel()
		if err == nil {
			s.Close()
			t.Errorf("%s: the store lets it in", name)
		} else if !strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	c.Worker = 1
	second := start(t, c)
	for _, p := range []*process{first, second} {
		p.says(t, "done")
	}
	// The processes of another user, or of another container, have another key.
	c.Worker, c.Store, c.Rendezvous = 0, freeStore(t), 20*time.Second
	first = start(t, c)
	c.Worker = 1
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o700); err != nil { // whatever the umask is
		t.Fatal(err)
	}
	second = startBy(t, c, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "TMPDIR="+folder) })
	if text := second.says(t, "error"); !strings.Contains(second.kinds, "worker.ErrNoSecret") || !strings.Contains(text,
		"does not have the key of this user on this host") {
		t.Errorf("%s: %s", second.kinds, text)
	}
	first.logged(t, "its proof is wrong")
}

// TestPlaintextOnOneHost: a job without a secret and without encryption uses this user's key if all its workers are
// known to be on one host, and none otherwise.
func TestPlaintextOnOneHost(t *testing.T) {
	t.Parallel()
	for name, addresses := range map[string][]string{
		"known":     {"127.0.0.1:0", "localhost:0"},
		"not known": {"127.0.0.1:0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := child{
				Workers: 2, Replicas: 1, Store: freeStore(t), Job: "plain", Steps: 2, At: -1, TCP: true, Plain: true,
				Addresses: addresses, Rendezvous: testWait,
			}
			first := start(t, c)
			first.logged(t, "joining")
			ctx, cancel := context.WithTimeout(t.Context(), testWait)
			defer cancel()
			s, err := rendezvous.Open(ctx, c.Store, rendezvous.Config{})
			if err == nil {
				s.Close()
			} else if !strings.Contains(err.Error(), "secret") {
				t.Fatal(err)
			}
			if refused := err != nil; refused != (name == "known") {
				t.Errorf("the store refuses a process without a key: %v", refused)
			}
			c.Worker = 1
			if name == "known" {
				c.Rendezvous = 20 * time.Second
				stranger := startBy(t, c, func(cmd *exec.Cmd) {
					folder := t.TempDir()
					if err := os.Chmod(folder, 0o700); err != nil {
						t.Error(err)
					}
					cmd.Env = append(cmd.Env, "TMPDIR="+folder)
				})
				if text := stranger.says(t, "error"); !strings.Contains(stranger.kinds, "worker.ErrNoSecret") ||
					!strings.Contains(text, "Give all workers the same secret") {
					t.Errorf("a worker with another key: %s: %s", stranger.kinds, text)
				}
			}
			second := start(t, c)
			for _, p := range []*process{first, second} {
				p.says(t, "done")
			}
		})
	}
}

// TestFullStore: the store that a worker serves is bounded.
func TestFullStore(t *testing.T) {
	t.Parallel()
	store := freeStore(t)
	c := child{Workers: 2, Replicas: 1, Store: store, Job: "full", Steps: 2, At: -1, Rendezvous: testWait}
	start(t, c).logged(t, "joining")
	s := openAsOwn(t, store, c.Job)
	var err error
	stored := 0
	for value := make([]byte, rendezvous.ValueMax); err == nil && stored < 256<<20; stored += len(value) {
		err = s.Set(t.Context(), fmt.Sprint("big/", stored), value)
	}
	if !errors.Is(err, rendezvous.ErrFull) || stored > 80<<20 {
		t.Errorf("after %d MiB: %v, want ErrFull before 80", stored>>20, err)
	}
}

// openAsOwn opens the store of a job without a secret as this user.
func openAsOwn(t *testing.T, store, job string) rendezvous.Store {
	t.Helper()
	key, err := secret.OfHost()
	if err != nil {
		t.Fatal(err)
	}
	cfg := rendezvous.Config{Authenticate: key.Authenticate(secret.Store, job, 0)}
	if cfg.TLS, err = key.TLS(job, 0); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testWait)
	defer cancel()
	s, err := rendezvous.Open(ctx, store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// TestLeftovers: worker 0 of a job removes the folders of jobs that were killed, and no other.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Skip("left out: this system does not show which launchers have ended")
	}
	folder := t.TempDir()
	id, _, _ := strings.Cut(string(boot), "-")
	// no process has the first's number, and the second ran before the machine was started
	killed, other := "mpirun-4194399-17-"+id, "job_1-hydra_pmi_proxy-12-17-00000000"
	alive := fmt.Sprintf("mpirun-%d-%s-%s", os.Getpid(), startOf(t), id)
	otherHost, foreign := "mpirun-4194398-17-"+id, "mpirun-4194397-17-"+id
	for _, name := range []string{killed, other, alive, otherHost, "results"} {
		s, err := rendezvous.Open(t.Context(), "file://"+filepath.Join(folder, name), rendezvous.Config{})
		if err != nil {
			t.Fatal(err)
		}
		if name == otherHost { // in use, by a process that another container shows
			defer s.Close()
			continue
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(folder, foreign), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, foreign, "thesis.tex"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var all []*process
	for w := range 2 {
		all = append(all, start(t, child{Worker: w, Workers: 2, Replicas: 1, Store: "file://" + filepath.Join(folder,
			"now"), Temporary: true, Job: "leftovers", Steps: 2, At: -1}))
	}
	for _, p := range all {
		p.says(t, "done")
		p.ends(t)
	}
	for name, want := range map[string]bool{
		killed: false, other: false, "now": false, alive: true, otherHost: true,
		foreign: true, "results": true,
	} {
		if _, err := os.Stat(filepath.Join(folder, name)); (err == nil) != want {
			t.Errorf("%s: %v, want it there: %v", name, err, want)
		}
	}
}

// startOf returns this process's start time, in the system's unit.
func startOf(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	return strings.Fields(rest)[19]
}

// TestForeignFolder: a folder that others can change is not used for a job's temporary store.
func TestForeignFolder(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	p := start(t, child{
		Workers: 2, Replicas: 1, Store: "file://" + filepath.Join(folder, "now"), Temporary: true,
		Job: "foreign", Steps: 2, At: -1,
	})
	if text := p.says(t, "error"); !strings.Contains(text, "other users may write to the folder "+folder) ||
		!strings.Contains(text, cluster.EnvStore) {
		t.Error(text)
	}
}
