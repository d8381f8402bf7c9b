package data_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// slow is a dataset whose elements take a second each; started counts them.
func slow(n int, started *int) data.Pipeline {
	return data.FromSeq(n, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for i := range n {
				*started++
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
					yield(nil, context.Cause(ctx))
					return
				}
				if !yield(tensor.Scalar(int32(i)), nil) {
					return
				}
			}
		}
	})
}

func TestPrefetchReadsAhead(t *testing.T) {
	for _, n := range []int{1, 2, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				started, seen := 0, 0
				for e, err := range slow(20, &started).Prefetch(n).Iter(t.Context()) {
					if err != nil || tensor.Data[int32](e.(*tensor.Tensor))[0] != int32(seen) {
						t.Fatalf("element %d: %v, %v", seen, e, err)
					}
					seen++
					time.Sleep(time.Hour) // a consumer that is slower than any buffer
					synctest.Wait()
					if want := min(20, seen+n); started != want {
						t.Fatalf("after %d elements %d were made, want %d", seen, started, want)
					}
				}
				if seen != 20 {
					t.Errorf("%d elements, want 20", seen)
				}
			})
		})
	}
}

func TestPrefetchOverlaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, started := time.Now(), 0
		for _, err := range slow(10, &started).Prefetch(1).Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took != 11*time.Second {
			t.Errorf("10 elements of 1 s and 10 steps of 1 s took %v, want 11 s", took)
		}
	})
}

// TestPrefetchEnds checks that the goroutine ends with the loop: synctest fails if it remains.
func TestPrefetchEnds(t *testing.T) {
	cause := errors.New("cause")
	tests := []struct {
		name string
		loop func(t *testing.T, p data.Pipeline)
	}{
		{"break", func(t *testing.T, p data.Pipeline) {
			for range p.Iter(t.Context()) {
				break
			}
		}},
		{"never started", func(t *testing.T, p data.Pipeline) { p.Iter(t.Context()) }},
		{"panic in the loop", func(t *testing.T, p data.Pipeline) {
			defer func() {
				if got := recover(); got != "mine" {
					t.Errorf("got %v", got)
				}
			}()
			for range p.Iter(t.Context()) {
				panic("mine")
			}
		}},
		{"pull and stop", func(t *testing.T, p data.Pipeline) {
			next, stop := iter.Pull2(p.Iter(t.Context()))
			defer stop()
			if _, err, ok := next(); err != nil || !ok {
				t.Errorf("got %v, %t", err, ok)
			}
		}},
		{"cancel while waiting", func(t *testing.T, p data.Pipeline) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(500*time.Millisecond, func() { cancel(cause) })
			start := time.Now()
			n, err := firstError(ctx, p)
			if n != 0 || !errors.Is(err, cause) || time.Since(start) != 500*time.Millisecond {
				t.Errorf("%d elements, then %v after %v", n, err, time.Since(start))
			}
		}},
		{"deadline", func(t *testing.T, p data.Pipeline) {
			ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
			defer cancel()
			if n, err := firstError(ctx, p); n != 2 || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d elements, then %v", n, err)
			}
		}},
	}
	for _, c := range tests {
		for _, depth := range []int{1, 3} {
			t.Run(fmt.Sprint(c.name, " ", depth), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					started := 0
					c.loop(t, slow(5, &started).Prefetch(depth).Prefetch(1))
					if before := started; before > 0 {
						time.Sleep(time.Minute)
						if started != before {
							t.Errorf("elements were made after the loop: %d, then %d", before, started)
						}
					}
				})
			})
		}
	}
}

func TestPrefetchPanics(t *testing.T) {
	cause := errors.New("cause")
	tests := []struct {
		name string
		fail func()
		want string
	}{
		{"panic", func() { panic("what") }, "data: panic in the pipeline: what\n\ngoroutine "},
		{"panic with an error", func() { panic(cause) }, "data: panic in the pipeline: cause\n\ngoroutine "},
		{"Goexit", runtime.Goexit, "data: the pipeline called runtime.Goexit"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			p := data.FromFunc(5, func(_ context.Context, i int) (data.Element, error) {
				if i == 2 {
					c.fail()
				}
				return tensor.Scalar(int32(i)), nil
			})
			n, err := firstError(t.Context(), p.Prefetch(2))
			if n != 2 || err == nil || !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%d elements, then %v", n, err)
			}
			if c.name == "panic with an error" && !errors.Is(err, cause) {
				t.Errorf("%v does not match the error it panicked with", err)
			}
			if strings.HasPrefix(c.name, "panic") && !strings.Contains(err.Error(), "prefetch_test.go") {
				t.Errorf("no stack with the function's file: %v", err)
			}
		})
	}
}
