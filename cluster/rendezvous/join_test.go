package rendezvous_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// registration returns the registration of a worker on a separate host.
func registration(worker, workers int) rendezvous.Registration {
	return rendezvous.Registration{
		Job: "digits", Worker: worker, Workers: workers, Host: string(rune('a' + worker)),
		PID: 100 + worker,
	}
}

// joinResult is what Join returned to one process.
type joinResult struct {
	registrations []rendezvous.Registration
	err           error
	after         time.Duration
}

// joinAll joins with every registration, each with a separate store, within a timeout.
func joinAll(
	ctx context.Context, open func() rendezvous.Store, timeout time.Duration, registrations ...rendezvous.Registration,
) []joinResult {
	out := make([]joinResult, len(registrations))
	var work sync.WaitGroup
	start := time.Now()
	for i, c := range registrations {
		work.Go(func() {
			s := open()
			defer s.Close()
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			out[i].registrations, out[i].err = rendezvous.Join(ctx, s, c)
			out[i].after = time.Since(start)
		})
	}
	work.Wait()
	return out
}

// TestJoin: all processes that fail to join get the same error, which names the workers and their hosts, and no later
// than necessary.
func TestJoin(t *testing.T) {
	for _, c := range []struct {
		name          string
		registrations []rendezvous.Registration
		want          []string // in every error; none: they join
		kind          rendezvous.JoinErrorKind
		after         time.Duration
	}{
		{name: "all", registrations: []rendezvous.Registration{registration(2, 3), registration(0, 3), registration(1, 3)}},
		{name: "one", registrations: []rendezvous.Registration{registration(0, 1)}},
		{
			name: "one is missing", registrations: []rendezvous.Registration{registration(0, 3), registration(2, 3)},
			kind:  rendezvous.Missing,
			after: 10 * time.Second,
			want:  []string{`job "digits" (epoch 0) timed out after 10s: 2 of 3 workers joined (worker 0 (host a, pid 100) and worker 2 (host c, pid 102)); missing: worker 1`},
		},
		{
			name: "one joins twice", kind: rendezvous.Duplicate,
			registrations: []rendezvous.Registration{registration(0, 3), registration(1, 3), {
				Job: "digits", Worker: 1, Workers: 3, Host: "x",
				PID: 7,
			}},
			want: []string{`worker 1 of job "digits" (epoch 0) joined twice`, "host b as pid 101", "host x as pid 7"},
		},
		{
			name: "one expects more workers", registrations: []rendezvous.Registration{
				registration(0, 3), registration(1, 4),
				registration(2, 3),
			},
			kind: rendezvous.Mismatch,
			want: []string{"worker 1 (host b, pid 101)", " expects 4", ", but worker ", " expects 3"},
		},
		{
			name: "one has a number that is too high", registrations: []rendezvous.Registration{
				registration(0, 2), registration(1, 2),
				registration(2, 2),
			}, kind: rendezvous.Mismatch,
			want: []string{`worker 2 (host c, pid 102) expects job "digits" to have 2 workers, numbered 0 to 1, and is not one of them`},
		},
		{
			name: "one is of another job", kind: rendezvous.Missing, after: 10 * time.Second,
			registrations: []rendezvous.Registration{registration(0, 2), {
				Job: "other", Worker: 1, Workers: 2, Host: "z",
				PID: 5,
			}},
			want: []string{"missing: ", "the store also has job"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				memory := rendezvous.NewMemory()
				for i, m := range joinAll(t.Context(), memory.Open, 10*time.Second, c.registrations...) {
					if len(c.want) == 0 {
						if m.err != nil || len(m.registrations) != len(c.registrations) {
							t.Fatalf("process %d: %v, %v", i, m.registrations, m.err)
						}
						for w, got := range m.registrations {
							if got.Worker != w || got.Host != string(rune('a'+w)) {
								t.Errorf("process %d: registration %d is %v", i, w, &got)
							}
						}
						continue
					}
					var e *rendezvous.JoinError
					if !errors.As(m.err, &e) || e.Kind != c.kind || m.after != c.after {
						// Whether those that joined before the mismatching process get its error depends on the order.
						if c.registrations[i].Worker < c.registrations[i].Workers && m.err == nil && strings.Contains(c.name,
							"too high") {
							continue
						}
						t.Fatalf("process %d after %v: %v", i, m.after, m.err)
					}
					for _, want := range c.want {
						if !strings.Contains(e.Error(), want) {
							t.Errorf("process %d: %v\nwant %q in it", i, e, want)
						}
					}
					if e.Kind == rendezvous.Missing && !errors.Is(e, context.DeadlineExceeded) {
						t.Errorf("process %d: the cause is %v", i, e.Cause)
					}
				}
			})
		})
	}
}
