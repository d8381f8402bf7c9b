package rendezvous_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous/storetest"
)

// TestMain runs the tests or, in a process that a test has started, what it is told to.
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

// open opens a store that is there.
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
	storetest.Run(t, storetest.Stores{New: func(*testing.T) func() rendezvous.Store { return rendezvous.NewMemory().Open }})
}

func TestConformanceFile(t *testing.T) {
	storetest.Run(t, storetest.Stores{New: func(t *testing.T) func() rendezvous.Store {
		url := "file://" + filepath.ToSlash(t.TempDir())
		return func() rendezvous.Store { return open(t, url, rendezvous.Config{}) }
	}})
}
