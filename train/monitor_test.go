package train

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
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

// scripted is a model whose loss is the label, so that a dataset decides the losses. Each step moves its weight by the
// learning rate.
func scripted() *gomlx.Model {
	return &gomlx.Model{
		Forward: func(s *model.Scope, in []*graph.Node) []*graph.Node {
			w := s.VariableWithShape("w", shapes.Make(dtypes.Float64)).NodeValue(in[0].Graph())
			return []*graph.Node{graph.Mul(in[0], w)}
		},
		Loss: func(labels, p []*graph.Node) *graph.Node {
			return graph.Add(labels[0], graph.Sub(p[0], graph.StopGradient(p[0])))
		},
		Optimizer: optimizer.EMA(optimizer.SGD().LearningRate(0.5).Done(), optimizer.EMAConfig{Momentum: 0.5}),
	}
}

// losses is a dataset of one example, whose label is another number of the list each time it is read.
func losses(list []float64, from int) data.Dataset {
	return data.FromSeq(1, func(context.Context) iter.Seq2[data.Element, error] {
		loss := list[min(from, len(list)-1)]
		from++
		return func(yield func(data.Element, error) bool) {
			yield(data.Batch{
				Inputs: []*tensor.Tensor{tensor.From([]float64{1})}, Labels: []*tensor.Tensor{tensor.From([]float64{loss})},
			}, nil)
		}
	})
}

// scriptedFit is a Fit of the scripted model of two steps an epoch.
type scriptedFit struct {
	values    []float64 // the validation losses
	from      int       // the first of them
	callbacks func(t *Trainer) ([]Callback, error)
	cfg       FitConfig
	backup    string // the folder; "": none
	every     int    // BackupConfig.EverySteps
}

// scriptedResult is the result of one worker.
type scriptedResult struct {
	history *History
	rate    float64
	weight  float64
}

// run makes the Fit over workers and returns the chief's result, which must be every worker's.
func (f scriptedFit) run(t *testing.T, layout []int) scriptedResult {
	t.Helper()
	engines, results := make([]engine.Engine, len(layout)), make([]scriptedResult, len(layout))
	for w, n := range layout {
		e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: n})
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		engines[w] = e
	}
	feature := []engine.Feature{{DType: tensor.Float64}}
	errs := overWorkersOn(t, layout, engines, func(w int, s *distribute.Strategy) (err error) {
		trainer, err := New(t.Context(), s, scripted(), Config{
			Inputs: feature, Labels: feature, GlobalBatch: 2, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return err
		}
		defer trainer.Close()
		cfg := f.cfg
		if cfg.Validation == nil {
			cfg.Validation = losses(f.values, f.from)
		}
		if f.backup != "" {
			dir := f.backup
			if w > 0 {
				dir = ""
			}
			b, err := NewBackup(trainer, BackupConfig{Dir: dir, EverySteps: f.every})
			if err != nil {
				return err
			}
			defer b.Close()
			cfg.Callbacks = append(cfg.Callbacks, b.Callback()) // first, and called last all the same
		}
		more, err := f.callbacks(trainer)
		if err != nil {
			return err
		}
		cfg.Callbacks = append(cfg.Callbacks, more...)
		four := data.Batch{
			Inputs: []*tensor.Tensor{tensor.From([]float64{1, 2, 3, 4})},
			Labels: []*tensor.Tensor{tensor.From([]float64{1, 1, 1, 1})},
		}
		if results[w].history, err = trainer.Fit(t.Context(), sizes(four, 2, 2), cfg); err != nil {
			return err
		}
		timeless(results[w].history)
		results[w].rate, _ = trainer.LearningRate()
		value, err := trainer.program.Read(0, 0)
		results[w].weight = value.Float64s()[0]
		return err
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v: %v", layout, err)
	}
	for w := range layout {
		if !reflect.DeepEqual(results[w], results[0]) {
			t.Errorf("%v: worker %d has %+v, the chief %+v", layout, w, results[w], results[0])
		}
	}
	return results[0]
}

// kerasCase is a recorded case of testdata/callbacks.json.
type kerasCase struct {
	Values        []float64
	Mode          string
	EarlyStopping struct {
		Patience   int
		MinDelta   float64 `json:"min_delta"`
		StartEpoch int     `json:"start_from_epoch"`
		Baseline   *float64
	} `json:"early_stopping"`
	ReduceLR struct {
		Factor             float64
		Patience, Cooldown int
		MinDelta           float64 `json:"min_delta"`
		MinRate            float64 `json:"min_lr"`
	} `json:"reduce_lr"`
	Epochs, Best int // of EarlyStopping
	Rates        []float64
}

func (c *kerasCase) mode() Mode {
	return map[string]Mode{"min": ModeMin, "max": ModeMax}[c.Mode]
}

// stopping returns the configuration of EarlyStopping.
func (c *kerasCase) stopping() EarlyStoppingConfig {
	e := c.EarlyStopping
	return EarlyStoppingConfig{
		Mode: c.mode(), MinDelta: e.MinDelta, Patience: e.Patience, Baseline: e.Baseline, StartFromEpoch: e.StartEpoch,
		RestoreBest: true,
	}
}

func kerasCases(t *testing.T) (list []kerasCase) {
	t.Helper()
	text, err := os.ReadFile("testdata/callbacks.json")
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err != nil || len(list) == 0 {
		t.Fatal(len(list), err)
	}
	return list
}

// TestLikeKerasCallbacks repeats Keras' recorded decisions of EarlyStopping and ReduceLROnPlateau: by one worker and
// by two, at once and resumed from a snapshot at any epoch.
func TestLikeKerasCallbacks(t *testing.T) {
	for i, c := range kerasCases(t) {
		if testing.Short() && i%4 > 0 {
			continue
		}
		stop := func(trainer *Trainer) ([]Callback, error) {
			callback, err := NewEarlyStopping(trainer, c.stopping())
			return []Callback{callback}, err
		}
		layout := [][]int{{2}, {1, 1}}[i/2%2]
		fit := scriptedFit{values: c.Values, callbacks: stop, cfg: FitConfig{Epochs: len(c.Values)}}
		got := fit.run(t, layout)
		if n := len(got.history.Epochs); n != c.Epochs {
			t.Errorf("case %d: stopped after %d epochs, Keras after %d", i, n, c.Epochs)
		}
		start := got.weight + 0.5*5*float64(c.Best+1)
		first := fit
		first.cfg.Epochs = 1
		if one := first.run(t, layout); math.Abs(one.weight+2.5-start) > 1e-9 {
			t.Errorf("case %d: the weights are of another epoch than %d, Keras' best one: %v, after one epoch %v", i, c.Best,
				got.weight, one.weight)
		}

		reduce := func(trainer *Trainer) ([]Callback, error) {
			r := c.ReduceLR
			callback, err := NewReduceLROnPlateau(trainer, ReduceLROnPlateauConfig{
				Mode: c.mode(), Factor: r.Factor, Patience: r.Patience, MinDelta: r.MinDelta, Cooldown: r.Cooldown,
				MinRate: r.MinRate,
			})
			return []Callback{callback}, err
		}
		plateau := scriptedFit{values: c.Values, callbacks: func(trainer *Trainer) ([]Callback, error) {
			list, err := reduce(trainer)
			return append(list, Callback{OnEpochEnd: func(_ context.Context, e Epoch) error {
				if rate, _ := trainer.LearningRate(); math.Abs(rate-c.Rates[e.Epoch]) > 1e-7 {
					t.Errorf("case %d: after epoch %d the rate is %v, Keras' %v", i, e.Epoch, rate, c.Rates[e.Epoch])
				}
				return nil
			}}), err
		}, cfg: FitConfig{Epochs: len(c.Values)}}
		want := plateau.run(t, layout)

		// Some are interrupted: a snapshot takes a while on a busy disk.
		if i%4 > 0 {
			continue
		}
		cut := 1 + i%(len(c.Values)-2)
		for name, whole := range map[string]struct {
			fit  scriptedFit
			want scriptedResult
		}{"EarlyStopping": {fit, got}, "ReduceLROnPlateau": {plateau, want}} {
			if name == "EarlyStopping" && cut >= c.Epochs {
				continue
			}
			part := whole.fit
			part.backup, part.every = filepath.Join(t.TempDir(), "backup"), 1000 // one at the end
			part.cfg.Epochs = cut
			part.run(t, layout)
			part.cfg.Epochs, part.from = len(c.Values), cut
			resumed := part.run(t, [][]int{{1, 1}, {2}}[i/4%2])
			if !reflect.DeepEqual(resumed, whole.want) {
				t.Errorf("case %d, %s: resumed after %d epochs:\n%+v, want\n%+v", i, name, cut, resumed, whole.want)
			}
		}
	}
}

// TestValidateEvery checks the validations between steps, by which callbacks decide, also with moving averages and
// resumed at any step.
func TestValidateEvery(t *testing.T) {
	values := []float64{5, 4, 3, 3.5, 3.6, 3.7, 3.8, 1}
	dir := t.TempDir()
	var validated []int
	fit := scriptedFit{values: values, callbacks: func(trainer *Trainer) ([]Callback, error) {
		stop, err := NewEarlyStopping(trainer, EarlyStoppingConfig{Patience: 3})
		return []Callback{{OnStepEnd: func(_ context.Context, s Step) error {
			if s.Validation != nil && trainer.strategy.Properties().ShouldCheckpoint {
				validated = append(validated, s.Epoch*2+s.Step)
			}
			return nil
		}}, stop}, err
	}, cfg: FitConfig{Epochs: 20, ValidateEvery: 3, EMA: true}}
	want := fit.run(t, []int{2})
	var steps []int
	for _, v := range want.history.Validations {
		steps = append(steps, v.Step)
	}
	if !slices.Equal(steps, validated) || len(steps) < 4 || steps[0] != 3 || !want.history.Stopped {
		t.Errorf("validated after steps %v, and in callbacks %v", steps, validated)
	}
	// A validation after each epoch takes a value of the script too, unless one after a step was just made.
	reads := 0
	for step := 2; step <= want.history.Steps; step++ {
		if step%3 == 0 || step%2 == 0 {
			reads++
		}
	}
	if last := want.history.Validations[len(want.history.Validations)-1]; last.Loss != values[min(reads, len(values))-1] {
		t.Errorf("%d steps with %d validations end with %+v", want.history.Steps, reads, last)
	}
	for cut := 1; cut < want.history.Steps; cut++ {
		part := fit
		part.backup, part.every = filepath.Join(dir, string(rune('a'+cut))), 1000
		part.cfg.Steps = cut
		part.run(t, []int{2})
		part.cfg.Steps, part.from = 0, 0
		for step := 2; step <= cut; step++ {
			if step%3 == 0 || step%2 == 0 {
				part.from++
			}
		}
		if cut%2 == 0 && cut%3 > 0 { // the epoch that Steps truncated is validated again when it goes on
			part.from--
		}
		if got := part.run(t, []int{1, 1}); !reflect.DeepEqual(got, want) {
			t.Errorf("resumed after %d steps:\n%+v, want\n%+v", cut, got, want)
		}
	}
}

// TestEMAOfFit checks that validation uses the averages, that ModelCheckpoint writes them, and that training goes on
// from the parameters.
func TestEMAOfFit(t *testing.T) {
	dir := t.TempDir()
	var averages []float64
	fit := scriptedFit{values: []float64{1}, callbacks: func(trainer *Trainer) ([]Callback, error) {
		c, err := NewModelCheckpoint(trainer, ModelCheckpointConfig{Path: filepath.Join(dir, "{epoch}")})
		return []Callback{c, {OnEpochEnd: func(ctx context.Context, _ Epoch) error {
			w, err := trainer.EMAWeights(ctx)
			averages = append(averages, w[0].Value.Float64s()[0])
			return err
		}}}, err
	}, cfg: FitConfig{Epochs: 2, EMA: true}}
	with := fit.run(t, []int{2})
	fit.cfg.EMA = false
	if without := fit.run(t, []int{2}); without.weight != with.weight {
		t.Errorf("with EMA the weight is %v, without %v", with.weight, without.weight)
	}
	start := with.weight + 5
	average, w := start, start
	for step, x := range []float64{1.5, 3.5, 1.5, 3.5} {
		w -= 0.5 * x
		if average = (average + w) / 2; step%2 == 1 && math.Abs(averages[step/2]-average) > 1e-12 {
			t.Errorf("the average after step %d is %v, want %v", step+1, averages[step/2], average)
		}
	}
}

// TestMonitorMistakes checks that wrong configurations are errors, at once or when Fit begins.
func TestMonitorMistakes(t *testing.T) {
	trainer, _ := newFake(t, 1, 7, fakeModel{})
	ds := sizes(lineExamples(7), 7)
	fit := func(c Callback, err error) error {
		if err != nil {
			return err
		}
		_, err = trainer.Fit(t.Context(), ds, FitConfig{Callbacks: []Callback{c}})
		return err
	}
	for want, f := range map[string]func() error{
		"Monitor is val_loss, and FitConfig.Validation is not set": func() error {
			return fit(NewEarlyStopping(trainer, EarlyStoppingConfig{}))
		},
		"Monitor is far: the model has no such metric: want one of loss, near, val_loss": func() error {
			return fit(NewEarlyStopping(trainer, EarlyStoppingConfig{Monitor: "far"}))
		},
		"Patience -1": func() error { return fit(NewEarlyStopping(trainer, EarlyStoppingConfig{Patience: -1})) },
		"Mode is Mode(7)": func() error {
			return fit(NewEarlyStopping(trainer, EarlyStoppingConfig{Monitor: "loss", Mode: 7}))
		},
		"has Factor 2": func() error {
			return fit(NewReduceLROnPlateau(trainer, ReduceLROnPlateauConfig{Factor: 2}))
		},
		"ReduceLROnPlateau: the optimizer has no learning rate in a variable": func() error {
			return fit(NewReduceLROnPlateau(trainer, ReduceLROnPlateauConfig{Monitor: "loss"}))
		},
		"ValidateEvery is 3, and Validation is not set": func() error {
			_, err := trainer.Fit(t.Context(), ds, FitConfig{ValidateEvery: 3})
			return err
		},
		"FitConfig.EMA is set, and the optimizer keeps no moving averages": func() error {
			_, err := trainer.Fit(t.Context(), ds, FitConfig{EMA: true})
			return err
		},
		"without a Name": func() error { return fit(Callback{Save: func() []Weight { return nil }}, nil) },
		"two callbacks named": func() error {
			_, err := trainer.Fit(t.Context(), ds, FitConfig{Callbacks: []Callback{{Name: "a"}, {Name: "a"}}})
			return err
		},
	} {
		if err := f(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestRestoreBestAgain resumes a Fit that has ended, which takes no step.
func TestRestoreBestAgain(t *testing.T) {
	for _, steps := range []int{0, 6} {
		fit := scriptedFit{values: []float64{5, 1, 4, 4, 4}, callbacks: func(trainer *Trainer) ([]Callback, error) {
			stop, err := NewEarlyStopping(trainer, EarlyStoppingConfig{Patience: 9, RestoreBest: true})
			return []Callback{stop}, err
		}, cfg: FitConfig{Epochs: 4, Steps: steps}, backup: t.TempDir()}
		first := fit.run(t, []int{2})
		fit.from = 3
		if second := fit.run(t, []int{1, 1}); first.weight != second.weight {
			t.Errorf("with %d steps at most: got weight %v, want %v", steps, second.weight, first.weight)
		}
	}
}
