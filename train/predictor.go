package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Predictor computes predictions of a model with fixed weights, without strategy, loss and optimizer. Several
// goroutines may use it concurrently, and then compute at the same time.
type Predictor struct {
	inference engine.Inference
	cfg       PredictorConfig
	loaded    Loaded
}

// PredictorConfig configures [NewPredictor].
type PredictorConfig struct {
	Engine  engine.Engine    // required; must outlive the predictor
	Device  engine.Device    // the zero value means the engine's first device
	Inputs  []engine.Feature // required: one row of each input
	Batch   int              // rows that are computed at once; 0: 32. Other numbers of rows are cut and padded
	Weights []Weight         // of [LoadWeights], [Trainer.Weights], …; NewPredictor copies the values
	Load    LoadOptions      // how to match Weights with the model's variables
}

// NewPredictor compiles the predictions of m, and sets its variables. The weights of the model that
// predictions do not use, such as those of an optimizer, are ignored if LoadOptions.Partial is set, and otherwise an
// error. The caller must call [Predictor.Close].
func NewPredictor(ctx context.Context, m engine.Model, cfg PredictorConfig) (*Predictor, error) {
	im, ok := m.(engine.InferenceModel)
	switch {
	case !ok:
		return nil, fmt.Errorf("train: predictor: a %T cannot be compiled for prediction alone: use Trainer.Predict", m)
	case cfg.Engine == nil:
		return nil, errors.New("train: predictor: PredictorConfig.Engine is nil: open one, such as with gomlx.Open")
	case len(cfg.Inputs) == 0:
		return nil, errors.New("train: predictor: PredictorConfig.Inputs is empty: want the type and shape of one row of " +
			"each input")
	case cfg.Batch < 0:
		return nil, fmt.Errorf("train: predictor: PredictorConfig.Batch is %d: want 1 or more, or 0 for the default",
			cfg.Batch)
	case cfg.Batch == 0:
		cfg.Batch = 32
	}
	if cfg.Device == (engine.Device{}) {
		cfg.Device = cfg.Engine.Devices()[0]
	}
	x, err := im.CompileInference(ctx, cfg.Engine, engine.Spec{
		Rows: cfg.Batch, Inputs: cfg.Inputs, Devices: []engine.Device{cfg.Device},
	})
	if err != nil {
		return nil, fmt.Errorf("train: predictor: compiling the model: %w", err)
	}
	p := &Predictor{inference: x, cfg: cfg}
	variables := slices.Clone(x.Variables())
	for i, v := range variables {
		if v.Role == engine.Frozen { // without training, moving averages are frozen
			variables[i].Role = engine.Average
		}
	}
	values, loaded, err := matchWeights(variables, cfg.Weights, cfg.Load)
	for i := 0; i < len(values) && err == nil; i++ {
		if values[i] != nil {
			err = x.Write(i, values[i])
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("train: predictor: %w", err), x.Close())
	}
	p.loaded, p.cfg.Weights = loaded, nil
	return p, nil
}

// Loaded lists which variables have been set.
func (p *Predictor) Loaded() Loaded { return p.loaded }

// Variables lists the variables that the predictions use, sorted by name.
func (p *Predictor) Variables() []engine.Variable { return p.inference.Variables() }

// Predict returns the model's predictions for any number of rows, in the order of the model function's
// results. The first dimension of each input and each result counts the rows, which must not depend on one
// another, since they are computed in batches with padding. Predict only reads the inputs, until it returns; the
// caller owns the results.
func (p *Predictor) Predict(ctx context.Context, inputs ...*tensor.Tensor) ([]*tensor.Tensor, error) {
	if len(inputs) != len(p.cfg.Inputs) {
		return nil, fmt.Errorf("train: predict: %d inputs: want %d", len(inputs), len(p.cfg.Inputs))
	}
	rows := 0
	if inputs[0] != nil && inputs[0].Rank() > 0 {
		rows = inputs[0].Shape()[0]
	}
	if err := checkFeatures("input", inputs, p.cfg.Inputs, rows); err != nil {
		return nil, fmt.Errorf("train: predict: %w", err)
	}
	if rows == 0 {
		return nil, errors.New("train: predict: the inputs have no rows: want at least one")
	}
	var results []*tensor.Tensor
	batch := make([]*tensor.Tensor, len(inputs))
	for lo := 0; lo < rows; lo += p.cfg.Batch {
		hi := min(rows, lo+p.cfg.Batch)
		for i, x := range inputs {
			batch[i] = padded(x.Rows(lo, hi), p.cfg.Batch)
		}
		out, err := p.inference.Predict(ctx, batch)
		if err != nil {
			return nil, fmt.Errorf("train: predict: %w", err)
		}
		if results == nil {
			for _, x := range out {
				shape := slices.Clone(x.Shape())
				shape[0] = rows
				results = append(results, tensor.New(x.DType(), shape...))
			}
		}
		for i, x := range out {
			copy(results[i].Rows(lo, hi).Memory().HostBytes(), x.Rows(0, hi-lo).Memory().HostBytes())
		}
	}
	return results, nil
}

// ForInputs compiles the model for other inputs: one row of each. Both predictors use one set of values of the
// variables, in memory once, so the new one must use no others, and ends with this one. The caller must call
// [Predictor.Close] for both.
func (p *Predictor) ForInputs(ctx context.Context, inputs ...engine.Feature) (*Predictor, error) {
	x, err := p.inference.ForInputs(ctx, inputs)
	if err != nil {
		return nil, fmt.Errorf("train: predictor: compiling the model for other inputs: %w", err)
	}
	q := &Predictor{inference: x, cfg: p.cfg, loaded: p.loaded}
	q.cfg.Inputs = inputs
	return q, nil
}

// NewState returns zeros for the inputs from first on, for Batch rows, which stay where the engine computes. axis
// counts from that of the rows, 0. The caller must close it.
func (p *Predictor) NewState(first, axis int) (engine.State, error) {
	s, err := p.inference.NewState(first, axis)
	if err != nil {
		return nil, fmt.Errorf("train: predictor: %w", err)
	}
	return s, nil
}

// Continue is Predict for exactly Batch rows with the values of a state as the last inputs. The state must be of this
// predictor, or of one with the same set of values (ForInputs). The last results, one for each value of the state,
// are not returned: their first count elements along the state's axis replace those from at on in the state. After an
// error the state is as before. Calls with one state compute one after the other.
func (p *Predictor) Continue(ctx context.Context, s engine.State, at, count int, inputs ...*tensor.Tensor) (
	[]*tensor.Tensor, error,
) {
	out, err := p.inference.Continue(ctx, s, at, count, inputs)
	if err != nil {
		return nil, fmt.Errorf("train: predict: %w", err)
	}
	return out, nil
}

// padded returns t, or a copy with zeros for the missing rows.
func padded(t *tensor.Tensor, rows int) *tensor.Tensor {
	if t.Shape()[0] == rows {
		return t
	}
	shape := slices.Clone(t.Shape())
	shape[0] = rows
	out := tensor.New(t.DType(), shape...)
	copy(out.Memory().HostBytes(), t.Memory().HostBytes())
	return out
}

// Close frees the model's memory, after calls in progress.
func (p *Predictor) Close() error { return p.inference.Close() }
