package distribute_test

import (
	"context"
	"errors"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/failure"
	clusterworker "github.com/lockstep-ml/lockstep/cluster/worker"
	"github.com/lockstep-ml/lockstep/distribute"
)

// TestRecoveredWorker: a worker has a record of its failure from the failed Run until a Run succeeds.
func TestRecoveredWorker(t *testing.T) {
	folder := t.TempDir()
	w, err := clusterworker.Join(t.Context(), clusterworker.Config{
		Replicas: 2, Getenv: func(name string) (string, bool) {
			if name == cluster.EnvRecords {
				return folder, true
			}
			return "", false
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	s, err := distribute.NewMultiWorkerMirroredStrategy(distribute.MultiWorkerConfig{
		Resolver: w.Resolver(), Worker: w, LogicalCPUs: 2, Devices: shortNames(2),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	full := errors.New("disk full")
	for i, fails := range []bool{false, true, true, false, true} {
		_, err := distribute.Run(t.Context(), s,
			func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
				if fails && r.ID() == 1 {
					return struct{}{}, full
				}
				return struct{}{}, sum(ctx, r, "x", 3)
			}, nil)
		if fails != errors.Is(err, full) {
			t.Fatalf("Run %d: %v", i, err)
		}
		records, err := failure.Read(folder, 0)
		if err != nil || (len(records) == 1) != fails {
			t.Errorf("after Run %d: records %+v, %v", i, records, err)
		}
	}
}
