package rendezvous_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/storetest"
)

// TestMain runs the tests or, in a process that a test has started, its task.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	goleak.VerifyTestMain(m)
}

// quiet keeps warnings out of the tests' output.
var quiet = slog.New(slog.DiscardHandler)

// serve starts a server on loopback that ends with the test.
func serve(t testing.TB, cfg rendezvous.ServerConfig) *rendezvous.Server {
	t.Helper()
	cfg.Logger = quiet
	s, err := rendezvous.Serve(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// open opens an existing store.
func open(t testing.TB, url string, cfg rendezvous.Config) rendezvous.Store {
	t.Helper()
	cfg.Logger = quiet
	s, err := rendezvous.Open(t.Context(), url, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformanceTCP(t *testing.T) {
	storetest.Run(t, storetest.Stores{New: func(t *testing.T) func() rendezvous.Store {
		s := serve(t, rendezvous.ServerConfig{})
		return func() rendezvous.Store { return open(t, s.URL(), rendezvous.Config{}) }
	}})
}

func TestConformanceMemory(t *testing.T) {
	open := func(*testing.T) func() rendezvous.Store { return rendezvous.NewMemory().Open }
	storetest.Run(t, storetest.Stores{New: open})
}

func TestConformanceFile(t *testing.T) {
	storetest.Run(t, storetest.Stores{New: func(t *testing.T) func() rendezvous.Store {
		url := "file://" + filepath.ToSlash(t.TempDir())
		return func() rendezvous.Store { return open(t, url, rendezvous.Config{}) }
	}})
}

// TestOpenWrong: the error of an invalid URL describes a valid one.
func TestOpenWrong(t *testing.T) {
	for url, want := range map[string]string{
		"":                     "begin with file:// or tcp://",
		"host:29500":           "begin with file:// or tcp://",
		"zookeeper://h:2379":   "Config.Schemes",
		"tcp://host":           "want tcp://host:port",
		"tcp://":               "want tcp://host:port",
		"file://folder":        "an absolute path",
		"file://" + os.DevNull: os.DevNull,
	} {
		if _, err := rendezvous.Open(t.Context(), url, rendezvous.Config{}); err == nil || !strings.Contains(err.Error(),
			want) {
			t.Errorf("Open(%q): %v, want %q in it", url, err, want)
		}
	}
}

// TestFolder: an invalid log is refused with its name; a store whose folder was removed is lost; a log does not grow
// without need.
func TestFolder(t *testing.T) {
	folder := t.TempDir()
	url, log := "file://"+filepath.ToSlash(folder), filepath.Join(folder, "lockstep-store.log")
	if err := os.WriteFile(log, []byte(strings.Repeat("no log ", 10)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := rendezvous.Open(t.Context(), url, rendezvous.Config{}); err == nil || !strings.Contains(err.Error(),
		"lockstep-store.log: not the log of a store") {
		t.Errorf("got %v", err)
	}
	if err := os.Remove(log); err != nil {
		t.Fatal(err)
	}
	a, b := open(t, url, rendezvous.Config{}), open(t, url, rendezvous.Config{})
	defer a.Close()
	defer b.Close()
	if err := a.Set(t.Context(), "deleted", nil); err != nil {
		t.Fatal(err)
	}
	_, revision, err := b.List(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Delete(t.Context(), "deleted"); err != nil {
		t.Fatal(err)
	}
	for i := range 40 { // of 100 KiB: it is rewritten
		if err := a.Set(t.Context(), "k", append(make([]byte, 100<<10), byte(i))); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(log)
	if err != nil || info.Size() > 2<<20 {
		t.Errorf("after 4 MiB of changes the log has %d bytes, %v", info.Size(), err)
	}
	// A client that was not connected meanwhile has missed nothing.
	entries, _, err := b.Changes(t.Context(), "", revision)
	if err != nil || len(entries) != 2 || !entries[0].Deleted || entries[1].Key != "k" || entries[1].Value[100<<10] != 39 {
		t.Errorf("%d changes, %v", len(entries), err)
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := a.Set(t.Context(), "k", nil); !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("without the folder: %v, want ErrLost", err)
	}
	if _, _, err := b.List(t.Context(), ""); !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("without the folder: %v, want ErrLost", err)
	}
}
