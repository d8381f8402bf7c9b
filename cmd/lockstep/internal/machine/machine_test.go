package machine

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

func TestMemoryLimit(t *testing.T) {
	for _, c := range []struct {
		total   int64
		workers int
		want    int64
	}{{64 << 30, 1, 32 << 30}, {64 << 30, 4, 8 << 30}, {0, 1, memoryFallback}, {0, 2, memoryFallback / 2}} {
		if got := memoryLimit(c.total, c.workers); got != c.want {
			t.Errorf("memory limit of each of %d workers of %d bytes: %d, want %d", c.workers, c.total, got, c.want)
		}
	}
}

func TestPercentOf(t *testing.T) {
	for live, want := range map[uint64]int{0: 400, 1 << 20: 400, 256 << 20: 400, 1 << 30: 100, 2 << 30: 50, 64 << 30: 25} {
		if got := percentOf(live); got != want {
			t.Errorf("percentage of garbage for %d live bytes: %d, want %d", live, got, want)
		}
	}
}

// TestFollowHeap verifies that the percentage is set again after each collection, not only after the first.
func TestFollowHeap(t *testing.T) {
	const other = 123
	defer debug.SetGCPercent(debug.SetGCPercent(other))
	followHeap()
	for range 3 {
		debug.SetGCPercent(other)
		deadline := time.Now().Add(10 * time.Second)
		for {
			runtime.GC()
			now := debug.SetGCPercent(other)
			if now != other {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("the percentage stays as it was after a collection")
			}
			time.Sleep(time.Millisecond)
		}
	}
}
