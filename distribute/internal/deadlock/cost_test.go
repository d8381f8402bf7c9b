package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/internal/stacks"
)

func devices(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("CPU:%d", i)
	}
	return out
}

// inRun calls f on replica 0's goroutine while the others wait for its end, outside of every call.
func inRun(tb testing.TB, l *deadlock.Detector, f func(run *deadlock.Run)) {
	tb.Helper()
	run, err := l.Begin(context.Background(), nil)
	if err != nil {
		tb.Fatal(err)
	}
	done := make(chan struct{})
	for i := range l.Replicas() {
		go run.Do(i, 0, func(context.Context) error {
			if i == 0 {
				f(run)
				close(done)
			}
			<-done
			return nil
		})
	}
	if _, err := run.Wait(); err != nil {
		tb.Fatal(err)
	}
	run.Close()
}

func TestNoAllocation(t *testing.T) {
	l := deadlock.New(deadlock.Config{Devices: devices(2)})
	m := l.Monitor("a", nil, nil)
	call := vector("w", 3)
	seq := uint64(0)
	inRun(t, l, func(run *deadlock.Run) {
		tests := map[string]func(){
			"acquire": func() {
				if err := run.Acquire(0); err != nil {
					t.Error(err)
				}
				run.Release(0)
			},
			"enter and leave": func() {
				m.Enter(0, seq, call)
				m.Leave(0, seq, call, nil)
				seq++
			},
			"park and unpark": func() {
				m.Enter(0, seq, call)
				if err := m.Park(0, seq, call); err != nil {
					t.Error(err)
				}
				m.Unpark(0)
				m.Leave(0, seq, call, nil)
				seq++
			},
		}
		for name, f := range tests {
			if n := testing.AllocsPerRun(100, f); n != 0 {
				t.Errorf("%s allocates %v times", name, n)
			}
		}
	})
}

func TestMergeDoesNotAllocate(t *testing.T) {
	l := deadlock.New(deadlock.Config{Devices: devices(2)})
	run, err := l.Begin(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	const rounds = 100
	f := func() (any, error) { return nil, nil }
	for i := range 2 {
		go run.Do(i, 0, func(ctx context.Context) error {
			merge := func() {
				if _, err := run.Merge(ctx, i, "", 0, f); err != nil {
					t.Error(err)
				}
			}
			// AllocsPerRun counts the allocations of all goroutines, and first calls its function once more.
			if i == 0 {
				if n := testing.AllocsPerRun(rounds, merge); n != 0 {
					t.Errorf("a merge allocates %v times", n)
				}
				return nil
			}
			for range rounds + 1 {
				merge()
			}
			return nil
		})
	}
	if _, err := run.Wait(); err != nil {
		t.Error(err)
	}
	run.Close()
}

func BenchmarkEnterLeave(b *testing.B) {
	l := deadlock.New(deadlock.Config{Devices: devices(2)})
	m := l.Monitor("a", nil, nil)
	call := vector("w", 3)
	inRun(b, l, func(*deadlock.Run) {
		seq := uint64(0)
		for b.Loop() {
			m.Enter(0, seq, call)
			m.Leave(0, seq, call, nil)
			seq++
		}
	})
}

func BenchmarkParkUnpark(b *testing.B) {
	for _, n := range []int{2, 8, 64} {
		b.Run(fmt.Sprintf("replicas=%d", n), func(b *testing.B) {
			l := deadlock.New(deadlock.Config{Devices: devices(n)})
			m := l.Monitor("a", nil, nil)
			call := vector("w", 3)
			m.Enter(0, 0, call)
			inRun(b, l, func(*deadlock.Run) {
				for b.Loop() {
					if err := m.Park(0, 0, call); err != nil {
						b.Error(err)
					}
					m.Unpark(0)
				}
				m.Leave(0, 0, call, nil)
			})
		})
	}
}

func BenchmarkMerge(b *testing.B) {
	for _, n := range []int{2, 8} {
		b.Run(fmt.Sprintf("replicas=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			l := deadlock.New(deadlock.Config{Devices: devices(n)})
			run, err := l.Begin(context.Background(), nil)
			if err != nil {
				b.Fatal(err)
			}
			f := func() (any, error) { return nil, nil }
			for i := range n {
				go run.Do(i, 0, func(ctx context.Context) error {
					for range b.N {
						if _, err := run.Merge(ctx, i, "", 0, f); err != nil {
							return err
						}
					}
					return nil
				})
			}
			if _, err := run.Wait(); err != nil {
				b.Fatal(err)
			}
			run.Close()
		})
	}
}

// BenchmarkRun measures a run in which the replicas do nothing, on goroutines that are reused.
func BenchmarkRun(b *testing.B) {
	b.ReportAllocs()
	const n = 2
	l := deadlock.New(deadlock.Config{Devices: devices(n)})
	nothing := func(context.Context) error { return nil }
	var runs [n]chan *deadlock.Run
	var wg sync.WaitGroup
	for i := range runs {
		runs[i] = make(chan *deadlock.Run)
		wg.Go(func() {
			goroutine := stacks.ID()
			for run := range runs[i] {
				_ = run.Do(i, goroutine, nothing)
			}
		})
	}
	for b.Loop() {
		run, err := l.Begin(context.Background(), nil)
		if err != nil {
			b.Fatal(err)
		}
		for i := range runs {
			runs[i] <- run
		}
		if _, err := run.Wait(); err != nil {
			b.Fatal(err)
		}
		run.Close()
	}
	for i := range runs {
		close(runs[i])
	}
	wg.Wait()
}

// BenchmarkReport measures a failure: a snapshot of all goroutines, of which there are many here, and its parsing.
func BenchmarkReport(b *testing.B) {
	stop := make(chan struct{})
	defer close(stop)
	for range 1000 {
		go func() { <-stop }()
	}
	l := deadlock.New(deadlock.Config{Devices: devices(2)})
	m := l.Monitor("a", nil, nil)
	mine := errors.New("mine")
	for b.Loop() {
		if err := m.Explain(0, mine); !strings.Contains(err.Error(), "mine") {
			b.Fatal(err)
		}
	}
}
