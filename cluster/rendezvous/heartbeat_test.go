package rendezvous_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// publishers are workers that publish a heartbeat every second.
type publishers struct {
	stop     []context.CancelFunc // makes it leave
	progress []atomic.Uint64
	silent   []atomic.Bool // publishes nothing, as if it were stopped
	work     sync.WaitGroup
}

// mute is a store that drops changes while the worker is silent.
type mute struct {
	rendezvous.Store
	silent *atomic.Bool
}

func (m mute) Set(ctx context.Context, key string, value []byte) error {
	if m.silent.Load() {
		return nil
	}
	return m.Store.Set(ctx, key, value)
}

func publishAll(t *testing.T, s rendezvous.Store, n int) *publishers {
	b := &publishers{stop: make([]context.CancelFunc, n), progress: make([]atomic.Uint64, n), silent: make([]atomic.Bool,
		n)}
	for w := range n {
		ctx, cancel := context.WithCancel(t.Context())
		b.stop[w] = cancel
		b.work.Go(func() {
			err := rendezvous.Publish(ctx, mute{s, &b.silent[w]}, "pulse", w, rendezvous.HeartbeatTiming{Every: time.Second},
				func() rendezvous.Heartbeat {
					return rendezvous.Heartbeat{Step: 12, Phase: "reduce", Progress: b.progress[w].Add(1)}
				})
			if err != nil {
				t.Errorf("worker %d: %v", w, err)
			}
		})
	}
	return b
}

func TestWatch(t *testing.T) {
	const limit = 10 * time.Second
	for _, c := range []struct {
		name  string
		act   func(b *publishers, m *rendezvous.Memory)
		blame int    // -1: no worker within the hour
		want  string // in the description or the error
		lost  bool
	}{
		{name: "all publish", act: func(*publishers, *rendezvous.Memory) {}, blame: -1},
		{
			name: "one stops", act: func(b *publishers, _ *rendezvous.Memory) { b.silent[2].Store(true) }, blame: 2,
			want: "worker 2 was last seen 10s ago in step 12, reduce",
		},
		{name: "one leaves", act: func(b *publishers, _ *rendezvous.Memory) { b.stop[2]() }, blame: -1},
		{name: "all heartbeats stop", act: func(b *publishers, _ *rendezvous.Memory) {
			for i := range b.silent {
				b.silent[i].Store(true)
			}
		}, lost: true, want: "this worker's own heartbeat"},
		{name: "its own stops", act: func(b *publishers, _ *rendezvous.Memory) {
			b.silent[0].Store(true)
		}, lost: true, want: "this worker's own heartbeat"},
		{name: "its own stops after the others left", act: func(b *publishers, _ *rendezvous.Memory) {
			b.stop[1]()
			b.stop[2]()
			time.Sleep(time.Second)
			b.silent[0].Store(true)
		}, lost: true, want: "this worker's own heartbeat"},
		{name: "it leaves itself", act: func(b *publishers, _ *rendezvous.Memory) { b.stop[0]() }, blame: -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := rendezvous.NewMemory()
				s := m.Open()
				b := publishAll(t, s, 3)
				w := rendezvous.NewWatch(s, "pulse", 3)
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				b.work.Go(func() {
					if err := w.Follow(ctx, time.Second); err != nil {
						t.Error(err)
					}
				})
				time.Sleep(time.Minute + time.Millisecond)
				start := time.Now()
				c.act(b, m)
				v, err := w.Silence(ctx, 0, limit)
				switch {
				case c.lost:
					if !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(), c.want) {
						t.Errorf("got %v, %v, want ErrLost: %s", v, err, c.want)
					}
				case c.blame < 0:
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v, %v, want no worker", v, err)
					}
				case err != nil || v.Worker != c.blame || !strings.Contains(v.String(), c.want):
					t.Errorf("got %v, %v, want worker %d: %s", v, err, c.blame, c.want)
				case time.Since(start) > limit+2*time.Second:
					t.Errorf("found after %v", time.Since(start))
				}
				cancel()
				for _, stop := range b.stop {
					stop()
				}
				b.work.Wait()
			})
		})
	}
}

// TestStalled: a worker whose heartbeats continue without progress is reported as stalled, and one that was never seen
// as silent.
func TestStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := rendezvous.NewMemory().Open()
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		for w := range 2 {
			progress := uint64(0)
			work.Go(func() {
				rendezvous.Publish(ctx, s, "pulse", w, rendezvous.HeartbeatTiming{Every: time.Second}, func() rendezvous.Heartbeat {
					if w == 0 || progress < 40 {
						progress++
					}
					return rendezvous.Heartbeat{Progress: progress, Text: "all-reduce 7"}
				})
			})
		}
		three, two := rendezvous.NewWatch(s, "pulse", 3), rendezvous.NewWatch(s, "pulse", 2)
		work.Go(func() { three.Follow(ctx, time.Second) })
		work.Go(func() { two.Follow(ctx, time.Second) })
		start := time.Now()
		if v, err := three.Silence(ctx, 0, 20*time.Second); err != nil || v.String() != "worker 2 has not been seen for 20s" {
			t.Errorf("silence: %v, %v", v, err)
		}
		time.Sleep(70*time.Second - time.Since(start)) // worker 1 made progress for 40 s
		all := two.States()
		if v := all[1]; v.Silent > 2*time.Second || v.Stalled < 28*time.Second || v.Stalled > 32*time.Second {
			t.Errorf("stalled: %v", v)
		}
		if v := all[0]; v.Stalled > 2*time.Second {
			t.Errorf("a worker that makes progress has stalled: %v", v)
		}
		cancel()
		work.Wait()
	})
}

// TestWake: Wake causes an early heartbeat, though not before the shortest interval; without it heartbeats continue.
func TestWake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := rendezvous.NewMemory().Open()
		ctx, cancel := context.WithCancel(t.Context())
		wake := make(chan struct{}, 1)
		var work sync.WaitGroup
		var at []time.Duration
		begin := time.Now()
		work.Go(func() {
			rendezvous.Publish(ctx, s, "pulse", 0, rendezvous.HeartbeatTiming{
				Every: time.Second, Min: 200 * time.Millisecond,
				Wake: wake,
			}, func() rendezvous.Heartbeat {
				at = append(at, time.Since(begin))
				return rendezvous.Heartbeat{}
			})
		})
		for _, after := range []time.Duration{
			1500 * time.Millisecond, 50 * time.Millisecond, 50 * time.Millisecond,
			50 * time.Millisecond, 2 * time.Second,
		} {
			time.Sleep(after)
			select {
			case wake <- struct{}{}:
			default:
			}
		}
		time.Sleep(10 * time.Millisecond)
		cancel()
		work.Wait()
		ms := time.Millisecond
		if want := []time.Duration{0, 1000 * ms, 1500 * ms, 1700 * ms, 2700 * ms, 3650 * ms, 3660 * ms}; !slices.Equal(at,
			want) {
			t.Errorf("published after %v, want %v", at, want)
		}
	})
}

// TestPublishAgain: the count continues from that of an earlier Publish, so the first heartbeat of the later one counts
// as new.
func TestPublishAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := rendezvous.NewMemory().Open()
		w := rendezvous.NewWatch(s, "pulse", 1)
		ctx, cancel := context.WithCancel(t.Context())
		var work sync.WaitGroup
		work.Go(func() { w.Follow(ctx, time.Millisecond) })
		before := uint64(0)
		for range 3 { // each publishes twice, and the final heartbeat
			short, stop := context.WithTimeout(ctx, 1500*time.Millisecond)
			if err := rendezvous.Publish(short, s, "pulse", 0, rendezvous.HeartbeatTiming{Every: time.Second},
				func() rendezvous.Heartbeat { return rendezvous.Heartbeat{} }); err != nil {
				t.Error(err)
			}
			stop()
			time.Sleep(10 * time.Millisecond)
			if v := w.States()[0]; v.Heartbeat.Count != before+3 || v.Silent > 20*time.Millisecond {
				t.Errorf("count %d, silent for %v; want count %d just now", v.Heartbeat.Count, v.Silent, before+3)
			}
			before += 3
		}
		cancel()
		work.Wait()
	})
}
