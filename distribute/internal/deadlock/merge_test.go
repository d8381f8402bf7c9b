package deadlock_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
)

func TestMerge(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		w := newWorld(t, n, deadlock.Config{}, "a")
		defer w.close()
		mine := errors.New("a merge function's own error")
		var runs, inside atomic.Int32
		_, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
			for round := range 50 {
				inside.Add(1)
				v, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
					if got := inside.Load(); got != int32(n) {
						return nil, fmt.Errorf("%d replicas had come", got)
					}
					inside.Store(0)
					runs.Add(1)
					if round%10 == 9 {
						return nil, mine
					}
					return round, nil
				})
				switch {
				case round%10 == 9 && err != mine:
					return fmt.Errorf("round %d returned %v, %w", round, v, err)
				case round%10 != 9 && (v != round || err != nil):
					return fmt.Errorf("round %d returned %v, %w", round, v, err)
				}
				if round%3 == 0 {
					if err := r.comm("a").Do(ctx, vector("w", 1)); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil || runs.Load() != 50 {
			t.Errorf("%d functions ran: %v", runs.Load(), err)
		}
	})
}

// A merge function acts for all replicas: no replica waits in its calls.
func TestMergeActsForAll(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		w := newWorld(t, n, deadlock.Config{}, "a", "b")
		defer w.close()
		_, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
			for range 10 {
				_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
					for _, name := range []string{"b", "a"} {
						calls := make([]collective.Call, n)
						for i := range calls {
							calls[i] = *vector("w", 4)
						}
						if err := w.groups[name].DoAll(ctx, calls); err != nil {
							return nil, err
						}
						// And by the ranks separately, as a user might.
						errs := make(chan error, n)
						for i, comm := range w.groups[name].Local() {
							go func() {
								time.Sleep(time.Duration(i) * time.Second)
								errs <- comm.Do(ctx, &calls[i])
							}()
						}
						for range n {
							if err := <-errs; err != nil {
								return nil, err
							}
						}
					}
					return nil, nil
				})
				if err != nil {
					return err
				}
				if err := r.comm("a").Do(ctx, vector("w", 4)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestMergeAgainstReduce(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		failure := fails(t, n, deadlock.Config{}, want{
			is: []error{collective.ErrDesync, collective.ErrMismatch},
			reason: []string{
				"the replicas wait for each other: ", "replica 0 (CPU:0) waits for replica 1 in all_reduce SUM #0 on a",
				"replica 1 (CPU:1) waits for replica 0 in merge_call #0",
			},
			lines: map[int][]string{
				0: {`waits in all_reduce SUM #0 "w" float32 (2,) on a, called at `},
				1: {"waits in merge_call #0, called at "},
			},
		}, func(ctx context.Context, r replica) error {
			switch r.id {
			case 0:
				return r.comm("a").Do(ctx, vector("w", 2))
			case 1:
				_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) { return nil, nil })
				return err
			}
			<-ctx.Done() // the others compute
			return context.Cause(ctx)
		})
		if s := failure.Replicas[1].State; s != deadlock.Merging {
			t.Errorf("replica 1 is %v", s)
		}
	})
}

func TestMergePurposesDiffer(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		fails(t, n, deadlock.Config{}, want{
			is:  []error{collective.ErrMismatch},
			not: []error{collective.ErrDesync},
			reason: []string{
				"the calls differ: ", "replica 1 (CPU:1) makes merge_call #0 for saving",
				" merge_call #0 for loading",
			},
		}, func(ctx context.Context, r replica) error {
			purpose := "loading"
			if r.id == 1 {
				purpose = "saving"
			}
			_, err := r.run.Merge(ctx, r.id, purpose, 0, func() (any, error) { panic("they do not mean the same") })
			return err
		})
	})
}

func TestMergeNeedsEnded(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		for _, late := range []bool{false, true} {
			fails(t, n, deadlock.Config{}, want{
				is: []error{collective.ErrDesync}, reason: []string{
					"replica 1 (CPU:1) returned, but replica ",
					"waits for it in merge_call #0",
				},
			}, func(ctx context.Context, r replica) error {
				if r.id == 1 {
					if late {
						synctest.Wait()
					}
					return nil
				}
				if !late {
					if r.id > 0 {
						<-ctx.Done()
						return context.Cause(ctx)
					}
					synctest.Wait() // replica 1 has ended
				}
				// A replica that uses another context still gets the failure.
				_, err := r.run.Merge(context.WithoutCancel(ctx), r.id, "", 0, func() (any, error) { return nil, nil })
				return err
			})
		}
	})
}

func TestMergeFunctionPanics(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		value := &badness{3}
		failure := fails(t, n, deadlock.Config{}, want{
			is:     []error{collective.ErrPeerLost, value},
			reason: []string{"the merge function of merge_call #0 panicked on replica ", ": bad 3"},
		}, func(ctx context.Context, r replica) error {
			_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
				explode(value)
				return nil, nil
			})
			return err
		})
		i := slices.IndexFunc(failure.Replicas, func(r deadlock.ReplicaReport) bool { return r.State == deadlock.Panicked })
		if i < 0 || failure.Replicas[i].Panic != any(value) ||
			failure.Replicas[i].Stack[0].Name() != "deadlock_test.explode" ||
			!strings.Contains(failure.Replicas[i].String(), "panicked in the merge function of merge_call #0: bad 3\n") {
			t.Errorf("report %+v", failure.Replicas)
		}
	})
}

func TestMergeFunctionExits(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		w := newWorld(t, n, deadlock.Config{}, "a")
		defer w.close()
		start := time.Now()
		_, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
			_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
				runtime.Goexit()
				return nil, nil
			})
			return err
		})
		want{
			is: []error{collective.ErrPeerLost}, reason: []string{"the merge function of merge_call #0 called runtime.Goexit " +
				"on replica "},
		}.check(t, nil, err, time.Since(start))
		w.rebuild()
		w.works()
	})
}

func TestMergeFunctionMakesReplicaCall(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		fails(t, n, deadlock.Config{}, want{
			is: []error{collective.ErrBusy},
			reason: []string{"makes a call at ", "while it is in merge_call #0: a merge function makes the calls of " +
				"cross-replica context only"},
		}, func(ctx context.Context, r replica) error {
			_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) { return nil, r.run.Acquire((r.id + 1) % n) })
			return err
		})
	})
}

func TestMergeTimeout(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		// The others' options set no timeout; the run fails for all when one has waited too long.
		fails(t, n, deadlock.Config{Timeout: time.Minute}, want{
			is: []error{collective.ErrTimeout, context.DeadlineExceeded},
			reason: []string{"deadline exceeded: replica 0 (CPU:0) waited 40s in merge_call #0 for replica 1 (CPU:1), which " +
				"is blocked at "},
			lines: map[int][]string{1: {"[chan receive]\n      "}},
			took:  40 * time.Second,
		}, func(ctx context.Context, r replica) error {
			timeout := 40 * time.Second
			switch r.id {
			case 0:
			case 1:
				<-ctx.Done()
				return context.Cause(ctx)
			default:
				timeout = -1
			}
			_, err := r.run.Merge(ctx, r.id, "", timeout, func() (any, error) { return nil, nil })
			return err
		})
	})
	t.Run("of the function", func(t *testing.T) {
		bubble(t, func(t *testing.T, n int) {
			fails(t, n, deadlock.Config{Timeout: time.Minute}, want{
				is:     []error{collective.ErrTimeout},
				reason: []string{"waited 1m0s in merge_call #0, whose merge function still runs"},
				took:   time.Minute,
			}, func(ctx context.Context, r replica) error {
				_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
					<-ctx.Done()
					return nil, nil
				})
				return err
			})
		})
	})
}

func TestMergeStallReport(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		w := newWorld(t, n, deadlock.Config{Stall: 7 * time.Second})
		for range 2 {
			start := time.Now()
			_, _, err := w.run(t.Context(), func(ctx context.Context, r replica) error {
				if r.id == 0 {
					time.Sleep(time.Minute)
				}
				_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) {
					time.Sleep(3 * time.Second)
					return nil, nil
				})
				return err
			})
			if err != nil || time.Since(start) != 63*time.Second {
				t.Errorf("after %v: %v", time.Since(start), err)
			}
		}
		logs := w.logs.String()
		if got, want := strings.Count(logs, "merge call stalls"), 2*(n-1); got != want {
			t.Errorf("%d stall reports, want %d:\n%s", got, want, logs)
		}
		for _, part := range []string{
			`call="merge_call #0"`, "waited=7s", `missing="[replica 0 (CPU:0)]"`,
			`waiting="replica 1 (CPU:1)"`,
		} {
			if !strings.Contains(logs, part) {
				t.Errorf("the stall report lacks %s:\n%s", part, logs)
			}
		}
	})
}

func TestMergeEndedContext(t *testing.T) {
	bubble(t, func(t *testing.T, n int) {
		why := errors.New("stop")
		fails(t, n, deadlock.Config{}, want{is: []error{why, context.Canceled}, reason: []string{"replica 1 (CPU:1) gave " +
			"up in merge_call #0"}},
			func(ctx context.Context, r replica) error {
				if r.id == 1 {
					var cancel context.CancelCauseFunc
					ctx, cancel = context.WithCancelCause(ctx)
					cancel(why)
				}
				_, err := r.run.Merge(ctx, r.id, "", 0, func() (any, error) { return nil, nil })
				return err
			})
	})
}
