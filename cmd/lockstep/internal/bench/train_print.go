package bench

import (
	"fmt"
	"io"
	"runtime"
	"time"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
	"github.com/lockstep-ml/lockstep/internal/units"
)

// benchTrained is a measurement of lockstep bench train, and its form as JSON.
type benchTrained struct {
	Model          string        `json:"model"`
	Optimizer      string        `json:"optimizer"`
	Strategy       string        `json:"strategy"`
	Replicas       int           `json:"replicas"`
	Workers        int           `json:"workers"`
	GlobalBatch    int           `json:"global_batch"`
	Accumulate     int           `json:"accumulate"`
	BucketBytes    int           `json:"bucket_bytes,omitempty"`
	Compression    string        `json:"compression"`
	Precision      string        `json:"precision"`
	ShardOptimizer bool          `json:"shard_optimizer"`
	Engine         string        `json:"engine"`
	Cores          int           `json:"cores"`
	OS             string        `json:"os"`
	Arch           string        `json:"arch"`
	Processor      string        `json:"processor"`
	Unit           string        `json:"unit"`                // what an example is: images or sequences
	PerSecond      cli.Number    `json:"examples_per_second"` // the median of the rounds
	Rounds         []cli.Number  `json:"rounds"`              // examples per second of each, the slowest first
	Tokens         cli.Number    `json:"tokens_per_second,omitempty"`
	ReduceShare    cli.Number    `json:"reduce_share"`
	WaitShare      cli.Number    `json:"wait_share"`
	Step           stepPhases    `json:"step"`       // the mean step of the first replica
	Compile        time.Duration `json:"compile_ns"` // of building and planning the graphs, and initial values
	PeakMemory     int           `json:"peak_memory_bytes,omitempty"`
	ParameterBytes int           `json:"parameter_bytes"`
	OptimizerBytes int           `json:"optimizer_bytes"`
	Alone          *overhead     `json:"alone,omitempty"`

	engine, worker string // descriptions, for people
}

func (m *benchTrained) print(out io.Writer, o *benchTrainFlags) error {
	switch o.format {
	case "plain":
		return m.plain(out, o)
	case "json":
		return cli.WriteJSON(out, m)
	}
	return m.table(out, o)
}

// plain prints one line for other programs.
func (m *benchTrained) plain(out io.Writer, o *benchTrainFlags) error {
	more := ""
	if m.Tokens > 0 {
		more = fmt.Sprintf(" tokens/s=%.0f", float64(m.Tokens))
	}
	more += o.step.Plain()
	if m.ShardOptimizer {
		more += " shard-optimizer=on"
	}
	if m.Alone != nil {
		more += m.Alone.plain()
	}
	_, err := fmt.Fprintf(out, "lockstep model=%s replicas=%d global_batch=%d images/s=%.0f%s\n", m.Model, m.Replicas,
		m.GlobalBatch, float64(m.PerSecond), more)
	return err
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
		cli.Count(m.Cores, "core"), m.OS, m.Arch, m.Processor, m.Unit+"/s", float64(m.PerSecond),
		float64(m.Rounds[0]), float64(m.Rounds[len(m.Rounds)-1]),
		100*float64(m.ReduceShare), 100*float64(m.WaitShare), m.worker)
	if err == nil && m.Tokens > 0 {
		_, err = fmt.Fprintf(out, "tokens/s      %.0f\n", float64(m.Tokens))
	}
	if err == nil {
		err = m.Step.table(out)
	}
	if err == nil {
		_, err = fmt.Fprintf(out, "compilation   %.2f s, with initial values\n", m.Compile.Seconds())
	}
	if err == nil && m.PeakMemory > 0 {
		_, err = fmt.Fprintf(out, "memory        at most %s resident in a worker: %s of parameters, %s of optimizer state\n",
			units.Bytes(m.PeakMemory), units.Bytes(m.ParameterBytes), units.Bytes(m.OptimizerBytes))
	}
	if err == nil && m.Alone != nil {
		err = m.Alone.table(out)
	}
	return err
}

// host sets the fields that describe this machine.
func (m *benchTrained) host() {
	m.Cores, m.OS, m.Arch, m.Processor = runtime.GOMAXPROCS(0), runtime.GOOS, runtime.GOARCH, machine.Vectors()
}
