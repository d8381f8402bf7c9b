// Package training is lockstep train: its flags, a run, and the files that it writes.
package training

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/gomlx/gomlx/ml/train/optimizer"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/datasets"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/monitor"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/train"
)

// Flags are the flags of lockstep train.
type Flags struct {
	Data datasets.Flags
	setup.GPTFlags
	Model                        string
	hidden                       []int
	weights                      weightsFlags
	strategy                     string
	replicas                     int
	devices                      []string
	GlobalBatch, BatchPerReplica int
	evalBatch                    int  // 0: as for training
	batchByDefault               bool // globalBatch is the default
	epochs, steps                int
	clipNorm, clipValue          float64
	noiseScale                   bool
	Step                         setup.StepFlags
	diloco                       dilocoFlags
	optimizer                    string
	adam                         setup.OptimizerFlags
	learningRate                 float64
	schedule                     string
	seed                         int64
	engine                       setup.EngineFlags
	progress, summary, out       string
	workers                      setup.WorkerFlags
	config                       configFlag
	checkpoint                   checkpointFlags
	callbacks                    callbackFlags
	trace                        setup.TraceFlags
	dashboard                    monitor.Flags
}

// New returns lockstep train.
func New() *cobra.Command { return trainCommand(&Flags{}) }

// trainCommand returns lockstep train with its flags in o.
func trainCommand(o *Flags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a model on several replicas",
		Long: `Train trains a model on several replicas, which all-reduce their gradients in
every step. Without flags it trains a small CNN on the handwritten digits that
are built into the program, with one replica per core. The same command and seed
give the same weights, bit for bit, on CPUs of one type.

With --strategy multi-worker this process is one worker of a job, as lockstep
run, TF_CONFIG, torchrun, mpirun, Slurm, Kubernetes or flags describe it. Give
all workers the same flags, except --replicas and --devices.

The first Ctrl-C finishes the step on all workers and writes the results.
docs/flags.md explains all flags, also those that are set in a file of --config.`,
		Example: `  lockstep train --data mnist --data-dir DIR --model mlp --epochs 3 --out run1
  lockstep train --data images --data-dir pets --image-size 32 --model resnet
  lockstep train --data csv --data-file adult.csv --text-columns sex,income
  lockstep train --data text --data-file book.txt --layers 6 --checkpoint-dir run2
  lockstep run --nproc-per-node 2 -- lockstep train --strategy multi-worker`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.config.read(cmd); err != nil {
				return err
			}
			if err := o.complete(cmd.Flags().Changed); err != nil {
				return err
			}
			return runTrain(cmd.Context(), cmd.OutOrStdout(), *o)
		},
	}
	cmd.Flags().SortFlags = false
	o.add(cmd.Flags())
	cli.GroupFlags(cmd, cli.FlagGroup{Heading: "Flags of the data", Flags: o.Data.Set},
		cli.FlagGroup{Heading: "Flags of --model gpt", Flags: o.GPTSet},
		cli.FlagGroup{Heading: "Flags of callbacks (docs/callbacks.md)", Flags: o.callbacks.set},
		cli.FlagGroup{Heading: "Flags of a worker (--strategy multi-worker)", Flags: o.workers.Set})
	return cmd
}

// ReadFlags returns the flags in the config file of a run, and their defaults.
func ReadFlags(file string) (*Flags, error) {
	o := &Flags{}
	cmd := trainCommand(o)
	err := cmd.Flags().Set("config", file)
	if err == nil {
		err = o.config.read(cmd)
	}
	if err == nil {
		err = o.complete(cmd.Flags().Changed)
	}
	return o, err
}

// Averages reports whether training ends with moving averages of the weights.
func (o *Flags) Averages() bool { return o.callbacks.ema > 0 }

func (o *Flags) add(f *pflag.FlagSet) {
	o.Data.Add(f)
	cli.ChoiceVar(f, &o.Model, "model", "", strings.Join(setup.ModelNames, ", ")+" (default by data)",
		setup.ModelNames...)
	f.IntSliceVar(&o.hidden, "hidden", nil, "`widths` of mlp's layers (default 512,512)")
	o.weights.add(f)
	cli.ChoiceVar(f, &o.strategy, "strategy", "mirrored", "", "mirrored", multiWorker, "one-device")
	f.IntVar(&o.replicas, "replicas", 0, "of this process (default one per device)")
	f.StringSliceVar(&o.devices, "devices", nil, "of the replicas, such as CPU:0,CPU:1")
	f.IntVar(&o.GlobalBatch, "global-batch", 0, "examples per step, over all replicas (default 128 for mnist, 32 for "+
		"text, 64 for others)")
	f.IntVar(&o.BatchPerReplica, "batch-per-replica", 0, "instead of --global-batch")
	f.IntVar(&o.evalBatch, "eval-batch", 0, "of validation and test (default the same)")
	f.IntVar(&o.epochs, "epochs", 0, "passes over the data (default by data)")
	f.IntVar(&o.steps, "steps", 0, "stop after so many steps (default no limit)")
	o.Step.Add(f)
	o.diloco.add(f)
	f.Float64Var(&o.clipNorm, "clip-norm", 0, "limit for the gradients' global norm")
	f.Float64Var(&o.clipValue, "clip-value", 0, "limit for each element of the gradients")
	f.BoolVar(&o.noiseScale, "noise-scale", false, "report the gradient noise scale")
	cli.ChoiceVar(f, &o.optimizer, "optimizer", "adam", "", cli.Sorted(setup.Optimizers)...)
	o.adam.Add(f)
	f.Float64Var(&o.learningRate, "learning-rate", 0, "(default "+setup.LearningRates()+"; for text at most "+
		"0.001, except for sgd)")
	cli.ChoiceVar(f, &o.schedule, "schedule", "cosine", "", schedules...)
	f.Int64Var(&o.seed, "seed", 1, "of weights, order and shifts")
	o.engine.Add(f)
	cli.ChoiceVar(f, &o.progress, "progress", "auto", "", progressModes...)
	f.StringVar(&o.summary, "summary", "", "write the results into this `file`")
	f.StringVar(&o.out, "out", "", "write weights, history, summary, config and report into this `folder`")
	o.trace.Add(f)
	o.dashboard.Add(f, " (worker 0)")
	o.config.add(f)
	o.checkpoint.add(f)
	o.callbacks.add(f)
	o.workers.Add(f)
	o.GPTFlags.Add(f, false)
	cli.Limit(f, fmt.Sprintf("[1,%d]", setup.ReplicasMax), "replicas")
	cli.Limit(f, "[1,)", "global-batch", "batch-per-replica", "eval-batch", "steps")
	cli.Limit(f, "[0,)", "epochs")
	cli.Limit(f, "(0,)", "clip-norm", "clip-value")
	cli.Limit(f, "(0,3.4e38]", "learning-rate") // as a float32
	cli.FileOnly(f, "beta1", "channels", "dropout", "log-every", "no-header", "reduce-lr-factor")
	cli.NotCompared(f, "strategy", "replicas", "devices", "progress", "summary", "out", "config",
		"dashboard", "metrics")
}

// complete validates the flags and fills in the defaults that depend on other flags.
func (o *Flags) complete(given func(flag string) bool) error {
	if err := o.check(given); err != nil {
		return err
	}
	set := datasets.Kinds[o.Data.Name]
	if !given("shift") {
		o.Data.Shift = set.Shift
	}
	if o.Model == "" {
		o.Model = set.Model
	}
	if !given("learning-rate") {
		o.learningRate = setup.Optimizers[o.optimizer].Rate
		if set.Rate > 0 && o.optimizer != "sgd" {
			o.learningRate = min(o.learningRate, set.Rate)
		}
	}
	if o.callbacks.minRate > o.learningRate {
		return cli.Usagef("--min-learning-rate %v: want at most --learning-rate, which is %v", o.callbacks.minRate,
			o.learningRate)
	}
	switch {
	case given("epochs"):
	case o.steps > 0:
		o.epochs = -1 // as many as the steps need
	default:
		o.epochs = set.Epochs
	}
	if o.BatchPerReplica == 0 && o.GlobalBatch == 0 {
		o.GlobalBatch, o.batchByDefault = set.Batch, true
	}
	return nil
}

func (o *Flags) check(given func(flag string) bool) error {
	stray := o.workers.Stray(given)
	switch {
	case given("clip-norm") && given("clip-value"):
		return cli.Usagef("--clip-norm and --clip-value exclude each other: give one of them")
	case given("global-batch") && given("batch-per-replica"):
		return cli.Usagef("--global-batch and --batch-per-replica exclude each other: the global batch is the batch per " +
			"replica times the number of replicas; give one of them")
	case o.diloco.innerSteps > 0 && o.Step.Sharded():
		return cli.Usagef("--diloco and --shard-optimizer on exclude each other, because the workers have different " +
			"states of the optimizer: give one of them")
	case stray != "" && o.strategy != multiWorker:
		return cli.Usagef("--%s is for --strategy multi-worker, not %s", stray, o.strategy)
	}
	return cmp.Or(o.engine.Check(), o.checkModel(given), o.Data.Check(given),
		o.adam.Check(given, o.optimizer), o.diloco.check(given), o.workers.Check(), o.checkpoint.check(given),
		o.weights.check(given), errors.Join(o.callbacks.check(given, o), o.trace.Check(given), o.dashboard.Check(given)),
		o.checkDevices(given))
}

// checkModel checks the flags of the model.
func (o *Flags) checkModel(given func(flag string) bool) error {
	model := cmp.Or(o.Model, datasets.Kinds[o.Data.Name].Model)
	if fit := setup.ModelsFor(o.Data.Name); given("model") && !slices.Contains(fit, model) {
		return cli.Usagef("--model %s does not fit --data %s: want %s", model, o.Data.Name, strings.Join(fit, ", "))
	}
	switch {
	case !given("hidden"):
	case model != "mlp":
		return cli.Usagef("--hidden is for --model mlp, not %s", model)
	case len(o.hidden) == 0 || slices.Min(o.hidden) < 1 || slices.Max(o.hidden) > setup.DimensionMax:
		return cli.Usagef("--hidden %s: want widths from 1 to %s, such as 512,512", strings.Trim(fmt.Sprint(o.hidden), "[]"),
			cli.Grouped(setup.DimensionMax))
	}
	return o.GPTFlags.Check(model)
}

func (o *Flags) checkDevices(given func(flag string) bool) error {
	switch {
	case given("replicas") && given("devices"):
		return cli.Usagef("--replicas and --devices exclude each other: every device listed gets one replica; give one of " +
			"them")
	case given("devices") && len(o.devices) == 0:
		return cli.Usagef("--devices is empty: want a list such as CPU:0,CPU:1")
	case o.strategy == "one-device" && o.replicas > 1:
		return cli.Usagef("--strategy one-device has 1 replica, not %d: leave out --replicas, or use --strategy mirrored",
			o.replicas)
	case o.strategy == "one-device" && len(o.devices) > 1:
		return cli.Usagef("--strategy one-device takes one device, not %d: list one in --devices, or use --strategy mirrored",
			len(o.devices))
	}
	for i, name := range o.devices {
		o.devices[i] = strings.TrimSpace(name)
		d, err := device.Parse(o.devices[i])
		switch {
		case o.devices[i] == "":
			return cli.Usagef("--devices %q: device %d of %d has no name: want a list such as CPU:0,CPU:1",
				strings.Join(o.devices, ","), i+1, len(o.devices))
		case err != nil:
			return cli.Usagef("--devices %s: %v", o.devices[i], err)
		case d.Index >= setup.ReplicasMax:
			return cli.Usagef("--devices %s: want an index below %d", o.devices[i], setup.ReplicasMax)
		}
	}
	return nil
}

// logicalCPUs returns how many CPU devices the replicas need.
func (o *Flags) logicalCPUs() int {
	n := o.replicas
	for _, name := range o.devices {
		if d, err := device.Parse(name); err == nil {
			n = max(n, d.Index+1)
		}
	}
	switch {
	case n > 0:
		return n
	case o.strategy == "one-device":
		return 1
	}
	return runtime.GOMAXPROCS(0)
}

// NewModel returns the model of the flags for the examples.
func (o *Flags) NewModel(x *datasets.Examples, opt optimizer.Interface) *gomlx.Model {
	var m *gomlx.Model
	switch {
	case x.Text:
		m = setup.LanguageModel(&o.GPTFlags, x.Classes, opt)
	case x.Regression != nil:
		m = x.Regression.Model(o.hidden, opt)
	default:
		m = setup.NewClassifier(o.Model, x.Shape, x.Classes, o.hidden, opt)
	}
	m.Precision = gomlx.Precision(o.Step.Precision)
	return m
}

// dilocoFlags are the flags of DiLoCo.
type dilocoFlags struct {
	innerSteps        int // 0: gradients are exchanged in each step
	outerLearningRate float64
	outerMomentum     float64
}

func (o *dilocoFlags) add(f *pflag.FlagSet) {
	f.IntVar(&o.innerSteps, "diloco", 0, "steps between exchanges (default off)")
	f.Float64Var(&o.outerLearningRate, "outer-learning-rate", 0.7, "of --diloco")
	f.Float64Var(&o.outerMomentum, "outer-momentum", 0.9, "of --diloco, from 0 to 1")
	cli.Limit(f, "[1,), the number of steps between two exchanges", "diloco")
	cli.Limit(f, "(0,3.4e38]", "outer-learning-rate")
	cli.Limit(f, "[0,1)", "outer-momentum")
}

func (o *dilocoFlags) check(given func(flag string) bool) error {
	for _, flag := range []string{"outer-learning-rate", "outer-momentum"} {
		if given(flag) && o.innerSteps == 0 {
			return cli.Usagef("--%s is for --diloco: give both", flag)
		}
	}
	return nil
}

// config returns the configuration, or nil if DiLoCo is off.
func (o *dilocoFlags) config() *train.DiLoCo {
	if o.innerSteps == 0 {
		return nil
	}
	d := &train.DiLoCo{InnerSteps: o.innerSteps, LearningRate: o.outerLearningRate, Momentum: o.outerMomentum}
	if d.Momentum == 0 {
		d.Momentum = -1 // none
	}
	return d
}

// exchange returns train.Config.Exchange: nil if the engine chooses.
func (o *Flags) exchange() train.Exchange {
	exchange := o.Step.Exchange()
	if d := o.diloco.config(); d != nil {
		d.Compress = o.Step.Compress.Codec
		return *d
	}
	if exchange == nil && o.callbacks.gradients {
		return train.AllReduce{} // a sharded optimizer leaves each sum on one replica only
	}
	return exchange
}
