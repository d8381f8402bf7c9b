package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

// The communicators that follow a failed run count from 0; a call that lacks a replica is detected in them too.
func TestFailureAfterRebuild(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		w := newWorld(t, n, deadlock.Config{}, "a")
		defer w.close()
		fail := func() {
			start := time.Now()
			each, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
				if r.id == 1 {
					return nil
				}
				return r.comm("a").Do(ctx, vector("w", 3))
			})
			want{is: []error{collective.ErrDesync}}.check(t, each, err, time.Since(start))
			w.rebuild()
		}
		for range 3 {
			for range 5 {
				w.works()
			}
			fail()
			fail()
			// Calls between the runs, for all replicas at once, are not a mismatch either.
			if err := w.groups["a"].DoAll(t.Context(),
				slices.Repeat([]collective.Call{{Op: collective.Barrier}}, n)); err != nil {
				t.Error(err)
			}
		}
	})
}

// A report reads the calls in flight while replicas whose calls end make new ones. (The race detector checks this.)
func TestReportBesideCalls(t *testing.T) {
	l := deadlock.New(deadlock.Config{Devices: devices(2)})
	m := l.Monitor("a", nil, nil)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		call := vector("w", 3)
		for seq := uint64(0); ; seq++ {
			call.Manifest.Name = fmt.Sprint("w", seq)
			call.Manifest.Shape[0] = int(seq)
			m.Enter(0, seq, call)
			runtime.Gosched() // on one processor no report might be made in between
			m.Leave(0, seq, call, nil)
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	defer func() {
		close(stop)
		<-done
	}()
	seen := 0
	for i := 0; i < 200 || seen == 0 && i < 100_000; i++ {
		var failure *deadlock.StepError
		if err := m.Explain(1, errors.New("why")); !errors.As(err, &failure) || !strings.HasSuffix(failure.Reason, ": why") {
			t.Fatal(err)
		}
		if call := failure.Replicas[0].Call; call != nil && call.Op == "all_reduce" {
			seen++
			if want := fmt.Sprint("w", call.Seq); call.Name != want || call.Shape[0] != int(call.Seq) {
				t.Fatalf("call %d is reported as %v", call.Seq, call)
			}
		}
	}
	if seen == 0 {
		t.Error("no report saw a call in flight")
	}
}

// The text of a report after a deadline.
func TestReportText(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4, deadlock.Config{Timeout: time.Minute}, "a")
		defer w.close()
		lock := make(chan int)
		_, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
			switch r.id {
			case 0:
				return r.comm("a").Do(ctx, vector("dense/kernel", 6))
			case 1:
				time.Sleep(time.Second)
				result := make(chan error)
				go func() { result <- r.comm("a").Do(ctx, vector("dense/kernel", 6)) }()
				return <-result
			case 2:
				return waitFor(ctx, lock)
			}
			time.Sleep(50 * time.Second)
			_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) { return nil, nil })
			return err
		})
		// Replica 3 makes its merge call before the deadline, which ends the run.
		const want = `the replicas wait for each other: replica 0 (CPU:0) waits for replica 3 in all_reduce SUM #0 on a, replica 3 (CPU:3) waits for replica 0 in merge_call #0
  replica 0 (CPU:0) waits in all_reduce SUM #0 "dense/kernel" float32 (6,) on a, called at report_test.go:N (deadlock_test.TestReportText.func1.1), from detector_test.go:N (deadlock_test.(*world).run.func1.1)
  replica 1 (CPU:1) waits in all_reduce SUM #0 "dense/kernel" float32 (6,) on a, called by goroutine N at report_test.go:N (deadlock_test.TestReportText.func1.1.1)
  replica 2 (CPU:2) is blocked at report_test.go:N (deadlock_test.waitFor) [select]
  replica 3 (CPU:3) waits in merge_call #0, called at report_test.go:N (deadlock_test.TestReportText.func1.1), from detector_test.go:N (deadlock_test.(*world).run.func1.1)`
		if got := anonymous(err); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		w.rebuild()
		_, _, err = w.run(t.Context(), func(ctx context.Context, r replica) error {
			switch r.id {
			case 2:
				return waitFor(ctx, lock)
			case 3:
				for ctx.Err() == nil {
					time.Sleep(7 * time.Second) // not until the exact time of the deadline
				}
				return nil
			}
			time.Sleep(time.Duration(r.id) * time.Second) // the deadline of replica 0 is the first
			return r.comm("a").Do(ctx, vector("dense/kernel", 6))
		})
		const late = `deadline exceeded: replica 0 (CPU:0) waited in all_reduce SUM #0 on a for replica 2 (CPU:2), replica 3 (CPU:3)
  replica 0 (CPU:0) waits in all_reduce SUM #0 "dense/kernel" float32 (6,) on a, called at report_test.go:N (deadlock_test.TestReportText.func1.2), from detector_test.go:N (deadlock_test.(*world).run.func1.1)
  replica 1 (CPU:1) waits in all_reduce SUM #0 "dense/kernel" float32 (6,) on a, called at report_test.go:N (deadlock_test.TestReportText.func1.2), from detector_test.go:N (deadlock_test.(*world).run.func1.1)
  replica 2 (CPU:2) is blocked at report_test.go:N (deadlock_test.waitFor) [select]
      report_test.go:N (deadlock_test.waitFor)
      report_test.go:N (deadlock_test.TestReportText.func1.2)
      detector_test.go:N (deadlock_test.(*world).run.func1.1)
  replica 3 (CPU:3) is blocked at report_test.go:N (deadlock_test.TestReportText.func1.2) [sleep]
      time.go:N (time.Sleep)
      report_test.go:N (deadlock_test.TestReportText.func1.2)
      detector_test.go:N (deadlock_test.(*world).run.func1.1)`
		if got := anonymous(err); got != late {
			t.Errorf("got\n%s\nwant\n%s", got, late)
		}
	})
}

func waitFor(ctx context.Context, lock chan int) error {
	select {
	case <-lock:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

var (
	numbers = regexp.MustCompile(`(goroutine |\.go:)[0-9]+`)
	folders = regexp.MustCompile(`\S*/([a-z_]+\.go:)`)
)

// anonymous returns an error's text without the parts that differ between machines or builds.
func anonymous(err error) string {
	return folders.ReplaceAllString(numbers.ReplaceAllString(err.Error(), "${1}N"), "$1")
}

// The text of a report shortens a very deep stack; the report has all of it.
func TestReportDeepStack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var dive func(n int)
		dive = func(n int) {
			if n == 0 {
				panic("deep")
			}
			dive(n - 1)
		}
		failure := fails(t, 2, deadlock.Config{}, want{
			is: []error{collective.ErrPeerLost}, reason: []string{"replica 1 (CPU:1) panicked: deep"},
			lines: map[int][]string{1: {" more"}},
		}, func(ctx context.Context, r replica) error {
			if r.id == 1 {
				dive(40)
			}
			return r.comm("a").Do(ctx, vector("w", 1))
		})
		if n := len(failure.Replicas[1].Stack); n < 42 {
			t.Errorf("the report has %d frames, want all", n)
		}
		if n := strings.Count(failure.Replicas[1].String(), "\n"); n != 17 {
			t.Errorf("the text shows %d lines of the stack, want 16 and one that says how many more", n)
		}
	})
}
