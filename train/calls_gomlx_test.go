package train_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/train"
)

// TestCallsOfAStep checks that a step makes one collective call for each bucket, and none for loss, metrics and what
// workers compare.
func TestCallsOfAStep(t *testing.T) {
	const steps = 3
	for _, bytes := range []int{0, 1} {
		trainer := newTrainerWith(t, "go", 2, train.Config{GlobalBatch: 30, Seed: 1, BucketBytes: bytes}, unchanged,
			optimizer.Adam().Done(), models.MLP{Hidden: []int{16, 16}}.Forward)
		facts, err := trainer.Facts()
		if err != nil {
			t.Fatal(err)
		}
		buckets := 0
		for _, f := range facts {
			if f.Name == "buckets" {
				buckets, _ = strconv.Atoi(f.Value)
			}
		}
		if bytes == 1 && buckets < 3 || buckets < 1 {
			t.Fatalf("%d buckets of %d bytes", buckets, bytes)
		}
		var before, after distribute.Stats
		trainer.Strategy().ReadStats(&before)
		if _, err := trainer.Fit(t.Context(), loadDigits(t).Train.Take(steps*30).Batch(30), train.FitConfig{}); err != nil {
			t.Fatal(err)
		}
		trainer.Strategy().ReadStats(&after)
		for replica := range after.Replicas {
			if calls := after.Replicas[replica].Calls - before.Replicas[replica].Calls; calls != uint64(steps*buckets) {
				t.Errorf("%d buckets: replica %d made %d calls in %d steps, want %d", buckets, replica, calls, steps, steps*buckets)
			}
		}
	}
}

// TestRestoreWithOtherBuckets checks that a snapshot records the buckets, and that training with others is reported.
func TestRestoreWithOtherBuckets(t *testing.T) {
	var snapshot *train.Snapshot
	for i, bytes := range []int{1, 1, 0} {
		trainer := newTrainerWith(t, "go", 2, train.Config{GlobalBatch: 30, Seed: 1, BucketBytes: bytes}, unchanged,
			optimizer.Adam().Done(), models.MLP{Hidden: []int{16}}.Forward)
		if i == 0 {
			taken, err := trainer.Snapshot(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			snapshot = throughContents(t, taken)
			continue
		}
		restored, err := trainer.Restore(t.Context(), snapshot)
		if err != nil {
			t.Fatal(err)
		}
		differs := len(restored.Differ) == 1 && strings.Contains(restored.Differ[0], "other buckets")
		if differs != (bytes == 0) {
			t.Errorf("buckets of %d bytes: %q", bytes, restored.Differ)
		}
	}
}
