package train

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestReducesWhileComputing checks that a bucket is summed over the replicas while the replicas still compute: the
// program hands over the first bucket, and does not go on before its memory has the sums.
func TestReducesWhileComputing(t *testing.T) {
	if race.Enabled {
		t.Skip("it watches memory that the library writes")
	}
	var summed atomic.Int32
	var other *fakeReplica // does not own the bucket
	trainer, p := newFake(t, 2, 4, fakeModel{ready: func(r *fakeReplica, bucket int) {
		if bucket != 0 || r == other {
			return
		}
		own := r.own
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if g := r.gradient(1); g[0] != own[0] || g[1] != own[1] {
				summed.Add(1)
				return
			}
		}
	}})
	if len(p.buckets) != 2 {
		t.Fatalf("%d buckets", len(p.buckets))
	}
	want := int32(4)
	if trainer.Sharded() {
		other, want = p.replicas[1], 2
	}
	if _, err := trainer.Fit(t.Context(), sizes(lineExamples(4), 4), FitConfig{Epochs: 2}); err != nil {
		t.Fatal(err)
	}
	if n := summed.Load(); n != want {
		t.Errorf("%d of %d first buckets were summed while their replicas computed", n, want)
	}
}
