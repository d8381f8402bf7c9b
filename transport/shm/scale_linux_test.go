package shm_test

import (
	"os"
	"runtime"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// TestSetUpCost checks what a group costs a process before data flows: at most 4 KiB of memory and one descriptor for
// each other process, and a few descriptors besides.
func TestSetUpCost(t *testing.T) {
	const n = 48
	cfg := config(t, n)
	cfg.ArenaBytes = 1 << 20
	memory := func() int {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse)
	}
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	ends := make([]transport.Endpoint, n)
	memoryBefore, descriptorsBefore := memory(), descriptors()
	ctx, cancel := soon()
	defer cancel()
	var opening sync.WaitGroup
	for r := range n {
		opening.Go(func() {
			cfg := cfg
			cfg.Ranks = []int{r}
			list, err := shm.Open(ctx, cfg)
			if err != nil {
				t.Error(err)
				return
			}
			ends[r] = list[0]
		})
	}
	opening.Wait()
	if t.Failed() {
		return
	}
	const peers = n * (n - 1)
	each := (memory() - memoryBefore) / peers
	more := descriptors() - descriptorsBefore - peers
	t.Logf("%d processes: %d bytes for each of %d pairs, a descriptor for each and %d more", n, each, peers, more)
	if each > 4<<10 {
		t.Errorf("%d bytes for each other process, want at most 4096", each)
	}
	if more > 6*n {
		t.Errorf("%d descriptors besides one for each other process, want at most %d", more, 6*n)
	}
	for _, e := range ends {
		e.Close()
	}
}
