// Package bench measures collectives on this machine, in the way of other libraries' benchmarks, so that the
// numbers are comparable: a barrier before each timed call, warm-up calls first, and the median time of a
// call on rank 0 (the columns are those of nccl-tests, but with the median where nccl-tests has the mean).
// After the timed calls the result is compared with the expected one.
//
// Ranks are goroutines of this process, or processes that it starts ([Options.Processes]).
package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
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
	Limit bool // also measure the limit of the operation on this machine
	// Processors is the number of processors that the ranks share; the default of Calls depends on it.
	// Default those of this machine. It is the same for all processes.
	Processors int
	Format     string // "plain" (default), one line per size for other programs to read; "table" or "json"
	Name       string // first word of a plain line; default "lockstep-" and the transport's name

	// Worker returns the command of a process that runs [Work]; required for more than one process.
	Worker WorkerCommand `json:"-"`
}

// Bounds of [Options]. With more ranks one call takes seconds, and depends on the machine more than on the
// library.
const (
	CallsMax     = 1_000_000
	RanksMax     = 1024
	ProcessesMax = shm.SizeMax
)

// Sizes are the default sizes, in bytes.
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
	Ranks     int           `json:"ranks"`
	Processes int           `json:"processes"`
	Type      string        `json:"dtype"`
	Buffers   string        `json:"buffers"`
	Algorithm string        `json:"algorithm"` // requested; empty: chosen by the chooser
	Bytes     int           `json:"bytes"`     // of the whole vector, rounded down so that every rank has the same part
	Median    time.Duration `json:"median_ns"` // of a call on rank 0
	Best      time.Duration `json:"best_ns"`
	Calls     int           `json:"calls"`
	AlgBW     float64       `json:"algbw"` // GB/s: Bytes / Median
	// GB/s: AlgBW times the share of Bytes that the busiest rank must at least transfer
	BusBW float64       `json:"busbw"`
	Limit time.Duration `json:"limit_ns,omitempty"`
}

// Share returns the fraction of the limit that was reached, from 0 to 1; slightly more if the machine was
// slower while the limit was measured; 0 if it was not measured.
func (r Result) Share() float64 {
	if r.Limit == 0 || r.Median == 0 {
		return 0
	}
	return float64(r.Limit) / float64(r.Median)
}

// Run measures each size and prints each result to w as soon as it is available. In the plain format a line is
//
//	NAME ranks=N bytes=B us=T
//
// In the table time is the median, and algbw is bytes divided by time. busbw is algbw times the share of the
// bytes that the busiest rank must at least send or receive, such as 2(n-1)/n for an all-reduce of n ranks. It can be
// compared between numbers of ranks, and with the bandwidth of the hardware (nccl-tests: PERFORMANCE.md). With Limit
// another column shows the share of the limit that was reached: the time in which the ranks do the same reads and
// writes without synchronising or adding ("mem", "shm"), or exchange the same bytes over plain sockets
// ("tcp").
//
// Run returns the results, those before an error included.
func Run(ctx context.Context, w io.Writer, opts Options) (results []Result, err error) {
	opts, err = opts.filled()
	if err != nil {
		return nil, err
	}
	p := newPrinter(w, opts)
	err = measureAll(ctx, opts, func(r Result) error {
		results = append(results, r)
		return p.print(r)
	})
	return results, err
}

// Measure is Run without printing.
func Measure(ctx context.Context, opts Options) ([]Result, error) { return Run(ctx, io.Discard, opts) }

// measureAll measures every size and reports each. It measures the limit of a size just before and just after
// the size, so that a temporary slowdown of the machine affects both.
func measureAll(ctx context.Context, opts Options, report func(Result) error) error {
	if !opts.Limit || opts.Op == collective.Barrier {
		return measureSizes(ctx, opts, report)
	}
	for _, size := range opts.Sizes {
		one := opts
		one.Sizes = []int{size}
		bytes := opts.count(size) * opts.Type.Bytes()
		before, err := limitOf(opts, bytes)
		if err != nil {
			return err
		}
		var result Result
		if err := measureSizes(ctx, one, func(r Result) error {
			result = r
			return nil
		}); err != nil {
			return err
		}
		after, err := limitOf(opts, bytes)
		if err != nil {
			return err
		}
		result.Limit = min(before, after)
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

// count returns the number of elements of a vector of this size, rounded down so that every rank has the same
// part.
func (o *Options) count(size int) int {
	count := size / o.Type.Bytes()
	if parted(o.Op) {
		count = max(1, count/o.Ranks) * o.Ranks
	}
	return count
}

// result computes the result from rank 0's times.
func (o *Options) result(bytes int, times []time.Duration) Result {
	slices.Sort(times)
	r := Result{
		Op: o.Op.String(), Transport: o.Transport, Ranks: o.Ranks, Processes: o.Processes, Type: o.Type.String(),
		Buffers:   o.Buffers,
		Algorithm: o.Algorithm, Bytes: bytes, Median: times[len(times)/2], Best: times[0], Calls: len(times),
	}
	if r.Median > 0 {
		r.AlgBW = float64(bytes) / float64(r.Median)
		r.BusBW = r.AlgBW * busFactor(o.Op, o.Ranks)
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

// Memory returns the least memory, in bytes, that all ranks together need to measure a size: sources,
// destinations, and the expected results.
func (o *Options) Memory(size int) int {
	give, get := o.Ranks, o.Ranks // whole vectors, of all ranks
	switch o.Op {
	case collective.Barrier:
		return 0
	case collective.Reduce:
		get = 1
	case collective.ReduceScatter:
		get = 1
	case collective.Broadcast, collective.AllGather:
		give = 1
	case collective.Gather, collective.Scatter:
		give, get = 1, 1
	case collective.Send:
		give, get = o.Ranks/2, o.Ranks/2
	}
	vectors := give + 2*get
	if size > math.MaxInt/vectors {
		return math.MaxInt
	}
	return size * vectors
}

// filled returns o with its defaults filled in, or what is invalid.
func (o Options) filled() (Options, error) {
	if o.Op == 0 {
		o.Op = collective.AllReduce
	}
	if o.Type == 0 {
		o.Type = tensor.Float32
	}
	if o.Transport == "" {
		o.Transport = "mem"
	}
	if o.Ranks == 0 {
		o.Ranks = 2
	}
	if o.Sizes == nil {
		o.Sizes = Sizes
	}
	if o.Op == collective.Barrier {
		o.Sizes = []int{0}
	}
	if o.Format == "" {
		o.Format = "plain"
	}
	if o.Processors == 0 {
		o.Processors = runtime.NumCPU()
	}
	t, ok := Transports[o.Transport]
	switch {
	case !ok:
		return o, fmt.Errorf("bench: unknown transport %q: want %s", o.Transport, TransportNames())
	case t.lack() != "":
		return o, fmt.Errorf("bench: transport %s: %s", o.Transport, t.lack())
	case o.Ranks < 1 || o.Ranks > RanksMax:
		return o, fmt.Errorf("bench: %d ranks: want 1 to %d", o.Ranks, RanksMax)
	case o.Calls < 0 || o.Calls > CallsMax:
		return o, fmt.Errorf("bench: %d calls of each size: want 1 to %d, or 0 for the default", o.Calls, CallsMax)
	case o.Op == collective.Send && o.Ranks < 2:
		return o, fmt.Errorf("bench: %d ranks: a send needs two", o.Ranks)
	case o.Root < 0 || o.Root >= o.Ranks:
		return o, fmt.Errorf("bench: root %d of %d ranks", o.Root, o.Ranks)
	case !slices.Contains([]string{"plain", "table", "json"}, o.Format):
		return o, fmt.Errorf("bench: unknown format %q: want plain, table or json", o.Format)
	case !o.Type.IsNumeric():
		return o, fmt.Errorf("bench: elements of %v: want a numeric dtype", o.Type)
	}
	if o.Processes == 0 {
		o.Processes = t.processes(o.Ranks)
	}
	if o.Buffers == "" {
		o.Buffers = t.buffers
	}
	if o.Name == "" {
		o.Name = "lockstep-" + o.Transport
	}
	switch {
	case o.Processes < 1 || o.Processes > o.Ranks:
		return o, fmt.Errorf("bench: %d ranks over %d processes: want at least one rank a process", o.Ranks, o.Processes)
	case o.Processes > ProcessesMax:
		return o, fmt.Errorf("bench: %d processes: want at most %d, each with several ranks", o.Processes, ProcessesMax)
	case o.Transport == "shm" && o.Ranks > shm.SizeMax:
		return o, fmt.Errorf("bench: %d ranks: the transport shm joins at most %d", o.Ranks, shm.SizeMax)
	case o.Processes > 1 && t.here != nil:
		return o, fmt.Errorf("bench: transport %s joins the goroutines of one process, not %d processes", o.Transport,
			o.Processes)
	case t.here == nil && o.Worker == nil:
		return o, fmt.Errorf("bench: transport %s joins processes, and Options.Worker is not set", o.Transport)
	case o.Buffers != "shared" && o.Buffers != "ordinary":
		return o, fmt.Errorf("bench: unknown buffers %q: want shared or ordinary", o.Buffers)
	}
	for _, size := range o.Sizes {
		if element := o.Type.Bytes(); size%element != 0 || size <= 0 && o.Op != collective.Barrier {
			return o, fmt.Errorf("bench: size %d: want a multiple of %d bytes, the size of a %v", size, element, o.Type)
		}
		if left, ok := memlimit.Available(); ok && int64(o.Memory(size)) > left {
			return o, fmt.Errorf("bench: size %d: %d ranks take at least %d bytes of memory for it, and %d are available: "+
				"want smaller sizes or fewer ranks", size, o.Ranks, o.Memory(size), left)
		}
	}
	return o, nil
}

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
