package datasets

import (
	"fmt"
	"math"

	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// regressionLosses are the values of --loss.
var regressionLosses = map[string]gomlx.Loss{
	"mse": gomlx.MeanSquaredError, "mae": gomlx.MeanAbsoluteError, "huber": gomlx.Huber(1),
}

// regression describes a column of numbers to predict. The model predicts them standardised, by the mean and
// deviation of the training rows.
type regression struct {
	Loss      string  `json:"loss"`
	Mean      float64 `json:"mean"`
	Deviation float64 `json:"deviation"`
}

// newRegression returns the regression of a column of a table of training rows.
func newRegression(loss string, table *data.Frame, label string) (*regression, error) {
	if table.Categories[label] != nil {
		return nil, cli.Usagef("--loss %s: the column %s is text: want numbers, or leave out --loss to predict its "+
			"categories", loss, label)
	}
	mean, deviation, err := table.Mean(label)
	switch {
	case err != nil:
		return nil, cli.Usagef("--label: %v", err)
	case !(deviation > 0):
		return nil, fmt.Errorf("--label %s: the training rows have %v only: want different numbers to predict", label, mean)
	}
	return &regression{Loss: loss, Mean: mean, Deviation: deviation}, nil
}

// labels returns the standardised labels of a table.
func (r *regression) labels(f *data.Frame, label string) (*tensor.Tensor, error) {
	values, err := f.Column(label)
	if err != nil {
		return nil, fmt.Errorf("--label: %w", err)
	}
	list := make([]float32, len(values))
	for i, v := range values {
		if math.IsNaN(v) {
			return nil, fmt.Errorf("--label %s: row %d has no value", label, i)
		}
		list[i] = float32((v - r.Mean) / r.Deviation)
	}
	return tensor.Of(list), nil
}

// Value returns the number that a prediction of the model means.
func (r *regression) Value(predicted float32) float64 { return float64(predicted)*r.Deviation + r.Mean }

// Model returns a perceptron with hidden layers of some widths and one output. Its errors are in units of the label.
func (r *regression) Model(hidden []int, opt optimizer.Interface) *gomlx.Model {
	scaled := func(m gomlx.Metric) gomlx.Metric {
		value := m.Value
		if value == nil {
			value = func(sums []float64, weight float64) float64 { return sums[0] / weight }
		}
		m.Value = func(sums []float64, weight float64) float64 { return value(sums, weight) * r.Deviation }
		return m
	}
	return &gomlx.Model{
		Forward: models.MLP{Hidden: hidden, Classes: 1}.Forward, Loss: regressionLosses[r.Loss], Optimizer: opt,
		Metrics: []gomlx.Metric{
			scaled(gomlx.MeanOf("mean_absolute_error", gomlx.MeanAbsoluteError)), scaled(gomlx.RootMeanSquaredError()),
			gomlx.RSquared(),
		},
	}
}

// Rows adds the results of an evaluation to a table.
func (x *Examples) Rows(t *cli.Table, prefix string, result train.Result) {
	if x.Regression != nil {
		t.Row(prefix+"mean absolute error", "%.4g", result.Metrics["mean_absolute_error"])
		t.Row(prefix+"root mean squared error", "%.4g", result.Metrics["root_mean_squared_error"])
		t.Row(prefix+"R²", "%.4f", result.Metrics["r_squared"])
		t.Row(prefix+"loss", "%.4g (%s of the standardised numbers)", result.Loss, x.Regression.Loss)
		return
	}
	t.Row(prefix+"accuracy", "%.2f %%", 100*result.Metrics["accuracy"])
	t.Row(prefix+"loss", "%.4g", result.Loss)
	if x.Text {
		t.Row(prefix+"perplexity", "%.4g", math.Exp(result.Loss))
	}
}

// Accuracy returns the accuracy of a result, or NaN if it has none.
func Accuracy(r train.Result) cli.Number {
	if a, ok := r.Metrics["accuracy"]; ok {
		return cli.Number(a)
	}
	return cli.Number(math.NaN())
}

// Numbers returns the metrics for JSON.
func Numbers(r train.Result) map[string]cli.Number {
	out := map[string]cli.Number{}
	for name, x := range r.Metrics {
		out[name] = cli.Number(x)
	}
	return out
}
