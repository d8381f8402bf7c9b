package main

import (
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/internal/units"
)

// benchTrained is a measurement of lockstep bench train, and its form as JSON.
type benchTrained struct {
	Model          string   `json:"model"`
	Optimizer      string   `json:"optimizer"`
	Strategy       string   `json:"strategy"`
	Replicas       int      `json:"replicas"`
	Workers        int      `json:"workers"`
	GlobalBatch    int      `json:"global_batch"`
	Accumulate     int      `json:"accumulate"`
	BucketBytes    int      `json:"bucket_bytes,omitempty"`
	Compression    string   `json:"compression"`
	Precision      string   `json:"precision"`
	ShardOptimizer bool     `json:"shard_optimizer"`
	Engine         string   `json:"engine"`
	Cores          int      `json:"cores"`
	OS             string   `json:"os"`
	Arch           string   `json:"arch"`
	Processor      string   `json:"processor"`
	Unit           string   `json:"unit"`                // what an example is: images or sequences
	PerSecond      number   `json:"examples_per_second"` // the median of the rounds
	Rounds         []number `json:"rounds"`              // examples per second of each, the slowest first
	Tokens         number   `json:"tokens_per_second,omitempty"`
	ReduceShare    number   `json:"reduce_share"`
	WaitShare      number   `json:"wait_share"`
	Step           struct {
		Input         time.Duration `json:"input_ns"`
		Computation   time.Duration `json:"computation_ns"`
		Forward       time.Duration `json:"forward_ns"` // measured apart
		Exposed       time.Duration `json:"exposed_ns"`
		Update        time.Duration `json:"update_ns"`
		Communication time.Duration `json:"communication_ns"`
	} `json:"step"` // the mean step of the first replica
	PeakMemory     int            `json:"peak_memory_bytes,omitempty"`
	ParameterBytes int            `json:"parameter_bytes"`
	OptimizerBytes int            `json:"optimizer_bytes"`
	Alone          *overheadAlone `json:"alone,omitempty"`

	engine, worker string // descriptions, for people
	step           stepTimes
	overhead       *overhead
}

// overheadAlone is an overhead as JSON.
type overheadAlone struct {
	Step          time.Duration `json:"step_ns"`
	Computation   time.Duration `json:"computation_ns"`
	Cost          number        `json:"overhead"` // 0.02: a step takes 2 % longer than its computation
	Low           number        `json:"overhead_quartile_1"`
	High          number        `json:"overhead_quartile_3"`
	Processor     number        `json:"processor_overhead"`
	Wait          number        `json:"wait_overhead"`          // of replicas that only wait for each other
	Expected      number        `json:"wait_overhead_expected"` // the same, if steps took independent times
	Exchange      number        `json:"exchange_overhead"`      // beyond it, of replicas that also sum their gradients
	Input         number        `json:"input_overhead"`
	Rest          number        `json:"rest_overhead"` // with the exchange, if that was not measured
	Update        time.Duration `json:"update_ns"`     // of computation; 0: not separate
	GradientBytes int           `json:"gradient_bytes"`
	Limit         time.Duration `json:"limit_ns"`
}

func (m *benchTrained) print(out io.Writer, o *benchTrainFlags) error {
	switch o.format {
	case "plain":
		return m.plain(out, o)
	case "json":
		return m.json(out)
	}
	return m.table(out, o)
}

// plain prints one line for other programs.
func (m *benchTrained) plain(out io.Writer, o *benchTrainFlags) error {
	more := ""
	if m.Tokens > 0 {
		more = fmt.Sprintf(" tokens/s=%.0f", float64(m.Tokens))
	}
	more += o.step.plain()
	if m.ShardOptimizer {
		more += " shard-optimizer=on"
	}
	if m.overhead != nil {
		more += m.overhead.plain()
	}
	_, err := fmt.Fprintf(out, "lockstep model=%s replicas=%d global_batch=%d images/s=%.0f%s\n", m.Model, m.Replicas,
		m.GlobalBatch, float64(m.PerSecond), more)
	return err
}

func (m *benchTrained) json(out io.Writer) error {
	s := m.step
	m.Step.Input, m.Step.Computation, m.Step.Forward, m.Step.Exposed = s.input, s.compute, s.forward, s.exposed
	m.Step.Update, m.Step.Communication = s.update, s.communication
	if a := m.overhead; a != nil {
		m.Alone = &overheadAlone{
			Step: a.step, Computation: a.alone, Cost: number(a.cost), Low: number(a.low), High: number(a.high),
			Processor: number(a.cpu), Wait: number(a.wait), Expected: number(a.expected), GradientBytes: a.bytes,
			Limit: a.limit, Exchange: number(a.exchange), Input: number(a.input), Rest: number(a.rest), Update: a.update,
		}
	}
	return writeJSON(out, m)
}

func (m *benchTrained) table(out io.Writer, o *benchTrainFlags) error {
	accumulated := ""
	if m.Accumulate > 1 {
		accumulated = fmt.Sprintf("\naccumulation  %d batches a step", m.Accumulate)
	}
	_, err := fmt.Fprintf(out, `model         %s
strategy      %s
global batch  %d
engine        %s
compression   %s
precision     %s%s
machine       %s, %s/%s, %s
%-13s %.0f (%.0f to %.0f)
all-reduce    %.1f %% of a step
wait          %.1f %% of a step, for collective calls%s
`, m.Model, m.Strategy, m.GlobalBatch, m.engine, m.Compression, m.Precision, accumulated,
		count(m.Cores, "core"), m.OS, m.Arch, m.Processor, m.Unit+"/s", float64(m.PerSecond),
		float64(m.Rounds[0]), float64(m.Rounds[len(m.Rounds)-1]),
		100*float64(m.ReduceShare), 100*float64(m.WaitShare), m.worker)
	if err == nil && m.Tokens > 0 {
		_, err = fmt.Fprintf(out, "tokens/s      %.0f\n", float64(m.Tokens))
	}
	if err == nil {
		err = m.step.table(out)
	}
	if err == nil && m.PeakMemory > 0 {
		_, err = fmt.Fprintf(out, "memory        at most %s resident in a worker: %s of parameters, %s of optimizer state\n",
			units.Bytes(m.PeakMemory), units.Bytes(m.ParameterBytes), units.Bytes(m.OptimizerBytes))
	}
	if err == nil && m.overhead != nil {
		err = m.overhead.table(out)
	}
	return err
}

// host sets the fields that describe this machine.
func (m *benchTrained) host() {
	m.Cores, m.OS, m.Arch, m.Processor = runtime.GOMAXPROCS(0), runtime.GOOS, runtime.GOARCH, vectors()
}
