package train

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// kerasMetrics are recorded values of testdata/metrics.json.
type kerasMetrics struct {
	Labels          []int32
	Logits          [][]float32
	Binary, P       []float32
	Weights         []float32
	Batch           int
	OfBinary        map[string]float64 `json:"of_binary"`
	OfClasses       map[string]float64 `json:"of_classes"`
	ConfusionMatrix []float64          `json:"confusion_matrix"`
}

// named renames a metric.
func named(name string, m gomlx.Metric) gomlx.Metric {
	m.Name = name
	return m
}

// measured evaluates metrics over workers, of a model that returns its input.
func measured(t *testing.T, layout []int, width int, label engine.Feature, metrics []gomlx.Metric, batches []data.Batch,
) (out Result) {
	t.Helper()
	engines, results := make([]engine.Engine, len(layout)), make([]Result, len(layout))
	for w, n := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	m := &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			w := s.VariableWithShape("w", shapes.Make(dtypes.Float32)).NodeValue(in[0].Graph())
			return []*graph.Node{graph.Add(in[0], graph.Sub(w, graph.StopGradient(w)))}
		},
		Loss: func(_, p []*graph.Node) *graph.Node { return graph.ReduceMean(p[0], -1) }, Metrics: metrics,
		Optimizer: optimizer.SGD().Done(),
	}
	errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
		trainer, err := New(t.Context(), s, m, Config{
			Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{width}}}, Labels: []engine.Feature{label},
			GlobalBatch: batches[0].Rows(),
		})
		if err != nil {
			return err
		}
		defer trainer.Close()
		if results[w], err = trainer.Evaluate(t.Context(), batchesOf(batches)); err != nil {
			return err
		}
		// Training has the same values, because the model only returns its input.
		h, err := trainer.Fit(t.Context(), batchesOf(batches), FitConfig{})
		if err == nil && !maps.Equal(h.Epochs[0].Metrics, results[w].Metrics) {
			t.Errorf("training has metrics %v, evaluation %v", h.Epochs[0].Metrics, results[w].Metrics)
		}
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for w := range layout {
		if !maps.Equal(results[w].Metrics, results[0].Metrics) {
			t.Errorf("worker %d has %v, the chief %v", w, results[w], results[0])
		}
	}
	return results[0]
}

func batchesOf(list []data.Batch) data.Dataset { return batches(list...) }

// TestLikeKerasMetrics compares metrics over several batches, replicas and workers with Keras' recorded values.
func TestLikeKerasMetrics(t *testing.T) {
	text, err := os.ReadFile("testdata/metrics.json")
	if err != nil {
		t.Fatal(err)
	}
	var want kerasMetrics
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	batched := func(x, y *tensor.Tensor) (list []data.Batch) {
		for lo := 0; lo < len(want.Weights); lo += want.Batch {
			hi := min(lo+want.Batch, len(want.Weights))
			list = append(list, data.Batch{
				Inputs: []*tensor.Tensor{x.Rows(lo, hi)}, Labels: []*tensor.Tensor{y.Rows(lo, hi)},
				Weights: tensor.From(want.Weights).Rows(lo, hi),
			})
		}
		return list
	}
	n := len(want.Weights)
	probabilities := batched(tensor.From(want.P, n, 1), tensor.From(want.Binary, n, 1))
	logit := make([]float32, n)
	for i, p := range want.P {
		logit[i] = float32(max(-30, min(30, math.Log(float64(p)/(1-float64(p))))))
	}
	logits := batched(tensor.From(slices.Concat(want.Logits...), n, 4), tensor.From(want.Labels))
	binary := gomlx.Binary{}
	of := func(p gomlx.Binary) []gomlx.Metric {
		pr, few, high := p, p, p
		pr.PR, few.Thresholds, high.Threshold = true, 7, 0.7
		return []gomlx.Metric{
			p.AUC(), named("pr", pr.AUC()), named("auc of 7", few.AUC()), p.Precision(),
			named("precision at 0.7", high.Precision()), p.Recall(), p.F1(),
		}
	}
	check := func(what string, got, want map[string]float64, all bool) {
		t.Helper()
		for name, x := range want {
			if y, ok := got[name]; (ok || all) && !(math.Abs(x-y) <= 2e-6*max(1, x)) {
				t.Errorf("%s: %s is %v, Keras' %v", what, name, y, x)
			}
		}
	}
	for _, layout := range [][]int{{1}, {3}, {1, 2}} {
		label := engine.Feature{DType: tensor.Float32, Shape: []int{1}}
		r := measured(t, layout, 1, label, append(of(binary), gomlx.MeanOf("mean_absolute_error", gomlx.MeanAbsoluteError),
			gomlx.MeanOf("mean_squared_error", gomlx.MeanSquaredError), gomlx.RootMeanSquaredError(),
			gomlx.MeanOf("accuracy", func(y, p []*graph.Node) *graph.Node {
				half := []*graph.Node{graph.AddScalar(p[0], -0.5)}
				return gomlx.BinaryAccuracyLogits().PerExample(y, half)
			})), probabilities)
		check("probabilities", r.Metrics, want.OfBinary, true)
		r = measured(t, layout, 1, label, of(gomlx.Binary{Logits: true}), batched(tensor.From(logit, n, 1),
			tensor.From(want.Binary, n, 1)))
		check("logits", r.Metrics, want.OfBinary, false)
		r = measured(t, layout, 4, engine.Feature{DType: tensor.Int32}, []gomlx.Metric{
			gomlx.SparseCategoricalAccuracy(), gomlx.SparseTopKAccuracy(2), gomlx.Perplexity(), gomlx.MacroF1(4),
			gomlx.ConfusionMatrix(4),
		}, logits)
		check("classes", r.Metrics, want.OfClasses, true)
		if table := r.Tables["confusion_matrix"]; !slices.Equal(table, want.ConfusionMatrix) {
			t.Errorf("confusion matrix %v, want %v", table, want.ConfusionMatrix)
		}
	}
}
