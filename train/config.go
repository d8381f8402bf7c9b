package train

import (
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

// Config says what a model is trained on: either Data, or Inputs and Labels.
type Config struct {
	// Data yields global batches ([data.Batch]) like those that Fit will get. New reads the first one, for the types and
	// shapes of inputs and labels.
	Data data.Dataset
	// Inputs and Labels are one example of each input, of which there is at least one, and of each label, in place of Data.
	Inputs, Labels []engine.Feature
	// GlobalBatch is the most examples of one step, over all replicas. Default: as many as the first batch of Data has.
	GlobalBatch int
	// Seed is that of the initial values and of the replicas' random numbers.
	Seed int64
	// Progress, if not nil, is told what the trainer is about to do: in which step (the first is 1) and which phase of it. It is called
	// several times a step, by the goroutine that does it (of several replicas the first one's), one call at a time, and must not block:
	// a worker of a job shows by it that it is alive.
	Progress func(step int64, phase Phase)
	// NotFinite says what happens when a loss or a gradient is an infinity or NaN. The default is an error, a
	// [NotFiniteError]. It is the same on all workers.
	NotFinite NotFinitePolicy
	// DataTimeout is how long a step, or New, waits for a batch, and then fails with a [DataTimeoutError].
	// Default: half of the strategy's Options.Timeout, so 5 minutes if that is not set either: the other
	// workers, which wait for this one in a reduction, then learn what it waits for. Negative, or the default
	// where Options.Timeout is negative: no limit.
	DataTimeout time.Duration
	// Logger gets warnings. Default: slog.Default().
	Logger *slog.Logger
}

// Phase is what a trainer does.
type Phase = string

// The phases.
const (
	PhaseCompile  Phase = "compile"  // builds the model's programs
	PhaseStart    Phase = "start"    // gives all workers the chief's initial values
	PhaseData     Phase = "data"     // waits for the next batch
	PhaseCompute  Phase = "compute"  // gradients
	PhaseReduce   Phase = "reduce"   // adds up over replicas, and waits for them
	PhasePacks    Phase = "packs"    // has one pack of gradients while others travel
	PhaseApply    Phase = "apply"    // new values, which nobody sees yet
	PhaseBetween  Phase = "between"  // steps: callbacks
	PhaseEvaluate Phase = "evaluate" // a batch of an evaluation
	PhasePredict  Phase = "predict"
	PhaseSnapshot Phase = "snapshot" // copies the state of training, and waits until the snapshot before is written
	PhaseRestore  Phase = "restore"  // reads a snapshot, or gets it from the chief
)

// complete fills in the defaults, takes from Data what it gives, and checks the rest. timeout is the strategy's.
func (c *Config) complete(ctx context.Context, timeout time.Duration) error {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.DataTimeout == 0 {
		c.DataTimeout = timeout / 2
	}
	if c.Data != nil {
		if c.Inputs != nil || c.Labels != nil {
			return errors.New("train: Config has Data, and Inputs or Labels as well: want one or the other")
		}
		if err := c.infer(ctx); err != nil {
			return fmt.Errorf("train: Config.Data: first batch: %w", err)
		}
	}
	switch {
	case c.Data == nil && len(c.Inputs) == 0:
		return errors.New("train: Config has neither Data nor Inputs: want a dataset of global batches, or the type and shape of one example of each input")
	case c.NotFinite > SkipNotFinite:
		return fmt.Errorf("train: Config.NotFinite is %v: want FailNotFinite, WarnNotFinite or SkipNotFinite",
			c.NotFinite)
	case c.GlobalBatch < 1:
		return fmt.Errorf("train: Config.GlobalBatch is %d: want at least 1", c.GlobalBatch)
	}
	for _, f := range slices.Concat(c.Inputs, c.Labels) {
		if !f.DType.Valid() || f.DType == tensor.String || slices.ContainsFunc(f.Shape, func(d int) bool { return d < 0 }) {
			return fmt.Errorf("train: Config has a feature of type %v and shape %s: want numbers and no negative dimension", f.DType, tensor.FormatShape(f.Shape))
		}
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
	return nil
}

// firstElement reads the first element of ds, for which it waits so long. It returns when the dataset does, or
// ignores the end of its context.
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
			return nil, r.ignorant()
		}
		return nil, context.Cause(ctx)
	case <-deadline:
		err := r.late(timeout)
		cancel()
		r.wait(endTimeout)
		return nil, err
	}
}

// featuresOf returns what one row of each tensor is.
func featuresOf(kind string, tensors []*tensor.Tensor) ([]engine.Feature, error) {
	var out []engine.Feature
	for i, t := range tensors {
		if t == nil || t.Rank() == 0 {
			return nil, fmt.Errorf("%s %d is missing or a scalar: want a first dimension that counts examples, as data.Pipeline.Batch makes it", kind, i)
		}
		out = append(out, engine.Feature{DType: t.DType(), Shape: slices.Clone(t.Shape()[1:])})
	}
	return out, nil
}
