package train

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/loss"
	gomlxmetric "github.com/gomlx/gomlx/ml/train/metric"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// theirError is the mean absolute error, as a function for a metric of GoMLX.
func theirError(_ *model.Scope, labels, predictions []*graph.Node) *graph.Node {
	return loss.MeanAbsoluteError(labels, predictions)
}

// ownMetric is a metric of GoMLX of another type, without variables unless counted is set.
type ownMetric struct {
	gomlxmetric.Interface
	counted bool
}

func (m ownMetric) UpdateGraph(s *model.Scope, labels, predictions []*graph.Node) *graph.Node {
	if m.counted {
		s.VariableWithValue("count", float32(0))
	}
	return theirError(s, labels, predictions)
}

// TestMetricsOfGoMLX compares metrics of GoMLX over replicas and workers, of batches that do not divide evenly, with
// what GoMLX computes from the whole batches.
func TestMetricsOfGoMLX(t *testing.T) {
	const width = 3
	theirs := func() []gomlxmetric.Interface {
		named := func(name string) gomlxmetric.Interface { return gomlxmetric.NewMeanBinaryAccuracy(name, "") }
		return []gomlxmetric.Interface{
			named("binary"), gomlxmetric.NewMeanBinaryLogitsAccuracy("logits", ""),
			gomlxmetric.NewMeanMetric("error", "", "", theirError, nil),
			gomlxmetric.NewMeanMetric("batches", "", "", theirError, nil).WithDynamicBatch(false),
			gomlxmetric.NewExponentialMovingAverageMetric("moving", "", "", theirError, nil, 0.4),
			gomlxmetric.NewBaseMetric("last", "", "", theirError, nil),
			gomlxmetric.NewMedianMetric("median", "", "", theirError, nil),
			ownMetric{gomlxmetric.NewBaseMetric("own", "", "", nil, nil), false},
		}
	}
	backend, err := gobackend.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Finalize()
	rng, want := rand.New(rand.NewPCG(1, 2)), map[string]float64{}
	var list []data.Batch
	for _, rows := range []int{8, 8, 8, 5} {
		x, y := tensor.New(tensor.Float32, rows, width), tensor.New(tensor.Float32, rows, width)
		for i := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[i], tensor.Data[float32](y)[i] = rng.Float32()-0.2, float32(rng.IntN(2))
		}
		list = append(list, data.Batch{Inputs: []*tensor.Tensor{x}, Labels: []*tensor.Tensor{y}})
	}
	for _, m := range theirs() {
		exec := model.MustNewExec(backend, model.NewStore(), func(s *model.Scope, y, x *graph.Node) *graph.Node {
			return m.UpdateGraph(s, []*graph.Node{y}, []*graph.Node{x})
		})
		for _, b := range list {
			x, y := b.Inputs[0], b.Labels[0]
			out := exec.MustCall(tensors.FromFlatDataAndDimensions(tensor.Data[float32](y), y.Shape()...),
				tensors.FromFlatDataAndDimensions(tensor.Data[float32](x), x.Shape()...))[0]
			if u, ok := m.(gomlxmetric.UpdateGo); ok {
				u.UpdateGo(out)
				out = u.ReadGo()
			}
			switch v := out.Value().(type) {
			case float32:
				want[m.Name()] = float64(v)
			case float64:
				want[m.Name()] = v
			}
		}
		exec.Finalize()
	}
	for _, layout := range [][]int{{1}, {2}, {4}, {1, 1}, {2, 2}} {
		list := list
		var metrics []gomlx.Metric
		for _, m := range theirs() {
			metrics = append(metrics, gomlx.MetricFrom(m))
		}
		label := engine.Feature{DType: tensor.Float32, Shape: []int{width}}
		r := measured(t, layout, width, label, metrics, list)
		if len(r.Metrics) != len(want) {
			t.Fatalf("%v: metrics %v, want %v", layout, r.Metrics, want)
		}
		for name, x := range want {
			if got := r.Metrics[name]; !(math.Abs(got-x) <= 1e-6) {
				t.Errorf("%v: %s is %v, GoMLX's %v", layout, name, got, x)
			}
		}
	}
}

// TestMetricsOfGoMLXRefused checks the errors for metrics that cannot be combined.
func TestMetricsOfGoMLXRefused(t *testing.T) {
	e, err := gomlx.OpenGo(gomlx.GoOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	sum := func(_ *model.Scope, _, predictions []*graph.Node) *graph.Node {
		return graph.ReduceAllSum(predictions[0])
	}
	for want, m := range map[string]gomlxmetric.Interface{
		"which is not the mean of a value per example": gomlxmetric.NewMeanMetric("m", "", "", sum, nil),
		"keeps the variable /count":                    ownMetric{gomlxmetric.NewBaseMetric("m", "", "", nil, nil), true},
		"its function is nil":                          gomlxmetric.NewBaseMetric("m", "", "", nil, nil),
		"it updates itself in Go": struct {
			*gomlxmetric.StreamingMedianMetric
		}{
			gomlxmetric.NewMedianMetric("m", "", "", sum, nil),
		},
	} {
		model := &gomlx.Model{
			Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
				return []*graph.Node{graph.Mul(in[0], s.VariableWithValue("w", float32(1)).NodeValue(in[0].Graph()))}
			},
			Loss: loss.MeanSquaredError, Metrics: []gomlx.Metric{gomlx.MetricFrom(m)}, Optimizer: optimizer.SGD().Done(),
		}
		feature := []engine.Feature{{DType: tensor.Float32, Shape: []int{1}}}
		_, err := model.Compile(t.Context(), e, engine.Spec{Rows: 2, Inputs: feature, Labels: feature, Devices: e.Devices()})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `"m"`) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
