package worker

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// counted is a store that records when a heartbeat is set.
type counted struct {
	rendezvous.Store
	mu sync.Mutex
	at []time.Duration
	t0 time.Time
}

func (c *counted) Set(ctx context.Context, key string, value []byte) error {
	c.mu.Lock()
	c.at = append(c.at, time.Since(c.t0))
	c.mu.Unlock()
	return c.Store.Set(ctx, key, value)
}

// TestHeartbeatsOfAll: all workers together publish at most 200 heartbeats a second, however many they are and even
// if all begin phases all the time. Each publishes at least four times within the heartbeat timeout.
func TestHeartbeatsOfAll(t *testing.T) {
	for _, workers := range []int{2, 39, 150, 200, 201, 300, 1000, 3000} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log strings.Builder
				cfg, err := Config{
					Job: &cluster.Job{
						Workers: workers,
						Store:   "tcp://10.0.0.1:7070",
					}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
					Getenv: func(string) (string, bool) { return "", false },
				}.filled()
				if err != nil {
					t.Fatal(err)
				}
				s := &counted{Store: rendezvous.NewMemory().Open(), t0: time.Now()}
				ctx, cancel := context.WithCancel(t.Context())
				var work sync.WaitGroup
				for i := range workers {
					beats := cfg.heartbeats(i, workers)
					if beats.Delay >= beats.Every || cfg.HeartbeatTimeout < 4*beats.Every {
						t.Errorf("worker %d: %+v with a heartbeat timeout of %v", i, beats, cfg.HeartbeatTimeout)
					}
					news := make(chan struct{})
					beats.Wake = news
					work.Go(func() {
						for {
							select {
							case news <- struct{}{}:
							case <-ctx.Done():
								return
							}
						}
					})
					work.Go(func() {
						if err := rendezvous.Publish(ctx, s, "alive", i, beats,
							func() rendezvous.Heartbeat { return rendezvous.Heartbeat{} }); err != nil {
							t.Error(err)
						}
					})
				}
				time.Sleep(20 * time.Second)
				s.mu.Lock()
				at := slices.Clone(s.at)
				s.mu.Unlock()
				cancel()
				work.Wait()
				slices.Sort(at)
				most := 0
				for i, j := 0, 0; j < len(at); j++ {
					for at[i] <= at[j]-time.Second {
						i++
					}
					most = max(most, j-i+1)
				}
				if most > 200+1 { // one at both ends of the second
					t.Errorf("%d pulses in one second, want at most 200", most)
				}
				if len(at) < min(workers*4, 100*20) {
					t.Errorf("only %d pulses in 20 s", len(at))
				}
				if long := strings.Contains(log.String(), "heartbeat timeout is longer"); long != (workers > 1500) {
					t.Errorf("a warning of a longer heartbeat timeout: %v: %s", long, &log)
				}
			})
		})
	}
}
