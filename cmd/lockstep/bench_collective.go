package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
	"github.com/lockstep-ml/lockstep/tensor"
)

// benchFlags are the flags of the commands that measure one collective.
type benchFlags struct {
	opts    bench.Options
	sizes   []string
	dtype   string
	reduce  string
	table   string
	explain bool
	plot    string
	peers   []string
}

// benchAbout describes what each command measures.
var benchAbout = map[string]string{
	"allreduce":     "all-reduce: every rank gets the reduced vector",
	"reduce":        "reduce: the root gets the reduced vector",
	"reducescatter": "reduce-scatter: every rank gets a part of the reduced vector",
	"broadcast":     "broadcast: every rank gets the root's vector",
	"allgather":     "all-gather: every rank gets all ranks' parts",
	"gather":        "gather: the root gets all ranks' parts",
	"scatter":       "scatter: every rank gets its part of the root's vector",
	"alltoall":      "all-to-all: every rank sends a block to every rank",
	"barrier":       "barrier: no rank leaves before every rank has entered",
	"sendrecv":      "send and receive: in each pair of ranks, one sends",
}

func newBenchCollective(name string) *cobra.Command {
	b := benchFlags{opts: bench.Options{Op: bench.Ops[name], Worker: benchWorker}}
	op := bench.Ops[name]
	cmd := &cobra.Command{
		Use:   name,
		Short: "Measure " + benchAbout[name],
		Long: fmt.Sprintf(`%s
A barrier precedes each timed call. For each size it prints the median time of a
call on rank 0:

  lockstep-mem ranks=2 bytes=1048576 us=101.3

With --format table it also prints nccl-tests' columns. algbw is the size
divided by the time. busbw is algbw times the share of the size that the busiest
rank must at least send or receive, such as 2(n-1)/n for an all-reduce of n
ranks. It can be compared between numbers of ranks, and with the bandwidth of
the hardware. With --limit the command also prints a lower bound, measured in
the same run: the ranks do the same reads and writes without synchronizing or
adding (or exchange the same bytes over bare sockets).

With --plot it draws time and bus bandwidth over the sizes, with --peer beside
those that another program has printed.`, strings.Join(wrapWords(
			strings.ToUpper(name[:1])+name[1:]+" measures "+benchAbout[name]+".", helpColumns), "\n")),
		Example: fmt.Sprintf(`  lockstep bench %s --ranks 2
  lockstep bench %s --transport shm --ranks 4 --sizes 64KiB,1MiB --format table --limit
  lockstep bench %s --limit --plot out.svg --peer nccl-tests.txt
  lockstep bench %s --ranks 4 --explain`, name, name, name, name),
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.check(cmd); err != nil {
				return err
			}
			if b.explain {
				return b.printChoice(cmd)
			}
			in := catchInterrupts(cmd.Context())
			defer in.close()
			out := &lineCounter{w: cmd.OutOrStdout()}
			defer reassure(cmd.ErrOrStderr(), func() string { return b.soFar(int(out.lines.Load())) })()
			peers, err := readPeers(b.peers)
			if err != nil {
				return err
			}
			results, err := bench.Run(in, out, b.opts)
			switch {
			case in.interrupted.Load():
				return errInterrupted
			case err != nil || b.plot == "":
				return err
			}
			return plotSizes(b.plot, b.opts.Op.String(), results, peers)
		},
	}
	if full := op.String(); strings.Contains(full, "_") {
		cmd.Aliases = []string{full, strings.ReplaceAll(full, "_", "-")}
	}
	f := cmd.Flags()
	o := &b.opts
	f.StringVar(&o.Transport, "transport", "mem", "transport between the ranks: "+transportHelp())
	f.IntVar(&o.Ranks, "ranks", 2, "number of ranks")
	f.IntVar(&o.Processes, "processes", 0, "number of processes, over which the ranks are spread (default one per rank; "+
		"mem and pipe: 1)")
	f.StringVar(&o.Algorithm, "algorithm", "", "name of the algorithm (default the library's choice)")
	f.StringVar(&b.table, "table", "", "`file` that lockstep bench --calibrate wrote, from which algorithms are chosen")
	f.IntVar(&o.Calls, "calls", 0, "timed calls per size (default 500, fewer for large sizes)")
	f.StringVar(&o.Format, "format", "plain", "plain (one line per size, for other programs), table or json")
	f.BoolVar(&b.explain, "explain", false,
		"measure nothing; print which algorithm would be chosen for each size, and why")
	f.StringVar(&o.Name, "name", "", "first word of a plain line (default lockstep- and the transport)")
	if op == collective.Barrier {
		return cmd
	}
	f.StringSliceVar(&b.sizes, "sizes", nil, "sizes of the whole vector of a call (default 4 bytes to 64MiB)")
	f.StringVar(&b.dtype, "dtype", "float32", "type of the elements")
	f.StringVar(&o.Buffers, "buffers", "", "shared (the communicator's memory, which peers access in place) or ordinary "+
		"(default shared for mem and shm, else ordinary)")
	f.BoolVar(&o.Limit, "limit", false, "also measure the lower bound on this machine")
	f.StringVar(&b.plot, "plot", "", "draw time and bus bandwidth over the sizes into this SVG `file`")
	f.StringArrayVar(&b.peers, "peer", nil, "with --plot, also draw the measurements in this `file`, or NAME=FILE: "+
		"output of nccl-tests, of the OSU micro-benchmarks or of lockstep bench")
	if op.Reduces() {
		f.StringVar(&b.reduce, "reduce", "sum", "reduction: sum, mean, min, max or prod")
	}
	if op.Rooted() && op != collective.Send {
		f.IntVar(&o.Root, "root", 0, "the root's rank")
	}
	return cmd
}

// soFar describes the progress of a measurement that has printed so many lines.
func (b *benchFlags) soFar(lines int) string {
	if b.opts.Format == "table" {
		lines = max(0, lines-1) // the header
	}
	return fmt.Sprintf("measuring %s on %s, %s done", count(b.opts.Ranks, "rank"), count(runtime.NumCPU(), "processor"),
		count(lines, "size"))
}

// lineCounter counts the lines that are written.
type lineCounter struct {
	w     io.Writer
	lines atomic.Int64
}

func (c *lineCounter) Write(b []byte) (int, error) {
	c.lines.Add(int64(bytes.Count(b, []byte{'\n'})))
	return c.w.Write(b)
}

func transportHelp() string {
	var parts []string
	for _, name := range sorted(bench.Transports) {
		parts = append(parts, name+", "+bench.Transports[name].About)
	}
	return strings.Join(parts, "; ")
}

// check validates the flags and parses those that are texts.
func (b *benchFlags) check(cmd *cobra.Command) error {
	o := &b.opts
	t, ok := bench.Transports[o.Transport]
	switch {
	case !ok:
		return usagef("--transport %s: want one of %s", o.Transport, strings.Join(sorted(bench.Transports), ", "))
	case o.Ranks < 1 || o.Ranks > bench.RanksMax:
		return usagef("--ranks %d: want 1 to %d", o.Ranks, bench.RanksMax)
	case o.Transport == "shm" && o.Ranks > bench.ProcessesMax:
		return usagef("--ranks %d: want at most %d with --transport shm", o.Ranks, bench.ProcessesMax)
	case !t.Goroutines() && max(o.Processes, 0) == 0 && o.Ranks > bench.ProcessesMax:
		return usagef("--ranks %d: want at most %d, one process per rank; or give --processes, up to this number", o.Ranks,
			bench.ProcessesMax)
	case o.Processes > bench.ProcessesMax:
		return usagef("--processes %d: want at most %d", o.Processes, bench.ProcessesMax)
	case cmd.Flags().Changed("processes") && (o.Processes < 1 || o.Processes > o.Ranks):
		return usagef("--processes %d: want 1 to %d, at most one per rank", o.Processes, o.Ranks)
	case o.Processes > 1 && t.Goroutines():
		return usagef("--processes %d: the transport %s connects goroutines of one process only", o.Processes, o.Transport)
	case o.Format != "plain" && o.Format != "table" && o.Format != "json":
		return usagef("--format %s: want plain, table or json", o.Format)
	case b.plot != "" && !strings.HasSuffix(b.plot, ".svg"):
		return usagef("--plot %s: want a file whose name ends with .svg", b.plot)
	case b.plot != "" && b.explain:
		return usagef("--plot draws measurements, --explain measures nothing: leave out one of them")
	case len(b.peers) > 0 && b.plot == "":
		return usagef("--peer %s: is for --plot FILE.svg", b.peers[0])
	case o.Buffers != "" && o.Buffers != "shared" && o.Buffers != "ordinary":
		return usagef("--buffers %s: want shared or ordinary", o.Buffers)
	case o.Root < 0 || o.Root >= o.Ranks:
		return usagef("--root %d: want 0 to %d", o.Root, o.Ranks-1)
	case cmd.Flags().Changed("calls") && (o.Calls < 1 || o.Calls > bench.CallsMax):
		return usagef("--calls %d: want 1 to %d", o.Calls, bench.CallsMax)
	case o.Op == collective.Send && o.Ranks < 2:
		return usagef("--ranks %d: a send needs two ranks", o.Ranks)
	case o.Algorithm != "" && !slices.Contains(chooser.Names(), o.Algorithm):
		return usagef("--algorithm %s: want one of %s", o.Algorithm, strings.Join(chooser.Names(), ", "))
	}
	var err error
	if b.dtype != "" {
		if o.Type, err = tensor.ParseDType(b.dtype); err != nil || !o.Type.IsNumeric() {
			return usagef("--dtype %s: want a numeric type such as float32, bfloat16 or int8", b.dtype)
		}
	}
	if b.reduce != "" {
		if o.Reduce, err = collective.ParseReduceOp(b.reduce); err != nil {
			return usagef("--reduce %s: want sum, mean, min, max or prod", b.reduce)
		}
		if o.Reduce == collective.Mean && !o.Type.IsFloat() {
			return usagef("--reduce mean of %s: integers have no true mean", b.dtype)
		}
	}
	o.Sizes = nil
	for _, text := range b.sizes {
		size, err := parseBytes(text)
		if err != nil {
			return usagef("--sizes: %v", err)
		}
		if element := o.Type.Bytes(); size < element || size%element != 0 {
			return usagef("--sizes: %d is not a multiple of %d bytes, the size of a %v", size, element, o.Type)
		}
		o.Sizes = append(o.Sizes, size)
	}
	if err := b.checkMemory(); err != nil {
		return err
	}
	if b.table != "" {
		if o.Table, err = chooser.Load(b.table); err != nil {
			return err
		}
	}
	return nil
}

// checkMemory returns an error if the sizes need more memory than is available. With --explain nothing is allocated.
func (b *benchFlags) checkMemory() error {
	o := &b.opts
	left, ok := memlimit.Available()
	if !ok || b.explain {
		return nil
	}
	flag, sizes := "--sizes", o.Sizes
	if sizes == nil && o.Op != collective.Barrier {
		flag, sizes = fmt.Sprintf("--ranks %d, size", o.Ranks), bench.Sizes
	}
	for _, size := range sizes {
		if need := o.Memory(size); int64(need) > left {
			return usagef("%s %s: %s need at least %s of memory, and %s are available: want smaller --sizes or fewer --ranks",
				flag, formatBytes(size), count(o.Ranks, "rank"), formatBytes(need), formatBytes(int(left)))
		}
	}
	return nil
}

// printChoice prints the algorithm that would be chosen for each size.
func (b *benchFlags) printChoice(cmd *cobra.Command) error {
	texts, err := bench.Explain(b.opts)
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(cmd.OutOrStdout(), strings.Join(texts, "\n"))
	return err
}

// benchWorkerCommand is the hidden command that a process of a measurement runs.
const benchWorkerCommand = "worker"

// benchWorker starts this program again as one process of a measurement.
func benchWorker(ctx context.Context, job string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	cmd := exec.CommandContext(ctx, self, "bench", benchWorkerCommand)
	cmd.Env = append(os.Environ(), benchWorkerVariable+"="+job)
	return cmd
}

// benchWorkerVariable is the environment variable that holds a worker's job.
const benchWorkerVariable = "LOCKSTEP_BENCH_WORKER"

func newBenchWorker() *cobra.Command {
	return &cobra.Command{
		Use:    benchWorkerCommand,
		Hidden: true,
		Args:   noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			job, ok := os.LookupEnv(benchWorkerVariable)
			if !ok {
				return usagef("lockstep bench %s: only lockstep bench starts this command", benchWorkerCommand)
			}
			return bench.Work(cmd.Context(), job, os.Stdin, cmd.OutOrStdout())
		},
	}
}
