package train

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestEvaluationBatch checks that evaluation and prediction in larger batches give the results of a model that was
// compiled for them, on any number of workers, and that training still refuses them.
func TestEvaluationBatch(t *testing.T) {
	examples := fromTensors(lineExamples(40))
	var want string
	for _, c := range []struct {
		layout    []int
		batch     int
		evaluated int
	}{{[]int{4}, 16, 0}, {[]int{4}, 5, 16}, {[]int{2, 2}, 5, 16}, {[]int{1, 1, 1, 1}, 3, 16}} {
		got := make([]string, len(c.layout))
		errs := overWorkers(t, c.layout, func(w int, s *distribute.Strategy) error {
			cfg := fakeConfig(c.batch)
			cfg.EvaluationBatch = c.evaluated
			trainer, err := New(t.Context(), s, fakeModel{rate: 1.0 / 64, start: 0.5}, cfg)
			if err != nil {
				return err
			}
			defer trainer.Close()
			if _, err := trainer.Evaluate(t.Context(), examples.Batch(c.batch)); err != nil {
				return err
			}
			result, err := trainer.Evaluate(t.Context(), examples.Batch(16))
			if err != nil {
				return err
			}
			out, err := trainer.Predict(t.Context(), examples.Batch(16))
			if err != nil {
				return err
			}
			got[w] = fmt.Sprint(result, out[0].Format())
			if c.evaluated == 0 {
				return nil
			}
			if _, err := trainer.Evaluate(t.Context(), examples.Batch(17)); err == nil ||
				!strings.Contains(err.Error(), "larger Config.EvaluationBatch") {
				t.Errorf("evaluating 17 examples at once gives %v", err)
			}
			return nil
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%v: %v", c, err)
		}
		for w := range got {
			if want == "" {
				want = got[w]
			}
			if got[w] != want {
				t.Errorf("%v: worker %d has %s, want %s", c, w, got[w], want)
			}
		}
	}
	cfg := fakeConfig(5)
	cfg.EvaluationBatch = 16
	trainer, _ := newFakeWith(t, 2, cfg, fakeModel{})
	if _, err := trainer.Fit(t.Context(), examples.Batch(16), FitConfig{}); err == nil ||
		!strings.Contains(err.Error(), "want at most the global batch of 5") {
		t.Errorf("training on 16 examples at once gives %v", err)
	}
	if h, err := trainer.Fit(t.Context(), examples.Batch(5), FitConfig{Validation: examples.Batch(16)}); err != nil ||
		h.Epochs[0].Validation == nil {
		t.Errorf("%v, %v", h, err)
	}
}

// TestOtherShapes checks that workers with different shapes of batches fail before the first step.
func TestOtherShapes(t *testing.T) {
	for w, err := range overWorkers(t, []int{1, 1}, func(w int, s *distribute.Strategy) error {
		cfg := fakeConfig(4)
		cfg.EvaluationBatch = 8 * (w + 1)
		trainer, err := New(t.Context(), s, fakeModel{rate: 1}, cfg)
		if err == nil {
			err = trainer.Close()
		}
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "batches of at most 16 examples") {
			t.Errorf("worker %d: %v", w, err)
		}
	}
}

// sentences are sequences of tokens from 1 to 9 of different lengths; the label is whether there are more odd tokens.
func sentences(n, longest int) data.Pipeline {
	r := rand.New(rand.NewPCG(4, 4))
	list := make([]data.Batch, n)
	for i := range list {
		tokens, odd := make([]int32, 1+r.IntN(longest)), 0
		for k := range tokens {
			tokens[k] = 1 + r.Int32N(9)
			odd += int(tokens[k] % 2)
		}
		label := int32(0)
		if 2*odd > len(tokens) {
			label = 1
		}
		list[i] = data.Batch{Inputs: []*tensor.Tensor{tensor.Of(tokens)}, Labels: []*tensor.Tensor{tensor.Scalar(label)}}
	}
	return data.FromFunc(n, func(_ context.Context, i int) (data.Element, error) { return list[i], nil })
}

// bagOfTokens classifies sequences by the mean of the embeddings of their tokens, without padding.
func bagOfTokens() *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			x := layer.Embedding(s.In("embedding"), in[0], dtypes.Float32, 10, 4)
			mask := graph.InsertAxes(in[1], -1)
			x = graph.ReduceSum(graph.Mul(x, graph.BroadcastToDims(mask, x.Shape().Dimensions...)), 1)
			x = graph.Div(x, graph.BroadcastToDims(graph.ReduceSum(mask, 1), x.Shape().Dimensions...))
			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 2)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.05).Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
}

// TestBuckets trains on sequences in buckets by length: equal bits on 1, 2 and 4 workers, also when the training is
// resumed inside an epoch, a program per bucket, and a model that learns.
func TestBuckets(t *testing.T) {
	batches := sentences(90, 12).Shuffle(1).BucketByLength(data.Buckets{
		Boundaries: []int{3, 6, 12}, Rows: []int{11, 8, 5}, Padding: data.Padding{Mask: true},
	}).Prefetch(2)
	fit := func(layout []int, epochs, steps int, dir string) (string, *History) {
		t.Helper()
		engines := make([]engine.Engine, len(layout))
		for w, n := range layout {
			e, err := gomlx.Open("go", gomlx.Options{Devices: n})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			engines[w] = e
		}
		hashes, histories := make([]string, len(layout)), make([]*History, len(layout))
		errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, bagOfTokens(), Config{Data: batches, Seed: 1, EvaluationBatch: 20})
			if err != nil {
				return err
			}
			defer trainer.Close()
			if n := len(trainer.shapes); n != 6 {
				t.Errorf("%d shapes: want 3 for training and 3 for evaluation", n)
			}
			cfg := FitConfig{Epochs: epochs, Steps: steps, Validation: sentences(30, 12).BucketByLength(data.Buckets{
				Boundaries: []int{3, 6, 12}, Rows: []int{20}, Padding: data.Padding{Mask: true},
			})}
			if dir != "" {
				b := backup(t, trainer, BackupConfig{Dir: dir})
				if _, err := b.Restore(t.Context()); err != nil {
					return err
				}
				cfg.Callbacks = append(cfg.Callbacks, b.Callback())
			}
			if histories[w], err = trainer.Fit(t.Context(), batches, cfg); err != nil {
				return err
			}
			hashes[w], err = trainer.WeightsHash(t.Context())
			return err
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("%v: %v", layout, err)
		}
		for w := range hashes {
			if hashes[w] != hashes[0] {
				t.Errorf("%v: weights %v differ", layout, hashes)
			}
		}
		return hashes[0], histories[0]
	}
	const epochs = 6
	want, h := fit([]int{4}, epochs, 0, "")
	if last := h.Epochs[epochs-1]; last.Loss > 0.6*h.Epochs[0].Loss || last.Validation == nil {
		t.Errorf("the loss went from %v to %v, validation %v", h.Epochs[0].Loss, last.Loss, last.Validation)
	}
	if got, _ := fit([]int{1, 1, 1, 1}, epochs, 0, ""); got != want {
		t.Errorf("4 workers have the weights %s, want %s", got, want)
	}
	dir := filepath.Join(t.TempDir(), "snapshots")
	fit([]int{1, 1, 1, 1}, epochs, h.Steps/2+2, dir)
	if got, _ := fit([]int{2, 2}, epochs, 0, dir); got != want {
		t.Errorf("4 workers and then 2 have the weights %s, want %s", got, want)
	}
}

// TestRowsOfDifferentShapes checks that reading ends if the rows of a batch have different shapes: which rows a worker
// reads depends on their shape.
func TestRowsOfDifferentShapes(t *testing.T) {
	features := func(n int) []engine.Feature { return []engine.Feature{{DType: tensor.Float32, Shape: []int{n}}} }
	rows := data.FromFunc(60, func(_ context.Context, i int) (data.Element, error) {
		return data.Batch{Inputs: []*tensor.Tensor{tensor.New(tensor.Float32, 1+i%3/2)}}, nil // 1, 1, 2
	})
	x := &Trainer{replicasOf: [][]int{{0}, {1}, {2}}, worker: 2}
	x.shapes = []*batchShape{
		{Shape: Shape{GlobalBatch: 3, Inputs: features(1)}, per: 1},
		{Shape: Shape{GlobalBatch: 6, Inputs: features(2)}, per: 2},
	}
	r, err := data.Open(t.Context(), rows.Batch(3))
	if err != nil {
		t.Fatal(err)
	}
	s, found, weighted := rowSelection{t: x, replicas: 3}, false, false
	for batch := range r.Len() {
		_, err := s.read(t.Context(), r.(data.RowReader), batch, &weighted)
		found = found || err != nil && strings.Contains(err.Error(), "rows of different shapes")
	}
	if !found {
		t.Error("no batch had an error")
	}
}

// TestShapesMisuse checks the errors for batches and configurations that have no shape in common.
func TestShapesMisuse(t *testing.T) {
	e, err := gomlx.Open("go", gomlx.Options{Devices: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tokens := func(n int) []engine.Feature {
		return []engine.Feature{{DType: tensor.Int32, Shape: []int{n}}, {DType: tensor.Float32, Shape: []int{n}}}
	}
	label := []engine.Feature{{DType: tensor.Int32, Shape: []int{}}}
	good := Config{
		Inputs: tokens(4), Labels: label, GlobalBatch: 8,
		Shapes: []Shape{{Inputs: tokens(8), Labels: label, GlobalBatch: 4}},
	}
	for want, change := range map[string]func(*Config){
		"want at least GlobalBatch, 8":       func(c *Config) { c.EvaluationBatch = 7 },
		"want at most 63":                    func(c *Config) { c.Shapes = slices.Repeat(c.Shapes, 64) },
		"Shapes[0].GlobalBatch is -1":        func(c *Config) { c.Shapes[0].GlobalBatch = -1 },
		"want the number and types":          func(c *Config) { c.Shapes[0].Inputs = label },
		"which another shape has too":        func(c *Config) { c.Shapes[0].Inputs = tokens(4) },
		"a feature of type int32 and shape ": func(c *Config) { c.Shapes[0].Inputs = tokens(-1) },
	} {
		cfg := good
		cfg.Shapes = slices.Clone(good.Shapes)
		change(&cfg)
		if _, err := New(t.Context(), s, bagOfTokens(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	trainer, err := New(t.Context(), s, bagOfTokens(), good)
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.Close()
	pad := data.Padding{Mask: true}
	for want, ds := range map[string]data.Dataset{
		"it has none of the 2 shapes of Config and Config.Shapes either: at most 8 examples of int32(4,), ": sentences(9, 4).
			PaddedBatch(4, 5, pad),
		"want at most the global batch of 8": sentences(9, 4).PaddedBatch(9, 4, pad),
		"it has 8 examples":                  sentences(8, 8).PaddedBatch(8, 8, pad),
	} {
		if _, err := trainer.Fit(t.Context(), ds, FitConfig{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	h, err := trainer.Fit(t.Context(), sentences(8, 8).PaddedBatch(4, 8, pad), FitConfig{})
	if err != nil || h.Steps != 2 {
		t.Errorf("%d steps, %v", h.Steps, err)
	}
	// A model whose variables depend on the length cannot have two.
	m := bagOfTokens()
	pooled := m.Forward
	m.Forward = func(s *model.Scope, in []*graph.Node) []*graph.Node {
		out := pooled(s, in)
		return []*graph.Node{graph.Add(out[0], layers.Dense(s.In("positions"), in[1], true, 2))}
	}
	other, err := New(t.Context(), s, m, good)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.Fit(t.Context(), sentences(8, 8).PaddedBatch(4, 8, pad), FitConfig{}); err == nil ||
		!strings.Contains(err.Error(), "its shape must not depend on that of a batch") {
		t.Errorf("a model with a variable by position gives %v", err)
	}
	if h, err := other.Fit(t.Context(), sentences(8, 4).PaddedBatch(8, 4, pad), FitConfig{}); err != nil || h.Steps != 1 {
		t.Errorf("after that, %d steps, %v", h.Steps, err)
	}
}

// TestJoinedBuckets trains on two pipelines with buckets after each other, whose shapes no configuration lists: equal
// bits on one worker and on two.
func TestJoinedBuckets(t *testing.T) {
	part := func(n int, boundaries ...int) data.Pipeline {
		return sentences(n, 12).Shuffle(1).BucketByLength(data.Buckets{
			Boundaries: boundaries, Rows: []int{8}, Padding: data.Padding{Mask: true},
		})
	}
	batches, want := data.Concat(part(30, 6, 12), part(20, 4, 12)).Prefetch(1), ""
	for _, layout := range [][]int{{2}, {1, 1}} {
		engines := make([]engine.Engine, len(layout))
		for w, n := range layout {
			e, err := gomlx.Open("go", gomlx.Options{Devices: n})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			engines[w] = e
		}
		hashes := make([]string, len(layout))
		if err := errors.Join(overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
			trainer, err := New(t.Context(), s, bagOfTokens(), Config{Data: batches, Seed: 1})
			if err != nil {
				return err
			}
			defer trainer.Close()
			if n := len(trainer.shapes); n != 3 {
				t.Errorf("%d shapes: want 3", n)
			}
			if _, err := trainer.Fit(t.Context(), batches, FitConfig{Epochs: 2}); err != nil {
				return err
			}
			hashes[w], err = trainer.WeightsHash(t.Context())
			return err
		})...); err != nil {
			t.Fatal(err)
		}
		for _, h := range hashes {
			if want == "" {
				want = h
			}
			if h != want {
				t.Errorf("%v: weights %s, want %s", layout, h, want)
			}
		}
	}
}
