package rendezvous_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/formula"
	"github.com/lockstep-ml/lockstep/internal/race"
)

var manyWorkers = flag.Int("workers", 0, "TestManyWorkers: also so many workers, each with a connection to a TCP store")

// counted is a worker's handle on a store that counts the requests of all, and the bytes of their keys and values in
// both directions.
type counted struct {
	rendezvous.Store
	requests, bytes *atomic.Int64
	decoding        chan struct{} // bounds the workers that decode a record: in a job each has its own memory
	decodes         *atomic.Bool
}

// begin ends the decoding of what the last request of this worker returned.
func (c counted) begin() {
	if c.decodes.Swap(false) {
		<-c.decoding
	}
}

func (c counted) count(key string, value []byte, entries ...rendezvous.Entry) {
	n := len(key) + len(value)
	for _, e := range entries {
		n += len(e.Key) + len(e.Value)
	}
	c.requests.Add(1)
	c.bytes.Add(int64(n))
	if len(entries) == 1 && len(entries[0].Value) > 4<<10 && c.decodes.CompareAndSwap(false, true) {
		c.decoding <- struct{}{}
	}
}

func (c counted) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	c.begin()
	value, revision, err := c.Store.Get(ctx, key)
	c.count(key, value)
	return value, revision, err
}

func (c counted) Set(ctx context.Context, key string, value []byte) error {
	c.begin()
	c.count(key, value)
	return c.Store.Set(ctx, key, value)
}

func (c counted) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	c.begin()
	current, created, err := c.Store.Create(ctx, key, value)
	c.count(key, value, rendezvous.Entry{Value: current})
	return current, created, err
}

func (c counted) List(ctx context.Context, prefix string) ([]rendezvous.Entry, uint64, error) {
	c.begin()
	entries, revision, err := c.Store.List(ctx, prefix)
	c.count(prefix, nil, entries...)
	return entries, revision, err
}

func (c counted) Changes(ctx context.Context, prefix string, after uint64) ([]rendezvous.Entry, uint64, error) {
	c.begin()
	entries, revision, err := c.Store.Changes(ctx, prefix, after)
	c.count(prefix, nil, entries...)
	return entries, revision, err
}

func (c counted) Wait(ctx context.Context, prefix string, n int) ([]rendezvous.Entry, error) {
	c.begin()
	entries, err := c.Store.Wait(ctx, prefix, n)
	c.count(prefix, nil, entries...)
	return entries, err
}

// many is a job of many workers, 8 on a host, with registrations as package worker has them.
type many struct {
	workers         int
	open            func() (rendezvous.Store, error)
	requests, bytes [3]atomic.Int64 // of joining, a comparison, leaving
	registrations   []rendezvous.Registration
	decoding        chan struct{}
}

func newMany(workers int, open func() (rendezvous.Store, error)) *many {
	m := &many{workers: workers, open: open, decoding: make(chan struct{}, runtime.GOMAXPROCS(0))}
	for w := range workers {
		m.registrations = append(m.registrations, m.registration(w))
	}
	return m
}

func (m *many) registration(w int) rendezvous.Registration {
	host := fmt.Sprintf("node-%04d.cluster.example", w/8)
	data, _ := json.Marshal(map[string]any{
		"host_id": fmt.Sprintf("%08x-5d3c-4f0e-9a55-1c1f5a2b7e90/4026531835/4026532000/4026531840",
			uint64(w/8)*2654435761),
		"folder":   fmt.Sprintf("%032x", w/8*40503),
		"platform": "linux/amd64", "executable": "8f14e45fceea167a", "node": w / 8,
	})
	return rendezvous.Registration{
		Job: "many", Worker: w, Workers: m.workers, Host: host, PID: 20000 + 7*w, Replicas: 1, Data: data,
		Addr:  fmt.Sprintf("10.0.%d.%d:%d", w/2048, w/8%256, 30000+w*7%20000),
		Build: "example.com/digits v1.2.0, revision 1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d, modified",
	}
}

// work joins as a worker, compares and leaves.
func (m *many) work(ctx context.Context, w int) error {
	s, err := m.open()
	if err != nil {
		return err
	}
	defer s.Close()
	var decodes atomic.Bool
	counting := func(part int) rendezvous.Store {
		return counted{s, &m.requests[part], &m.bytes[part], m.decoding, &decodes}
	}
	own := m.registrations[w]
	all, err := rendezvous.Join(ctx, counting(0), own)
	if err != nil {
		return err
	}
	for i, got := range all {
		want := &m.registrations[i]
		if got.Worker != i || got.PID != want.PID || got.Host != want.Host || got.Addr != want.Addr ||
			!bytes.Equal(got.Data, want.Data) || got.Nonce == "" && i%8 == 0 {
			return fmt.Errorf("worker %d of %d: %v, want %v", i, len(all), &got, want)
		}
	}
	own, all = all[w], nil // the others are in another process's memory
	facts := []rendezvous.Fact{{Name: "model", Value: "mlp"}, {Name: "global batch", Value: "65536"}}
	if err := rendezvous.Compare(ctx, counting(1), own.Key("compare"), w, m.workers, facts); err != nil {
		return err
	}
	return rendezvous.Leave(ctx, counting(2), own)
}

// run runs all workers and returns how long that took. It fails if there are more requests than the formula says.
func (m *many) run(t *testing.T) time.Duration {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	begin := time.Now()
	var work sync.WaitGroup
	errs := make([]error, m.workers)
	for w := range m.workers {
		work.Go(func() { errs[w] = m.work(ctx, w) })
	}
	work.Wait()
	took := time.Since(begin)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	n := int64(m.workers)
	for part, c := range []struct {
		name string
		each int64 // requests of each worker, at most
	}{{"join", 7}, {"compare", 2}, {"leave", 1}} {
		requests, bytes := m.requests[part].Load(), m.bytes[part].Load()
		formula.Row(t, fmt.Sprintf("%d workers %s: requests to the store", n, c.name), int(requests), int(c.each*n+16),
			fmt.Sprintf("at most %d n + 16", c.each))
		t.Logf("%d bytes, %d for each worker", bytes, bytes/n)
		if requests > c.each*n+16 {
			t.Errorf("%d workers: %s takes %d requests", n, c.name, requests)
		}
	}
	return took
}

// TestManyWorkers: the requests of a rendezvous are proportional to the number of workers.
func TestManyWorkers(t *testing.T) {
	for _, n := range []int{128, 1024} {
		if n > 128 && (testing.Short() || race.Enabled) {
			break
		}
		memory := rendezvous.NewMemory()
		newMany(n, func() (rendezvous.Store, error) { return memory.Open(), nil }).run(t)
	}
	if *manyWorkers == 0 {
		return
	}
	s := serve(t, rendezvous.ServerConfig{Clients: *manyWorkers})
	m := newMany(*manyWorkers, func() (rendezvous.Store, error) {
		return rendezvous.Open(t.Context(), s.URL(), rendezvous.Config{Logger: quiet})
	})
	took := m.run(t)
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	t.Logf("%5d workers over TCP in one process: %v, %d MiB from the system, %d bytes for each worker; refused: %v",
		m.workers, took.Round(time.Millisecond), memory.Sys>>20, int(memory.Sys)/m.workers, s.Refused())
}
