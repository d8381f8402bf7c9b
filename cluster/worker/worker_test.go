package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/freeport"
)

// bare is an empty environment.
func bare(string) (string, bool) { return "", false }

// only is an environment of one variable.
func only(name, value string) func(string) (string, bool) {
	return func(asked string) (string, bool) {
		if asked != name {
			return "", false
		}
		return value, true
	}
}

// joinAll joins several workers in this process.
func joinAll(t *testing.T, replicas ...int) []*worker.Worker {
	t.Helper()
	return joinAt(t, freeStore(t), false, replicas...)
}

// joinAt is joinAll with a store that worker 0 serves, or that exists.
func joinAt(t *testing.T, store string, hosted bool, replicas ...int) []*worker.Worker {
	t.Helper()
	all := make([]*worker.Worker, len(replicas))
	var wg sync.WaitGroup
	for i, n := range replicas {
		wg.Go(func() {
			w, err := worker.Join(t.Context(), worker.Config{
				Job: &cluster.Job{
					Source: "a test", ID: "in one process", Worker: i, Workers: len(replicas), Store: store,
					Hosted: hosted,
				},
				Replicas: n, NoSharedMemory: true, Getenv: bare, Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
			all[i] = w
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return all
}

// each calls f for all workers at the same time.
func each(all []*worker.Worker, f func(w *worker.Worker) error) []error {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, w := range all {
		wg.Go(func() { errs[i] = f(w) })
	}
	wg.Wait()
	return errs
}

// TestMembers: all workers know all others, can compare, exchange and leave. No goroutine is left, which goleak
// checks.
func TestMembers(t *testing.T) {
	all := joinAll(t, 2, 1)
	for i, w := range all {
		members := w.Members()
		if len(members) != 2 || members[0].Replicas != 2 || members[1].First != 2 || members[1].Worker != 1 ||
			members[0].PID == 0 || members[0].Host == "" {
			t.Errorf("worker %d knows %+v", i, members)
		}
		local := w.Group().Local()
		if len(local) != members[i].Replicas || local[0].Rank() != members[i].First || local[0].Size() != 3 {
			t.Errorf("worker %d has ranks from %d of %d", i, local[0].Rank(), local[0].Size())
		}
		spec, err := w.Resolver().Spec()
		if n, e := cluster.WorkerCount(spec, cluster.Worker); err != nil || e != nil || n != 2 {
			t.Errorf("worker %d: %v, %v, %v", i, spec, err, e)
		}
	}
	for i, err := range each(all, func(w *worker.Worker) error {
		return w.Compare(context.Background(), "same", []rendezvous.Fact{{Name: "model", Value: "mlp"}})
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	for i, err := range each(all, func(w *worker.Worker) error {
		return w.Compare(context.Background(), "step",
			[]rendezvous.Fact{{Name: "step", Value: string(rune('0' + w.Job().Worker))}})
	}) {
		if differ := (*rendezvous.DifferError)(nil); !errors.Is(err, worker.ErrDiffer) || !errors.As(err, &differ) ||
			differ.Differences[0].Name != "step" {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	for i, err := range each(all, func(w *worker.Worker) error {
		got, err := w.Exchange(context.Background(), "names", []byte{'a' + byte(w.Job().Worker)})
		if err == nil && (len(got) != 2 || string(got[0])+string(got[1]) != "ab") {
			err = errors.New(string(got[0]) + string(got[1]))
		}
		return err
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	for i, err := range each(all, func(w *worker.Worker) error { return errors.Join(w.Close(), w.Close()) }) {
		if err != nil {
			t.Errorf("worker %d leaves: %v", i, err)
		}
	}
}

// TestGone: a worker that fails and leaves while others wait for it in a comparison or an exchange ends their wait,
// although the store and all others continue. Their errors name it and its failure. A value that it wrote before it
// left counts.
func TestGone(t *testing.T) {
	for name, wait := range map[string]func(w *worker.Worker) error{
		"compare":  func(w *worker.Worker) error { return w.Compare(context.Background(), "model", nil) },
		"exchange": func(w *worker.Worker) error { _, err := w.Exchange(context.Background(), "model", nil); return err },
	} {
		for _, gone := range []int{0, 2} {
			t.Run(fmt.Sprint(name, " without ", gone), func(t *testing.T) {
				t.Parallel()
				all := joinAt(t, "file://"+filepath.Join(t.TempDir(), "store"), true, 1, 1, 1)
				for i, err := range each(all, func(w *worker.Worker) error {
					if err := w.Compare(context.Background(), "before",
						[]rendezvous.Fact{{Name: "model", Value: "mlp"}}); err != nil || w.Job().Worker != gone {
						return errors.Join(err, wait(w))
					}
					return errors.Join(w.Fail(errors.New("no such file: digits")), w.Close())
				}) {
					switch {
					case i == gone && err != nil:
						t.Errorf("the worker that leaves: %v", err)
					case i == gone:
					case err == nil || !errors.Is(err, collective.ErrPeerLost) ||
						!strings.Contains(err.Error(), fmt.Sprintf("worker %d has failed and left the job", gone)) ||
						!strings.Contains(err.Error(), "it reported: no such file: digits"):
						t.Errorf("worker %d: %v", i, err)
					}
				}
				each(all, func(w *worker.Worker) error { return w.Close() })
			})
		}
	}
}

// TestGoneWhileOthersConnect: workers that still connect do not wait for one that fails and leaves after it has
// registered its address.
func TestGoneWhileOthersConnect(t *testing.T) {
	store := "file://" + filepath.Join(t.TempDir(), "store")
	leave := func(_ context.Context, w *worker.Worker, _ collective.Config) (collective.Group, error) {
		if w.Job().Worker != 1 {
			return nil, nil // by the library's own transports
		}
		return nil, errors.New("no file descriptors are left")
	}
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			var w *worker.Worker
			w, errs[i] = worker.Join(t.Context(), worker.Config{
				Job:      &cluster.Job{Source: "a test", ID: "in one process", Worker: i, Workers: 3, Store: store, Hosted: true},
				Replicas: 1, NoSharedMemory: true, Getenv: bare, Logger: slog.New(slog.DiscardHandler),
				Opener: &worker.Opener{Name: "test", Open: leave},
			})
			if w != nil {
				w.Close()
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		switch {
		case err == nil || !strings.Contains(err.Error(), "no file descriptors are left"):
			t.Errorf("worker %d: %v", i, err)
		case i != 1 && (!errors.Is(err, collective.ErrPeerLost) ||
			!strings.Contains(err.Error(), "worker 1 has failed and left the job")):
			t.Errorf("worker %d: %v", i, err)
		}
	}
}

// withoutFolder is a store that takes the folder for temporary files from the process once all workers have joined.
type withoutFolder struct {
	rendezvous.Store
	t *testing.T
}

func (s *withoutFolder) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	current, created, err := s.Store.Create(ctx, key, value)
	if strings.HasSuffix(key, "/join/outcome") {
		if err := os.Setenv("TMPDIR", filepath.Join(os.DevNull, "none")); err != nil {
			s.t.Error(err)
		}
	}
	return current, created, err
}

// TestNoNodeFile: workers that cannot open the file of their node end the job for all at once, with the reason.
func TestNoNodeFile(t *testing.T) {
	key, err := secret.Parse(strings.Repeat("0123456789abcdef", 4))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("XDG_RUNTIME_DIR", "")
	memory := rendezvous.NewMemory()
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			apart := "two workers that need a file"
			if i == 1 {
				apart = "a worker that needs none"
			}
			_, errs[i] = worker.Join(t.Context(), worker.Config{
				Job: &cluster.Job{
					Source: "a test", ID: "no file", Worker: i, Workers: 3, Store: "test://", LocalWorker: -1,
				},
				Secret: key, Apart: apart, Getenv: bare, Logger: slog.New(slog.DiscardHandler),
				RendezvousTimeout: 20 * time.Second, Schemes: map[string]rendezvous.Opener{
					"test": func(context.Context, string, rendezvous.Config) (rendezvous.Store, error) {
						return &withoutFolder{memory.Open(), t}, nil
					},
				},
			})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err == nil || errors.Is(err, context.DeadlineExceeded) ||
			!strings.Contains(err.Error(), "the folder in which the workers of this host exchange heartbeats") {
			t.Errorf("worker %d: %v, want the reason", i, err)
		}
	}
}

// TestNoSecretFirst: a worker of a job on several hosts without a secret reports that, also if another worker, which
// has
// failed for the same reason, has left the job already.
func TestNoSecretFirst(t *testing.T) {
	for range 20 {
		store := rendezvous.NewMemory()
		other := rendezvous.Registration{
			Job: "job", Worker: 1, Workers: 2, Host: "other", PID: 1, Replicas: 1, Build: "same",
			Data: []byte(`{"transport":{"host":"other"},"platform":"` + runtime.GOOS + "/" + runtime.GOARCH + `"}`),
		}
		joined := make(chan error, 1)
		go func() {
			s := store.Open()
			err := s.Set(t.Context(), rendezvous.Key("job", 0, "gone", "1"), nil)
			if err == nil {
				_, err = rendezvous.Join(t.Context(), s, other)
			}
			joined <- errors.Join(err, s.Close())
		}()
		_, err := worker.Join(t.Context(), worker.Config{
			Job:   &cluster.Job{Source: "a test", ID: "job", Workers: 2, Store: "test://store"},
			Build: "same", Getenv: bare, Logger: slog.New(slog.DiscardHandler),
			Schemes: map[string]rendezvous.Opener{
				"test": func(context.Context, string, rendezvous.Config) (rendezvous.Store, error) { return store.Open(), nil },
			},
		})
		if !errors.Is(err, worker.ErrNoSecret) {
			t.Errorf("got %v, want ErrNoSecret", err)
		}
		if err := <-joined; err != nil {
			t.Error(err)
		}
	}
}

// TestGoneAfterwards: a value that a worker wrote before it failed and left is still compared.
func TestGoneAfterwards(t *testing.T) {
	all := joinAt(t, "file://"+filepath.Join(t.TempDir(), "store"), true, 1, 1, 1)
	left := make(chan struct{})
	for i, err := range each(all, func(w *worker.Worker) error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		compare := func() error { return w.Compare(ctx, "model", []rendezvous.Fact{{Name: "model", Value: "mlp"}}) }
		switch w.Job().Worker {
		case 1: // does not wait for the others
			defer close(left)
			go func() {
				defer cancel()
				for given := rendezvous.Key("in one process", 0, "compare", "model", "1"); ; time.Sleep(time.Millisecond) {
					if _, _, err := w.Store().Get(ctx, given); err == nil || ctx.Err() != nil {
						return
					}
				}
			}()
			if err := compare(); !errors.Is(err, context.Canceled) {
				return fmt.Errorf("got %w, want that it does not wait", err)
			}
			return errors.Join(w.Fail(errors.New("no such file: digits")), w.Close())
		case 2: // the last to come
			<-left
		}
		return compare()
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	each(all, func(w *worker.Worker) error { return errors.Join(w.Fail(errors.New("over")), w.Close()) })
}

// TestRebuild: the group that replaces a failed one works, and is aborted with the worker like the first.
func TestRebuild(t *testing.T) {
	all := joinAll(t, 1, 1)
	groups := make([]collective.Group, 2)
	for i, w := range all {
		groups[i] = w.Group()
		groups[i].Local()[0].Abort(errors.New("on purpose"))
	}
	for i, err := range each(all, func(w *worker.Worker) error {
		g, err := w.Group().Rebuild(context.Background())
		if err != nil {
			return err
		}
		groups[w.Job().Worker] = g
		return g.Local()[0].Do(context.Background(), &collective.Call{Op: collective.Barrier})
	}) {
		if err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
	each(all, func(w *worker.Worker) error { return w.Close() })
	for i, g := range groups {
		if err := g.Local()[0].Do(context.Background(), &collective.Call{Op: collective.Barrier}); !errors.Is(err,
			collective.ErrClosed) {
			t.Errorf("worker %d: after Close: %v", i, err)
		}
	}
}

// TestSingleProcess: a job of one worker needs no other, and can fail too.
func TestSingleProcess(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "records")
	var phases []string
	w, err := worker.Join(t.Context(), worker.Config{
		Replicas: 2, OnProgress: func(_ int64, phase string) { phases = append(phases, phase) },
		Getenv: only(cluster.EnvRecords, folder),
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(w.Group().Local()); n != 2 || w.Store() != nil || w.Err() != nil {
		t.Errorf("%d replicas, store %v, %v", n, w.Store(), w.Err())
	}
	w.Progress(7, "compute")
	if err := errors.Join(w.Compare(t.Context(), "x", nil), w.Fail(nil), w.Fail(errors.New("first\nof all")),
		w.Fail(errors.New("second"))); err != nil {
		t.Error(err)
	}
	records, err := failure.Read(folder, 0)
	if err != nil || len(records) != 1 || records[0].Message != "first\nof all" || records[0].Step != 7 ||
		records[0].Phase != "compute" || records[0].Kind != "error" {
		t.Errorf("%+v, %v", records, err)
	}
	w.Progress(8, "compute")
	if err := w.Fail(context.Canceled); err != nil {
		t.Error(err)
	}
	if records, err = failure.Read(folder, 0); err != nil || len(records) != 1 || records[0].Kind != "interrupted" ||
		records[0].Step != 8 {
		t.Errorf("%+v, %v", records, err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if strings.Join(phases, " ") != "compute compute" {
		t.Errorf("reported %v", phases)
	}
}

// TestRecovered: the other workers do not find a failure that was withdrawn, and a later one is reported again.
func TestRecovered(t *testing.T) {
	all := joinAll(t, 1, 1)
	find := func() error {
		_, _, err := all[1].Store().Get(context.Background(), rendezvous.Key("in one process", 0, "failure", "0"))
		return err
	}
	for range 2 {
		if err := errors.Join(all[0].Fail(errors.New("disk full")), find()); err != nil {
			t.Error(err)
		}
		if err := errors.Join(all[0].Recovered(), all[0].Recovered()); err != nil {
			t.Error(err)
		}
		if err := find(); !errors.Is(err, rendezvous.ErrNotFound) {
			t.Errorf("the report is left: %v", err)
		}
	}
	for i, err := range each(all, func(w *worker.Worker) error { return w.Close() }) {
		if err != nil {
			t.Errorf("worker %d: %v", i, err)
		}
	}
}

// TestPanicking: a worker that is closed by a deferred function while its program panics leaves a record of the
// panic.
func TestPanicking(t *testing.T) {
	folder := t.TempDir()
	func() {
		defer func() {
			if recover() == nil {
				t.Error("Close has stopped the panic")
			}
		}()
		w, err := worker.Join(t.Context(), worker.Config{Getenv: only(cluster.EnvRecords, folder)})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		panic("at the disco")
	}()
	records, err := failure.Read(folder, 0)
	if err != nil || len(records) != 1 || records[0].Kind != "panic" ||
		!strings.Contains(records[0].Message, "worker_test.go:") || !strings.Contains(records[0].Stack, "TestPanicking") {
		t.Errorf("%+v, %v", records, err)
	}
}

// TestConfig: an invalid configuration is an error at once.
func TestConfig(t *testing.T) {
	two := func(change func(*cluster.Job)) *cluster.Job {
		j := &cluster.Job{Source: "a test", Workers: 2, Store: "tcp://127.0.0.1:1"}
		change(j)
		return j
	}
	for _, test := range []struct {
		name string
		cfg  worker.Config
		says string
	}{
		{"replicas", worker.Config{Replicas: -1}, "-1 replicas: want 1 to"},
		{
			"ports",
			worker.Config{Ports: "7099-7000"},
			`Ports: "7099-7000" is not a port or a range of ports: want one such as 7000 or 7000-7099`,
		},
		{
			"number",
			worker.Config{Job: two(func(j *cluster.Job) { j.Worker = 2 })},
			"want a number from 0 to one less than the number of workers",
		},
		{
			"no store",
			worker.Config{Job: two(func(j *cluster.Job) { j.Store = "" })},
			"no rendezvous store: set LOCKSTEP_STORE",
		},
		{
			"no store, for a reason",
			worker.Config{Job: two(func(j *cluster.Job) { j.Store, j.NoStore = "", "because" })},
			"no rendezvous store: because",
		},
		{
			"scheme",
			worker.Config{Job: two(func(j *cluster.Job) { j.Store = "ftp://x" })},
			"knows stores whose URLs begin with etcd:// or etcds:// or file:// or tcp://",
		},
		{"several hosts", worker.Config{Job: two(func(j *cluster.Job) {
			j.Spec = cluster.NewSpec(map[string][]string{"worker": {"a:1", "b:1"}})
		})}, "several hosts without a secret: the job is spread over a, b"},
		{
			"secret",
			worker.Config{Job: two(func(*cluster.Job) {}), Getenv: only(cluster.EnvSecret, "short")},
			"LOCKSTEP_SECRET: the secret has 5 characters",
		},
		{
			"no server",
			worker.Config{Job: two(func(j *cluster.Job) { j.Worker = 1 }), RendezvousTimeout: 1},
			"worker 0, which serves the store at tcp://127.0.0.1:1, was not reached",
		},
	} {
		if test.cfg.Getenv == nil {
			test.cfg.Getenv = bare
		}
		test.cfg.Logger = slog.New(slog.DiscardHandler)
		w, err := worker.Join(t.Context(), test.cfg)
		if err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want %q", test.name, err, test.says)
		}
		if w != nil && err == nil {
			w.Close()
		}
	}
}

// TestLongSecretFile: an endless secret file is an error.
func TestLongSecretFile(t *testing.T) {
	const endless = "/dev/zero"
	if _, err := os.Stat(endless); err != nil {
		t.Skip("needs " + endless)
	}
	_, err := worker.Join(t.Context(), worker.Config{
		Job: &cluster.Job{Workers: 2, Store: "file:///x"}, Getenv: only(cluster.EnvSecretFile, endless),
	})
	if err == nil || !strings.Contains(err.Error(), endless+" has more than 4194304 bytes") {
		t.Errorf("got %v, want that the file is too long", err)
	}
}

// TestMissingWorker: a worker that times out waiting for another at the start reports it to the launcher, and blames
// the missing one.
func TestMissingWorker(t *testing.T) {
	dir := t.TempDir()
	_, err := worker.Join(t.Context(), worker.Config{
		Job:               &cluster.Job{Source: "a test", ID: "in vain", Workers: 2, Store: freeStore(t)},
		RendezvousTimeout: 2 * time.Second, Getenv: only(cluster.EnvRecords, dir), Logger: slog.New(slog.DiscardHandler),
	})
	if joining := (*rendezvous.JoinError)(nil); !errors.As(err, &joining) {
		t.Fatalf("got %v", err)
	}
	records, err := failure.Read(dir, 0)
	if err != nil || len(records) != 1 || records[0].Kind != "timeout" || !slices.Equal(records[0].Blames, []int{1}) ||
		records[0].Phase != "rendezvous" {
		t.Errorf("got %+v, %v", records, err)
	}
}

// freeStore returns the URL of a store on a free port of loopback.
func freeStore(t *testing.T) string {
	t.Helper()
	return fmt.Sprintf("tcp://127.0.0.1:%d", freeport.Take(t, 1))
}

// TestJoiningLine: the line that a joining worker logs is short; what it has read is logged at level debug.
func TestJoiningLine(t *testing.T) {
	for _, level := range []slog.Level{slog.LevelInfo, slog.LevelDebug} {
		store, logs := "file://"+filepath.ToSlash(t.TempDir()), make([]bytes.Buffer, 2)
		var workers sync.WaitGroup
		for i := range logs {
			job := &cluster.Job{
				ID: "line", Worker: i, Workers: 2, Store: store,
				Values: []cluster.Value{{Name: "LONG_VARIABLE", Value: strings.Repeat("x", 300)}},
			}
			logger := slog.New(slog.NewTextHandler(&logs[i], &slog.HandlerOptions{Level: level}))
			workers.Go(func() {
				w, err := worker.Join(t.Context(), worker.Config{Job: job, Logger: logger})
				if err == nil {
					err = w.Close()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		workers.Wait()
		text := logs[1].String()
		line, _, _ := strings.Cut(text, "\n")
		if !strings.Contains(line, "worker 1 of 2") || len(line) > 150 {
			t.Errorf("level %v: %q", level, line)
		}
		if got := strings.Contains(text, "LONG_VARIABLE"); got != (level == slog.LevelDebug) {
			t.Errorf("level %v: what it read is logged: %v in\n%s", level, got, text)
		}
	}
}
