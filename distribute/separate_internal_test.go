package distribute

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
)

// TestSeparateWorkers: the first of several workers that were started as one job warns once if it does not join.
func TestSeparateWorkers(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	for _, c := range []struct {
		name            string
		worker, workers string
		warns           bool
	}{
		{"a single process", "", "", false},
		{"a job of one", "0", "1", false},
		{"the second of two", "1", "2", false},
		{"the first of two", "0", "2", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, name := range []string{"TF_CONFIG", "RANK", "WORLD_SIZE", cluster.EnvSource} {
				t.Setenv(name, "")
			}
			t.Setenv(cluster.EnvWorker, c.worker)
			t.Setenv(cluster.EnvWorkers, c.workers)
			separateWarned.Store(false)
			log.Reset()
			for range 2 {
				s, err := NewMirroredStrategy(MirroredConfig{LogicalCPUs: 2, Logger: logger})
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}
			want := 0
			if c.warns {
				want = 1
			}
			if strings.Count(log.String(), "NewMultiWorkerMirroredStrategy") != want {
				t.Errorf("want %d warnings, got:\n%s", want, log.String())
			}
		})
	}
}
