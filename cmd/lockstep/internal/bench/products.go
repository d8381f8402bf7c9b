package bench

import (
	"bufio"
	"context"
	_ "embed"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/shapes"
	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/backend"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/machine"
)

// benchProductsFlags are the flags of lockstep bench products.
type benchProductsFlags struct {
	threads        []int
	rounds         int
	python, format string
	worker         bool // this is a process of the measurement
}

//go:embed products.py
var benchProductsScript string

// benchMatrix is a product of Rows × Depth by Depth × Columns elements, of each of a batch.
type benchMatrix struct {
	name string
	// transposed is the operand that lies in memory column by column: a, b, or - for none.
	transposed                  string
	batch, rows, depth, columns int
}

// benchMatrices are products of the training steps of small models, and two squares.
var benchMatrices = []benchMatrix{
	{"MLP, layer 1", "-", 1, 64, 784, 512},
	{"MLP, layer 2", "-", 1, 64, 512, 512},
	{"MLP, layer 3", "-", 1, 64, 512, 10},
	{"MLP, weights 1", "a", 1, 784, 64, 512},
	{"MLP, weights 2", "a", 1, 512, 64, 512},
	{"MLP, inputs 2", "b", 1, 64, 512, 512},
	{"CNN, windows", "-", 1, 6400, 288, 64},
	{"CNN, weights", "a", 1, 288, 6400, 64},
	{"CNN, inputs", "b", 1, 6400, 64, 288},
	{"CNN, dense", "-", 1, 64, 1600, 128},
	{"GPT, projections", "-", 1, 1024, 128, 384},
	{"GPT, attention", "-", 64, 64, 32, 64},
	{"GPT, output", "-", 1, 1024, 128, 128},
	{"GPT, up", "-", 1, 1024, 128, 512},
	{"GPT, down", "-", 1, 1024, 512, 128},
	{"GPT, logits", "-", 1, 1024, 128, 256},
	{"GPT, weights up", "a", 1, 128, 1024, 512},
	{"GPT, inputs up", "b", 1, 1024, 512, 128},
	{"GPT, weights p.", "a", 1, 128, 1024, 384},
	{"GPT, inputs down", "b", 1, 1024, 128, 512},
	{"square", "-", 1, 512, 512, 512},
	{"square", "-", 1, 1024, 1024, 1024},
}

// benchPeak is a product that runs at the rate of the fused multiply-adds: its left operand is one row, repeated,
// so that all that it reads lies in the first-level cache.
var benchPeak = benchMatrix{"peak", "repeated", 1, 32 * 14 * 12, 256, 32}

func (s *benchMatrix) operations() float64 {
	return 2 * float64(s.batch) * float64(s.rows) * float64(s.depth) * float64(s.columns)
}

func newBenchProducts() *cobra.Command {
	var o benchProductsFlags
	cmd := &cobra.Command{
		Use:   "products",
		Short: "Measure products of matrices on the Go engine",
		Long: `Products measures products of float32 matrices by the Go engine's backend: those
of the training steps of small models, and two squares. Each is a compiled graph
that is executed again and again. The measurements alternate, in rounds; the
numbers are medians.

The share is that of the peak, the rate of fused multiply-adds, which is measured
in the same rounds by a product that reads the first-level cache only. The clock
of a processor varies, so a share can be above 100 %.

With --pytorch it also measures torch.matmul on the same shapes, in the same
rounds, and prints its time divided by ours: the argument is a Python that has
torch.`,
		Example: `  lockstep bench products
  lockstep bench products --threads 1,2 --pytorch python3`,
		Args: cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.worker {
				return executeProducts(cmd.InOrStdin(), cmd.OutOrStdout())
			}
			for _, n := range o.threads {
				if n < 1 || n > 1024 {
					return cli.Usagef("--threads %d: want 1 to 1024", n)
				}
			}
			return o.measure(cmd.Context(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.IntSliceVar(&o.threads, "threads", []int{runtime.GOMAXPROCS(0)}, "numbers of threads to measure")
	f.IntVar(&o.rounds, "rounds", 20, "rounds to measure, after one to warm up")
	f.StringVar(&o.python, "pytorch", "", "also measure PyTorch with this `program`")
	cli.ChoiceVar(f, &o.format, "format", "plain", "", "plain", "json")
	f.BoolVar(&o.worker, benchDataWorker, false, "")
	if err := f.MarkHidden(benchDataWorker); err != nil {
		panic(err)
	}
	cli.Limit(f, "[1,1000]", "rounds")
	return cmd
}

// benchProduct is the measurement of a product as JSON.
type benchProduct struct {
	Name       string     `json:"name"`
	Transposed string     `json:"transposed"` // the operand that lies column by column: a, b or -
	Batch      int        `json:"batch"`
	Rows       int        `json:"rows"`
	Depth      int        `json:"depth"`
	Columns    int        `json:"columns"`
	Threads    int        `json:"threads"`
	Processor  string     `json:"processor"`
	NS         cli.Number `json:"median_ns"`
	Share      cli.Number `json:"peak_share"` // of the peak of so many threads
	PyTorch    cli.Number `json:"pytorch_median_ns,omitempty"`
	Ratio      cli.Number `json:"pytorch_ratio,omitempty"` // PyTorch's time divided by ours
}

// measure starts a process for each number of threads and each program, and prints the results.
func (o *benchProductsFlags) measure(ctx context.Context, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	for _, threads := range o.threads {
		ours := exec.CommandContext(ctx, self, "bench", "products", "--"+benchDataWorker)
		ours.Env = append(os.Environ(), fmt.Sprintf("GOMAXPROCS=%d", threads))
		commands := []*exec.Cmd{ours}
		if o.python != "" {
			commands = append(commands, exec.CommandContext(ctx, o.python, "-c", benchProductsScript, fmt.Sprint(threads)))
		}
		var g benchGroup
		err := func() error {
			defer g.stop()
			for _, c := range commands {
				if err := g.start(c, false); err != nil {
					return err
				}
			}
			return o.compare(&g, threads, out)
		}()
		if err != nil {
			return err
		}
	}
	return nil
}

// compare measures the products by the processes of a group in turns: this program's, then PyTorch's.
func (o *benchProductsFlags) compare(g *benchGroup, threads int, out io.Writer) error {
	list := append(slices.Clone(benchMatrices), benchPeak)
	times := make([][2][]float64, len(list)) // in seconds, by round
	for round := range o.rounds + 1 {
		for k, p := range g.processes {
			// The threads of the other program poll for some time after its last product.
			time.Sleep(300 * time.Millisecond)
			for i, s := range list {
				if k > 0 && i == len(benchMatrices) {
					break
				}
				t, err := p.time(&s)
				if err != nil {
					return err
				}
				if round > 0 {
					times[i][k] = append(times[i][k], t)
				}
			}
		}
	}
	median := func(list []float64) float64 {
		slices.Sort(list)
		return list[len(list)/2]
	}
	last := len(benchMatrices)
	peak := benchPeak.operations() / median(times[last][0])
	if o.format == "plain" {
		fmt.Fprintf(out, "%s, %s, peak %.0f GFLOP/s\n", cli.Count(threads, "thread"), machine.Vectors(), peak/1e9)
	}
	logs, least := 0.0, math.Inf(1)
	for i, s := range benchMatrices {
		ours := median(times[i][0])
		m := benchProduct{
			Name: s.name, Transposed: s.transposed, Batch: s.batch, Rows: s.rows, Depth: s.depth, Columns: s.columns,
			Threads: threads, Processor: machine.Vectors(), NS: cli.Number(ours * 1e9),
			Share: cli.Number(s.operations() / ours / peak),
		}
		more := ""
		if len(g.processes) > 1 {
			theirs := median(times[i][1])
			m.PyTorch, m.Ratio = cli.Number(theirs*1e9), cli.Number(theirs/ours)
			logs, least = logs+math.Log(theirs/ours), min(least, theirs/ours)
			more = fmt.Sprintf("   PyTorch %9.1f µs  %.2f x", theirs*1e6, theirs/ours)
		}
		var err error
		if o.format == "json" {
			err = cli.WriteJSON(out, m)
		} else {
			_, err = fmt.Fprintf(out, "%-18s %-21s %9.1f µs  %5.1f %%%s\n", s.name, s.size(), ours*1e6,
				100*float64(m.Share), more)
		}
		if err != nil {
			return err
		}
	}
	if o.format == "plain" && len(g.processes) > 1 {
		_, err := fmt.Fprintf(out, "PyTorch's time divided by ours: geometric mean %.2f, least %.2f\n",
			math.Exp(logs/float64(len(benchMatrices))), least)
		return err
	}
	return nil
}

// size describes the operands: ᵀ follows the one that lies column by column.
func (s *benchMatrix) size() string {
	mark := map[string]string{s.transposed: "ᵀ"}
	text := fmt.Sprintf("%d×%d%s · %d×%d%s", s.rows, s.depth, mark["a"], s.depth, s.columns, mark["b"])
	if s.batch > 1 {
		return fmt.Sprintf("%d (%s)", s.batch, text)
	}
	return text
}

// time lets a process execute a product for some time, and returns the seconds that one takes.
func (p *benchProcess) time(s *benchMatrix) (seconds float64, err error) {
	if _, err := fmt.Fprintln(p.in, s.transposed, s.batch, s.rows, s.depth, s.columns); err != nil {
		return 0, p.failed()
	}
	if !p.out.Scan() {
		return 0, p.failed()
	}
	if _, err := fmt.Sscan(p.out.Text(), &seconds); err != nil {
		return 0, fmt.Errorf("a process printed %q: %w", p.out.Text(), err)
	}
	return seconds, nil
}

// executeProducts is a process of the measurement: it executes the product that each line of in describes.
func executeProducts(in io.Reader, out io.Writer) error {
	b, err := backend.New("")
	if err != nil {
		return err
	}
	defer b.Finalize()
	if _, err := fmt.Fprintln(out, "ready"); err != nil {
		return err
	}
	machine.TuneGC(nil)
	compiled := map[string]func() error{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		run := compiled[lines.Text()]
		if run == nil {
			var s benchMatrix
			if _, err = fmt.Sscan(lines.Text(), &s.transposed, &s.batch, &s.rows, &s.depth, &s.columns); err != nil {
				return err
			}
			if run, err = s.compile(b); err != nil {
				return err
			}
			compiled[lines.Text()] = run
		}
		if err := run(); err != nil {
			return err
		}
		calls, start := 0, time.Now()
		for time.Since(start) < benchProductTime {
			if err := run(); err != nil {
				return err
			}
			calls++
		}
		if _, err := fmt.Fprintln(out, time.Since(start).Seconds()/float64(calls)); err != nil {
			return err
		}
	}
	return nil
}

// benchProductTime is the least time of a measurement, also in products.py.
const benchProductTime = 10 * time.Millisecond

// compile returns a function that computes the product of random operands, by a graph with nothing else.
func (s *benchMatrix) compile(b compute.Backend) (run func() error, err error) {
	builder := b.Builder("product")
	f := builder.Main()
	operands := [2]shapes.Shape{
		shapes.Make(dtypes.Float32, s.batch, s.rows, s.depth), shapes.Make(dtypes.Float32, s.batch, s.depth, s.columns),
	}
	contracted := [2]int{2, 1}
	for i, d := range [2][]int{operands[0].Dimensions, operands[1].Dimensions} {
		if s.transposed == "ab"[i:i+1] {
			d[1], d[2], contracted[i] = d[2], d[1], 3-contracted[i]
		}
	}
	left := operands[0]
	if s.transposed == "repeated" {
		operands[0] = shapes.Make(dtypes.Float32, s.batch, 1, s.depth)
	}
	var in [2]compute.Buffer
	var values [2]compute.Value
	for i, shape := range operands {
		flat := make([]float32, shape.Size())
		for i := range flat {
			flat[i] = rand.Float32() - 0.5
		}
		if values[i], err = f.Parameter(fmt.Sprint("operand", i), shape, nil); err != nil {
			return nil, err
		}
		if in[i], err = b.BufferFromFlatData(0, flat, shape); err != nil {
			return nil, err
		}
	}
	if values[0], err = f.BroadcastInDim(values[0], left, []int{0, 1, 2}); err != nil {
		return nil, err
	}
	dot, err := f.DotGeneral(values[0], contracted[:1], []int{0}, values[1], contracted[1:], []int{0},
		compute.DotGeneralConfig{})
	if err != nil {
		return nil, err
	}
	if err := f.Return([]compute.Value{dot}, nil); err != nil {
		return nil, err
	}
	exe, err := builder.Compile()
	if err != nil {
		return nil, err
	}
	return func() error {
		out, err := exe.Execute(in[:], nil, 0)
		if err != nil {
			return err
		}
		return out[0].Finalize()
	}, nil
}
