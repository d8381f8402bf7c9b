package train

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
	"github.com/lockstep-ml/lockstep/distribute"
)

// blocked is a dataset that yields some batches and then waits for release, and ignores its context.
func blocked(release <-chan struct{}, before ...data.Batch) data.Dataset {
	return data.FromSeq(-1, func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for _, b := range before {
				if !yield(b, nil) {
					return
				}
			}
			waitForDisk(release)
			for _, b := range before {
				if !yield(b, nil) {
					return
				}
			}
		}
	})
}

//go:noinline
func waitForDisk(release <-chan struct{}) { <-release }

// inBubble runs f with a strategy of two replicas, in virtual time.
func inBubble(t *testing.T, options distribute.Options, f func(t *testing.T, s *distribute.Strategy)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}, Options: options})
		if err != nil {
			t.Fatal(err)
		}
		f(t, s)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestDataTimeout checks that a dataset that blocks and ignores its context ends training, an evaluation, a prediction
// and New at a deadline, with the place where it is blocked. Batches that it yields later are discarded.
func TestDataTimeout(t *testing.T) {
	for _, c := range []struct {
		name    string
		timeout time.Duration
		options distribute.Options
		want    time.Duration
	}{
		{"default", 0, distribute.Options{}, 5 * time.Minute},
		{"half of the strategy's", 0, distribute.Options{Timeout: time.Minute}, 30 * time.Second},
		{"its own", 20 * time.Second, distribute.Options{}, 20 * time.Second},
	} {
		for name, call := range map[string]func(context.Context, *Trainer, data.Dataset) error{
			"Fit": func(ctx context.Context, t *Trainer, ds data.Dataset) error {
				_, err := t.Fit(ctx, ds, FitConfig{})
				return err
			},
			"Fit in steps": func(ctx context.Context, t *Trainer, ds data.Dataset) error {
				_, err := t.Fit(ctx, ds, FitConfig{StepsPerEpoch: 5})
				return err
			},
			"Evaluate": func(ctx context.Context, t *Trainer, ds data.Dataset) error {
				_, err := t.Evaluate(ctx, ds)
				return err
			},
			"Predict": func(ctx context.Context, t *Trainer, ds data.Dataset) error {
				_, err := t.Predict(ctx, ds)
				return err
			},
		} {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				inBubble(t, c.options, func(t *testing.T, s *distribute.Strategy) {
					cfg := fakeConfig(4)
					cfg.DataTimeout = c.timeout
					trainer, err := New(t.Context(), s, fakeModel{}, cfg)
					if err != nil {
						t.Fatal(err)
					}
					release := make(chan struct{})
					start := time.Now()
					err = call(t.Context(), trainer, blocked(release, lineExamples(4), lineExamples(4)))
					var e *DataTimeoutError
					if !errors.As(err, &e) || e.Waited != c.want || !errors.Is(err, distribute.ErrTimeout) ||
						!errors.Is(err, context.DeadlineExceeded) {
						t.Fatalf("got %v", err)
					}
					if took := time.Since(start); took != c.want+stuckTimeout {
						t.Errorf("it took %v: want %v, and %v for the dataset to return", took, c.want, stuckTimeout)
					}
					for _, want := range []string{
						fmt.Sprintf("the dataset gave no batch for %v: it is at ", c.want),
						"reader_test.go:", "train.waitForDisk", "DataTimeout",
					} {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("the error does not mention %q: %v", want, err)
						}
					}
					// The reader continues while the memory of its batches is reused.
					before := trainer.program.(*fakeProgram).snapshot()
					close(release)
					if _, err := trainer.Evaluate(t.Context(), batches(lineExamples(4))); err != nil {
						t.Error(err)
					}
					synctest.Wait()
					if got := trainer.program.(*fakeProgram).snapshot(); fmt.Sprint(got) != fmt.Sprint(before) {
						t.Error("the late dataset changed variables")
					}
					if err := trainer.Close(); err != nil {
						t.Error(err)
					}
				})
			})
		}
	}
}

// TestDataTimeoutInNew checks the timeout for the first batch of Config.Data.
func TestDataTimeoutInNew(t *testing.T) {
	inBubble(t, distribute.Options{}, func(t *testing.T, s *distribute.Strategy) {
		release := make(chan struct{})
		start := time.Now()
		_, err := New(t.Context(), s, fakeModel{}, Config{Data: blocked(release), DataTimeout: time.Second})
		if took := time.Since(start); took != time.Second+stuckTimeout {
			t.Errorf("it took %v: want 1s, and %v for the dataset to return", took, stuckTimeout)
		}
		var e *DataTimeoutError
		if !errors.As(err, &e) || !strings.HasPrefix(err.Error(),
			"train: Config.Data: first batch: the dataset gave no batch for 1s: it is at ") {
			t.Errorf("got %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			time.Sleep(time.Second)
			cancel()
		}()
		_, err = New(ctx, s, fakeModel{}, Config{Data: blocked(release)})
		if !errors.As(err, &e) || !strings.Contains(err.Error(),
			"the dataset has not returned within 10s after the end of its context: it is at ") {
			t.Errorf("got %v", err)
		}
		close(release)
		synctest.Wait()
	})
}

// TestIgnorantDataset checks that a Fit that ends for another reason waits only 10 seconds for the dataset, and returns
// an error.
func TestIgnorantDataset(t *testing.T) {
	inBubble(t, distribute.Options{}, func(t *testing.T, s *distribute.Strategy) {
		trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(4))
		if err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("the machine shuts down")
		time.AfterFunc(time.Minute, func() { cancel(cause) })
		start := time.Now()
		if _, err = trainer.Fit(ctx, blocked(release, lineExamples(4)), FitConfig{}); !errors.Is(err, cause) {
			t.Errorf("got %v, want the cause", err)
		}
		if took := time.Since(start); took != time.Minute+stopGrace+endTimeout {
			t.Errorf("it took %v", took)
		}
		stop := Callback{OnStepEnd: func(context.Context, Step) error { time.Sleep(time.Second); return ErrStop }}
		_, err = trainer.Fit(t.Context(), blocked(release, lineExamples(4)), FitConfig{Callbacks: []Callback{stop}})
		var e *DataTimeoutError
		if !errors.As(err, &e) || !strings.Contains(err.Error(),
			"the dataset has not returned within 10s after the end of its context") || !strings.Contains(e.Stack,
			"waitForDisk") {
			t.Errorf("got %v", err)
		}
		close(release)
		synctest.Wait()
		if err := trainer.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestDataTimeoutOfAnother checks that the place is also found if the dataset waits for a goroutine that it has
// started, such as one that reads ahead.
func TestDataTimeoutOfAnother(t *testing.T) {
	inBubble(t, distribute.Options{}, func(t *testing.T, s *distribute.Strategy) {
		trainer, err := New(t.Context(), s, fakeModel{}, fakeConfig(4))
		if err != nil {
			t.Fatal(err)
		}
		release := make(chan struct{})
		elements := data.FromSeq(-1, func(ctx context.Context) iter.Seq2[data.Element, error] {
			return func(yield func(data.Element, error) bool) {
				waitForDisk(release)
				yield(lineExamples(4), nil)
			}
		})
		_, err = trainer.Fit(t.Context(), elements.Prefetch(2), FitConfig{})
		if err == nil || !strings.Contains(err.Error(), "train.waitForDisk") {
			t.Errorf("got %v", err)
		}
		close(release)
		synctest.Wait()
		if err := trainer.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestDataTimeoutOverWorkers checks that the other workers get the error too.
func TestDataTimeoutOverWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(8)
			cfg.DataTimeout = 20 * time.Second
			trainer, err := New(t.Context(), s, fakeModel{}, cfg)
			if err != nil {
				return err
			}
			ds := batches(lineExamples(8), lineExamples(8))
			if w == 1 {
				ds = blocked(release, lineExamples(8))
			}
			_, err = trainer.Fit(t.Context(), ds, FitConfig{})
			return errors.Join(err, trainer.Close())
		})
		close(release)
		for w, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "the dataset gave no batch for 20s: it is at ") {
				t.Errorf("worker %d ends with %v", w, err)
			}
		}
	})
}

// TestRefill checks that the reader of a training is two batches ahead, and that it fills the memory of a batch again
// only when the replicas have begun the next step, or when no other batch is left to take.
func TestRefill(t *testing.T) {
	for _, accumulate := range []int{1, 3} {
		inBubble(t, distribute.Options{}, func(t *testing.T, s *distribute.Strategy) {
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(4))
			if err != nil {
				t.Fatal(err)
			}
			const steps = 4
			total, read := steps*accumulate, 0
			ds := data.FromSeq(total, func(context.Context) iter.Seq2[data.Element, error] {
				return func(yield func(data.Element, error) bool) {
					for read = range total {
						if !yield(lineExamples(4), nil) {
							return
						}
					}
					read = total
				}
			})
			_, err = trainer.Fit(t.Context(), ds, FitConfig{Accumulate: accumulate, Callbacks: []Callback{{
				OnStepEnd: func(_ context.Context, e Step) error {
					synctest.Wait()
					// The reader waits for memory for the batch number read, which counts from 0.
					if want := min(e.Step*accumulate+accumulate+1, total); read != want {
						t.Errorf("accumulating %d, after step %d, %d batches are filled: want %d", accumulate, e.Step, read, want)
					}
					return nil
				},
			}}})
			if err := errors.Join(err, trainer.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLateReader checks that a feeder that is closed just after its reader has filled a batch does not change that
// batch afterwards, and fills no other.
func TestLateReader(t *testing.T) {
	trainer, _ := newFake(t, 1, 4, fakeModel{})
	g, err := trainer.borrow(true, false)
	if err != nil {
		t.Fatal(err)
	}
	f := &feeder{ready: make(chan *globalBatch), free: make(chan *globalBatch, 1), t: trainer}
	f.free <- g
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	at := batchPosition{2, 7}
	go func() { sent <- f.send(ctx, lineExamples(4), at) }()
	for !f.closed {
		f.mu.Lock()
		if g.examples > 0 {
			f.closed = true
			if g.position != at { // -race reports a reader that sets it later
				t.Errorf("a filled batch is at %v, want %v", g.position, at)
			}
		}
		f.mu.Unlock()
		runtime.Gosched()
	}
	cancel()
	if err := <-sent; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	f.free <- g
	if err := f.send(t.Context(), lineExamples(4), batchPosition{3, 8}); !errors.Is(err, context.Canceled) ||
		g.position != at {
		t.Errorf("after close: got %v, and the batch is at %v", err, g.position)
	}
}
