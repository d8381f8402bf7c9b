package train

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// goldenTrainEnv names a file of trainings that is used instead of testdata/golden-train.json.
const goldenTrainEnv = "LOCKSTEP_GOLDEN_TRAIN"

// goldenTraining is a whole training that Keras made on one device, with all its results.
type goldenTraining struct {
	ID, Family string
	Inputs     []struct {
		Shape []int
		DType string
	}
	Layers    []goldenLayer
	Classes   int
	Loss      oneOrMore
	Optimizer goldenOptimizer

	ClipGlobalNorm float64 `json:"clip_global_norm"` // of the gradients; 0: not clipped
	Accumulate     int     // parts that a batch is cut into, whose gradients are summed before one update
	EMA            float64 // share of the weights' exponential moving averages that an update keeps; 0: none are kept

	Batch, Epochs int
	X, Y          []goldenArray
	Weights       []float32

	Before, After map[string]goldenArray // by Keras' path
	EMAAfter      map[string]goldenArray `json:"ema_after"`
	StepLoss      []*float64             `json:"step_loss"`     // with the regularizers; nil: no update was made
	GradientNorm  []*float64             `json:"gradient_norm"` // before clipping
	Evaluate      struct {
		Loss     *float64 // without the regularizers
		Accuracy *float64
	}
	Predict []goldenArray

	bucketBytes int // Config.BucketBytes
}

// trainedGolden holds Lockstep's results for a golden training.
type trainedGolden struct {
	stepLoss  []*float64
	norms     []float64              // of the gradients, by step
	weights   map[string]goldenArray // by our names
	averages  map[string]goldenArray // of the weights, by our names
	evaluated Result
	predicted []goldenArray
}

// goldenLayouts lists how many replicas each worker has.
var goldenLayouts = [][]int{{1}, {2}, {3}, {1, 1}, {2, 2}}

// TestGoldenTrain repeats whole trainings of Keras, which were made on one device, on one and several replicas and
// workers. It wants the same losses, weights, moving averages, evaluation and predictions.
func TestGoldenTrain(t *testing.T) {
	path := os.Getenv(goldenTrainEnv)
	if path == "" {
		path = "testdata/golden-train.json"
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		TensorFlow, Keras string
		Cases             []json.RawMessage
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if len(file.Cases) == 0 {
		t.Fatalf("%s has no cases", path)
	}
	families := map[string]bool{}
	for i, raw := range file.Cases {
		var id struct{ ID, Family string }
		if err := json.Unmarshal(raw, &id); err != nil || id.ID == "" {
			t.Fatalf("%s: case %d has no id: %v", path, i, err)
		}
		t.Run(id.ID, func(t *testing.T) {
			decoder := json.NewDecoder(bytes.NewReader(raw))
			decoder.DisallowUnknownFields()
			var c goldenTraining
			if err := decoder.Decode(&c); err != nil {
				t.Fatalf("the case is of another form than the runner knows: %v", err)
			}
			if err := c.check(); err != nil {
				t.Fatal(err)
			}
			if testing.Short() && families[c.Family] {
				t.Skip("-short: one training of each family")
			}
			families[c.Family] = true
			for _, layout := range goldenLayouts {
				c.run(t, layout)
			}
		})
	}
}

// run makes the training once, and compares.
func (c *goldenTraining) run(t *testing.T, layout []int) {
	t.Helper()
	engines := make([]engine.Engine, len(layout))
	for w, n := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	compare := func(w int, got *trainedGolden) {
		for _, difference := range c.compare(got) {
			t.Errorf("workers with %v replicas, worker %d: %s", layout, w, difference)
		}
	}
	if len(layout) > 1 {
		errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) error {
			got, err := c.train(t.Context(), s)
			if err == nil {
				compare(w, got)
			}
			return err
		})
		if err := errors.Join(errs...); err != nil {
			t.Errorf("workers with %v replicas: %v", layout, err)
		}
		return
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: engines[0]})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got, err := c.train(t.Context(), s)
	if err != nil {
		t.Errorf("%v replicas: %v", layout, err)
		return
	}
	compare(0, got)
}

// train makes the training on a strategy.
func (c *goldenTraining) train(ctx context.Context, s *distribute.Strategy) (out *trainedGolden, err error) {
	cfg := Config{
		GlobalBatch: ceilDiv(c.Batch, c.Accumulate), ClipNorm: c.ClipGlobalNorm, BucketBytes: c.bucketBytes,
		Exchange: fakeSharding,
	}
	for i, in := range c.Inputs {
		cfg.Inputs = append(cfg.Inputs, engine.Feature{DType: c.inputType(i), Shape: in.Shape})
	}
	for i, y := range c.Y {
		cfg.Labels = append(cfg.Labels, engine.Feature{DType: c.labelType(i), Shape: y.shape[1:]})
	}
	trainer, err := New(ctx, s, c.model(), cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, trainer.Close()) }()
	if err := c.start(trainer); err != nil {
		return nil, err
	}
	out = &trainedGolden{weights: map[string]goldenArray{}, averages: map[string]goldenArray{}}
	record := Callback{OnStepEnd: func(_ context.Context, s Step) error {
		var loss *float64
		if !s.Skipped {
			loss = &s.Loss
		}
		out.stepLoss, out.norms = append(out.stepLoss, loss), append(out.norms, s.GradientNorm)
		return nil
	}}
	examples := c.examples()
	if _, err := trainer.Fit(ctx, examples, FitConfig{
		Epochs: c.Epochs, Accumulate: c.Accumulate, Callbacks: []Callback{record},
	}); err != nil {
		return nil, err
	}
	weights, err := trainer.Weights(ctx)
	if err != nil {
		return nil, err
	}
	for _, w := range weights {
		out.weights[w.Name] = goldenArrayOf(w.Value)
	}
	if c.EMA > 0 {
		averages, err := trainer.EMAWeights(ctx)
		if err != nil {
			return nil, err
		}
		for _, w := range averages {
			out.averages[w.Name] = goldenArrayOf(w.Value)
		}
	}
	if err := c.pinRounding(trainer, weights); err != nil {
		return nil, err
	}
	if out.evaluated, err = trainer.Evaluate(ctx, examples); err != nil {
		return nil, err
	}
	predicted, err := trainer.Predict(ctx, examples)
	for _, p := range predicted {
		out.predicted = append(out.predicted, goldenArrayOf(p))
	}
	return out, err
}

// pinRounding gives the weights that rounding decides Keras' final values, so that evaluation and predictions depend
// on the others alone.
func (c *goldenTraining) pinRounding(trainer *Trainer, weights []Weight) error {
	decided, names := c.decidedByRounding(), c.names()
	if len(decided) == 0 {
		return nil
	}
	for theirs := range decided {
		i := slices.IndexFunc(weights, func(w Weight) bool { return w.Name == names[theirs] })
		weights[i].Value = c.After[theirs].tensor(tensor.Float32)
	}
	return trainer.SetWeights(weights)
}

// start gives the trainer Keras' initial weights.
func (c *goldenTraining) start(trainer *Trainer) error {
	names := c.names()
	var weights []Weight
	for theirs, value := range c.Before {
		ours, ok := names[theirs]
		if !ok {
			return fmt.Errorf("the model has no variable %s: it has %v", theirs, slices.Sorted(maps.Keys(names)))
		}
		weights = append(weights, Weight{ours, value.tensor(tensor.Float32)})
	}
	return trainer.SetWeights(weights)
}

func (c *goldenTraining) inputType(i int) tensor.DType {
	if c.Inputs[i].DType == "int32" {
		return tensor.Int32
	}
	return tensor.Float32
}

func (c *goldenTraining) labelType(i int) tensor.DType {
	if c.Loss[i] == goldenSparse {
		return tensor.Int32
	}
	return tensor.Float32
}

// examples returns the examples in order, in batches of which the last may be short. If gradients are accumulated, each
// batch is cut into parts as equal as possible, of which some may be empty.
func (c *goldenTraining) examples() data.Dataset {
	var all data.Batch
	for i, x := range c.X {
		all.Inputs = append(all.Inputs, x.tensor(c.inputType(i)))
	}
	for i, y := range c.Y {
		all.Labels = append(all.Labels, y.tensor(c.labelType(i)))
	}
	all.Weights = tensor.From(c.Weights)
	var list []data.Batch
	for begin := 0; begin < len(c.Weights); begin += c.Batch {
		end := min(begin+c.Batch, len(c.Weights))
		for part := range c.Accumulate {
			n := end - begin
			lo := begin + part*(n/c.Accumulate) + min(part, n%c.Accumulate) // as numpy.array_split
			hi := begin + (part+1)*(n/c.Accumulate) + min(part+1, n%c.Accumulate)
			rows := func(from []*tensor.Tensor) (to []*tensor.Tensor) {
				for _, t := range from {
					to = append(to, t.Rows(lo, hi))
				}
				return to
			}
			weights := all.Weights.Rows(lo, hi)
			list = append(list, data.Batch{Inputs: rows(all.Inputs), Labels: rows(all.Labels), Weights: weights})
		}
	}
	return batches(list...)
}

// compare returns all differences from Keras' results.
func (c *goldenTraining) compare(got *trainedGolden) (differences []string) {
	differ := func(format string, args ...any) { differences = append(differences, fmt.Sprintf(format, args...)) }
	within := func(what string, got, want goldenArray, bound float64) {
		if d := got.differs(want, bound); d != "" {
			differ("%s: %s", what, d)
		}
	}
	same := func(what string, got, want goldenArray) { within(what, got, want, want.bound()) }
	if len(got.stepLoss) != len(c.StepLoss) {
		differ("%d steps: want %d", len(got.stepLoss), len(c.StepLoss))
	} else {
		for i, want := range c.StepLoss {
			switch loss := got.stepLoss[i]; {
			case (loss == nil) != (want == nil):
				differ("step %d skipped: %v, want %v", i+1, loss == nil, want == nil)
			case want != nil:
				same(fmt.Sprintf("loss of step %d", i+1), goldenNumber(*loss), goldenNumber(*want))
			}
			if want := c.GradientNorm[i]; c.ClipGlobalNorm > 0 && want != nil {
				same(fmt.Sprintf("gradient norm of step %d", i+1), goldenNumber(got.norms[i]), goldenNumber(*want))
			}
		}
	}
	names, decided := c.names(), c.decidedByRounding()
	for _, theirs := range slices.Sorted(maps.Keys(c.After)) {
		want := c.After[theirs]
		within(theirs+" after training", got.weights[names[theirs]], want, max(want.bound(), decided[theirs]))
	}
	for _, theirs := range slices.Sorted(maps.Keys(c.EMAAfter)) {
		want := c.EMAAfter[theirs]
		within("the average of "+theirs, got.averages[names[theirs]], want, max(want.bound(), decided[theirs]))
	}
	if (c.EMA > 0) != (len(c.EMAAfter) > 0) {
		differ("%d averages with a momentum of %v", len(c.EMAAfter), c.EMA)
	}
	if len(got.weights) != len(c.After) {
		differ("%d weights: want %d", len(got.weights), len(c.After))
	}
	if c.Evaluate.Loss != nil {
		// Lockstep's evaluation has the regularizers in its loss, as Keras' Model.evaluate has; the recorded one is
		// without.
		same("evaluated loss", goldenNumber(got.evaluated.Loss-c.penalty(got)), goldenNumber(*c.Evaluate.Loss))
	}
	if want := c.Evaluate.Accuracy; want != nil {
		same("evaluated accuracy", goldenNumber(got.evaluated.Metrics["accuracy"]), goldenNumber(*want))
	}
	if len(got.predicted) != len(c.Predict) {
		differ("%d predictions: want %d", len(got.predicted), len(c.Predict))
	} else {
		for i, want := range c.Predict {
			same(fmt.Sprintf("prediction %d", i), got.predicted[i], want)
		}
	}
	return differences
}

// penalty is the regularizers' part of a loss with the final weights.
func (c *goldenTraining) penalty(got *trainedGolden) (sum float64) {
	names := c.names()
	for _, l := range c.Layers {
		if l.L2 == 0 {
			continue
		}
		for _, x := range got.weights[names[l.Name+"/kernel"]].values {
			sum += l.L2 * x * x
		}
	}
	return sum
}

func goldenNumber(x float64) goldenArray { return goldenArray{values: []float64{x}} }

func goldenArrayOf(t *tensor.Tensor) goldenArray {
	return goldenArray{slices.Clone(t.Shape()), t.Float64s()}
}

// tensor returns the numbers as a tensor of float32 or int32.
func (n goldenArray) tensor(dtype tensor.DType) *tensor.Tensor {
	t := tensor.New(dtype, n.shape...)
	for i, x := range n.values {
		if dtype == tensor.Int32 {
			tensor.Data[int32](t)[i] = int32(x)
		} else {
			tensor.Data[float32](t)[i] = float32(x)
		}
	}
	return t
}

// goldenTolerance is how far a number may be from Keras', relative to the largest of its array: float32 sums in another
// order, and other kernels, over some tens of steps. goldenFloor is added to it, for arrays of numbers near 0.
const (
	goldenTolerance = 1e-4
	goldenFloor     = 1e-6
)

// bound returns how far numbers may be from those of n.
func (n goldenArray) bound() float64 {
	largest := 0.0
	for _, x := range n.values {
		largest = max(largest, math.Abs(x))
	}
	return goldenTolerance*largest + goldenFloor
}

// differs describes the element of n that is farthest from want, if it is farther than the bound.
func (n goldenArray) differs(want goldenArray, bound float64) string {
	if !slices.Equal(n.shape, want.shape) || len(n.values) != len(want.values) {
		return fmt.Sprintf("shape %v of %d numbers, want %v of %d", n.shape, len(n.values), want.shape, len(want.values))
	}
	worst, at := 0.0, -1
	for i, x := range want.values {
		d := math.Abs(n.values[i] - x)
		if math.IsNaN(d) {
			d = math.Inf(1)
		}
		if d > worst {
			worst, at = d, i
		}
	}
	if worst <= bound {
		return ""
	}
	return fmt.Sprintf("element %d of %v is %v, want %v: %.1e apart, more than %.0e",
		at, want.shape, n.values[at], want.values[at], worst, bound)
}

// TestGoldenDiffers checks that a number is compared relative to the largest number of its array.
func TestGoldenDiffers(t *testing.T) {
	array := func(values ...float64) goldenArray { return goldenArray{[]int{len(values)}, values} }
	for _, c := range []struct {
		got, want goldenArray
		differ    bool
	}{
		{array(0.001, 0.002), array(0.001, 0.002), false},
		{array(0.00105, 0.002), array(0.001, 0.002), true}, // by 5 %
		{array(0.001001, 0.002), array(0.001, 0.002), false},
		{array(1e-5, 3), array(0, 3), false},
		{array(1e-5, 0), array(0, 0), true},
		{array(1e-7, 0), array(0, 0), false},
		{array(100.005), array(100), false},
		{array(100.05), array(100), true},
		{array(math.NaN()), array(1), true},
		{array(1, 2), array(1), true},
	} {
		if got := c.got.differs(c.want, c.want.bound()); (got != "") != c.differ {
			t.Errorf("%v, want %v: differs %v: %q", c.got.values, c.want.values, !c.differ, got)
		}
	}
}
