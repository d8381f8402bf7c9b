package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/setup"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
	"github.com/lockstep-ml/lockstep/train/compress"
)

// aloneRounds is the number of blocks of steps that --alone measures, each followed by blocks of the computation alone.
const aloneRounds = 25

// alone runs only the computation of a step: the same programs with the same batch on the same devices, by
// replicas that never synchronize, that only wait for each other, or that also sum their gradients. It has separate
// variables.
type alone struct {
	strategy  *distribute.Strategy
	exchanges bool             // the steps of a training all-reduce the gradients as they are
	clock     *setup.StepClock // of the training
	programs  []engine.Program // one per replica, because a commit is for all replicas of a program
	batch     engine.Batch
	micros    int     // micro-batches of a step
	weightSum float64 // of a step
	perBlock  int     // steps
	blocks    []block
	times     []time.Duration // of the steps of the replicas that never synchronize
	updates   []time.Duration // update and commit of them

	start     time.Time // of the steps being measured
	processor time.Duration
}

// block holds the time per step of a block of whole steps, and of the blocks of the computation alone that follow it:
// by replicas that never synchronize, by replicas that wait for each other after each step, and by replicas that sum
// their gradients before each update.
type block struct {
	step, alone, together, exchange taken
	input                           time.Duration // of step: the first replica waits for its batch
}

// taken is an elapsed time, and the processor time of this process.
type taken struct{ clock, processor time.Duration }

// newAlone compiles the model again, for the devices of the session and a replica's share of the batch.
func newAlone(ctx context.Context, s *setup.Session, w benchWorkload, batch data.Batch, o benchTrainFlags,
) (*alone, error) {
	n := s.Strategy.NumReplicasInSync()
	rows := (s.Config.GlobalBatch + n - 1) / n
	spec := engine.Spec{
		Rows: rows, Seed: s.Config.Seed, Replicas: n, Inputs: w.inputs, Labels: w.labels, BucketBytes: s.Config.BucketBytes,
	}
	a := &alone{
		strategy:  s.Strategy,
		exchanges: n > 1 && o.step.Compress.Codec.Method == compress.None && !s.Trainer.Sharded(),
		clock:     &setup.StepClock{Recorder: s.Trainer.Timeline()},
		weightSum: float64(s.Config.GlobalBatch * o.step.Accumulate), micros: o.step.Accumulate, perBlock: o.steps,
	}
	for _, d := range s.Strategy.EngineDevices() {
		spec.Devices = []engine.Device{d}
		program, err := w.model.Compile(ctx, s.Engine, spec)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("the computation alone: %w", err), a.close())
		}
		a.programs = append(a.programs, program)
	}
	for _, t := range batch.Inputs {
		a.batch.Inputs = append(a.batch.Inputs, t.Rows(0, rows))
	}
	for _, t := range batch.Labels {
		a.batch.Labels = append(a.batch.Labels, t.Rows(0, rows))
	}
	for range rows {
		a.batch.Weights = append(a.batch.Weights, 1)
	}
	return a, nil
}

// steps runs n steps on every replica, concurrently. With record set, it keeps the time of each.
func (a *alone) steps(ctx context.Context, n int, record bool) error {
	errs := make([]error, len(a.programs))
	times, updates := make([][]time.Duration, len(a.programs)), make([][]time.Duration, len(a.programs))
	var done sync.WaitGroup
	for replica, p := range a.programs {
		done.Go(func() {
			for i := 0; i < n && errs[replica] == nil; i++ {
				start := time.Now()
				var update time.Duration
				update, errs[replica] = a.step(ctx, p, uint64(i), nil)
				times[replica] = append(times[replica], time.Since(start))
				updates[replica] = append(updates[replica], update)
			}
		})
	}
	done.Wait()
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("the computation alone: %w", err)
		}
	}
	if record {
		a.times = append(a.times, slices.Concat(times...)...)
		a.updates = append(a.updates, slices.Concat(updates...)...)
	}
	return nil
}

// together runs n steps on every replica. After each one, all replicas of the job wait for the slowest, by an
// all-reduce of one number, or with sum set they sum their gradients in each step. The clock starts after the first
// step.
func (a *alone) together(ctx context.Context, n int, sum bool) (taken, error) {
	var t taken
	step := func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
		p := a.programs[r.LocalID()]
		number := []*tensor.Tensor{tensor.New(tensor.Float32, 1)}
		var e *exchange
		if sum {
			e = newExchange(p, r)
		}
		for i := range n + 1 {
			if _, err := a.step(ctx, p, uint64(i), e); err != nil {
				return struct{}{}, err
			}
			if !sum {
				if err := r.AllReduceInto(ctx, distribute.Sum, number, number, nil); err != nil {
					return struct{}{}, err
				}
			}
			if i == 0 && r.LocalID() == 0 {
				a.begin()
			}
		}
		if r.LocalID() == 0 {
			t = a.end(n)
		}
		return struct{}{}, nil
	}
	_, err := distribute.Run(ctx, a.strategy, step, nil)
	if err != nil {
		return t, fmt.Errorf("the computation alone, synchronized: %w", err)
	}
	return t, nil
}

// step computes gradients and updates. e, if not nil, sums the gradients in between. update is the time of the update
// and the commit; 0 if they are not separate.
func (a *alone) step(ctx context.Context, p engine.Program, seed uint64, e *exchange) (update time.Duration,
	err error,
) {
	m := engine.Micro{Batch: a.batch, WeightSum: a.weightSum, RNG: [3]uint64{seed, 0, 0}}
	if p.Info().WholeStep && a.micros == 1 && e == nil {
		m.Last = true
		_, _, err := p.Step(ctx, m)
		p.Commit()
		return 0, err
	}
	var ready func(bucket int)
	if e != nil {
		ready = func(k int) { e.ready(ctx, k) }
	}
	for i := range a.micros {
		m.Add, m.Last = i > 0, i == a.micros-1
		if _, err := p.Gradients(ctx, 0, m, ready); err != nil {
			return 0, err
		}
	}
	if e != nil {
		if err := e.finish(ctx); err != nil {
			return 0, err
		}
		p.Commit()
		return 0, nil
	}
	start := time.Now()
	for part := range p.Parts(0) {
		if err := p.Update(ctx, 0, 0, part, 1); err != nil {
			return 0, err
		}
	}
	p.Commit()
	return time.Since(start), nil
}

// exchange sums the gradients of a replica's program with those of all replicas, as a training step does without
// compression and a sharded optimizer: bucket by bucket, the last one with some scalars, each followed by its updates.
type exchange struct {
	program   engine.Program
	replica   *distribute.Replica
	gradients [][]*tensor.Tensor // by bucket
	parts     [][]int            // by bucket: those that it completes
	calls     []distribute.Handle
	scalars   []float64
	failure   error // of ready
}

// exchangedScalars is about the number of scalars that a training step sends: loss, metrics, and what workers compare.
const exchangedScalars = 12

func newExchange(p engine.Program, r *distribute.Replica) *exchange {
	e := &exchange{program: p, replica: r, scalars: make([]float64, exchangedScalars)}
	bucketOf := map[int]int{}
	for k, b := range p.Buckets() {
		e.gradients = append(e.gradients, make([]*tensor.Tensor, len(b.Parameters)))
		for _, parameter := range b.Parameters {
			bucketOf[parameter] = k
		}
	}
	e.parts = make([][]int, len(e.gradients))
	for part, list := range p.Parts(0) {
		last := 0
		for _, parameter := range list {
			last = max(last, bucketOf[parameter])
		}
		e.parts[last] = append(e.parts[last], part)
	}
	return e
}

// ready starts the call of a bucket, except of the last one: its call, which has the scalars, starts after the
// gradients program.
func (e *exchange) ready(ctx context.Context, k int) {
	if e.failure == nil && k < len(e.gradients)-1 {
		e.failure = e.start(ctx, k, nil)
	}
}

func (e *exchange) start(ctx context.Context, k int, scalars []float64) (err error) {
	list := e.gradients[k]
	for i, parameter := range e.program.Buckets()[k].Parameters {
		if list[i], err = e.program.Gradient(0, parameter); err != nil {
			return err
		}
	}
	h, err := e.replica.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Dst: list, Src: list, Scalars: scalars})
	if err == nil {
		e.calls = append(e.calls, h)
	}
	return err
}

// finish starts the last call, waits for all, and updates.
func (e *exchange) finish(ctx context.Context) error {
	if e.failure == nil {
		e.failure = e.start(ctx, len(e.gradients)-1, e.scalars)
	}
	if e.failure != nil {
		return e.failure
	}
	for k, h := range e.calls {
		if err := h.Wait(ctx); err != nil {
			return err
		}
		for _, part := range e.parts[k] {
			if err := e.program.Update(ctx, 0, 0, part, 1); err != nil {
				return err
			}
		}
	}
	e.calls = e.calls[:0]
	return nil
}

func (a *alone) close() error {
	var errs []error
	for _, p := range a.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// begin starts the clock. end returns the time of each of the n steps since then.
func (a *alone) begin() { a.start, a.processor = time.Now(), machine.ProcessorTime() }

func (a *alone) end(n int) taken {
	return taken{time.Since(a.start) / time.Duration(n), (machine.ProcessorTime() - a.processor) / time.Duration(n)}
}

// callback measures the steps of an epoch, then as many steps of the computation alone. The first step of each
// block does not count: the other kind of block has filled the caches, and with several workers it waits for
// slower workers.
func (a *alone) callback() train.Callback {
	return train.Callback{
		OnStepEnd: func(_ context.Context, s train.Step) error {
			if s.Step == 1 {
				a.clock.Reset()
				a.begin()
			}
			return nil
		},
		OnEpochEnd: func(ctx context.Context, e train.Epoch) error {
			n := e.Steps - 1
			if e.Steps < a.perBlock {
				return nil // interrupted
			}
			b := block{step: a.end(n)}
			a.clock.Add()
			b.input = a.clock.PerStep().Input
			err := a.steps(ctx, 1, false)
			if err == nil {
				a.begin()
				err = a.steps(ctx, n, e.Epoch > 0)
			}
			b.alone = a.end(n)
			if err == nil {
				b.together, err = a.together(ctx, n, false)
			}
			if err == nil && a.exchanges {
				b.exchange, err = a.together(ctx, n, true)
			}
			if e.Epoch > 0 {
				a.blocks = append(a.blocks, b)
			}
			return err
		},
	}
}

// overhead compares a step with its computation alone. The times are medians; the ratios are of neighbouring blocks:
// 0.02 means that a step takes 2 % longer than its computation.
type overhead struct {
	Step          time.Duration `json:"step_ns"`
	Alone         time.Duration `json:"computation_ns"`
	Cost          cli.Number    `json:"overhead"`
	Low           cli.Number    `json:"overhead_quartile_1"`
	High          cli.Number    `json:"overhead_quartile_3"`
	Processor     cli.Number    `json:"processor_overhead"`     // of processor time; 0 if unknown
	Wait          cli.Number    `json:"wait_overhead"`          // of replicas that only wait for each other
	Expected      cli.Number    `json:"wait_overhead_expected"` // the same, if steps took independent times
	Exchange      cli.Number    `json:"exchange_overhead"`      // beyond it, of replicas that also sum their gradients
	Input         cli.Number    `json:"input_overhead"`         // waiting for the batch
	Rest          cli.Number    `json:"rest_overhead"`          // all else; with the exchange, if that was not measured
	Update        time.Duration `json:"update_ns"`              // of Alone, with the commit; 0: not separate
	GradientBytes int           `json:"gradient_bytes"`         // of a replica
	Limit         time.Duration `json:"limit_ns"`

	exchanges bool // Exchange was measured
	replicas  int  // of the job
}

func (a *alone) overhead() overhead {
	var s overhead
	var step, alone []time.Duration
	var cost, cpu, wait, exchange, input []cli.Number
	for _, b := range a.blocks {
		step, alone = append(step, b.step.clock), append(alone, b.alone.clock)
		cost = append(cost, cli.Number(b.step.clock)/cli.Number(b.alone.clock)-1)
		wait = append(wait, cli.Number(b.together.clock)/cli.Number(b.alone.clock)-1)
		exchange = append(exchange, cli.Number(b.exchange.clock-b.together.clock)/cli.Number(b.alone.clock))
		input = append(input, cli.Number(b.input)/cli.Number(b.alone.clock))
		if b.alone.processor > 0 {
			cpu = append(cpu, cli.Number(b.step.processor)/cli.Number(b.alone.processor)-1)
		}
	}
	s.Step, s.Alone, s.Update = middle(step), middle(alone), middle(a.updates)
	s.Cost, s.Wait, s.Input = middle(cost), middle(wait), middle(input)
	if s.exchanges = a.exchanges; s.exchanges {
		s.Exchange = middle(exchange)
	}
	s.Rest = s.Cost - s.Wait - s.Exchange - s.Input
	s.replicas = a.strategy.NumReplicasInSync()
	s.Expected = cli.Number(expectedMaximum(a.times, s.replicas) - 1)
	s.Low, s.High = cost[len(cost)/4], cost[len(cost)*3/4]
	if len(cpu) > 0 {
		s.Processor = middle(cpu)
	}
	for _, v := range a.programs[0].Parameters() {
		bytes := v.DType.Bytes()
		for _, n := range v.Shape {
			bytes *= n
		}
		s.GradientBytes += bytes
	}
	s.Limit = bench.MemoryLimit(collective.AllReduce, len(a.programs), s.GradientBytes)
	return s
}

// expectedMaximum returns the expected maximum of n independent draws from a list, divided by the list's mean. With the
// list sorted, the i-th of m elements is the largest of the draws with probability (i/m)ⁿ - ((i-1)/m)ⁿ. It sorts the
// list.
func expectedMaximum(list []time.Duration, n int) float64 {
	slices.Sort(list)
	mean, largest := 0.0, 0.0
	for i, d := range list {
		m := float64(len(list))
		mean += float64(d) / m
		largest += float64(d) * (math.Pow(float64(i+1)/m, float64(n)) - math.Pow(float64(i)/m, float64(n)))
	}
	return largest / mean
}

// middle sorts a list and returns its median.
func middle[T interface{ ~int64 | ~float64 }](list []T) T {
	slices.Sort(list)
	return list[len(list)/2]
}

// plain formats the overhead for other programs, to be appended to a line.
func (s overhead) plain() string {
	return fmt.Sprintf(" step_us=%.0f alone_us=%.0f cost=%.1f%% processor_cost=%.1f%% wait_cost=%.1f%% "+
		"exchange_cost=%.1f%% input_cost=%.1f%% rest_cost=%.1f%%", micros(s.Step), micros(s.Alone), 100*s.Cost,
		100*s.Processor, 100*s.Wait, 100*s.Exchange, 100*s.Input, 100*s.Rest)
}

func (s overhead) table(out io.Writer) error {
	row := func(name string, share cli.Number, format string, args ...any) string {
		return fmt.Sprintf("  %-11s %+.1f %%: %s\n", name, 100*share, fmt.Sprintf(format, args...))
	}
	shares := row("waits", s.Wait, "the computation alone, if all wait for the slowest after each step "+
		"(%+.1f %% if the times of steps are independent)", 100*s.Expected)
	rest := "the test of the gradients, agreement, callbacks, statistics"
	switch {
	case s.exchanges:
		shares += row("exchange", s.Exchange, "beyond that, if all sum their gradients in each step")
	case s.replicas > 1:
		rest = "the exchange of the gradients, and everything else"
	}
	shares += row("input", s.Input, "the first replica waits for its batch") + row("rest", s.Rest, "%s", rest)
	update := ""
	if s.Update > 0 {
		update = fmt.Sprintf(" (update %.0f µs)", micros(s.Update))
	}
	_, err := fmt.Fprintf(out, `step          %.0f µs; its computation alone %.0f µs%s, measured alternately
overhead      %+.1f %% (half of the blocks: %+.1f to %+.1f), %+.1f %% of the processors' time
%splain copies  %+.1f %%: each replica copies %s of gradients once, %.0f µs
`, micros(s.Step), micros(s.Alone), update, 100*s.Cost, 100*s.Low, 100*s.High, 100*s.Processor, shares,
		100*float64(s.Limit)/float64(s.Alone), units.Bytes(s.GradientBytes), micros(s.Limit))
	return err
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
