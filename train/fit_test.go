package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// recorder is a callback that records its calls.
func recorder(events *[]string) Callback {
	note := func(format string, args ...any) { *events = append(*events, fmt.Sprintf(format, args...)) }
	return Callback{
		OnTrainBegin: func(context.Context) error { note("train"); return nil },
		OnEpochBegin: func(_ context.Context, e EpochBegin) error {
			note("epoch %d/%d of %d", e.Epoch, e.Epochs, e.Steps)
			return nil
		},
		OnStepEnd: func(_ context.Context, s Step) error {
			note("step %d/%d: %d examples", s.Step, s.Steps, s.Examples)
			return nil
		},
		OnEpochEnd: func(_ context.Context, e Epoch) error {
			note("end %d: %d steps, %d examples, validated %t", e.Epoch, e.Steps, e.Examples, e.Validation != nil)
			return nil
		},
		OnTrainEnd: func(_ context.Context, h *History, err error) {
			note("done: %d steps, stopped %t, error %v", h.Steps, h.Stopped, err)
		},
	}
}

func TestCallbacks(t *testing.T) {
	all := lineExamples(10)
	stopAfter := func(n int) Callback {
		return Callback{OnStepEnd: func(context.Context, Step) error {
			if n--; n == 0 {
				return ErrStop
			}
			return nil
		}}
	}
	for _, c := range []struct {
		name string
		cfg  FitConfig
		more []Callback // before the recorder
		want []string
	}{
		{"whole dataset", FitConfig{Epochs: 2, Validation: sizes(all, 3)}, nil, []string{
			"train",
			"epoch 0/2 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 0: 3 steps, 10 examples, validated true",
			"epoch 1/2 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 1: 3 steps, 10 examples, validated true",
			"done: 6 steps, stopped false, error <nil>",
		}},
		{"initial epoch", FitConfig{Epochs: 5, InitialEpoch: 4}, nil, []string{
			"train", "epoch 4/5 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 4: 3 steps, 10 examples, validated false",
			"done: 3 steps, stopped false, error <nil>",
		}},
		{"the next epoch continues in the dataset", FitConfig{Epochs: 2, StepsPerEpoch: 2}, nil, []string{
			"train", "epoch 0/2 of 2", "step 1/2: 4 examples", "step 2/2: 4 examples",
			"end 0: 2 steps, 8 examples, validated false",
			"epoch 1/2 of 2", "step 1/2: 2 examples", "step 2/2: 4 examples", "end 1: 2 steps, 6 examples, validated false",
			"done: 4 steps, stopped false, error <nil>",
		}},
		{"limit of steps", FitConfig{Epochs: 9, Steps: 4}, nil, []string{
			"train", "epoch 0/9 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 0: 3 steps, 10 examples, validated false",
			"epoch 1/9 of 1", "step 1/1: 4 examples", "end 1: 1 steps, 4 examples, validated false",
			"done: 4 steps, stopped false, error <nil>",
		}},
		{"accumulate: the last step of an epoch is shorter", FitConfig{Epochs: 2, Accumulate: 2}, nil, []string{
			"train", "epoch 0/2 of 2", "step 1/2: 8 examples", "step 2/2: 2 examples",
			"end 0: 2 steps, 10 examples, validated false",
			"epoch 1/2 of 2", "step 1/2: 8 examples", "step 2/2: 2 examples", "end 1: 2 steps, 10 examples, validated false",
			"done: 4 steps, stopped false, error <nil>",
		}},
		{"accumulate over the dataset's end", FitConfig{Epochs: 2, StepsPerEpoch: 1, Accumulate: 2}, nil, []string{
			"train", "epoch 0/2 of 1", "step 1/1: 8 examples", "end 0: 1 steps, 8 examples, validated false",
			"epoch 1/2 of 1", "step 1/1: 6 examples", "end 1: 1 steps, 6 examples, validated false",
			"done: 2 steps, stopped false, error <nil>",
		}},
		{"limit of steps that accumulate", FitConfig{Epochs: 9, Steps: 3, Accumulate: 2}, nil, []string{
			"train", "epoch 0/9 of 2", "step 1/2: 8 examples", "step 2/2: 2 examples",
			"end 0: 2 steps, 10 examples, validated false",
			"epoch 1/9 of 1", "step 1/1: 8 examples", "end 1: 1 steps, 8 examples, validated false",
			"done: 3 steps, stopped false, error <nil>",
		}},
		{"both limits", FitConfig{Epochs: 9, StepsPerEpoch: 2, Steps: 3}, nil, []string{
			"train", "epoch 0/9 of 2", "step 1/2: 4 examples", "step 2/2: 4 examples",
			"end 0: 2 steps, 8 examples, validated false",
			"epoch 1/9 of 1", "step 1/1: 2 examples", "end 1: 1 steps, 2 examples, validated false",
			"done: 3 steps, stopped false, error <nil>",
		}},
		{
			"stop in a step: no validation, and no end",
			FitConfig{Epochs: 3, Validation: sizes(all, 3)},
			[]Callback{stopAfter(2)},
			[]string{
				"train", "epoch 0/3 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples",
				"done: 2 steps, stopped true, error <nil>",
			},
		},
		{"stop in the last step: an end", FitConfig{Epochs: 3}, []Callback{stopAfter(3)}, []string{
			"train", "epoch 0/3 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 0: 3 steps, 10 examples, validated false",
			"done: 3 steps, stopped true, error <nil>",
		}},
		{
			"stop in the last step before validation: no end",
			FitConfig{Epochs: 3, Validation: sizes(all, 3)},
			[]Callback{stopAfter(3)},
			[]string{
				"train", "epoch 0/3 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
				"done: 3 steps, stopped true, error <nil>",
			},
		},
		{
			"stop at the beginning",
			FitConfig{},
			[]Callback{{OnEpochBegin: func(context.Context, EpochBegin) error { return ErrStop }}},
			[]string{
				"train", "epoch 0/1 of 3", "done: 0 steps, stopped true, error <nil>",
			},
		},
		{"failing callback", FitConfig{}, []Callback{
			stopAfter(1),
			{OnStepEnd: func(context.Context, Step) error { return errors.New("full disk") }},
		}, []string{
			"train", "epoch 0/1 of 3", "step 1/3: 4 examples", "done: 1 steps, stopped false, error full disk",
		}},
		{"failing at the end of an epoch that was stopped", FitConfig{}, []Callback{
			stopAfter(3),
			{OnEpochEnd: func(context.Context, Epoch) error { return errors.New("full disk") }},
		}, []string{
			"train", "epoch 0/1 of 3", "step 1/3: 4 examples", "step 2/3: 4 examples", "step 3/3: 2 examples",
			"end 0: 3 steps, 10 examples, validated false",
			"done: 3 steps, stopped false, error full disk",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			trainer, _ := newFake(t, 2, 4, fakeModel{})
			var events []string
			c.cfg.Callbacks = append(c.more, recorder(&events))
			if _, err := trainer.Fit(t.Context(), sizes(all, 4, 4, 2), c.cfg); err != nil &&
				!strings.HasPrefix(c.name, "failing") {
				t.Fatal(err)
			}
			if !slices.Equal(events, c.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(events, "\n"), strings.Join(c.want, "\n"))
			}
		})
	}
}

// TestCallbackUsesTrainer checks that a callback may evaluate and change the model between steps.
func TestCallbackUsesTrainer(t *testing.T) {
	trainer, p := newFake(t, 3, 4, fakeModel{})
	all := lineExamples(4)
	var before []float64
	_, err := trainer.Fit(t.Context(), sizes(all, 4), FitConfig{Epochs: 3, Callbacks: []Callback{{
		OnStepEnd: func(ctx context.Context, _ Step) error {
			r, err := trainer.Evaluate(ctx, sizes(all, 4))
			before = append(before, r.Loss)
			return err
		},
		OnEpochEnd: func(_ context.Context, e Epoch) error {
			return trainer.SetVariable("bias", tensor.Scalar(float64(e.Epoch)))
		},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	if len(before) != 3 || p.replicas[2].now[0][0] != 2 {
		t.Errorf("losses %v; bias is %v, want 2", before, p.replicas[2].now[0][0])
	}
}

// TestFitInFit checks that a Fit in a callback of another Fit is an error, and that the outer one continues.
func TestFitInFit(t *testing.T) {
	trainer, _ := newFake(t, 2, 4, fakeModel{})
	ds := sizes(lineExamples(4), 4)
	inner := 0
	h, err := trainer.Fit(t.Context(), ds,
		FitConfig{Callbacks: []Callback{{OnStepEnd: func(ctx context.Context, _ Step) error {
			inner++
			if _, err := trainer.Fit(ctx, ds, FitConfig{}); err == nil ||
				!strings.Contains(err.Error(), "while another Fit of this trainer is running") {
				t.Errorf("Fit in a callback: %v", err)
			}
			return nil
		}}}})
	if err != nil || h.Steps != 1 || inner != 1 {
		t.Errorf("%d steps, %d callbacks: %v", h.Steps, inner, err)
	}
	if _, err := trainer.Fit(t.Context(), ds, FitConfig{}); err != nil {
		t.Errorf("the next Fit: %v", err)
	}
}

// TestSlowReplica checks that a failed step returns only after all replicas have ended their computations, since the
// engine's variables must not be used before. Its error is that of the replica that failed first.
func TestSlowReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cause := errors.New("enough")
		var ended atomic.Bool
		trainer, _ := newFake(t, 2, 4, fakeModel{fail: func(phase string, replica int) error {
			switch {
			case phase != "gradients" || ended.Load():
				return nil
			case replica == 1:
				return cause
			}
			time.Sleep(time.Minute)
			ended.Store(true)
			return nil
		}})
		ds := sizes(lineExamples(4), 4)
		start := time.Now()
		_, err := trainer.Fit(t.Context(), ds, FitConfig{})
		if took := time.Since(start); took != time.Minute || !ended.Load() {
			t.Errorf("Fit returned after %v, want a minute; replica 0 has ended: %t", took, ended.Load())
		}
		if !errors.Is(err, cause) {
			t.Errorf("got %v, want the cause", err)
		}
		if h, err := trainer.Fit(t.Context(), ds, FitConfig{}); err != nil || h.Steps != 1 {
			t.Errorf("the next Fit took %d steps: %v", h.Steps, err)
		}
	})
}

// TestEndOfContext ends the context while a replica computes, and checks that the step is undone on all replicas and
// that Fit returns the cause.
func TestEndOfContext(t *testing.T) {
	for bad := range 2 {
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("enough")
		steps := 0
		trainer, p := newFake(t, 2, 4, fakeModel{fail: func(at string, replica int) error {
			if at == "update 1" && replica == bad {
				if steps++; steps == 3 {
					cancel(cause)
					<-ctx.Done()
					return context.Cause(ctx)
				}
			}
			return nil
		}})
		all := lineExamples(4)
		var events []string
		h, err := trainer.Fit(ctx, sizes(all, 4), FitConfig{Epochs: 10, Callbacks: []Callback{recorder(&events)}})
		if !errors.Is(err, cause) {
			t.Errorf("got %v, want the cause", err)
		}
		if h.Steps != 2 || trainer.Steps() != 2 {
			t.Errorf("%d steps in the history, %d committed: want 2", h.Steps, trainer.Steps())
		}
		o := oracle{w0: 3}
		o.step(1.0/64, all)
		o.step(1.0/64, all)
		for replica, v := range p.snapshot() {
			if !close64(v[0][0], o.bias) || !close64(v[3][1], o.m1) {
				t.Errorf("replica %d has the bias %v, want %v of after two steps", replica, v[0][0], o.bias)
			}
		}
		if last := events[len(events)-1]; !strings.HasPrefix(last,
			"done: 2 steps, stopped false, error train: epoch 3, step 1: ") {
			t.Errorf("OnTrainEnd saw %q", last)
		}
	}
}

func TestDatasetErrors(t *testing.T) {
	good := lineExamples(4)
	wide := tensor.New(tensor.Float64, 4, 3)
	elements := func(list ...data.Element) data.Dataset {
		return data.FromSeq(-1, func(context.Context) iter.Seq2[data.Element, error] {
			return func(yield func(data.Element, error) bool) {
				for _, e := range list {
					if err, ok := e.(error); ok {
						yield(nil, err)
						return
					}
					if !yield(e, nil) {
						return
					}
				}
			}
		})
	}
	broken := errors.New("disk removed")
	for _, c := range []struct {
		name string
		ds   data.Dataset
		want string
	}{
		{"none", nil, "the dataset is nil"},
		{"empty", elements(), "the dataset is empty"},
		{"no batch", elements(good.Inputs[0]), "batch 1 of the dataset: it is a *tensor.Tensor: want a data.Batch"},
		{
			"too large", elements(good, lineExamples(5)),
			"batch 2 of the dataset: it has 5 examples: want at most the global batch of 4",
		},
		{
			"other shape", elements(data.Batch{Inputs: []*tensor.Tensor{wide}, Labels: good.Labels}),
			"input 0: got float64(4, 3), want float64(4, 2)",
		},
		{
			"other dtype", elements(data.Batch{Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, 4, 2)}, Labels: good.Labels}),
			"input 0: got float32(4, 2), want float64(4, 2)",
		},
		{"inputs", elements(data.Batch{Labels: good.Labels}), "it has 0 inputs: want 1"},
		{
			"scalar", elements(data.Batch{Inputs: []*tensor.Tensor{tensor.Scalar(1.0)}, Labels: good.Labels}),
			"input 0 is missing or a scalar",
		},
		{
			"nil input", elements(data.Batch{Inputs: []*tensor.Tensor{nil}, Labels: good.Labels}),
			"input 0 is missing or a scalar",
		},
		{"labels", elements(data.Batch{Inputs: good.Inputs}), "it has 0 labels: want 1"},
		{
			"fewer labels", elements(data.Batch{Inputs: good.Inputs, Labels: lineExamples(3).Labels}),
			"label 0: got float64(3,), want float64(4,)",
		},
		{
			"nil label", elements(data.Batch{Inputs: good.Inputs, Labels: []*tensor.Tensor{nil}}),
			"label 0: missing: want float64(4,)",
		},
		{
			"weights", elements(data.Batch{Inputs: good.Inputs, Labels: good.Labels, Weights: tensor.New(tensor.Float32, 3)}),
			"weights: got float32(3,), want float32(4,)",
		},
		{
			"negative weight",
			elements(data.Batch{Inputs: good.Inputs, Labels: good.Labels, Weights: tensor.Of([]float32{1, -1, 1, 1})}),
			"weight 1 is -1",
		},
		{
			"weight no number",
			elements(data.Batch{
				Inputs: good.Inputs, Labels: good.Labels,
				Weights: tensor.Of([]float32{1, 1, 1, float32(math.NaN())}),
			}), "weight 3 is NaN",
		},
		{"reader", elements(good, broken), "disk removed"},
		{
			"panic", data.FromSeq(1, func(context.Context) iter.Seq2[data.Element, error] { panic("bug in the reader") }),
			"the dataset panicked: bug in the reader",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			trainer, _ := newFake(t, 2, 4, fakeModel{})
			_, err := trainer.Fit(t.Context(), c.ds, FitConfig{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			if c.name == "reader" && !errors.Is(err, broken) {
				t.Errorf("the cause is not wrapped: %v", err)
			}
		})
	}
}

func TestConfigErrors(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	bare, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{LogicalCPUs: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	fromData := func(ds data.Dataset) func(*Config, *fakeModel) {
		return func(c *Config, _ *fakeModel) { *c = Config{Data: ds} }
	}
	refuse := errors.New("no such operation")
	for _, c := range []struct {
		name     string
		strategy *distribute.Strategy
		change   func(*Config, *fakeModel)
		want     string
	}{
		{"batch", s, func(c *Config, _ *fakeModel) { c.GlobalBatch = 0 }, "GlobalBatch is 0"},
		{"bucket", s, func(c *Config, _ *fakeModel) { c.BucketBytes = -1 }, "BucketBytes is -1"},
		{"inputs", s, func(c *Config, _ *fakeModel) { c.Inputs = nil }, "neither Data nor Inputs"},
		{"nothing", s, func(c *Config, _ *fakeModel) { *c = Config{} }, "neither Data nor Inputs"},
		{"dtype", s, func(c *Config, _ *fakeModel) { c.Inputs[0].DType = tensor.String }, "a feature of type string"},
		{"shape", s, func(c *Config, _ *fakeModel) { c.Labels[0].Shape = []int{-1} }, "shape (-1,)"},
		{
			"data and inputs", s, func(c *Config, _ *fakeModel) { c.Data = sizes(lineExamples(4), 4) },
			"Config sets Data, and also Inputs or Labels",
		},
		{"empty data", s, fromData(data.Pipeline{}), "Config.Data: first batch: the dataset is empty"},
		{"empty batch", s, fromData(sizes(lineExamples(4), 0, 4)), "first batch: it has no examples: set GlobalBatch"},
		{
			"no batch", s, fromData(fromTensors(tensor.Of([]float64{1}))),
			"first batch: it is a *tensor.Tensor: want a data.Batch",
		},
		{"one example", s, fromData(fromTensors(lineExamples(4))), "label 0 is missing or a scalar"},
		{
			"no inputs", s, fromData(batches(data.Batch{Labels: []*tensor.Tensor{tensor.Of([]float64{1})}})),
			"it has no inputs",
		},
		{"failing data", s, fromData(data.Lines("absent")), "open absent: "},
		{"engine", bare, func(*Config, *fakeModel) {}, "the strategy has no engine"},
		{
			"model", s, func(_ *Config, m *fakeModel) { m.fail = func(string, int) error { return refuse } },
			"compiling the model: no such operation",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, m := fakeConfig(4), fakeModel{}
			c.change(&cfg, &m)
			_, err := New(t.Context(), c.strategy, m, cfg)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
		})
	}
	trainer, _ := newFake(t, 1, 4, fakeModel{})
	for want, cfg := range map[string]FitConfig{
		"epochs from 2 up to 1": {Epochs: 1, InitialEpoch: 2},
		"epochs from -1":        {InitialEpoch: -1},
		"StepsPerEpoch is -1":   {StepsPerEpoch: -1},
		"Steps is -2":           {Steps: -2},
		"Accumulate is -1":      {Accumulate: -1},
	} {
		if _, err := trainer.Fit(t.Context(), sizes(lineExamples(4), 4), cfg); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestRandomStatesDiffer(t *testing.T) {
	trainer, p := newFake(t, 3, 6, fakeModel{})
	if _, err := trainer.Fit(t.Context(), sizes(lineExamples(6), 6), FitConfig{Epochs: 4}); err != nil {
		t.Fatal(err)
	}
	if len(p.states) != 12 {
		t.Errorf("%d random states over 4 steps of 3 replicas: %v", len(p.states), p.states)
	}
	for state, used := range p.states {
		if len(used) != 2 {
			t.Errorf("state %v was used by %s", state, used)
		}
	}
	if a, b := randomState(1, 2, 0, 0, 0), randomState(1, 2, 0, 0, 0); a != b {
		t.Errorf("one step's state is %v and %v", a, b)
	}
	if a, b := randomState(1, 2, 0, 0, 0), randomState(2, 2, 0, 0, 0); a == b {
		t.Error("two seeds have one state")
	}
}

// TestReadsAhead checks that the next batch is read while a step runs.
func TestReadsAhead(t *testing.T) {
	fetched := make(chan int, 10)
	all := lineExamples(4)
	ds := data.FromSeq(3, func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for i := range 3 {
				fetched <- i
				if !yield(all, nil) {
					return
				}
			}
		}
	})
	first := true
	trainer, _ := newFake(t, 1, 4, fakeModel{fail: func(at string, _ int) error {
		if at != "gradients" || !first {
			return nil
		}
		first = false
		<-fetched
		<-fetched // the second batch, within the first step: without reading ahead, this blocks
		return nil
	}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := trainer.Fit(ctx, ds, FitConfig{}); err != nil {
		t.Fatal(err)
	}
}

// TestReadsAheadOfValidation checks that the batch of the last step is filled again while a validation runs: the reader
// then has all batches ahead, and waits with one more example.
func TestReadsAheadOfValidation(t *testing.T) {
	fetched := make(chan int, 10)
	all := lineExamples(4)
	ds := data.FromSeq(8, func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for i := range 8 {
				fetched <- i
				if !yield(all, nil) {
					return
				}
			}
		}
	})
	first := true
	validation := data.FromSeq(1, func(ctx context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for n := -1; first && n < 4; { // batch 0 is used, 1 to 3 are filled
				select {
				case n = <-fetched:
				case <-ctx.Done():
					yield(nil, context.Cause(ctx))
					return
				}
			}
			first = false
			yield(all, nil)
		}
	})
	trainer, _ := newFake(t, 1, 4, fakeModel{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := trainer.Fit(ctx, ds, FitConfig{Validation: validation, ValidateEvery: 1}); err != nil {
		t.Fatal(err)
	}
}

func TestCheckMirrored(t *testing.T) {
	trainer, p := newFake(t, 3, 4, fakeModel{})
	if err := trainer.CheckMirrored(); err != nil {
		t.Fatal(err)
	}
	p.replicas[2].now[3][1] = 7
	p.replicas[1].now[4][0] = 9 // sync-on-read: may differ
	_, err := trainer.Fit(t.Context(), sizes(lineExamples(4), 4), FitConfig{Epochs: 2})
	want := "train: the mirrored variable weights is no longer the same on all replicas: against replica 0, replica 2 " +
		"at element 1 of 2 ("
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %q", err, want)
	}
}

func TestSpeed(t *testing.T) {
	var w stopwatch
	stats := func(n time.Duration) distribute.Stats {
		return distribute.Stats{Replicas: []distribute.ReplicaStats{{Reduce: n, Wait: 3 * n}, {Reduce: 3 * n, Wait: n}}}
	}
	add := func(s Step, reduce time.Duration) {
		w.before, w.after = stats(0), stats(reduce)
		w.add(s, 2*reduce)
	}
	add(Step{Examples: 10, Duration: time.Hour}, time.Minute)
	if got := w.result(2); got.Steps != 1 || got.Duration != time.Hour {
		t.Errorf("the only step was not counted: %+v", got)
	}
	add(Step{Examples: 10, Duration: time.Second}, 100*time.Millisecond)
	add(Step{Examples: 6, Duration: time.Second}, 0)
	want := Speed{
		Steps: 2, Examples: 16, Duration: 2 * time.Second, ExamplesPerSecond: 8, ReduceShare: 0.1,
		WaitShare: 0.1,
	}
	if got := w.result(2); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestConfigFromData checks that Config.Data gives the same training as explicit features and a global batch.
func TestConfigFromData(t *testing.T) {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: fakeEngine{3}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ds := sizes(lineExamples(11), 4, 4, 3)
	want := fakeConfig(4)
	for name, cfg := range map[string]Config{
		"batch inferred": {Data: ds},
		"batch given":    {Data: sizes(lineExamples(3), 3), GlobalBatch: 4},
	} {
		trainer, err := New(t.Context(), s, fakeModel{rate: 0.01}, cfg)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := trainer.config
		if !reflect.DeepEqual([]any{got.Inputs, got.Labels, got.GlobalBatch},
			[]any{want.Inputs, want.Labels, want.GlobalBatch}) {
			t.Errorf("%s: got %+v, want %+v", name, got, want)
		}
		if _, err := trainer.Fit(t.Context(), ds, FitConfig{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := trainer.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestValidationIsCheckedFirst: a validation whose batches are too large is an error before the first step.
func TestValidationIsCheckedFirst(t *testing.T) {
	trainer, _ := newFake(t, 2, 8, fakeModel{})
	held := data.FromFunc(1, func(context.Context, int) (data.Element, error) { return lineExamples(9), nil })
	history, err := trainer.Fit(t.Context(), sizes(lineExamples(16), 8, 8), FitConfig{Validation: held})
	if err == nil || !strings.Contains(err.Error(), "FitConfig.Validation, batch 0: it has 9 examples: want at most the "+
		"global batch of 8 that the model was compiled for, or a larger Config.EvaluationBatch") {
		t.Errorf("got %v", err)
	}
	if history.Steps > 0 {
		t.Errorf("%d steps were taken", history.Steps)
	}
	stream := data.FromSeq(18, func(context.Context) iter.Seq2[data.Element, error] {
		return func(func(data.Element, error) bool) { t.Error("the stream is read") }
	}).Batch(9)
	_, err = trainer.Fit(t.Context(), sizes(lineExamples(16), 8, 8), FitConfig{Validation: stream})
	if err == nil || !strings.Contains(err.Error(), "its batches have 9 examples: want at most the global batch of 8") {
		t.Errorf("a stream: got %v", err)
	}
}
