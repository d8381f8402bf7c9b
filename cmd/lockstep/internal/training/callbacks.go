package training

import (
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"

	gomlxoptimizer "github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/optimizer"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/tensorboard"
	"github.com/lockstep-ml/lockstep/train/trainjob"
)

// callbackFlags are the flags of the callbacks of a training, and of what they need from the optimizer.
type callbackFlags struct {
	warmup                  int
	minRate                 float64
	ema                     float64
	validateEvery           int
	monitor                 string
	earlyStopping, reduceLR int
	reduceFactor            float64
	best                    string
	csv, json, tensorboard  string
	gradients               bool
	logEvery                int
	set                     *pflag.FlagSet
}

// constantSchedule is the value of --schedule that keeps the learning rate.
const constantSchedule = "constant"

// stepSchedules are the schedules of a learning rate over a number of steps. Those that end at a given rate
// take last.
var stepSchedules = map[string]func(rate, last float64, steps int) optimizer.Schedule{
	"cosine": func(rate, last float64, steps int) optimizer.Schedule {
		return optimizer.CosineDecay(rate, steps, last/rate)
	},
	"one-cycle": func(rate, _ float64, steps int) optimizer.Schedule {
		return optimizer.OneCycle(optimizer.OneCycleConfig{Max: rate, Steps: steps})
	},
	"linear": func(rate, last float64, steps int) optimizer.Schedule {
		return optimizer.PolynomialDecay(rate, steps, last, 1, false)
	},
	"exponential": func(rate, _ float64, steps int) optimizer.Schedule {
		return optimizer.ExponentialDecay(rate, steps, 0.01, false)
	},
	"step": func(rate, _ float64, steps int) optimizer.Schedule {
		return optimizer.StepDecay(rate, max((steps+2)/3, 1), 0.1)
	},
}

// schedules lists the values of --schedule.
var schedules = append([]string{constantSchedule}, cli.Sorted(stepSchedules)...)

func (o *callbackFlags) add(f *pflag.FlagSet) {
	s := pflag.NewFlagSet("", pflag.ContinueOnError)
	s.SortFlags = false
	s.IntVar(&o.warmup, "warmup-steps", 0, "`steps` in which the learning rate rises")
	s.Float64Var(&o.minRate, "min-learning-rate", 0, "`rate` at the end of cosine or linear")
	s.Float64Var(&o.ema, "ema", 0, "`share` that moving averages keep")
	s.IntVar(&o.validateEvery, "validate-every", 0, "validate after so many `steps` too")
	s.StringVar(&o.monitor, "monitor", "val_loss", "`name` of the number to decide by")
	s.IntVar(&o.earlyStopping, "early-stopping", 0, "`epochs` without improvement to stop after")
	s.IntVar(&o.reduceLR, "reduce-lr", 0, "`epochs` to reduce the learning rate after")
	s.Float64Var(&o.reduceFactor, "reduce-lr-factor", 0.1, "factor of --reduce-lr")
	s.StringVar(&o.best, "best", "", "write the best weights into this `file`")
	s.StringVar(&o.csv, "csv-log", "", "write metrics into this `file`, as CSV")
	s.StringVar(&o.json, "json-log", "", "write metrics into this `file`, as JSON")
	s.StringVar(&o.tensorboard, "tensorboard", "", "write event files into this `folder`")
	s.BoolVar(&o.gradients, "gradient-histograms", false, "of --tensorboard")
	s.IntVar(&o.logEvery, "log-every", 0, "write to the logs after so many `steps` too")
	cli.Limit(s, "[1,)", "warmup-steps", "validate-every", "early-stopping", "reduce-lr", "log-every")
	cli.Limit(s, "(0,1), such as 0.99", "ema")
	cli.Limit(s, "(0,1)", "reduce-lr-factor")
	cli.Limit(s, "[0,)", "min-learning-rate")
	cli.NotCompared(s, "csv-log", "json-log", "log-every")
	cli.ComparedIfGiven(s, "best", "tensorboard")
	o.set = s
	f.AddFlagSet(s)
}

func (o *callbackFlags) check(given func(flag string) bool, t *Flags) error {
	decides := o.earlyStopping > 0 || o.reduceLR > 0 || o.best != ""
	switch {
	case o.warmup > 0 && (t.schedule == constantSchedule || t.schedule == "one-cycle"):
		return cli.Usagef("--warmup-steps is for --schedule cosine, linear, exponential or step, not %s", t.schedule)
	case given("min-learning-rate") && t.schedule != "cosine" && t.schedule != "linear":
		return cli.Usagef("--min-learning-rate is for --schedule cosine or linear, not %s", t.schedule)
	case o.reduceLR > 0 && t.schedule != constantSchedule:
		return cli.Usagef("--reduce-lr needs --schedule constant: --schedule %s sets the learning rate", t.schedule)
	case o.validateEvery > 0 && t.Data.ValidationSplit == 0:
		return cli.Usagef("--validate-every needs --validation-split, the share of the training data to validate by")
	case decides && strings.HasPrefix(o.monitor, "val_") && t.Data.ValidationSplit == 0:
		return cli.Usagef("--early-stopping, --reduce-lr and --best by %s need --validation-split, the share of the "+
			"training "+"data to validate by; or give --monitor loss", o.monitor)
	case given("monitor") && !decides:
		return cli.Usagef("--monitor is for --early-stopping, --reduce-lr and --best: give one of them")
	case given("reduce-lr-factor") && o.reduceLR == 0:
		return cli.Usagef("--reduce-lr-factor is for --reduce-lr: give both")
	case o.gradients && o.tensorboard == "":
		return cli.Usagef("--gradient-histograms is for --tensorboard: give both")
	case o.logEvery > 0 && o.csv == "" && o.json == "" && o.tensorboard == "":
		return cli.Usagef("--log-every is for --csv-log, --json-log and --tensorboard: give one of them")
	}
	return nil
}

// checkMonitor returns an error if a training of the model has no number of the name of --monitor.
func (o *callbackFlags) checkMonitor(m *gomlx.Model, t *Flags) error {
	if o.earlyStopping == 0 && o.reduceLR == 0 && o.best == "" {
		return nil
	}
	known := []string{"loss", "val_loss"}
	for _, metric := range m.Metrics {
		if metric.Sums <= 1 || metric.Value != nil {
			known = append(known, metric.Name, "val_"+metric.Name)
		}
	}
	if t.clipNorm > 0 {
		known = append(known, "gradient_norm")
	}
	if t.noiseScale {
		known = append(known, "gradient_noise_scale")
	}
	slices.Sort(known)
	if !slices.Contains(known, o.monitor) {
		return cli.Usagef("--monitor %s: want %s", o.monitor, cli.OneOf(known))
	}
	return nil
}

// optimizer returns the run's optimizer. It needs r.batch.
func (r *trainRun) optimizer() gomlxoptimizer.Interface {
	o, rate := &r.flags.callbacks, r.flags.learningRate
	opt := setup.Optimizers[r.flags.optimizer].Make(rate, r.flags.adam)
	if schedule := stepSchedules[r.flags.schedule]; schedule != nil {
		s := schedule(rate, o.minRate, max(r.plannedSteps()-o.warmup, 1))
		if o.warmup > 0 {
			s = optimizer.LinearWarmup(0, rate, o.warmup, s)
		}
		opt = optimizer.Scheduled(opt, s)
	}
	if o.ema > 0 {
		opt = optimizer.EMA(opt, optimizer.EMAConfig{Momentum: o.ema})
	}
	return opt
}

// plannedSteps returns the number of steps over which the schedule runs: those of --epochs, which --steps may end
// earlier, or those of --steps alone.
func (r *trainRun) plannedSteps() int {
	if r.flags.epochs < 0 {
		return min(r.flags.steps, math.MaxInt32)
	}
	n, examples := r.batch*r.flags.Step.Accumulate, max(r.kept.Len(), 1)
	return min(r.flags.epochs, math.MaxInt32/examples) * ((examples + n - 1) / n)
}

// callbacks adds the callbacks to the configuration of Fit.
func (r *trainRun) callbacks(cfg *train.FitConfig) error {
	trainJob, inTrainJob := trainjob.FromEnvironment(os.LookupEnv)
	o, t := &r.flags.callbacks, r.Trainer
	cfg.EMA, cfg.ValidateEvery = o.ema > 0, o.validateEvery
	for _, c := range []struct {
		wanted bool
		make   func() (train.Callback, error)
	}{
		{o.reduceLR > 0, func() (train.Callback, error) {
			return train.NewReduceLROnPlateau(t, train.ReduceLROnPlateauConfig{
				Monitor: o.monitor, Patience: o.reduceLR, Factor: o.reduceFactor,
			})
		}},
		{o.best != "", func() (train.Callback, error) {
			return train.NewModelCheckpoint(t, train.ModelCheckpointConfig{
				Path: o.best, BestOnly: true, Monitor: o.monitor, Metadata: r.metadata,
			})
		}},
		{o.csv != "", func() (train.Callback, error) {
			return train.NewCSVLogger(t, train.LoggerConfig{Path: o.csv, EverySteps: o.logEvery})
		}},
		{o.json != "", func() (train.Callback, error) {
			return train.NewJSONLogger(t, train.LoggerConfig{Path: o.json, EverySteps: o.logEvery})
		}},
		{o.tensorboard != "", func() (train.Callback, error) {
			return tensorboard.New(t, tensorboard.Config{
				Dir: o.tensorboard, EverySteps: o.logEvery, HistogramEvery: 1, Gradients: o.gradients, HParams: map[string]any{
					"model": r.flags.Model, "optimizer": r.flags.optimizer, "learning_rate": r.flags.learningRate,
					"schedule": r.flags.schedule, "batch": r.batch, "seed": r.flags.seed, "ema": o.ema,
				},
			})
		}},
		{inTrainJob && r.chief, func() (train.Callback, error) {
			trainJob.Steps = cfg.Steps
			return trainjob.New(t, trainJob)
		}},
		{o.earlyStopping > 0, func() (train.Callback, error) {
			c, err := train.NewEarlyStopping(t, train.EarlyStoppingConfig{
				Monitor: o.monitor, Patience: o.earlyStopping, RestoreBest: true,
			})
			return r.noteEarly(c), err
		}},
		{o.ema > 0 && o.earlyStopping == 0, func() (train.Callback, error) {
			return train.Callback{OnTrainDone: func(ctx context.Context, _ *train.History) error {
				weights, err := t.EMAWeights(ctx)
				if err != nil {
					return err
				}
				return t.SetWeights(weights)
			}}, nil
		}},
	} {
		if !c.wanted {
			continue
		}
		callback, err := c.make()
		if err != nil {
			return err
		}
		cfg.Callbacks = append(cfg.Callbacks, callback)
	}
	return nil
}

// noteEarly notes that a callback ended training: the results are as complete as after all epochs.
func (r *trainRun) noteEarly(c train.Callback) train.Callback {
	note := func(err error) error {
		r.stoppedEarly = r.stoppedEarly || errors.Is(err, train.ErrStop)
		return err
	}
	begin, step, end := c.OnEpochBegin, c.OnStepEnd, c.OnEpochEnd
	if begin != nil {
		c.OnEpochBegin = func(ctx context.Context, e train.EpochBegin) error { return note(begin(ctx, e)) }
		c.OnStepEnd = func(ctx context.Context, s train.Step) error { return note(step(ctx, s)) }
		c.OnEpochEnd = func(ctx context.Context, e train.Epoch) error { return note(end(ctx, e)) }
	}
	return c
}
