package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
)

// trainFlags are the flags of lockstep train.
type trainFlags struct {
	data dataFlags
	gptFlags
	model                        string
	hidden                       []int
	weights                      weightsFlags
	strategy                     string
	replicas                     int
	devices                      []string
	globalBatch, batchPerReplica int
	evalBatch                    int  // 0: as for training
	batchByDefault               bool // globalBatch is the default
	epochs, steps                int
	clipNorm, clipValue          float64
	noiseScale                   bool
	step                         stepFlags
	diloco                       dilocoFlags
	optimizer                    string
	adam                         optimizerFlags
	learningRate                 float64
	schedule                     string
	seed                         int64
	engine, plugin               string
	progress, summary, out       string
	workers                      workerFlags
	config                       configFlag
	checkpoint                   checkpointFlags
	callbacks                    callbackFlags
	trace                        traceFlags
	dashboard                    dashboardFlags
}

// replicasMax bounds the number of logical CPUs that a typing error can create, and so their memory: every replica
// holds a copy of the model. A step of so many replicas takes minutes on a few cores.
const replicasMax = 1024

func newTrain() *cobra.Command { return trainCommand(&trainFlags{}) }

// trainCommand returns lockstep train with its flags in o.
func trainCommand(o *trainFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a model on several replicas",
		Long: `Train trains a model on several replicas. In every step each replica computes
the gradients of its share of the global batch, the replicas all-reduce the
gradients, and every replica applies the same update.

Without flags it trains a small CNN on the handwritten digits that are built
into the program, with one replica per core. --data names your own: a folder of
images, a table, or a text. The batch size need not be a multiple of the number
of replicas, and the last batch may be partial: loss and metrics are means over
examples. On CPUs of one type the same command and seed give the same weights,
bit for bit. Another number of replicas adds in another order, so the last
digits differ.

With --strategy multi-worker this process is one worker of a job. The replicas
of all workers train together and get the same bits as in one process. The
worker's number, the number of workers and the rendezvous address are detected
and printed. They come from lockstep run, TF_CONFIG, torchrun, mpirun, Slurm,
Kubernetes, or the flags of a worker below. Give all workers the same flags,
except --replicas and --devices: before the first step the workers compare
programs, options, data and models. Worker 0, the chief, prints the progress and
writes the files. A job on several hosts needs a secret: lockstep run -H creates
one, otherwise set LOCKSTEP_SECRET on every host.

Ctrl-C on any worker finishes the step on all workers, writes the results so
far, and exits with code 130. A second Ctrl-C stops at once.`,
		Example: `  lockstep train
  lockstep train --replicas 1 --epochs 3 --summary summary.json
  lockstep train --data mnist --data-dir DIR --model mlp --epochs 3 --out run1
  lockstep train --data images --data-dir pets --image-size 32 --model resnet --flip
  lockstep train --data csv --data-file adult.csv --text-columns sex,income --label income
  lockstep train --data text --data-file book.txt --layers 6 --out run2
  lockstep run --nproc-per-node 2 -- lockstep train --strategy multi-worker --replicas 1
  lockstep train --devices CPU:0,CPU:1 --batch-per-replica 64 --optimizer sgd
  lockstep train --checkpoint-dir run1 --save-every 100
  lockstep train --weights run1/weights.safetensors --epochs 0
  lockstep train --config run1/config.yaml --seed 2 --out run2`,
		Args: noArguments,
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
	groupFlags(cmd, flagGroup{"Flags of the data", o.data.set}, flagGroup{"Flags of --model gpt", o.gptSet},
		flagGroup{"Flags of callbacks (docs/callbacks.md)", o.callbacks.set},
		flagGroup{"Flags of a worker (--strategy multi-worker)", o.workers.set})
	return cmd
}

func (o *trainFlags) add(f *pflag.FlagSet) {
	o.data.add(f)
	f.StringVar(&o.model, "model", "", "model: "+strings.Join(modelNames, ", ")+" (default cnn for images, mlp for "+
		"csv and parquet, gpt for text)")
	f.IntSliceVar(&o.hidden, "hidden", nil, "`widths` of the hidden layers of --model mlp (default 512,512)")
	o.weights.add(f)
	f.StringVar(&o.strategy, "strategy", "mirrored",
		"strategy: mirrored (several replicas), multi-worker (replicas of several processes), one-device")
	f.IntVar(&o.replicas, "replicas", 0, "number of replicas in this process (default one per accelerator, or one per "+
		"core if there are none)")
	f.StringSliceVar(&o.devices, "devices", nil, "devices of the replicas, such as CPU:0,CPU:1, instead of --replicas")
	f.IntVar(&o.globalBatch, "global-batch", 0, "examples per step, over all replicas of all workers (default 128 for "+
		"mnist, 32 for text, 64 for others)")
	f.IntVar(&o.batchPerReplica, "batch-per-replica", 0, "examples per step on each replica, instead of --global-batch")
	f.IntVar(&o.evalBatch, "eval-batch", 0, "examples that validation and test compute at once, over all replicas: more "+
		"than for training are often faster (default as for training)")
	f.IntVar(&o.epochs, "epochs", 0, "passes over the training data (default 25 for digits, 3 for mnist, 5 for text, "+
		"10 for others, or as many as --steps needs)")
	f.IntVar(&o.steps, "steps", 0, "stop after this many steps (default no limit)")
	o.step.add(f)
	o.diloco.add(f)
	f.Float64Var(&o.clipNorm, "clip-norm", 0, "limit for the global norm of the gradients (default no limit)")
	f.Float64Var(&o.clipValue, "clip-value", 0, "limit for the magnitude of each element of the gradients (default no "+
		"limit)")
	f.BoolVar(&o.noiseScale, "noise-scale", false, "report the gradient noise scale, the batch size above which a larger "+
		"one helps less and less (needs 2 replicas)")
	f.StringVar(&o.optimizer, "optimizer", "adam", "optimizer: "+names(optimizers))
	o.adam.add(f)
	f.Float64Var(&o.learningRate, "learning-rate", 0, "learning rate (default by optimizer: "+learningRates()+
		"; for text at most 0.001, except for sgd)")
	f.StringVar(&o.schedule, "schedule", "cosine", "learning-rate schedule over --epochs, or over --steps alone: cosine "+
		"(falls to --min-learning-rate), constant, one-cycle, linear (to --min-learning-rate), exponential (to 1 %), "+
		"step (a tenth after each third)")
	f.Int64Var(&o.seed, "seed", 1, "seed of the initial weights, of shuffling and of shifts")
	f.StringVar(&o.engine, "engine", "go", "compute engine: "+strings.Join(gomlx.Names, ", "))
	f.StringVar(&o.plugin, "xla-plugin", "", "PJRT plugin `file` for --engine xla (default $"+gomlx.PluginEnv+")")
	f.StringVar(&o.progress, "progress", "auto",
		"progress display: "+strings.Join(progressModes, ", ")+" (auto: bar on a terminal, else plain)")
	f.StringVar(&o.summary, "summary", "", "write the results to this `file`, as JSON (worker 0)")
	f.StringVar(&o.out, "out", "", "write weights, history, summary, "+configFile+" and "+reportFile+
		" into this `folder` (worker 0)")
	o.trace.add(f)
	o.dashboard.add(f, " (worker 0)")
	o.config.add(f)
	o.checkpoint.add(f)
	o.callbacks.add(f)
	o.workers.add(f)
	o.gptFlags.add(f, false)
}

// complete validates the flags and fills in the defaults that depend on other flags.
func (o *trainFlags) complete(given func(flag string) bool) error {
	if err := o.check(given); err != nil {
		return err
	}
	set := dataSets[o.data.name]
	if !given("shift") {
		o.data.shift = set.shift
	}
	if o.model == "" {
		o.model = set.model
	}
	if !given("learning-rate") {
		o.learningRate = optimizers[o.optimizer].rate
		if set.rate > 0 && o.optimizer != "sgd" {
			o.learningRate = min(o.learningRate, set.rate)
		}
	}
	if o.callbacks.minRate > o.learningRate {
		return usagef("--min-learning-rate %v: want at most --learning-rate, which is %v", o.callbacks.minRate,
			o.learningRate)
	}
	switch {
	case given("epochs"):
	case o.steps > 0:
		o.epochs = -1 // as many as the steps need
	default:
		o.epochs = set.epochs
	}
	if o.batchPerReplica == 0 && o.globalBatch == 0 {
		o.globalBatch, o.batchByDefault = set.batch, true
	}
	return nil
}

func (o *trainFlags) check(given func(flag string) bool) error {
	if err := o.checkNames(given); err != nil {
		return err
	}
	stray := o.workers.stray(given)
	switch {
	case given("clip-norm") && given("clip-value"):
		return usagef("--clip-norm and --clip-value exclude each other: give one of them")
	case given("global-batch") && given("batch-per-replica"):
		return usagef("--global-batch and --batch-per-replica exclude each other: the global batch is the batch per " +
			"replica times the number of replicas; give one of them")
	case o.engine != "xla" && given("xla-plugin"):
		return usagef("--xla-plugin is for --engine xla, not %s", o.engine)
	case stray != "" && o.strategy != multiWorker:
		return usagef("--%s is for --strategy multi-worker, not %s", stray, o.strategy)
	}
	return cmp.Or(o.checkNumbers(given), o.checkModel(given), o.data.check(given), o.step.check(),
		o.adam.check(given, o.optimizer), o.diloco.check(given), o.workers.check(), o.checkpoint.check(given),
		o.weights.check(given), errors.Join(o.callbacks.check(given, o), o.trace.check(given), o.dashboard.check(given)),
		o.checkDevices(given))
}

// checkNames checks the flags whose value is one of a list.
func (o *trainFlags) checkNames(given func(flag string) bool) error {
	for _, c := range []struct {
		flag, value string
		allowed     []string
	}{
		{"data", o.data.name, sorted(dataSets)},
		{"strategy", o.strategy, []string{"mirrored", multiWorker, "one-device"}},
		{"optimizer", o.optimizer, sorted(optimizers)},
		{"schedule", o.schedule, schedules},
		{"engine", o.engine, gomlx.Names},
		{"progress", o.progress, progressModes},
		{"model", o.model, modelNames},
	} {
		if (c.flag != "model" || given("model")) && !slices.Contains(c.allowed, c.value) {
			return usagef("--%s %s: want %s", c.flag, c.value, oneOf(c.allowed))
		}
	}
	return nil
}

func (o *trainFlags) checkNumbers(given func(flag string) bool) error {
	for _, c := range []struct {
		flag         string
		value, least int
	}{
		{"replicas", o.replicas, 1},
		{"global-batch", o.globalBatch, 1},
		{"batch-per-replica", o.batchPerReplica, 1},
		{"eval-batch", o.evalBatch, 1},
		{"epochs", o.epochs, 0},
		{"steps", o.steps, 1},
	} {
		if given(c.flag) && c.value < c.least {
			return usagef("--%s %d: want at least %d", c.flag, c.value, c.least)
		}
	}
	if o.replicas > replicasMax {
		return usagef("--replicas %d: want at most %d", o.replicas, replicasMax)
	}
	for _, c := range []struct {
		flag        string
		value, most float64
	}{
		{"clip-norm", o.clipNorm, math.MaxFloat64},
		{"clip-value", o.clipValue, math.MaxFloat64},
		{"learning-rate", o.learningRate, math.MaxFloat32},
	} {
		if given(c.flag) && !(c.value > 0 && c.value <= c.most) {
			return usagef("--%s %v: want a positive number", c.flag, c.value)
		}
	}
	return nil
}

// checkModel checks the flags of the model.
func (o *trainFlags) checkModel(given func(flag string) bool) error {
	model := cmp.Or(o.model, dataSets[o.data.name].model)
	if fit := modelsFor(o.data.name); given("model") && !slices.Contains(fit, model) {
		return usagef("--model %s does not fit --data %s: want %s", model, o.data.name, strings.Join(fit, ", "))
	}
	switch {
	case !given("hidden"):
	case model != "mlp":
		return usagef("--hidden is for --model mlp, not %s", model)
	case len(o.hidden) == 0 || slices.Min(o.hidden) < 1 || slices.Max(o.hidden) > dimensionMax:
		return usagef("--hidden %s: want widths from 1 to %s, such as 512,512", strings.Trim(fmt.Sprint(o.hidden), "[]"),
			grouped(dimensionMax))
	}
	return o.gptFlags.check(model)
}

func (o *trainFlags) checkDevices(given func(flag string) bool) error {
	switch {
	case given("replicas") && given("devices"):
		return usagef("--replicas and --devices exclude each other: every device listed gets one replica; give one of them")
	case given("devices") && len(o.devices) == 0:
		return usagef("--devices is empty: want a list such as CPU:0,CPU:1")
	case o.strategy == "one-device" && o.replicas > 1:
		return usagef("--strategy one-device has 1 replica, not %d: leave out --replicas, or use --strategy mirrored",
			o.replicas)
	case o.strategy == "one-device" && len(o.devices) > 1:
		return usagef("--strategy one-device takes one device, not %d: list one in --devices, or use --strategy mirrored",
			len(o.devices))
	}
	for i, name := range o.devices {
		o.devices[i] = strings.TrimSpace(name)
		d, err := distribute.ParseDevice(o.devices[i])
		switch {
		case o.devices[i] == "":
			return usagef("--devices %q: device %d of %d has no name: want a list such as CPU:0,CPU:1",
				strings.Join(o.devices, ","), i+1, len(o.devices))
		case err != nil:
			return usagef("--devices %s: %v", o.devices[i], err)
		case d.Index >= replicasMax:
			return usagef("--devices %s: want an index below %d", o.devices[i], replicasMax)
		}
	}
	return nil
}

// logicalCPUs returns how many CPU devices the replicas need.
func (o *trainFlags) logicalCPUs() int {
	n := o.replicas
	for _, name := range o.devices {
		if d, err := distribute.ParseDevice(name); err == nil {
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

// allOf joins names: a, b and c.
func allOf(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " and " + list[last]
}

// oneOf joins alternatives: a, b or c.
func oneOf(list []string) string {
	last := len(list) - 1
	return strings.Join(list[:last], ", ") + " or " + list[last]
}
