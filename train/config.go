package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Config configures [New]. It describes the training data, by either Data, or Inputs and Labels.
type Config struct {
	// Data yields global batches ([data.Batch]) like those that Fit will get. New reads the first batch to
	// find the types and shapes of inputs and labels.
	Data data.Dataset
	// Inputs and Labels describe one example of each input and of each label, and replace Data. At least one
	// input is required.
	Inputs, Labels []engine.Feature
	// GlobalBatch is the maximum number of examples of one step, over all replicas. Default: the size of the
	// first batch of Data.
	GlobalBatch int
	// Shapes lists further shapes of batches, in which only the sizes of dimensions differ, such as sequences padded to
	// other lengths. The engine compiles a program for each when its first batch is used; at most [MaxShapes] with that
	// of Inputs and Labels. All replicas of a global batch have the same shape. If Data has
	// [data.Pipeline.BucketByLength], they are those of its buckets. It must be the same on all workers.
	Shapes []Shape
	// EvaluationBatch is the maximum number of examples of a global batch of [Trainer.Evaluate], [Trainer.Predict] and
	// FitConfig.Validation. Without a backward pass they need less memory, and larger ones are faster. If it is larger
	// than GlobalBatch, another program is compiled for them. Default: GlobalBatch.
	EvaluationBatch int
	// Seed seeds the initial values and the replicas' random numbers.
	Seed int64
	// BucketBytes is the desired number of bytes of gradients per bucket. The buckets are all-reduced one after
	// the other, while the gradients of later ones are computed. 0: the engine's default. It must be the same on
	// all workers; on XLA, another value may change the last bits of results.
	BucketBytes int
	// LossReduction is the rule by which the losses of a step's examples become one number. The default divides their
	// weighted sum by the sum of the weights. It must be the same on all workers.
	LossReduction LossReduction
	// Exchange is how the replicas exchange what they compute: [AllReduce], [Sharded], or [DiLoCo] over links that are too
	// slow for an exchange in each step. It must be the same on all workers.
	//
	// By default it is AllReduce or Sharded, without compression, as the engine decides by the model, its own kind and
	// the number of replicas: with package gomlx the optimizer is sharded if it has at least twice as many bytes as the
	// parameters, as Adam has, these are at least 1 MiB, and half of the gradients or more are reduced last, when no
	// computation is left to hide that. With central storage or CrossDeviceOps it is not.
	Exchange Exchange
	// Progress, if not nil, is called when a phase begins, with the step (from 1) and the phase. It is called
	// several times a step, by the goroutine that does the work (for several replicas, that of the first
	// one). Calls do not overlap. It must not block: a worker of a job reports through it that it is making
	// progress.
	Progress func(step int64, phase Phase)
	// Trace makes Fit write a timeline of its last steps. It must be set on all workers or on none; Path counts on the
	// chief only. Nil: none.
	Trace *Trace
	// NotFinite is the policy for a loss or a gradient that is an infinity or NaN. The default is to fail
	// with a [NotFiniteError]. It must be the same on all workers.
	NotFinite NotFinitePolicy
	// ClipNorm limits the global norm of the gradients, the square root of the sum of the squares of all
	// elements of all variables: gradients with a larger norm are multiplied by ClipNorm/norm. It is Keras'
	// global_clipnorm and PyTorch's clip_grad_norm_. The norm is the square root of sums in float64 in an order that
	// does not depend on the number of workers. It is reported as Step.GradientNorm, and as the metric
	// "gradient_norm" of training. 0: no limit.
	ClipNorm float64
	// NoiseScale measures the gradient noise scale (McCandlish et al., "An Empirical Model of Large-Batch Training",
	// 2018, appendix A.1) as the metric "gradient_noise_scale" of training: the number of examples of a batch at which
	// the noise of the gradient is as large as the gradient. Global batches much smaller than this train faster with
	// more examples in about as many passes; much larger ones waste examples. It is estimated from the norms of the
	// replicas' gradients before their reduction and of the sum, over all steps of the epoch so far, and is very noisy
	// over a few steps: +Inf if the noise hides the gradient, and negative if the replicas' gradients differ less than
	// those of random examples would. Compression adds its error to the noise. It needs at least two replicas, costs one
	// pass over the gradients on each, and two scalars in the last bucket's call.
	NoiseScale bool
	// ClipVariableNorm limits the norm of each variable's gradient separately (Keras' clipnorm). 0: no limit.
	ClipVariableNorm float64
	// ClipValue limits the elements of the gradients to [-ClipValue, ClipValue] (Keras' clipvalue). 0: no limit.
	// Only one of the three limits can be set. The gradients that are clipped are those of the mean loss of the
	// whole step, summed over all replicas and accumulated batches, by Fit and ApplyGradients.
	ClipValue float64
	// LossScaling configures the loss scale of models that compute in float16 (gomlx.MixedFloat16). It must be the
	// same on all workers.
	LossScaling LossScaling
	// VerifyEvery is the number of steps after which the bits of the mirrored variables are compared over all replicas: a
	// hash of them travels with the next step. If they differ, because memory or a processor has changed bits, that step
	// fails with an error that names the workers in the minority, and no snapshot has the damage, since one is written of
	// equal variables only. It must be the same on all workers. DiLoCo compares at snapshots only. Default 100, which
	// costs 0.3 to 0.5 % of the steps of a small MLP and 0.02 % of those of a GPT; negative: never.
	VerifyEvery int
	// DataTimeout is how long a step, or New, waits for a batch before it fails with a [DataTimeoutError].
	// Default: half of the strategy's Options.Timeout, so 5 minutes if that is unset too. The other workers,
	// which wait for this one in a reduction, then get this error before their own timeout. Negative, or the
	// default with a negative Options.Timeout: no limit.
	DataTimeout time.Duration
	// Logger receives warnings. Default: slog.Default().
	Logger *slog.Logger

	placements placements // of the replicas while Fit trains; nil: they stay where they are
}

// LossReduction is a rule by which the losses of examples, each multiplied by its weight ([data.Batch].Weights, which
// are Keras' sample_weight; a class_weight is that of the example's class), become the loss of a step. Metrics are
// divided by the sum of the weights with both rules.
type LossReduction uint8

// The rules. Without weights they are the same.
const (
	// WeightedMean divides by the sum of the weights, as PyTorch's CrossEntropyLoss(weight=…) does: the loss does not
	// depend on the scale of the weights.
	WeightedMean LossReduction = iota
	// SumOverBatchSize divides by the number of examples, as Keras' rule of that name does: examples of small weight
	// make the loss, and so the step, smaller. Not with [DiLoCo] or Config.NoiseScale.
	SumOverBatchSize
)

// String returns the rule's name: "weighted_mean", "sum_over_batch_size".
func (r LossReduction) String() string {
	if names := [...]string{"weighted_mean", "sum_over_batch_size"}; int(r) < len(names) {
		return names[r]
	}
	return fmt.Sprintf("LossReduction(%d)", uint8(r))
}

// divisor returns what the weighted sum of the losses of so many examples is divided by.
func (r LossReduction) divisor(weightSum float64, examples int64) float64 {
	if r == SumOverBatchSize {
		return float64(examples)
	}
	return weightSum
}

// check returns an error if the rule is invalid, or not supported with the rest of c.
func (r LossReduction) check(c *Config) error {
	switch {
	case r > SumOverBatchSize:
		return fmt.Errorf("train: Config.LossReduction is %v: want WeightedMean or SumOverBatchSize", r)
	case r == SumOverBatchSize && c.diloco() != nil:
		return errors.New("train: Config.LossReduction is SumOverBatchSize, which is not supported with DiLoCo")
	case r == SumOverBatchSize && c.NoiseScale:
		return errors.New("train: Config.LossReduction is SumOverBatchSize, which is not supported with Config.NoiseScale")
	}
	return nil
}

// Phase names a part of the trainer's work, as reported to Config.Progress.
type Phase = string

// The phases, with what the trainer does in each.
const (
	PhaseCompile  Phase = "compile"  // builds the model's programs
	PhaseStart    Phase = "start"    // sends the chief's initial values to all workers
	PhaseData     Phase = "data"     // waits for the next batch of the dataset
	PhaseCompute  Phase = "compute"  // computes gradients
	PhaseReduce   Phase = "reduce"   // all-reduces over replicas, which includes waiting for them
	PhaseUpdate   Phase = "update"   // computes new values, not visible yet
	PhaseOuter    Phase = "outer"    // exchanges the changes of the parameters, with DiLoCo
	PhaseBetween  Phase = "between"  // runs callbacks between steps
	PhaseEvaluate Phase = "evaluate" // evaluates one batch
	PhasePredict  Phase = "predict"  // predicts one batch
	PhaseSnapshot Phase = "snapshot" // copies the training state, and waits until the previous snapshot is written
	PhasePlace    Phase = "place"    // moves replicas between workers
	PhaseRestore  Phase = "restore"  // reads a snapshot, or receives it from the chief
)

// complete sets the defaults, infers what it can from Data, and validates the rest. timeout is the
// strategy's.
func (c *Config) complete(ctx context.Context, timeout time.Duration) error {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.VerifyEvery = cmp.Or(c.VerifyEvery, 100)
	if c.DataTimeout == 0 {
		c.DataTimeout = timeout / 2
	}
	if c.Data != nil {
		if c.Inputs != nil || c.Labels != nil {
			return errors.New("train: Config sets Data, and also Inputs or Labels: set one or the other")
		}
		if err := c.infer(ctx); err != nil {
			return fmt.Errorf("train: Config.Data: first batch: %w", err)
		}
	}
	switch {
	case c.Data == nil && len(c.Inputs) == 0:
		return errors.New("train: Config has neither Data nor Inputs: set a dataset of global batches, or the type and " +
			"shape of one example of each input")
	case c.NotFinite > SkipNotFinite:
		return fmt.Errorf("train: Config.NotFinite is %v: want FailNotFinite, WarnNotFinite or SkipNotFinite",
			c.NotFinite)
	case c.BucketBytes < 0:
		return fmt.Errorf("train: Config.BucketBytes is %d: want a size, or 0 for the engine's default", c.BucketBytes)
	case c.GlobalBatch < 1:
		return fmt.Errorf("train: Config.GlobalBatch is %d: want at least 1", c.GlobalBatch)
	}
	if err := errors.Join(c.checkClipping(), c.completeShapes()); err != nil {
		return err
	}
	if err := c.LossScaling.complete(); err != nil {
		return err
	}
	if err := errors.Join(c.completeExchange(), c.completeTrace(), c.LossReduction.check(c)); err != nil {
		return err
	}
	all := slices.Concat(c.Inputs, c.Labels)
	for _, s := range c.Shapes {
		all = slices.Concat(all, s.Inputs, s.Labels)
	}
	for _, f := range all {
		if !f.DType.Valid() || f.DType == tensor.String || slices.ContainsFunc(f.Shape, func(d int) bool { return d < 0 }) {
			return fmt.Errorf("train: Config has a feature of type %v and shape %s: want numbers and no negative dimension",
				f.DType, tensor.FormatShape(f.Shape))
		}
	}
	return nil
}

// completeExchange sets the default and those of the exchange.
func (c *Config) completeExchange() (err error) {
	if c.Exchange == nil {
		c.Exchange = engineChoice{}
	}
	if c.Exchange, err = c.Exchange.complete(c); err != nil {
		return fmt.Errorf("train: Config.Exchange: %w", err)
	}
	return nil
}

// infer sets Inputs, Labels and, if it is 0, GlobalBatch from the first batch of Data.
func (c *Config) infer(ctx context.Context) error {
	first, err := firstElement(ctx, c.Data, c.DataTimeout)
	if err != nil {
		return err
	}
	b, err := batchOf(first)
	if err != nil {
		return err
	}
	if c.Inputs, err = featuresOf("input", b.Inputs); err != nil {
		return err
	}
	if c.Labels, err = featuresOf("label", b.Labels); err != nil {
		return err
	}
	if len(b.Inputs) == 0 {
		return errors.New("it has no inputs: want at least one")
	}
	for i, label := range b.Labels {
		if label.Shape()[0] != b.Rows() {
			return fmt.Errorf("input 0 has %d rows, label %d has %d: want the first dimension of each to count "+
				"examples: call Batch on the pipeline (data.Pipeline.Batch)",
				b.Rows(), i, label.Shape()[0])
		}
	}
	if c.GlobalBatch == 0 {
		if c.GlobalBatch = b.Rows(); c.GlobalBatch == 0 {
			return errors.New("it has no examples: set GlobalBatch")
		}
	}
	if c.Shapes == nil {
		return c.inferShapes(ctx)
	}
	return nil
}

// firstElement reads the first element of ds, for which it waits for at most timeout. If the dataset then ignores the
// end of its context, its goroutine remains.
func firstElement(ctx context.Context, ds data.Dataset, timeout time.Duration) (data.Element, error) {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		element data.Element
		err     error
	}
	results := make(chan result, 1)
	var first data.Element
	r := read(func() error {
		for e, err := range ds.Iter(inner) {
			first = e
			return err
		}
		if err := context.Cause(inner); err != nil {
			return err
		}
		return errors.New("the dataset is empty")
	}, func(err error) { results <- result{first, err} })
	deadline, stop := after(timeout)
	defer stop()
	select {
	case got := <-results:
		return got.element, got.err
	case <-ctx.Done():
		cancel()
		if !r.wait(endTimeout) {
			return nil, r.notReturnedError()
		}
		return nil, context.Cause(ctx)
	case <-deadline:
		err := r.noBatchError(timeout)
		cancel()
		r.wait(stuckTimeout)
		return nil, err
	}
}

// featuresOf returns the dtype and the shape of a row of each tensor.
func featuresOf(kind string, tensors []*tensor.Tensor) ([]engine.Feature, error) {
	var out []engine.Feature
	for i, t := range tensors {
		if t == nil || t.Rank() == 0 {
			return nil, fmt.Errorf("%s %d is missing or a scalar: want a first dimension that counts examples, as "+
				"data.Pipeline.Batch makes it", kind, i)
		}
		out = append(out, engine.Feature{DType: t.DType(), Shape: slices.Clone(t.Shape()[1:])})
	}
	return out, nil
}
