// Package bench measures collectives on this machine, in the way of other libraries' benchmarks, so that the
// numbers are comparable: a barrier before each timed call, warm-up calls first, and the median over the calls of the
// average time of a call over the ranks (the columns are those of nccl-tests, which has the mean over the calls). Every
// rank times every call, and the times are collected after all of them.
// After the timed calls, further calls are checked: every element of their results is compared with that of an oracle,
// which computes it from all ranks' contributions one after the other. With [Options.Overlap] the calls are
// non-blocking, and the share of them that is hidden behind computation is measured.
//
// Ranks are goroutines of this process, or processes that it starts ([Options.Processes]).
package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/affinity"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

// Options configure a measurement. The zero value selects the defaults.
type Options struct {
	Op        collective.Op       // default AllReduce; Send measures pairs of ranks, one sends and the other receives
	Reduce    collective.ReduceOp // for reductions; default Sum
	Type      collective.DType    // of the elements; default float32
	Root      int                 // for rooted operations
	Transport string              // one of [Transports]; default "mem"
	Ranks     int                 // default 2
	Processes int                 // over which the ranks are distributed; default the transport's: 1, or one per rank
	Sizes     []int               // bytes of a call's whole vector, multiples of the element size; default [Sizes]
	Algorithm string              // one of plan.Algorithms; default: chosen by the chooser
	Table     *chooser.Table      // the chooser's table; default the built-in one
	// "shared": from the communicator, which peers access in place; "ordinary": from the heap; default the
	// transport's
	Buffers string
	// timed calls of each size, at most [CallsMax]; default by size, 500 for small ones, 12 for the largest,
	// fewer where many ranks share a processor
	Calls int
	// Warmup is the number of calls of each size before the timed ones; default a quarter of them; negative: none.
	Warmup int
	// Check is the number of calls of each size after the timed ones whose results are compared with the expected ones,
	// element by element; default 1; negative: none.
	Check     int
	Unaligned int   // bytes by which every buffer begins after a 64-byte boundary, 0 to [UnalignedMax]
	Split     Split // groups of ranks that make the calls at the same time; Root is a rank of each group
	// Average is how the ranks' times of a call become one time; default [AverageAvg]. With several groups the ranks are
	// those of rank 0's group.
	Average Average
	Overlap bool // the calls are non-blocking; also measure how much of them is hidden behind computation
	Limit   bool // also measure the limit of the operation on this machine
	TLS     bool // the connections are encrypted, as those between the hosts of a job are; for "tcp"
	// Processors is the number of processors that the ranks share; the default of Calls depends on it.
	// Default those of this machine. It is the same for all processes.
	Processors int
	// Listen are the addresses at which the processes listen with the transport tcp, such as "10.0.0.1:0", by process:
	// those that Worker starts in different network namespaces. Default: the loopback interface.
	Listen []string
	// Bind is how the processes are bound to the CPUs of this one; default [affinity.Share].
	Bind   affinity.Policy
	Format string // "plain" (default), one line per size for other programs to read; "table" or "json"
	Name   string // first word of a plain line; default "lockstep-" and the transport's name

	// Worker returns the command of a process that runs [Work]; required for more than one process.
	Worker WorkerCommand `json:"-"`

	group int   // the number of the group that this copy is for
	bare  *bare // the bare exchange of this process, if it is measured
}

// Bounds of [Options]. With more ranks one call takes seconds, and depends on the machine more than on the
// library.
const (
	CallsMax     = 1_000_000
	RanksMax     = 1024
	ProcessesMax = 256
	UnalignedMax = alignment - 1
)

// Sizes are the default sizes, in bytes. The first is that of one element, if an element is larger.
var Sizes = []int{4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}

// Ops are the operations that can be measured, by the name of their subcommand.
var Ops = map[string]collective.Op{
	"allreduce":     collective.AllReduce,
	"reduce":        collective.Reduce,
	"reducescatter": collective.ReduceScatter,
	"broadcast":     collective.Broadcast,
	"allgather":     collective.AllGather,
	"gather":        collective.Gather,
	"scatter":       collective.Scatter,
	"alltoall":      collective.AllToAll,
	"barrier":       collective.Barrier,
	"sendrecv":      collective.Send,
}

// Result is the measurement of one size.
type Result struct {
	Op        string        `json:"op"`
	Transport string        `json:"transport"`
	Ranks     int           `json:"ranks"` // of rank 0's group
	Groups    int           `json:"groups"`
	Processes int           `json:"processes"`
	Type      string        `json:"dtype"`
	Reduce    string        `json:"reduce,omitempty"` // in lower case; empty for operations that do not reduce
	Buffers   string        `json:"buffers"`
	Unaligned int           `json:"unaligned"`
	Algorithm string        `json:"algorithm"` // requested; empty: chosen by the chooser
	TLS       bool          `json:"tls"`       // the connections were encrypted
	Bytes     int           `json:"bytes"`     // of the whole vector, rounded down so that every rank has the same part
	Average   Average       `json:"average"`   // how the ranks' times of a call are one time
	Median    time.Duration `json:"median_ns"` // of the calls' times by Average, as Best and P99
	Best      time.Duration `json:"best_ns"`
	P99       time.Duration `json:"p99_ns"`  // no more than 1 % of the calls took longer
	Medians   Medians       `json:"medians"` // of the same calls by each average
	Calls     int           `json:"calls"`
	AlgBW     float64       `json:"algbw"` // GB/s: Bytes / Median
	// GB/s: AlgBW times the share of Bytes that the busiest rank must at least transfer
	BusBW     float64       `json:"busbw"`
	Checks    int           `json:"checks"`               // calls whose results were checked
	Wrong     *int64        `json:"wrong,omitempty"`      // wrong elements in them on all ranks; nil: not checked
	WrongText string        `json:"wrong_text,omitempty"` // describes the first of them
	Overlap   *Overlap      `json:"overlap,omitempty"`
	Limit     time.Duration `json:"limit_ns,omitempty"`
}

// Share returns the fraction of the limit that was reached, from 0 to 1; slightly more if the machine was
// slower while the limit was measured; 0 if it was not measured.
func (r Result) Share() float64 {
	if r.Limit == 0 || r.Median == 0 {
		return 0
	}
	return float64(r.Limit) / float64(r.Median)
}

// ErrWrong is the error of a measurement in which a checked result was wrong.
var ErrWrong = errors.New("wrong results")

// Run makes the measurements one after the other and prints each result to w as soon as it is available, in the format
// and with the name of the first. In the plain format a line is
//
//	NAME ranks=N bytes=B us=T average=A
//
// If there are several measurements, op=, dtype= and reduce= follow. In the table time is the median, and algbw is
// bytes divided by time. busbw is algbw times the share of the
// bytes that the busiest rank must at least send or receive, such as 2(n-1)/n for an all-reduce of n ranks. It can be
// compared between numbers of ranks, and with the bandwidth of the hardware (nccl-tests: PERFORMANCE.md). #wrong is the
// number of wrong elements. With Limit
// another column shows the share of the limit that was reached. The limit is the best time in which goroutines do the
// ranks' reads and writes without synchronising or adding ("mem", "shm", "pipe"), or the median time of a bare exchange
// over sockets between the same processes ("tcp"), measured in turns with the calls and averaged over the processes.
//
// Run returns the results, those before an error included. The error is an [ErrWrong] if all measurements were made but
// a result is wrong.
func Run(ctx context.Context, w io.Writer, list ...Options) (results []Result, err error) {
	list = slices.Clone(list)
	for i := range list {
		if list[i], err = list[i].filled(); err != nil {
			return nil, err
		}
	}
	if len(list) == 0 {
		return nil, nil
	}
	p := &printer{w: w, list: list}
	for i := range list {
		if err := p.begin(&list[i]); err != nil {
			return results, err
		}
		if err := measureAll(ctx, list[i], func(r Result) error {
			results = append(results, r)
			return p.print(r)
		}); err != nil {
			return results, err
		}
	}
	if err := p.end(); err != nil {
		return results, err
	}
	return results, wrongResults(results)
}

// wrongResults returns an error if a result is wrong.
func wrongResults(results []Result) error {
	bad, text := 0, ""
	for _, r := range results {
		if r.Wrong == nil || *r.Wrong == 0 {
			continue
		}
		if bad++; bad == 1 {
			text = fmt.Sprintf("%s of %d bytes of %s: %s", r.Op, r.Bytes, r.Type, r.WrongText)
		}
	}
	if bad == 0 {
		return nil
	}
	return fmt.Errorf("bench: %w: %d of %d sizes; %s", ErrWrong, bad, len(results), text)
}

// measureAll measures every size and reports each. It measures a limit of the memory just before and just after the
// size, so that a temporary slowdown of the machine affects both.
func measureAll(ctx context.Context, opts Options, report func(Result) error) error {
	if !opts.Limit || opts.bareExchange() {
		return measureSizes(ctx, opts, report)
	}
	for _, size := range opts.Sizes {
		one := opts
		one.Sizes = []int{size}
		bytes := opts.count(size, opts.Ranks) * opts.Type.Bytes()
		before := MemoryLimit(opts.Op, opts.Ranks, bytes)
		var result Result
		if err := measureSizes(ctx, one, func(r Result) error {
			result = r
			return nil
		}); err != nil {
			return err
		}
		result.Limit = min(before, MemoryLimit(opts.Op, opts.Ranks, bytes))
		if err := report(result); err != nil {
			return err
		}
	}
	return nil
}

// measureSizes measures every size with one group, and reports each.
func measureSizes(ctx context.Context, opts Options, report func(Result) error) error {
	if Transports[opts.Transport].here == nil {
		return spawn(ctx, opts, report)
	}
	group, err := openHere(opts)
	if err != nil {
		return err
	}
	err = measureGroup(ctx, group, opts, report)
	if e := group.Close(); err == nil {
		err = e
	}
	return err
}

// count returns the number of elements of a vector of this size, rounded down so that each of so many ranks has the
// same part.
func (o *Options) count(size, ranks int) int {
	count := size / o.Type.Bytes()
	if o.Op.Parted() || o.Op == collective.AllToAll {
		count = max(1, count/ranks) * ranks
	}
	return count
}

// result computes the result from the times of the calls in rank 0's group, which has so many ranks.
func (o *Options) result(bytes, ranks int, t *callTimes) Result {
	times := slices.Sorted(slices.Values(t.by(o.Average)))
	r := Result{
		Op: o.Op.String(), Transport: o.Transport, Ranks: ranks, Groups: len(o.Split.Sizes(o.Ranks)),
		Processes: o.Processes, Type: o.Type.String(), Buffers: o.Buffers, Unaligned: o.Unaligned, Algorithm: o.Algorithm,
		TLS:   o.TLS,
		Bytes: bytes, Calls: len(times), Average: o.Average, Medians: t.medians(),
		Best: percentile(times, 0), Median: percentile(times, 50), P99: percentile(times, 99),
	}
	if o.Op.Reduces() {
		r.Reduce = strings.ToLower(o.Reduce.String())
	}
	if r.Median > 0 {
		r.AlgBW = float64(bytes) / float64(r.Median)
		r.BusBW = r.AlgBW * busFactor(o.Op, ranks)
	}
	return r
}

// busFactor is the fraction of the vector that the busiest rank must at least send or receive (nccl-tests:
// PERFORMANCE.md).
func busFactor(op collective.Op, ranks int) float64 {
	n := float64(ranks)
	switch op {
	case collective.AllReduce:
		return 2 * (n - 1) / n
	case collective.ReduceScatter, collective.AllGather, collective.AllToAll, collective.Gather, collective.Scatter:
		return (n - 1) / n
	}
	return 1
}

// calls returns how many calls of a size are timed.
func (o *Options) calls(bytes int) int {
	calls := 500
	switch {
	case o.Calls > 0:
		return o.Calls
	case bytes >= 16<<20:
		calls = 12
	case bytes >= 1<<20:
		calls = 40
	}
	if perCore := o.Ranks / max(1, o.Processors); perCore > 8 { // beyond that a call takes longer
		calls = max(calls*8/perCore, 3)
	}
	return calls
}

// warmup returns how many calls precede so many timed ones.
func (o *Options) warmup(calls int) int {
	if o.Warmup == 0 {
		return calls / 4
	}
	return max(0, o.Warmup)
}

// checks returns how many calls are checked.
func (o *Options) checks() int {
	switch {
	case o.Op == collective.Barrier: // it has no result
		return 0
	case o.Check == 0:
		return 1
	}
	return max(0, o.Check)
}

// Memory returns the least memory, in bytes, that all ranks together need to measure a size: sources,
// destinations, and the expected results.
func (o *Options) Memory(size int) int {
	if o.Op == collective.Barrier {
		return 0
	}
	vectors := 0
	for _, ranks := range o.Split.Sizes(o.Ranks) {
		held := func(others plan.Portion) int { // whole vectors, of all ranks of the group
			switch {
			case o.Op == collective.Send:
				return ranks / 2
			case others == plan.Whole:
				return ranks
			}
			return 1
		}
		role := o.Op.Role(false)
		give, get := held(role.Gives), held(role.Gets)
		vectors += give + get
		if o.checks() > 0 {
			vectors += get
		}
	}
	if vectors > 0 && size > math.MaxInt/vectors {
		return math.MaxInt
	}
	return size * vectors
}

// filled returns o with its defaults filled in, or what is invalid.
func (o Options) filled() (Options, error) {
	o.Op = cmp.Or(o.Op, collective.AllReduce)
	o.Type = cmp.Or(o.Type, tensor.Float32)
	o.Transport = cmp.Or(o.Transport, "mem")
	o.Ranks = cmp.Or(o.Ranks, 2)
	if o.Sizes == nil {
		o.Sizes = slices.Clone(Sizes)
		o.Sizes[0] = max(o.Sizes[0], o.Type.Bytes())
	}
	if o.Op == collective.Barrier {
		o.Sizes, o.Limit = []int{0}, false
	}
	o.Average = cmp.Or(o.Average, AverageAvg)
	o.Bind = cmp.Or(o.Bind, affinity.Share)
	o.Format = cmp.Or(o.Format, "plain")
	o.Processors = cmp.Or(o.Processors, runtime.NumCPU())
	t, ok := Transports[o.Transport]
	if !ok {
		return o, fmt.Errorf("bench: unknown transport %q: want %s", o.Transport, TransportNames())
	}
	err := o.checkCalls(t)
	if err == nil {
		o.Processes = cmp.Or(o.Processes, t.processes(o.Ranks))
		o.Buffers = cmp.Or(o.Buffers, t.buffers)
		if o.Name == "" {
			if o.Name = "lockstep-" + o.Transport; o.TLS {
				o.Name += "-tls"
			}
		}
		err = cmp.Or(o.checkProcesses(t), o.checkSizes())
	}
	if err != nil {
		return o, fmt.Errorf("bench: %w", err)
	}
	return o, nil
}

// checkCalls checks what the calls are, and between which ranks.
func (o *Options) checkCalls(t *Transport) error {
	switch {
	case t.lack() != "":
		return fmt.Errorf("transport %s: %s", o.Transport, t.lack())
	case o.Ranks < 1 || o.Ranks > RanksMax:
		return fmt.Errorf("%d ranks: want 1 to %d", o.Ranks, RanksMax)
	case o.Calls < 0 || o.Calls > CallsMax:
		return fmt.Errorf("%d calls of each size: want 1 to %d, or 0 for the default", o.Calls, CallsMax)
	case o.Warmup > CallsMax:
		return fmt.Errorf("%d calls to warm up: want at most %d", o.Warmup, CallsMax)
	case o.Check > CallsMax:
		return fmt.Errorf("%d checked calls: want at most %d", o.Check, CallsMax)
	case o.Unaligned < 0 || o.Unaligned > UnalignedMax:
		return fmt.Errorf("buffers %d bytes after a boundary: want 0 to %d", o.Unaligned, UnalignedMax)
	case o.Split.By != "" && (o.Split.By != "mod" && o.Split.By != "div" || o.Split.N < 1):
		return fmt.Errorf("split %v: want mod:N or div:N", o.Split)
	case o.Limit && o.Split.By != "":
		return fmt.Errorf("a limit for split %v: want one group, the limit is that of one", o.Split)
	case o.Op == collective.Send && o.smallest() < 2:
		return fmt.Errorf("%d ranks: a send needs two", o.smallest())
	case o.Root < 0 || o.Root >= o.smallest():
		return fmt.Errorf("root %d of %d ranks", o.Root, o.smallest())
	case !slices.Contains(Averages, o.Average):
		return fmt.Errorf("unknown average %q over the ranks: want %s", o.Average, averageNames())
	case !slices.Contains([]string{"plain", "table", "json"}, o.Format):
		return fmt.Errorf("unknown format %q: want plain, table or json", o.Format)
	case !o.Type.IsNumeric():
		return fmt.Errorf("elements of %v: want a numeric dtype", o.Type)
	}
	return nil
}

// checkProcesses checks how the ranks are divided among processes.
func (o *Options) checkProcesses(t *Transport) error {
	switch {
	case o.Processes < 1 || o.Processes > o.Ranks:
		return fmt.Errorf("%d ranks over %d processes: want at least one rank a process", o.Ranks, o.Processes)
	case o.Processes > ProcessesMax:
		return fmt.Errorf("%d processes: want at most %d, each with several ranks", o.Processes, ProcessesMax)
	case o.Transport == "shm" && o.Ranks > shm.SizeMax:
		return fmt.Errorf("%d ranks: the transport shm joins at most %d", o.Ranks, shm.SizeMax)
	case o.Processes > 1 && t.here != nil:
		return fmt.Errorf("transport %s joins the goroutines of one process, not %d processes", o.Transport,
			o.Processes)
	case o.TLS && (o.Transport != "tcp" || o.Processes == 1):
		return fmt.Errorf("TLS for %d processes over %s: want at least 2 over tcp", o.Processes, o.Transport)
	case t.here == nil && o.Worker == nil:
		return fmt.Errorf("transport %s joins processes, and Options.Worker is not set", o.Transport)
	case len(o.Listen) > 0 && (o.Transport != "tcp" || len(o.Listen) != o.Processes):
		return fmt.Errorf("%d addresses to listen at, for %d processes over %s: want one for each process over tcp",
			len(o.Listen), o.Processes, o.Transport)
	case o.Buffers != "shared" && o.Buffers != "ordinary":
		return fmt.Errorf("unknown buffers %q: want shared or ordinary", o.Buffers)
	}
	return nil
}

func (o *Options) checkSizes() error {
	for _, size := range o.Sizes {
		if element := o.Type.Bytes(); size%element != 0 || size <= 0 && o.Op != collective.Barrier {
			return fmt.Errorf("size %d: want a multiple of %d bytes, the size of a %v", size, element, o.Type)
		}
		if left, ok := memlimit.Available(); ok && int64(o.Memory(size)) > left {
			return fmt.Errorf("size %d: %d ranks take at least %d bytes of memory for it, and %d are available: "+
				"want smaller sizes or fewer ranks", size, o.Ranks, o.Memory(size), left)
		}
	}
	return nil
}

// smallest returns the number of ranks of the smallest group.
func (o *Options) smallest() int { return slices.Min(o.Split.Sizes(o.Ranks)) }

// cores returns the number of processors that the ranks share.
func cores() int { return runtime.GOMAXPROCS(0) }

// TransportNames returns the names of the transports that can be measured here.
func TransportNames() string {
	var names []string
	for name, t := range Transports {
		if t.lack() == "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}
