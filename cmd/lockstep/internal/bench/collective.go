package bench

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

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/bench"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
	"github.com/lockstep-ml/lockstep/internal/terminal"
	"github.com/lockstep-ml/lockstep/internal/units"
	"github.com/lockstep-ml/lockstep/tensor"
)

// benchFlags are the flags of the commands that measure one collective.
type benchFlags struct {
	ops     []collective.Op // which are measured
	opts    bench.Options   // of each measurement, without Op, Type, Reduce and Sizes
	sizes   []string
	dtypes  []string
	reduces []string
	warmup  int
	check   int
	split   string
	bind    string
	average string
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
	allOps:          "every operation, one after the other",
}

// allOps is the name of the command that measures every operation, and allValues selects all values of a flag.
const (
	allOps    = "all"
	allValues = "all"
)

// opOrder is the order in which all operations are measured.
var opOrder = []collective.Op{
	collective.AllReduce, collective.Reduce, collective.ReduceScatter, collective.Broadcast, collective.AllGather,
	collective.Gather, collective.Scatter, collective.AllToAll, collective.Send, collective.Barrier,
}

func newBenchCollective(name string) *cobra.Command {
	b := benchFlags{ops: []collective.Op{bench.Ops[name]}, opts: bench.Options{Worker: benchWorker}}
	if name == allOps {
		b.ops = opOrder
	}
	cmd := &cobra.Command{
		Use:     name,
		Short:   "Measure " + benchAbout[name],
		Long:    benchLong(name),
		Example: benchExamples(name),
		Args:    cli.NoArguments,
		RunE:    func(cmd *cobra.Command, _ []string) error { return b.run(cmd) },
	}
	if full := b.ops[0].String(); name != allOps && strings.Contains(full, "_") {
		cmd.Aliases = []string{full, strings.ReplaceAll(full, "_", "-")}
	}
	b.addFlags(cmd, name)
	return cmd
}

// benchLong describes a command.
func benchLong(name string) string {
	about := strings.ToUpper(name[:1]) + name[1:] + " measures " + benchAbout[name] + "."
	text := strings.Join(cli.WrapWords(about, cli.HelpColumns), "\n") + `
A barrier precedes each timed call. Every rank times every call. The time of a
call is the average over the ranks, or with --average that on rank 0, on the
fastest or on the slowest rank. On a terminal it prints a table with nccl-tests'
columns, otherwise a line for each size with the median over the calls:

  lockstep-mem ranks=2 bytes=1048576 us=101.3 average=avg

The columns time, best and p99 are the median, the shortest and the 99th
percentile of the calls' times. algbw is the size divided by the time. busbw is
algbw times the share of the size that the busiest rank must at least send or
receive, such as 2(n-1)/n for an all-reduce of n ranks. It can be compared
between numbers of ranks, and with the bandwidth of the hardware. #wrong is the
number of elements in the results of the checked calls that differ from what an
oracle computes; if there are any, the exit code is 1.

With --overlap the calls are non-blocking, and the column overlap is the share
of a call that is hidden behind a computation of about the same length (as in
IMB-NBC and osu_iallreduce). With --limit the command also prints a limit,
measured in the same run: the best time in which the ranks do the same reads and
writes without synchronizing or adding, or, over tcp, the median time in which
the processes exchange the same bytes over bare sockets, in turns with the calls.`
	if name == allOps {
		return text
	}
	return text + `

With --plot it draws time and bus bandwidth over the sizes, with --peer beside
those that another program has printed.`
}

func benchExamples(name string) string {
	lines := []string{
		"bench %s --ranks 2",
		"bench %s --transport shm --ranks 4 --sizes 64KiB,1MiB -n 100 -w 20 --limit",
		"bench %s --transport tcp --overlap",
		"bench %s --dtype all -c 10 -u 3",
	}
	if name != allOps {
		lines = append(lines, "bench %s --limit --plot out.svg --peer nccl-tests.txt", "bench %s --ranks 4 --explain")
	}
	if name == "barrier" {
		lines = []string{"bench %s --ranks 2", "bench %s --transport tcp --overlap"}
	}
	for i, line := range lines {
		lines[i] = "  lockstep " + fmt.Sprintf(line, name)
	}
	return strings.Join(lines, "\n")
}

func (b *benchFlags) addFlags(cmd *cobra.Command, name string) {
	has := func(f func(collective.Op) bool) bool { return slices.ContainsFunc(b.ops, f) }
	f := cmd.Flags()
	o := &b.opts
	cli.ChoiceVar(f, &o.Transport, "transport", "mem", "transport between the ranks: "+transportHelp(),
		cli.Sorted(bench.Transports)...)
	f.IntVar(&o.Ranks, "ranks", 2, "number of ranks")
	f.IntVar(&o.Processes, "processes", 0, "number of processes, over which the ranks are spread (default one per rank; "+
		"mem and pipe: 1)")
	cli.BindVar(f, &b.bind, "each process")
	f.BoolVar(&o.TLS, "tls", false, "with --transport tcp, encrypt the connections, as those between the hosts of a job "+
		"are")
	f.StringVar(&b.split, "split", "", "divide the ranks into groups that make the calls at the same time: `mod:N` joins "+
		"ranks that are equal modulo N, div:N joins N consecutive ranks")
	cli.ChoiceVar(f, &o.Algorithm, "algorithm", "", "name of the algorithm (default the library's choice)",
		chooser.Names()...)
	f.StringVar(&b.table, "table", "", "`file` that lockstep bench --calibrate wrote, from which algorithms are chosen")
	f.IntVarP(&o.Calls, "calls", "n", 0, "timed calls per size (default 500, fewer for large sizes)")
	f.IntVarP(&b.warmup, "warmup", "w", 0, "calls per size before the timed ones (default a quarter of them)")
	f.StringVarP(&b.average, "average", "a", string(bench.AverageAvg), "the time of a call: avg (over the ranks), min, "+
		"max or rank0; or the number of nccl-tests, 0 (rank0) to 3 (max)")
	cli.Suggest(f, "average", "avg", "min", "max", "rank0")
	cli.ChoiceVar(f, &o.Format, "format", "", "plain (one line per size, for other programs), table or json (default "+
		"table on a terminal, else plain)", "plain", "table", "json")
	f.BoolVar(&o.Overlap, "overlap", false, "make non-blocking calls, and measure how much of them is hidden behind "+
		"computation")
	f.BoolVar(&b.explain, "explain", false,
		"measure nothing; print which algorithm would be chosen for each size, and why")
	f.StringVar(&o.Name, "name", "", "first word of a plain line (default lockstep- and the transport, and -tls)")
	cli.Limit(f, fmt.Sprintf("[1,%d]", bench.RanksMax), "ranks")
	cli.Limit(f, fmt.Sprintf("[1,%d]", bench.CallsMax), "calls")
	cli.Limit(f, fmt.Sprintf("[0,%d]", bench.CallsMax), "warmup")
	if name == "barrier" {
		return
	}
	f.IntVarP(&b.check, "check", "c", 1, "calls per size after the timed ones whose results are checked; 0: none")
	f.StringSliceVar(&b.sizes, "sizes", nil, "sizes of the whole vector of a call (default 4 bytes to 64MiB)")
	f.StringSliceVar(&b.dtypes, "dtype", []string{"float32"}, "types of the elements, or all")
	cli.Suggest(f, "dtype", benchTypes()...)
	cli.ChoiceVar(f, &o.Buffers, "buffers", "", "shared (the communicator's memory, which peers access in place) or "+
		"ordinary (default shared for mem and shm, else ordinary)", "shared", "ordinary")
	f.IntVarP(&o.Unaligned, "unaligned", "u", 0, fmt.Sprintf("misalign the buffers: they begin so many bytes after a "+
		"64-byte boundary, up to %d", bench.UnalignedMax))
	cli.Limit(f, fmt.Sprintf("[0,%d]", bench.CallsMax), "check")
	cli.Limit(f, fmt.Sprintf("[0,%d] bytes after a 64-byte boundary", bench.UnalignedMax), "unaligned")
	f.BoolVar(&o.Limit, "limit", false, "also measure plain copies on this machine")
	if has(collective.Op.Reduces) {
		f.StringSliceVar(&b.reduces, "reduce", []string{"sum"}, "reductions: sum, mean, min, max, prod, or all")
		cli.Suggest(f, "reduce", "sum", "mean", "min", "max", "prod", allValues)
	}
	if has(func(op collective.Op) bool { return op.Rooted() && op != collective.Send }) {
		f.IntVar(&o.Root, "root", 0, "the root's rank")
	}
	if name == allOps {
		return
	}
	f.StringVar(&b.plot, "plot", "", "draw time and bus bandwidth over the sizes into this SVG `file`")
	f.StringArrayVar(&b.peers, "peer", nil, "with --plot, also draw the measurements in this `file`, or NAME=FILE: "+
		"output of nccl-tests, of the OSU micro-benchmarks or of lockstep bench")
}

// run makes the measurements that the flags select.
func (b *benchFlags) run(cmd *cobra.Command) error {
	list, err := b.measurements(cmd)
	if err != nil {
		return err
	}
	if b.explain {
		return printChoices(cmd, list)
	}
	in := cli.CatchInterrupts(cmd.Context())
	defer in.Close()
	out := &lineCounter{w: cmd.OutOrStdout()}
	defer cli.Reassure(cmd.ErrOrStderr(), func() string { return b.soFar(int(out.lines.Load())) })()
	peers, err := readPeers(b.peers)
	if err != nil {
		return err
	}
	results, err := bench.Run(in, out, list...)
	switch {
	case in.Interrupted.Load():
		return cli.ErrInterrupted
	case err != nil || b.plot == "":
		return err
	}
	return plotSizes(b.plot, list[0].Op.String(), results, peers)
}

// soFar describes the progress of a measurement that has printed so many lines.
func (b *benchFlags) soFar(lines int) string {
	return fmt.Sprintf("measuring %s on %s, %s done", cli.Count(b.opts.Ranks, "rank"), cli.Count(runtime.NumCPU(),
		"processor"), cli.Count(lines, "size"))
}

// lineCounter counts the lines that are written, except comments. A write holds whole lines of one kind.
type lineCounter struct {
	w     io.Writer
	lines atomic.Int64
}

func (c *lineCounter) Write(b []byte) (int, error) {
	if !bytes.HasPrefix(b, []byte("#")) {
		c.lines.Add(int64(bytes.Count(b, []byte{'\n'})))
	}
	return c.w.Write(b)
}

func transportHelp() string {
	var parts []string
	for _, name := range cli.Sorted(bench.Transports) {
		parts = append(parts, name+", "+bench.Transports[name].About)
	}
	return strings.Join(parts, "; ")
}

// measurements validates the flags, and returns the measurements that they select.
func (b *benchFlags) measurements(cmd *cobra.Command) ([]bench.Options, error) {
	if err := b.checkFlags(cmd); err != nil {
		return nil, err
	}
	o := &b.opts
	if b.table != "" {
		var err error
		if o.Table, err = chooser.Load(b.table); err != nil {
			return nil, err
		}
	}
	dtypes, err := b.types()
	if err != nil {
		return nil, err
	}
	reduces, err := b.reductions(dtypes)
	if err != nil {
		return nil, err
	}
	var list []bench.Options
	for _, op := range b.ops {
		for _, dtype := range dtypes {
			for _, reduce := range reduces {
				one := *o
				one.Op, one.Type = op, dtype
				if op.Reduces() {
					one.Reduce = reduce
				} else if reduce != reduces[0] {
					continue
				}
				if op == collective.Barrier && dtype != dtypes[0] || one.Reduce == collective.Mean && !dtype.IsFloat() {
					continue
				}
				if op == collective.Barrier {
					one.Limit = false // it moves no bytes
				}
				if one.Sizes, err = b.parseSizes(dtype); err != nil {
					return nil, err
				}
				if err := b.checkMemory(&one); err != nil {
					return nil, err
				}
				list = append(list, one)
			}
		}
	}
	if b.plot != "" && len(list) > 1 {
		return nil, cli.Usagef("--plot %s draws one measurement, and the flags select %d: want one --dtype and one --reduce",
			b.plot, len(list))
	}
	return list, nil
}

// checkFlags validates the flags by themselves, and fills in what depends on others.
func (b *benchFlags) checkFlags(cmd *cobra.Command) error {
	o := &b.opts
	changed := cmd.Flags().Changed
	t := bench.Transports[o.Transport]
	switch {
	case o.Transport == "shm" && o.Ranks > bench.ProcessesMax:
		return cli.Usagef("--ranks %d: want at most %d with --transport shm", o.Ranks, bench.ProcessesMax)
	case !t.Goroutines() && max(o.Processes, 0) == 0 && o.Ranks > bench.ProcessesMax:
		return cli.Usagef("--ranks %d: want at most %d, one process per rank; or give --processes, up to this number",
			o.Ranks, bench.ProcessesMax)
	case o.Processes > bench.ProcessesMax:
		return cli.Usagef("--processes %d: want at most %d", o.Processes, bench.ProcessesMax)
	case changed("processes") && (o.Processes < 1 || o.Processes > o.Ranks):
		return cli.Usagef("--processes %d: want 1 to %d, at most one per rank", o.Processes, o.Ranks)
	case o.Processes > 1 && t.Goroutines():
		return cli.Usagef("--processes %d: the transport %s connects goroutines of one process only", o.Processes,
			o.Transport)
	case o.TLS && o.Transport != "tcp":
		return cli.Usagef("--tls: the transport %s has no connections to encrypt: want --transport tcp", o.Transport)
	case o.TLS && (o.Ranks == 1 || o.Processes == 1):
		return cli.Usagef("--tls: there is one process, which has no connections: want --ranks and --processes from 2")
	case b.plot != "" && !strings.HasSuffix(b.plot, ".svg"):
		return cli.Usagef("--plot %s: want a file whose name ends with .svg", b.plot)
	case b.plot != "" && b.explain:
		return cli.Usagef("--plot draws measurements, --explain measures nothing: leave out one of them")
	case len(b.peers) > 0 && b.plot == "":
		return cli.Usagef("--peer %s: is for --plot FILE.svg", b.peers[0])
	case changed("bind-to") && t.Goroutines():
		return cli.Usagef("--bind-to %s: it binds processes, and the ranks of the transport %s are goroutines of one "+
			"process: "+"leave it out, or give --transport shm or tcp", b.bind, o.Transport)
	case b.split != "" && (o.Limit || b.explain):
		return cli.Usagef("--split %s: --limit and --explain are for one group of all ranks", b.split)
	}
	if err := b.checkGroups(); err != nil {
		return err
	}
	var err error
	if o.Average, err = bench.ParseAverage(b.average); err != nil {
		return cli.Usagef("--average: %v", err)
	}
	if o.Warmup = b.warmup; changed("warmup") && b.warmup == 0 {
		o.Warmup = -1
	}
	o.Bind = affinity.Policy(b.bind)
	if o.Check = b.check; b.check == 0 {
		o.Check = -1
	}
	if out, ok := cmd.OutOrStdout().(*os.File); o.Format == "" && ok && terminal.CanRedraw(out) {
		o.Format = "table"
	}
	return nil
}

// checkGroups validates what depends on the ranks of the groups.
func (b *benchFlags) checkGroups() error {
	o := &b.opts
	var err error
	if o.Split, err = bench.ParseSplit(b.split); err != nil {
		return cli.Usagef("--split: %v", err)
	}
	smallest := slices.Min(o.Split.Sizes(o.Ranks))
	in := ""
	if b.split != "" {
		in = fmt.Sprintf(" in the smallest group of --split %s", b.split)
	}
	switch {
	case o.Root < 0 || o.Root >= smallest:
		return cli.Usagef("--root %d: want 0 to %d%s", o.Root, smallest-1, in)
	case slices.Contains(b.ops, collective.Send) && smallest < 2:
		return cli.Usagef("--ranks %d: a send needs two ranks, and there is one%s", o.Ranks, in)
	}
	return nil
}

// types parses --dtype.
func (b *benchFlags) types() (dtypes []tensor.DType, err error) {
	if b.dtypes == nil { // a barrier has none
		return []tensor.DType{tensor.Float32}, nil
	}
	if slices.Equal(b.dtypes, []string{allValues}) {
		return numericTypes(), nil
	}
	for _, text := range b.dtypes {
		d, err := tensor.ParseDType(text)
		if err != nil || !d.IsNumeric() {
			return nil, cli.Usagef("--dtype %s: want numeric types such as float32, bfloat16 or int8, or all", text)
		}
		dtypes = append(dtypes, d)
	}
	if len(dtypes) == 0 {
		return nil, cli.Usagef("--dtype: want a type")
	}
	return dtypes, nil
}

// numericTypes returns the types of elements that can be reduced.
func numericTypes() []tensor.DType {
	return slices.DeleteFunc(slices.Clone(tensor.DTypes[:]), func(d tensor.DType) bool { return !d.IsNumeric() })
}

// benchTypes returns the values of --dtype.
func benchTypes() []string {
	var list []string
	for _, d := range numericTypes() {
		list = append(list, d.String())
	}
	return append(list, allValues)
}

// reductions parses --reduce. A mean of integers is left out if one of the flags selects all.
func (b *benchFlags) reductions(dtypes []tensor.DType) (reduces []collective.ReduceOp, err error) {
	if b.reduces == nil {
		return []collective.ReduceOp{collective.Sum}, nil
	}
	if slices.Equal(b.reduces, []string{allValues}) {
		return []collective.ReduceOp{
			collective.Sum, collective.Mean, collective.Min, collective.Max, collective.Prod,
		}, nil
	}
	for _, text := range b.reduces {
		reduce, err := collective.ParseReduceOp(text)
		if err != nil {
			return nil, cli.Usagef("--reduce %s: want sum, mean, min, max, prod, or all", text)
		}
		i := slices.IndexFunc(dtypes, func(d tensor.DType) bool { return !d.IsFloat() })
		if reduce == collective.Mean && i >= 0 && !slices.Equal(b.dtypes, []string{allValues}) {
			return nil, cli.Usagef("--reduce mean of %v: integers have no true mean", dtypes[i])
		}
		reduces = append(reduces, reduce)
	}
	if len(reduces) == 0 {
		return nil, cli.Usagef("--reduce: want a reduction")
	}
	return reduces, nil
}

// parseSizes parses --sizes for elements of a type.
func (b *benchFlags) parseSizes(dtype tensor.DType) (sizes []int, err error) {
	for _, text := range b.sizes {
		size, err := cli.ParseBytes(text)
		if err != nil {
			return nil, cli.Usagef("--sizes: %v", err)
		}
		if element := dtype.Bytes(); size < element || size%element != 0 {
			return nil, cli.Usagef("--sizes: %d is not a multiple of %d bytes, the size of a %v", size, element, dtype)
		}
		sizes = append(sizes, size)
	}
	return sizes, nil
}

// checkMemory returns an error if the sizes need more memory than is available. With --explain nothing is allocated.
func (b *benchFlags) checkMemory(o *bench.Options) error {
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
			return cli.Usagef("%s %s: %s need at least %s of memory, and %s are available: want smaller --sizes or fewer "+
				"--ranks", flag, units.Bytes(size), cli.Count(o.Ranks, "rank"), units.Bytes(need), units.Bytes(int(left)))
		}
	}
	return nil
}

// printChoices prints the algorithm that would be chosen for each size of each measurement.
func printChoices(cmd *cobra.Command, list []bench.Options) error {
	var texts []string
	for _, o := range list {
		more, err := bench.Explain(o)
		if err != nil {
			return err
		}
		texts = append(texts, more...)
	}
	_, err := fmt.Fprint(cmd.OutOrStdout(), strings.Join(texts, "\n"))
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
		Args:   cli.NoArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			job, ok := os.LookupEnv(benchWorkerVariable)
			if !ok {
				return cli.Usagef("lockstep bench %s: only lockstep bench starts this command", benchWorkerCommand)
			}
			return bench.Work(cmd.Context(), job, os.Stdin, cmd.OutOrStdout())
		},
	}
}
