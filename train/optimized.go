package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// errNoEMA is the error of using moving averages that are not kept.
var errNoEMA = errors.New("the optimizer keeps no moving averages of the weights: wrap it by optimizer.EMA of " +
	"engine/gomlx/optimizer")

// LearningRate returns the current learning rate: that of the last update if a schedule sets it. ok is false if the
// optimizer has none in a variable.
func (t *Trainer) LearningRate() (rate float64, ok bool) {
	variable, _ := t.learningRate()
	if variable < 0 {
		return 0, false
	}
	value, err := t.program.Read(0, variable)
	if err != nil {
		return 0, false
	}
	return value.Float64s()[0], true
}

// SetLearningRate sets the learning rate. A callback may call it between steps. With several workers, every worker
// must set the same rate. It is an error if a schedule of the optimizer sets the rate.
func (t *Trainer) SetLearningRate(rate float64) error {
	if err := t.rateIsFree(); err != nil {
		return fmt.Errorf("train: set learning rate: %w", err)
	}
	variable, _ := t.learningRate()
	v := t.variables[variable]
	return t.SetVariable(v.Name, fromFloat64s(v.DType, v.Shape, []float64{rate}))
}

// rateIsFree returns an error unless the learning rate can be set between steps.
func (t *Trainer) rateIsFree() error {
	switch variable, scheduled := t.learningRate(); {
	case variable < 0:
		return errors.New("the optimizer has no learning rate in a variable")
	case scheduled:
		return fmt.Errorf("the optimizer's schedule sets %s in every step: leave out the schedule",
			t.variables[variable].Name)
	}
	return nil
}

func (t *Trainer) learningRate() (variable int, scheduled bool) {
	i := t.program.Info()
	return i.LearningRate, i.RateScheduled
}

// ema returns, for each parameter, the variable with its moving average.
func (t *Trainer) ema() ([]int, error) {
	if list := t.program.Info().EMA; list != nil {
		return list, nil
	}
	return nil, errNoEMA
}

// EMAWeights returns the weights as [Trainer.Weights] does, with the exponential moving averages that the optimizer
// keeps in place of the parameters (optimizer.EMA of engine/gomlx/optimizer). Before the first step they are the
// parameters. To continue with the averages as parameters, as Keras does at the end of training, pass them to
// [Trainer.SetWeights]. With several workers, every worker calls it.
func (t *Trainer) EMAWeights(ctx context.Context) (out []Weight, err error) {
	err = t.WithEMA(ctx, func() (err error) {
		out, err = t.Weights(ctx)
		return err
	})
	return out, err
}

// WithEMA calls f while the parameters have the values of their exponential moving averages: [Trainer.Evaluate],
// [Trainer.Predict] and [Trainer.Export] then use the averages. Afterwards the parameters have their values again. f
// must not train. With several workers, every worker calls it. FitConfig.EMA does this for validation.
func (t *Trainer) WithEMA(ctx context.Context, f func() error) (err error) {
	averages, err := t.ema()
	if err != nil {
		return fmt.Errorf("train: %w", err)
	}
	if t.committed == 0 { // the optimizer has set no average
		return f()
	}
	parameters := make([]*tensor.Tensor, len(averages))
	restore := func() (err error) {
		for i, value := range parameters {
			if value != nil {
				err = errors.Join(err, t.write(i, value))
			}
		}
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	if err := t.swapEMA(ctx, averages, parameters); err != nil {
		if _, everywhere := errors.AsType[*distribute.StepError](err); !everywhere {
			t.failOthers(ctx, err)
		}
		return err
	}
	return f()
}

// swapEMA sets the parameters to their moving averages, and stores the values that they had in before.
func (t *Trainer) swapEMA(ctx context.Context, averages []int, before []*tensor.Tensor) error {
	for i, average := range averages {
		v := t.variables[i]
		value, err := t.weight(ctx, average)
		if err != nil {
			return fmt.Errorf("train: reading the moving average of %s: %w", v.Name, err)
		}
		if value.DType() != v.DType {
			value = fromFloat64s(v.DType, v.Shape, value.Float64s())
		}
		if before[i], err = t.program.Read(0, i); err != nil {
			return fmt.Errorf("train: reading %s: %w", v.Name, err)
		}
		if err := t.write(i, value); err != nil {
			return fmt.Errorf("train: %w", err)
		}
	}
	return nil
}

// setEMA sets the moving averages to weights, as EMAWeights returns them.
func (t *Trainer) setEMA(weights []Weight) error {
	averages, err := t.ema()
	if err != nil {
		return fmt.Errorf("train: %w", err)
	}
	for i, average := range averages {
		at := slices.IndexFunc(weights, func(w Weight) bool { return w.Name == t.variables[i].Name })
		if at < 0 {
			return fmt.Errorf("train: set the moving averages: %s is missing", t.variables[i].Name)
		}
		value := weights[at].Value
		if of := t.variables[average].DType; value.DType() != of {
			value = fromFloat64s(of, value.Shape(), value.Float64s())
		}
		if err := t.assign(average, value); err != nil {
			return fmt.Errorf("train: set the moving averages: %w", err)
		}
	}
	return nil
}

// fromFloat64s returns a tensor of a floating-point dtype.
func fromFloat64s(dtype tensor.DType, shape []int, values []float64) *tensor.Tensor {
	out := tensor.New(dtype, shape...)
	for i, x := range values {
		switch dtype {
		case tensor.Float16:
			tensor.Data[tensor.F16](out)[i] = tensor.F16From(float32(x))
		case tensor.BFloat16:
			tensor.Data[tensor.BF16](out)[i] = tensor.BF16From(float32(x))
		case tensor.Float32:
			tensor.Data[float32](out)[i] = float32(x)
		default:
			tensor.Data[float64](out)[i] = x
		}
	}
	return out
}
