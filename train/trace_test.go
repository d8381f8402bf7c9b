package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/timeline/timelinetest"
)

// readTrace reads a trace file strictly.
func readTrace(t *testing.T, path string) *timelinetest.Trace {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	trace, err := timelinetest.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// TestTrace checks the rows of the trace of a training on workers of different sizes: the parts of the last steps in
// their order, on one clock, and a call of each bucket on every replica.
func TestTrace(t *testing.T) {
	for _, layout := range [][]int{{2}, {1, 2}} {
		t.Run(fmt.Sprint(layout), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "trace.json")
			f := func(w int, s *distribute.Strategy) error {
				cfg := fakeConfig(7)
				cfg.Trace = &Trace{Path: path, Steps: 3}
				if w > 0 {
					cfg.Trace.Path = ""
				}
				trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
				if err != nil {
					return err
				}
				_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), FitConfig{Epochs: 3})
				return errors.Join(err, trainer.Close())
			}
			if err := errors.Join(overWorkers(t, layout, f)...); err != nil {
				t.Fatal(err)
			}
			trace := readTrace(t, path)
			replica := 0
			for w, n := range layout {
				if !strings.HasPrefix(trace.Processes[w], fmt.Sprintf("worker %d (host ", w)) {
					t.Errorf("process %d is %q", w, trace.Processes[w])
				}
				for local := range n {
					checkReplica(t, trace, w, replica, local == 0)
					replica++
				}
			}
		})
	}
}

// checkReplica checks the spans of a replica in the last three of nine steps.
func checkReplica(t *testing.T, trace *timelinetest.Trace, worker, replica int, first bool) {
	t.Helper()
	name := fmt.Sprintf("replica %d", replica)
	for step := 7; step <= 9; step++ {
		var parts, calls []string
		for _, e := range trace.Spans(worker, name) {
			if e.Args["step"] == float64(step) && (len(parts) == 0 || parts[len(parts)-1] != e.Name) {
				parts = append(parts, e.Name)
			}
		}
		for _, e := range trace.Spans(worker, name+" calls") {
			if e.Args["step"] != float64(step) || e.Category == "wait" {
				continue
			}
			calls = append(calls, e.Name)
			if e.Args["bytes"].(float64) <= 0 || e.Args["algorithm"] == "" {
				t.Errorf("%s: %+v", name, e)
			}
		}
		got := strings.Join(parts, ", ")
		want := "forward and backward, bucket 1, backward, bucket 2, wait, update, wait, update"
		if first {
			want = "callbacks, input, " + want + ", wait, commit"
		}
		if alike := strings.ReplaceAll(got, "callbacks, input, callbacks, input", "callbacks, input"); alike != want {
			t.Errorf("%s, step %d: got %s, want %s", name, step, got, want)
		}
		if text := strings.Join(calls, ", "); text != "all_reduce, all_reduce" {
			t.Errorf("%s, step %d: calls %s", name, step, text)
		}
	}
	for _, e := range trace.Spans(worker, name) {
		if e.Args["step"].(float64) < 7 {
			t.Errorf("%s: an event of step %v: want the last 3 steps", name, e.Args["step"])
		}
	}
}

// TestTraceOfAFailure checks that a training that fails leaves the chief's events.
func TestTraceOfAFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.json")
	failure := errors.New("a callback failed")
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(7)
		cfg.Trace = &Trace{Path: path}
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
		if err != nil {
			return err
		}
		_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), FitConfig{Epochs: 3, Callbacks: []Callback{{
			OnStepEnd: func(_ context.Context, s Step) error {
				if w == 0 && s.Epoch == 1 {
					return failure
				}
				return nil
			},
		}}})
		if err == nil {
			t.Error("Fit succeeded")
		}
		return trainer.Close()
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	trace := readTrace(t, path)
	if len(trace.Spans(0, "replica 0")) == 0 || len(trace.Processes) != 1 {
		t.Errorf("got the processes %v", trace.Processes)
	}
	if notes := fmt.Sprint(trace.Metadata["notes"]); !strings.Contains(notes, "the training failed") {
		t.Errorf("notes: %s", notes)
	}
}

// TestTraceCannotBeWritten checks that a file of the trace that cannot be written does not fail the training, of which
// the error says so at the end.
func TestTraceCannotBeWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none", "trace.json")
	errs := overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(7)
		cfg.Trace = &Trace{Path: path}
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, cfg)
		if err != nil {
			return err
		}
		ended := errors.New("OnTrainEnd was not called")
		h, err := trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), FitConfig{Epochs: 3, Callbacks: []Callback{{
			OnTrainEnd: func(_ context.Context, _ *History, err error) { ended = err },
		}}})
		if trace, ok := err.(*TraceError); ok != (w == 0) || ok && !errors.Is(trace, fs.ErrNotExist) || !ok && err != nil {
			t.Errorf("worker %d: error %v", w, err)
		}
		if h.Steps != 9 || ended != nil {
			t.Errorf("worker %d: %d steps, OnTrainEnd saw %v", w, h.Steps, ended)
		}
		_, err = trainer.Weights(t.Context())
		return errors.Join(err, trainer.Close())
	})
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func TestTraceConfig(t *testing.T) {
	cfg := fakeConfig(7)
	cfg.Trace = &Trace{Path: "x", Steps: -1}
	if err := cfg.complete(t.Context(), time.Second); err == nil || !strings.Contains(err.Error(), "Trace.Steps is -1") {
		t.Errorf("error %v", err)
	}
}

// TestTimes checks that the parts of a step are within it, that time passes, and which part has an injected delay.
func TestTimes(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	const delay = 3 * time.Millisecond
	_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), FitConfig{Epochs: 2, Callbacks: []Callback{{
		OnStepEnd: func(context.Context, Step) error { time.Sleep(delay); return nil },
	}}})
	if err != nil {
		t.Fatal(err)
	}
	steps, _ := trainer.Timeline().Steps(0)
	if len(steps) != 6 {
		t.Fatalf("%d steps, want 6", len(steps))
	}
	for i, step := range steps {
		parts := step.Input + step.Compute + step.Wait + step.Update + step.Callbacks + step.Evaluate + step.Snapshot
		if step.Step != int64(i+1) || step.Start >= step.End || parts > step.End-step.Start+time.Microsecond && i > 0 {
			t.Errorf("step %d: %+v, parts of %v", i+1, step, parts)
		}
		if i > 0 && (step.Callbacks < delay || step.Start != steps[i-1].End) {
			t.Errorf("step %d after a callback of %v: %+v", i+1, delay, step)
		}
		if want := []int{7, 7, 2}[i%3]; step.Examples != want || step.Loss <= 0 {
			t.Errorf("step %d has %d examples, loss %v", i+1, step.Examples, step.Loss)
		}
	}
}

// TestMeasured checks at which steps metrics and validations are published, and the time that is left.
func TestMeasured(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64}, fakeConfig(7))
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	examples := sizes(lineExamples(16), 7, 7, 2) // three steps an epoch
	var validation []float64
	history, err := trainer.Fit(t.Context(), examples, FitConfig{
		Epochs: 4, Validation: examples, Settings: map[string]string{"model": "line"},
		Callbacks: []Callback{{OnEpochEnd: func(_ context.Context, e Epoch) error {
			now := trainer.Timeline().Training()
			m := now.Measured[len(now.Measured)-1]
			if m.Step != int64(3*(e.Epoch+1)) || m.Validation["loss"] != e.Validation.Loss {
				t.Errorf("at the end of epoch %d, the last measurement is %+v, want loss %v", e.Epoch, m, e.Validation.Loss)
			}
			if left := now.Left; e.Epoch > 0 && (left == nil || (*left == 0) != (e.Epoch == 3)) {
				t.Errorf("at the end of epoch %d of 4, the time left is %v", e.Epoch, left)
			}
			validation = append(validation, e.Validation.Loss)
			return nil
		}}},
	})
	if err != nil || len(history.Epochs) != 4 {
		t.Fatal(err, history)
	}
	now := trainer.Timeline().Training()
	for _, m := range now.Measured {
		if loss, ok := m.Validation["loss"]; ok != (m.Step%3 == 0) || ok && loss != validation[m.Step/3-1] {
			t.Errorf("step %d has the validation %v, want those of %v at the ends of the epochs", m.Step, m.Validation,
				validation)
		}
	}
	if now.Settings["model"] != "line" || now.Settings["global batch"] != "7" || now.Elapsed <= 0 {
		t.Errorf("settings %v, %v seconds", now.Settings, now.Elapsed)
	}
}

// TestTrainingNotFinite checks that a loss which is not finite is published as unknown, not as a number.
func TestTrainingNotFinite(t *testing.T) {
	for _, start := range []float64{0, math.NaN()} {
		s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{2}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		cfg := fakeConfig(7)
		cfg.NotFinite = WarnNotFinite
		trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64, start: start}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer trainer.Close()
		if _, err := trainer.Fit(t.Context(), sizes(lineExamples(16), 7, 7, 2), FitConfig{Epochs: 1}); err != nil {
			t.Fatal(err)
		}
		got := trainer.Timeline().Training()
		if text, err := json.Marshal(got); err != nil || (got.Loss == nil) != math.IsNaN(start) {
			t.Errorf("initial values plus %v: %s, %v", start, text, err)
		}
	}
}
