package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/train"
)

// benchTrainFlags are the flags of lockstep bench train.
type benchTrainFlags struct {
	model, optimizer      string
	engine                setup.EngineFlags
	format                string
	replicas, globalBatch int
	rounds                int
	steps                 int // 0: by time
	alone                 bool
	step                  setup.StepFlags
	trace                 setup.TraceFlags
	setup.GPTFlags
	setup.WorkerFlags
}

// Training is measured as the scripts of other libraries do: one round to warm up, then the median of the other rounds.
const (
	benchRounds       = 7
	benchSteps        = 20 // the least of a round
	benchLearningRate = 0.01
	forwardPasses     = 9 // that are timed
)

func newBenchTrain() *cobra.Command {
	var o benchTrainFlags
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Measure training steps in images or sequences per second",
		Long: fmt.Sprintf(`Train measures whole training steps on random images that are already in memory:
one round to warm up, then the median of %d rounds of at least %d steps and %v
each:

  lockstep model=mlp replicas=2 global_batch=128 images/s=12345

The images have the shape of MNIST's; for resnet, which is ResNet-20, that of
CIFAR's. The model gpt is a transformer that predicts the tokens of random
sequences. gpt2 is GPT-2 small (124 million parameters), and llama a Llama of
110 million, both with sequences of 256 tokens. On the line sequences count as
images, and tokens/s follows. --format table shows the parts of a step: input,
computation, update, and the communication that is hidden behind the computation
or exposed. Forward and backward pass are one program, so the forward pass is
measured apart, and backward is the rest.

With --alone it also measures the computation of a step alone: blocks of %d
steps of replicas that never synchronize. They alternate with blocks of training
steps, in the same run and on the same cores. It prints how much longer a step
takes than its computation, as the median of the ratios of neighbouring blocks.
Its shares are how much of that remains if the replicas exchange nothing but
wait for the slowest after each step, what is added if they sum their gradients,
the wait for input, and the rest. Last is the time to move the gradients' bytes
once, which no step can avoid.

With --workers the replicas are divided among so many processes of this machine,
at most one per replica, each on its own cores. Under lockstep run it measures
the workers of that job.`, benchRounds, benchSteps, roundTime, benchSteps),
		Example: `  lockstep bench train --model mlp --replicas 2 --global-batch 512
  lockstep bench train --model mlp --replicas 2 --workers 2 --format table
  lockstep bench train --model cnn --replicas 1 --global-batch 64 --engine xla
  lockstep bench train --model mlp --bucket-bytes 1MiB --accumulate 4 --format table
  lockstep bench train --model gpt --global-batch 32 --layers 6 --width 192 --heads 6
  lockstep bench train --model gpt2 --replicas 1 --global-batch 1 --steps 5 --format table`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("replicas") {
				o.replicas = max(runtime.GOMAXPROCS(0), o.Workers)
			}
			if err := errors.Join(o.check(), o.trace.Check(cmd.Flags().Changed), o.trace.CheckWritable()); err != nil {
				return err
			}
			if err := o.checkMemory(); err != nil {
				return err
			}
			if o.alone && o.steps == 0 {
				o.steps = benchSteps
			}
			o.Workers = min(o.Workers, o.replicas)
			job, err := o.job()
			if err != nil {
				return err
			}
			if job.Workers == 1 && o.Workers > 1 {
				return runBenchWorkers(cmd, o)
			}
			return runBenchTrain(cmd.Context(), cmd.OutOrStdout(), o, job)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	cli.ChoiceVar(f, &o.model, "model", "mlp", "", benchModels...)
	cli.ChoiceVar(f, &o.optimizer, "optimizer", "sgd", "", cli.Sorted(setup.Optimizers)...)
	f.IntVar(&o.replicas, "replicas", 0, "number of replicas, of all workers together (default one per core)")
	f.IntVar(&o.globalBatch, "global-batch", 128, "examples per step, over all replicas")
	o.engine.Add(f)
	o.step.Add(f)
	o.trace.Add(f)
	f.BoolVar(&o.alone, "alone", false, "also measure how much longer a step takes than its computation alone")
	f.IntVar(&o.rounds, "rounds", benchRounds, "rounds to measure, after one to warm up")
	f.IntVar(&o.steps, "steps", 0, fmt.Sprintf("steps of a round (default at least %d and %v; %d with --alone)",
		benchSteps, roundTime, benchSteps))
	cli.ChoiceVar(f, &o.format, "format", "plain", "plain (one line, for other programs), table or json", "plain", "table",
		"json")
	o.GPTFlags.Add(f, true)
	o.WorkerFlags.Add(f)
	cli.Limit(f, fmt.Sprintf("[1,%d]", setup.ReplicasMax), "replicas")
	cli.Limit(f, "[1,)", "global-batch", "rounds", "steps")
	cli.Limit(f, fmt.Sprintf("[1,%d]", bench.ProcessesMax), "workers")
	cli.GroupFlags(cmd, cli.FlagGroup{Heading: "Flags of --model gpt", Flags: o.GPTSet},
		cli.FlagGroup{Heading: "Flags of several workers", Flags: o.Set})
	return cmd
}

// checkMemory returns an error if the batch needs more memory than is available.
func (o *benchTrainFlags) checkMemory() error {
	left, ok := memlimit.Available()
	if need := o.globalBatch * o.workload().exampleBytes; ok && int64(need) > left {
		return cli.Usagef("--global-batch %d: its examples need at least %s of memory, and %s are available: "+
			"want a smaller batch", o.globalBatch, units.Bytes(need), units.Bytes(int(left)))
	}
	return nil
}

func (o *benchTrainFlags) check() error {
	if o.alone && o.steps == 1 {
		return cli.Usagef("--steps 1: want at least 2 with --alone")
	}
	return cmp.Or(o.engine.Check(), o.GPTFlags.Check(o.model), o.WorkerFlags.Check())
}

func runBenchTrain(ctx context.Context, out io.Writer, o benchTrainFlags, job *cluster.Job) (err error) {
	machine.TuneGC(job)
	in := cli.CatchInterrupts(ctx)
	defer in.Close()
	cfg, err := o.session(job)
	if err != nil {
		return err
	}
	s, err := setup.OpenSession(in, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	r := rounds{steps: o.steps, count: o.rounds}
	if s.Chief() {
		defer cli.Reassure(os.Stderr, func() string {
			return fmt.Sprintf("measuring %s on %s, %s done", cli.Count(o.replicas, "replica"), cli.Count(runtime.GOMAXPROCS(0),
				"core"), cli.Count(int(r.taken.Load()), "step"))
		})()
	}
	w, start := o.workload(), time.Now()
	if err := s.Compile(in, w.model, w.inputs, w.labels); err != nil {
		return err
	}
	compileTime := time.Since(start)
	r.clock = &setup.StepClock{Recorder: s.Trainer.Timeline()}
	fit := train.FitConfig{Accumulate: o.step.Accumulate}
	fit.Callbacks = []train.Callback{in.Callback(), r.callback(s.Chief())}
	batch := w.batch()
	var a *alone
	if o.alone {
		if a, err = newAlone(in, s, w, batch, o); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.close()) }()
		if fit.Callbacks = append(fit.Callbacks, a.callback()); r.count == benchRounds {
			r.count = aloneRounds
		}
	}
	if fit.Epochs, fit.StepsPerEpoch = 1+r.count, o.steps; o.steps == 0 {
		fit.Epochs, fit.StepsPerEpoch = 1, math.MaxInt32
	}
	examples, err := data.FromTensors(batch)
	if err != nil {
		return err
	}
	batches := examples.Batch(o.globalBatch)
	history, err := s.Trainer.Fit(ctx, batches, fit)
	switch {
	case err != nil:
		return err
	case history.Stopped && (o.steps > 0 || in.Interrupted.Load() || s.Chief() && !r.done()):
		return cli.ErrInterrupted
	}
	m := o.describe(s, job.Workers)
	m.PeakMemory, m.Compile, m.Step.StepTimes = machine.PeakMemory(), compileTime, r.clock.PerStep()
	if o.format != "plain" {
		if err := m.Step.divide(in, s.Trainer, batches, o.step.Accumulate); err != nil {
			return err
		}
	}
	if !s.Chief() {
		return nil
	}
	m.ReduceShare, m.WaitShare = cli.Number(history.Speed.ReduceShare), cli.Number(history.Speed.WaitShare)
	slices.Sort(r.rates)
	for _, x := range r.rates {
		m.Rounds = append(m.Rounds, cli.Number(x))
	}
	m.PerSecond = m.Rounds[len(m.Rounds)/2]
	m.Unit, m.Tokens = w.unit, m.PerSecond*cli.Number(w.tokens)
	if o.alone {
		cost := a.overhead()
		m.Alone = &cost
	}
	return m.print(out, &o)
}

// session returns the configuration of this worker's session.
func (o *benchTrainFlags) session(job *cluster.Job) (setup.SessionConfig, error) {
	cfg := setup.SessionConfig{
		Engine: o.engine, Replicas: o.replicas, LogicalCPUs: o.replicas,
		GlobalBatch: o.globalBatch, Seed: 1, Trace: o.trace.Config(),
		BucketBytes: o.step.BucketBytes.N, Exchange: o.step.Exchange(),
	}
	if job.Workers == 1 {
		return cfg, nil
	}
	return o.share(cfg, job)
}

// describe returns a result without measurements.
func (o *benchTrainFlags) describe(s *setup.Session, workers int) benchTrained {
	m := benchTrained{
		Model: o.model, Optimizer: o.optimizer, Strategy: fmt.Sprint(s.Strategy), Replicas: o.replicas,
		Workers: workers, GlobalBatch: o.globalBatch, Accumulate: o.step.Accumulate,
		BucketBytes: o.step.BucketBytes.N, Compression: o.step.Compress.String(), Precision: o.step.Precision,
		ShardOptimizer: s.Trainer.Sharded(), ParameterBytes: setup.ParameterBytes(s),
		OptimizerBytes: s.Trainer.OptimizerBytes(),
		Engine:         s.Engine.Name(), engine: s.Config.Engine.Describe(s.Engine), worker: s.OfThisWorker(),
	}
	m.host()
	return m
}
