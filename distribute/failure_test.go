package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(workerEnv); text != "" {
		workerMain(text)
		return
	}
	debug.SetGCPercent(400) // the tests use little memory, and a fifth of their time went into collecting it
	goleak.VerifyTestMain(m)
}

// step is one replica's step function in a failing Run.
type step func(ctx context.Context, r *distribute.Replica) error

func sum(ctx context.Context, r *distribute.Replica, name string, shape ...int) error {
	t := tensor.New(tensor.Float32, shape...)
	return r.AllReduceInto(ctx, distribute.Sum, []*tensor.Tensor{tensor.New(tensor.Float32, shape...)},
		[]*tensor.Tensor{t}, []string{name})
}

func merge(ctx context.Context, r *distribute.Replica) error {
	_, err := distribute.MergeCall(ctx, r,
		func(context.Context, *distribute.CrossReplica, distribute.PerReplica[int]) (distribute.Value, error) {
			return nil, nil
		}, 0)
	return err
}

func sumNest(ctx context.Context, r *distribute.Replica, key string) error {
	_, err := distribute.AllReduce(ctx, r, distribute.Sum, map[string]any{key: float32(1)})
	return err
}

// nilError is an error that cannot print itself when it is nil or empty.
type nilError struct{ why *string }

func (e *nilError) Error() string { return *e.why }

var errStep = errors.New("the step's own error")

// failures lists the ways in which a step fails on its last replica while the others wait for it.
var failures = []struct {
	name    string
	others  step // nil: they reduce
	last    step
	kind    error
	message []string
	sites   int // lower bound of the number of lines of this file that the error must name
}{
	{
		name: "early return",
		last: func(context.Context, *distribute.Replica) error { return nil },
		kind: distribute.ErrDesync, message: []string{"returned", "all_reduce", "gradient"}, sites: 1,
	},
	{
		name: "error",
		last: func(context.Context, *distribute.Replica) error { return errStep },
		kind: errStep, message: []string{"the step's own error"}, sites: 1,
	},
	{
		name: "an error of several lines",
		last: func(context.Context, *distribute.Replica) error {
			return errors.Join(errStep, errors.New("and another"))
		},
		kind: errStep, message: []string{") returned an error: the step's own error\n", "\n      | and another"}, sites: 1,
	},
	{
		name:    "an error that is a nil pointer",
		last:    func(context.Context, *distribute.Replica) error { return (*nilError)(nil) },
		message: []string{"a nil *distribute_test.nilError in an interface, which is not nil itself"}, sites: 1,
	},
	{
		name: "a panic whose text panics",
		last: func(context.Context, *distribute.Replica) error { panic(&nilError{}) },
		kind: distribute.ErrPeerLost, message: []string{"panicked: %!v(PANIC=Error method: "}, sites: 1,
	},
	{
		name: "a bad argument",
		last: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.AllReduce(ctx, r, distribute.Sum, []any{float32(1), "two"})
			return err
		},
		kind: distribute.ErrInvalid, message: []string{"distribute: AllReduce at ", "string"}, sites: 2,
	},
	{
		name: "panic",
		last: func(context.Context, *distribute.Replica) error { panic(errStep) },
		kind: errStep, message: []string{"panic", "the step's own error", "failure_test.go"}, sites: 2,
	},
	{
		name:    "Goexit",
		last:    func(context.Context, *distribute.Replica) error { runtime.Goexit(); return nil },
		message: []string{"Goexit"}, sites: 2,
	},
	{
		name: "other shape",
		last: func(ctx context.Context, r *distribute.Replica) error { return sum(ctx, r, "gradient", 3) },
		kind: distribute.ErrMismatch, message: []string{"(3,)", "(2,)"}, sites: 1,
	},
	{
		name:   "another nest",
		others: func(ctx context.Context, r *distribute.Replica) error { return sumNest(ctx, r, "weights") },
		last:   func(ctx context.Context, r *distribute.Replica) error { return sumNest(ctx, r, "biases") },
		kind:   distribute.ErrMismatch, message: []string{"the calls differ: ", "weights", "biases"}, sites: 2,
	},
	{
		name: "other order",
		others: func(ctx context.Context, r *distribute.Replica) error {
			if err := sum(ctx, r, "a", 2); err != nil {
				return err
			}
			return sum(ctx, r, "b", 2)
		},
		last: func(ctx context.Context, r *distribute.Replica) error {
			if err := sum(ctx, r, "b", 2); err != nil {
				return err
			}
			return sum(ctx, r, "a", 2)
		},
		kind: distribute.ErrMismatch, message: []string{`"a"`, `"b"`}, sites: 1,
	},
	{
		name: "another reduction",
		last: func(ctx context.Context, r *distribute.Replica) error {
			t := []*tensor.Tensor{tensor.New(tensor.Float32, 2)}
			return r.AllReduceInto(ctx, distribute.Mean, t, t, []string{"gradient"})
		},
		kind: distribute.ErrMismatch, message: []string{"SUM", "MEAN"}, sites: 2,
	},
	{
		name: "a merge call against a reduction",
		last: merge,
		kind: distribute.ErrDesync, message: []string{"merge", "all_reduce"}, sites: 2,
	},
	{
		name: "a merge call against another operation's",
		last: merge,
		others: func(ctx context.Context, r *distribute.Replica) error {
			_, err := r.Strategy().NewVariable(ctx, distribute.VariableConfig{Initial: float32(1)})
			return err
		},
		kind: distribute.ErrMismatch, message: []string{
			"the calls differ: replica ", " merge_call #0 for NewVariable",
			" merge_call #0, called at ",
		}, sites: 2,
	},
	{
		name: "merge calls with other arguments",
		last: merge,
		others: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(context.Context, *distribute.CrossReplica, distribute.PerReplica[string]) (int, error) {
					return 0, nil
				}, "other")
			return err
		},
		kind: distribute.ErrMismatch, message: []string{"gives a *int, replica 0 a *string"}, sites: 1,
	},
	{
		name: "no merge function",
		last: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall[int, int](ctx, r, nil, 0)
			return err
		},
		kind: distribute.ErrInvalid, message: []string{"the merge function is nil"}, sites: 2,
	},
	{
		name: "Close",
		last: func(_ context.Context, r *distribute.Replica) error { return r.Strategy().Close() },
		kind: distribute.ErrContext, message: []string{
			"distribute: Close at ",
			"Close would wait for the step to end",
		}, sites: 2,
	},
	{
		name: "Close inside a merge function",
		others: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(_ context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
					return nil, c.Strategy().Close()
				}, 0)
			return err
		},
		last: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(_ context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
					return nil, c.Strategy().Close()
				}, 0)
			return err
		},
		kind: distribute.ErrContext, message: []string{"Close would wait for the step to end"}, sites: 1,
	},
	{
		name:   "fewer merge calls",
		others: merge,
		last:   func(context.Context, *distribute.Replica) error { return nil },
		kind:   distribute.ErrDesync, message: []string{"merge", "returned"}, sites: 1,
	},
	{
		name: "nested Run",
		last: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.Run(ctx, r.Strategy(),
				func(context.Context, *distribute.Replica, struct{}) (distribute.Value, error) {
					return nil, nil
				}, nil)
			return err
		},
		kind: distribute.ErrContext, message: []string{"Runs do not nest", "distribute: Run at "}, sites: 2,
	},
	{
		name: "nested Run that hides its context",
		last: func(_ context.Context, r *distribute.Replica) error {
			_, err := distribute.Run(context.Background(), r.Strategy(),
				func(context.Context, *distribute.Replica, struct{}) (distribute.Value, error) {
					return nil, nil
				}, nil)
			return err
		},
		kind: distribute.ErrContext, message: []string{"inside a Run of the same strategy"}, sites: 1,
	},
	{
		name: "Run inside a merge function without its context",
		others: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(_ context.Context, c *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
					return distribute.RunNest(context.Background(), c.Strategy(),
						func(context.Context, *distribute.Replica, ...distribute.Value) (distribute.Value, error) {
							return nil, nil
						})
				}, 0)
			return err
		},
		last: merge,
		kind: distribute.ErrContext, message: []string{"inside a Run of the same strategy"}, sites: 1,
	},
	{
		name: "a merge function that panics",
		others: func(ctx context.Context, r *distribute.Replica) error {
			_, err := distribute.MergeCall(ctx, r,
				func(context.Context, *distribute.CrossReplica, distribute.PerReplica[int]) (distribute.Value, error) {
					panic(errStep)
				}, 0)
			return err
		},
		last: merge,
		kind: errStep, message: []string{"merge", "panic"}, sites: 2,
	},
	{
		name: "two goroutines on one replica",
		last: func(ctx context.Context, r *distribute.Replica) error {
			var wait sync.WaitGroup
			errs := make([]error, 2)
			for i := range errs {
				wait.Go(func() { errs[i] = merge(ctx, r) })
			}
			wait.Wait()
			return errors.Join(errs...)
		},
		others: func(ctx context.Context, _ *distribute.Replica) error { <-ctx.Done(); return context.Cause(ctx) },
		kind:   distribute.ErrBusy, message: []string{"replica"}, sites: 1,
	},
}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func TestFailuresAreFoundAtOnce(t *testing.T) {
	for _, n := range []int{2, 8} {
		for _, f := range failures {
			t.Run(fmt.Sprintf("%s/replicas=%d", f.name, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := mirrored(t, n, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
					start := time.Now()
					others := f.others
					if others == nil {
						others = func(ctx context.Context, r *distribute.Replica) error { return sum(ctx, r, "gradient", 2) }
					}
					seen := make([]error, n)
					_, err := distribute.Run(t.Context(), s,
						func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
							do := others
							if r.ID() == n-1 {
								do = f.last
							}
							seen[r.ID()] = do(ctx, r)
							return struct{}{}, seen[r.ID()]
						}, nil)
					if passed := time.Since(start); passed != 0 {
						t.Errorf("it took %v of virtual time, want none", passed)
					}
					checkStepError(t, err, f.kind, f.message, f.sites, n)
					for i, e := range seen[:n-1] {
						if e != nil && !errors.Is(e, err) && !errors.Is(err, e) {
							t.Errorf("replica %d got another error than Run's caller: %v", i, e)
						}
					}
					checkRunsAgain(t, s)
				})
			})
		}
	}
}

// checkStepError checks the kind and the text of a Run's error.
func checkStepError(t *testing.T, err, kind error, message []string, sites, n int) {
	t.Helper()
	var step *distribute.StepError
	if !errors.As(err, &step) {
		t.Fatalf("got %v (%T), want a *StepError", err, err)
	}
	if kind != nil && !errors.Is(err, kind) {
		t.Errorf("the error does not match %v: %v", kind, err)
	}
	text := err.Error()
	for _, s := range message {
		if !strings.Contains(text, s) {
			t.Errorf("the error does not say %q:\n%s", s, text)
		}
	}
	for i := range n {
		if want := fmt.Sprintf("replica %d (CPU:%d)", i, i); !strings.Contains(text, want) {
			t.Errorf("the error does not name %s:\n%s", want, text)
		}
	}
	found := map[string]bool{}
	for _, site := range regexp.MustCompile(`failure_test\.go:\d+`).FindAllString(text, -1) {
		found[site] = true
	}
	if len(found) < sites {
		t.Errorf("the error names %d places of the test, want at least %d:\n%s", len(found), sites, text)
	}
}

// checkRunsAgain checks that a strategy works after a failed Run.
func checkRunsAgain(t *testing.T, s *distribute.Strategy) {
	t.Helper()
	n := s.NumReplicasInSync()
	out, err := distribute.Run(t.Context(), s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (float32, error) {
			v, err := distribute.AllReduce(ctx, r, distribute.Sum, float32(1))
			if err != nil {
				return 0, err
			}
			return v, merge(ctx, r)
		}, nil)
	if err != nil {
		t.Fatalf("the next Run: %v", err)
	}
	for i, got := range out {
		if got != float32(n) {
			t.Errorf("the next Run: replica %d got %v, want %d", i, got, n)
		}
	}
}

func TestBlockedReplicaIsFoundByTheDeadline(t *testing.T) {
	for _, n := range []int{2, 8} {
		for name, wait := range map[string]step{
			"reduction": func(ctx context.Context, r *distribute.Replica) error { return sum(ctx, r, "gradient", 2) },
			"merge":     merge,
		} {
			t.Run(fmt.Sprintf("%s/replicas=%d", name, n), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					const timeout = 42 * time.Second
					s := mirrored(t, n, func(cfg *distribute.MirroredConfig) { cfg.Logger, cfg.Options.Timeout = quiet, timeout })
					stuck := make(chan struct{})
					defer close(stuck)
					start := time.Now()
					_, err := distribute.Run(t.Context(), s,
						func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
							if r.ID() == n-1 {
								<-stuck // the user's channel
								return struct{}{}, nil
							}
							return struct{}{}, wait(ctx, r)
						}, nil)
					if passed := time.Since(start); passed < timeout || passed > timeout+time.Minute {
						t.Errorf("it took %v, want the timeout %v and a little grace", passed, timeout)
					}
					checkStepError(t, err, distribute.ErrTimeout, []string{"chan receive", "failure_test.go"}, 2, n)
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("the error does not match context.DeadlineExceeded: %v", err)
					}
					checkRunsAgain(t, s)
				})
			})
		}
	}
}

func TestCancellationEndsEveryWait(t *testing.T) {
	for name, wait := range map[string]step{
		"reduction": func(ctx context.Context, r *distribute.Replica) error { return sum(ctx, r, "gradient", 2) },
		"merge":     merge,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(time.Second, func() { cancel(errStep) })
				start := time.Now()
				_, err := distribute.Run(ctx, s,
					func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
						if r.ID() == 1 {
							<-ctx.Done()
							return struct{}{}, context.Cause(ctx)
						}
						return struct{}{}, wait(ctx, r)
					}, nil)
				if passed := time.Since(start); passed != time.Second {
					t.Errorf("it took %v, want 1s", passed)
				}
				if !errors.Is(err, errStep) {
					t.Errorf("got %v, want the context's cause", err)
				}
				checkRunsAgain(t, s)
			})
		})
	}
}

// A Run that waits for another one, or has not begun, ends with its context.
func TestCancellationBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		hold, released := make(chan struct{}), make(chan error)
		go func() {
			_, err := distribute.Run(t.Context(), s,
				func(context.Context, *distribute.Replica, struct{}) (struct{}, error) {
					<-hold
					return struct{}{}, nil
				}, nil)
			released <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(errStep) })
		for _, when := range []string{"while it waits", "before"} {
			_, err := distribute.Run(ctx, s, func(context.Context, *distribute.Replica, struct{}) (struct{}, error) {
				t.Errorf("%s: the step ran", when)
				return struct{}{}, nil
			}, nil)
			if !errors.Is(err, errStep) || !errors.Is(err, context.Canceled) {
				t.Errorf("%s: got %v, want the context's error and its cause", when, err)
			}
		}
		close(hold)
		if err := <-released; err != nil {
			t.Errorf("the Run in progress: %v", err)
		}
		checkRunsAgain(t, s)
	})
}

func TestRunsOfOneStrategyAreSerialised(t *testing.T) {
	s := mirrored(t, 2)
	var mu sync.Mutex
	inside, most := 0, 0
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() {
			for range 20 {
				_, err := distribute.Run(t.Context(), s,
					func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
						if r.ID() == 0 {
							mu.Lock()
							inside++
							most = max(most, inside)
							mu.Unlock()
						}
						err := sum(ctx, r, "x", 1)
						if r.ID() == 0 {
							mu.Lock()
							inside--
							mu.Unlock()
						}
						return struct{}{}, err
					}, nil)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if most != 1 {
		t.Errorf("%d Runs were in progress at once, want 1", most)
	}
}

// The replica whose call differs from all others is named first.
func TestTheOddOneIsNamedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 5, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		_, err := distribute.Run(t.Context(), s,
			func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
				if r.ID() == 3 {
					synctest.Wait() // all others wait for it
					return struct{}{}, sum(ctx, r, "gradient", 7)
				}
				return struct{}{}, sum(ctx, r, "gradient", 2)
			}, nil)
		const want = `the calls differ: replica 3 (CPU:3) makes all_reduce SUM #0 "gradient" float32 (7,), ` +
			`replica 0 (CPU:0), replica 1 (CPU:1), replica 2 (CPU:2), replica 4 (CPU:4) make all_reduce SUM #0 "gradient" float32 (2,)` + "\n"
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want it to begin with %s", err, want)
		}
	})
}

func TestNestedRun(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	step := func(context.Context, *distribute.Replica, struct{}) (struct{}, error) { return struct{}{}, nil }
	for name, outer := range map[string]func(context.Context) context.Context{
		"its context": func(ctx context.Context) context.Context { return ctx },
		"another":     func(context.Context) context.Context { return t.Context() },
	} {
		_, err := distribute.Run(t.Context(), s,
			func(ctx context.Context, _ *distribute.Replica, _ struct{}) (struct{}, error) {
				_, err := distribute.Run(outer(ctx), s, step, nil)
				return struct{}{}, err
			}, nil)
		if !errors.Is(err, distribute.ErrNested) || !errors.Is(err, distribute.ErrContext) {
			t.Errorf("%s: got %v, want ErrNested and ErrContext", name, err)
		}
	}
}

// TestInsideInnerRun checks that a replica of a Run that a merge function starts can neither close the strategy nor
// start another Run, both of which would wait for it, although the outer replicas' goroutines are others than when the
// strategy made the inner ones.
func TestInsideInnerRun(t *testing.T) {
	calls := map[string]func(context.Context, *distribute.Strategy) error{
		"Close": func(_ context.Context, s *distribute.Strategy) error { return s.Close() },
		"Run": func(ctx context.Context, s *distribute.Strategy) error {
			return inStepOf(ctx, s, func(context.Context, *distribute.Replica) error { return nil })
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
				inner := func(f func(context.Context, *distribute.Replica) error) error {
					return inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
						_, err := distribute.MergeCall(ctx, r,
							func(ctx context.Context, _ *distribute.CrossReplica, _ distribute.PerReplica[int]) (distribute.Value, error) {
								return nil, inStepOf(ctx, s, f)
							}, 0)
						return err
					})
				}
				if err := inner(func(context.Context, *distribute.Replica) error { return nil }); err != nil {
					t.Fatal(err)
				}
				fail := func(context.Context, *distribute.Replica) error { return errStep }
				if err := inStep(t, s, fail); !errors.Is(err, errStep) {
					t.Fatalf("got %v, want the step's own error", err)
				}
				start, got := time.Now(), make([]error, 2)
				if err := inner(func(_ context.Context, r *distribute.Replica) error {
					got[r.ID()] = call(t.Context(), s)
					return nil
				}); err != nil {
					t.Error(err)
				}
				for i, err := range got {
					if passed := time.Since(start); !errors.Is(err, distribute.ErrContext) || passed != 0 {
						t.Errorf("replica %d: after %v: got %v, want ErrContext at once", i, passed, err)
					}
				}
				checkRunsAgain(t, s)
			})
		})
	}
}

func TestNoStep(t *testing.T) {
	s := mirrored(t, 2)
	if _, err := distribute.Run[int, int](t.Context(), s, nil, nil); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("Run: got %v, want ErrInvalid", err)
	}
	step := func(context.Context, *distribute.Replica, int) (int, error) { return 0, nil }
	if _, err := distribute.Run(t.Context(), s, step, []int{1}); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("one input for two replicas: got %v, want ErrInvalid", err)
	}
}

func TestClosedStrategy(t *testing.T) {
	s := mirrored(t, 2)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := distribute.Run(t.Context(), s,
		func(context.Context, *distribute.Replica, struct{}) (distribute.Value, error) {
			return nil, nil
		}, nil)
	if !errors.Is(err, distribute.ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
	_, err = distribute.Reduce(t.Context(), s, distribute.Sum, []float64{1, 2}, distribute.ReduceOptions{})
	if !errors.Is(err, distribute.ErrClosed) {
		t.Errorf("Reduce: got %v, want ErrClosed", err)
	}
}

// Close waits for the Run in progress. A Run that also waits for it returns ErrClosed.
func TestCloseDuringRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		start := time.Now()
		run := func(d time.Duration) error {
			_, err := distribute.Run(t.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
					time.Sleep(d)
					return struct{}{}, sum(ctx, r, "x", 1)
				}, nil)
			return err
		}
		first, second := make(chan error), make(chan error)
		go func() { first <- run(time.Second) }()
		synctest.Wait()
		go func() { second <- run(time.Hour) }()
		synctest.Wait()
		closed := make(chan error)
		go func() { closed <- s.Close() }()
		if err := <-first; err != nil {
			t.Errorf("the Run in progress: %v", err)
		}
		if err := <-second; !errors.Is(err, distribute.ErrClosed) {
			t.Errorf("the waiting Run: got %v, want ErrClosed", err)
		}
		if err := <-closed; err != nil || time.Since(start) != time.Second {
			t.Errorf("Close returned after %v: %v", time.Since(start), err)
		}
	})
}

// Run abandons a replica that does not return; StepError.Wait waits for it, and the strategy runs in the meantime.
func TestWaitForAbandonedReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		start := time.Now()
		_, err := distribute.Run(t.Context(), s,
			func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
				if r.ID() == 0 {
					return struct{}{}, errStep
				}
				time.Sleep(time.Minute)
				return struct{}{}, nil
			}, nil)
		failure, ok := err.(*distribute.StepError)
		if passed := time.Since(start); !ok || !errors.Is(err, errStep) || passed != 10*time.Second {
			t.Fatalf("after %v: got %v, want a *StepError after 10s", passed, err)
		}
		checkRunsAgain(t, s)
		failure.Wait()
		if passed := time.Since(start); passed != time.Minute {
			t.Errorf("Wait returned after %v, want 1m", passed)
		}
	})
}

func TestReplicaOutsideItsRun(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	replicas, contexts := make([]*distribute.Replica, 2), make([]context.Context, 2)
	note := func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
		replicas[r.ID()], contexts[r.ID()] = r, ctx
		return struct{}{}, nil
	}
	if _, err := distribute.Run(t.Context(), s, note, nil); err != nil {
		t.Fatal(err)
	}
	use := func(ctx context.Context) error {
		_, err := distribute.AllReduce(ctx, replicas[0], distribute.Sum, 1.0)
		return err
	}
	if err := use(t.Context()); !errors.Is(err, distribute.ErrContext) {
		t.Errorf("after the Run: got %v, want ErrContext", err)
	}
	// A goroutine that an earlier step started does not affect later Runs.
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if r.ID() == 0 {
			for _, ctx := range []context.Context{contexts[0], ctx} {
				if err := use(ctx); !errors.Is(err, distribute.ErrContext) {
					t.Errorf("in the next Run: got %v, want ErrContext", err)
				}
			}
			if _, err := distribute.AllReduce(contexts[0], r, distribute.Sum, 1.0); !errors.Is(err, distribute.ErrContext) {
				t.Errorf("with the context of the Run before: got %v, want ErrContext", err)
			}
		}
		return sum(ctx, r, "x", 2)
	})
	if err != nil {
		t.Errorf("the next Run: %v", err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		replicas[r.ID()] = r
		if err := merge(ctx, r); err != nil || r.ID() == 0 {
			return err
		}
		return use(ctx)
	})
	if !errors.Is(err, distribute.ErrContext) || !strings.Contains(err.Error(), "mismatching replica") {
		t.Errorf("another replica's: got %v, want ErrContext", err)
	}
	// After a failed Run they return its failure.
	failed := inStep(t, s, func(_ context.Context, r *distribute.Replica) error {
		replicas[r.ID()] = r
		return errStep
	})
	if err := use(t.Context()); err != failed {
		t.Errorf("after a failed Run: got %v, want its failure", err)
	}
}
