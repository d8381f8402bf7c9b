// Package bench measures collectives on this machine, the way the benchmarks of other libraries do, so that the numbers
// can stand side by side: an all-reduce (SUM) of float32 from one buffer to another, a barrier before each timed call,
// warm-up calls first, and the median time of a call on rank 0.
package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// Options say what is measured. The zero value is the default.
type Options struct {
	Transport string // "mem" (default) or "pipe": a row of [Transports]
	Ranks     int    // default 2
	Sizes     []int  // bytes of a call, multiples of 4; default [Sizes]
	Algorithm string // a row of collective.Algorithms; default: the chooser's
	Format    string // "plain" (default), one line per size for other programs to read, or "table"
	Name      string // first word of a plain line; default "lockstep-" and the transport's name
}

// Sizes are the sizes that are measured by default, in bytes.
var Sizes = []int{4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}

// Transports are the transports that can be measured, by name.
var Transports = map[string]func(ranks int) []transport.Endpoint{
	"mem":  mem.New,
	"pipe": mem.NewPipes,
}

// Result is the measurement of one size.
type Result struct {
	Bytes  int
	Median time.Duration // of a call on rank 0
	Best   time.Duration
	Calls  int
}

// Run measures an all-reduce of each size and prints each result to w as soon as it is there. In the plain format a line
// is
//
//	NAME ranks=N bytes=B us=T
func Run(ctx context.Context, w io.Writer, opts Options) error {
	opts, err := opts.filled()
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	if opts.Format == "table" {
		fmt.Fprintln(table, "bytes\tcalls\tmedian us\tbest us\tGB/s\t")
	}
	for _, size := range opts.Sizes {
		r, err := AllReduce(ctx, opts, size)
		if err != nil {
			return err
		}
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
		if opts.Format == "table" {
			fmt.Fprintf(table, "%d\t%d\t%.1f\t%.1f\t%.2f\t\n", r.Bytes, r.Calls, us(r.Median), us(r.Best), float64(r.Bytes)/1e3/us(r.Median))
			continue
		}
		if _, err := fmt.Fprintf(w, "%s ranks=%d bytes=%d us=%.1f\n", opts.Name, opts.Ranks, r.Bytes, us(r.Median)); err != nil {
			return err
		}
	}
	if opts.Format == "table" {
		return table.Flush()
	}
	return nil
}

// AllReduce measures one size.
func AllReduce(ctx context.Context, opts Options, bytes int) (Result, error) {
	opts, err := opts.filled()
	if err != nil {
		return Result{}, err
	}
	group, err := collective.Open(Transports[opts.Transport](opts.Ranks), collective.Config{Name: "bench", Algorithm: opts.Algorithm})
	if err != nil {
		return Result{}, err
	}
	calls := callsOf(bytes)
	times := make([]time.Duration, calls)
	errs := make(chan error)
	for rank, c := range group.Local() {
		go func() {
			errs <- measure(ctx, c, bytes, calls, func(i int, d time.Duration) {
				if rank == 0 {
					times[i] = d
				}
			})
		}()
	}
	for range group.Local() {
		if e := <-errs; e != nil && err == nil {
			err = e
		}
	}
	if e := group.Close(); err == nil {
		err = e
	}
	slices.Sort(times)
	return Result{Bytes: bytes, Median: times[calls/2], Best: times[0], Calls: calls}, err
}

// callsOf returns how many calls of a size are timed.
func callsOf(bytes int) int {
	switch {
	case bytes >= 16<<20:
		return 12
	case bytes >= 1<<20:
		return 40
	}
	return 500
}

// measure is one rank's part.
func measure(ctx context.Context, c collective.Communicator, bytes, calls int, note func(int, time.Duration)) error {
	src, dst := make([]float32, bytes/4), make([]float32, bytes/4)
	for i := range src {
		src[i] = float32(c.Rank() + 1)
	}
	sum := &collective.Call{
		Op: collective.AllReduce, Reduce: collective.Sum, Type: tensor.Float32,
		Src: tensor.HostMemory(src), Dst: tensor.HostMemory(dst),
	}
	barrier := &collective.Call{Op: collective.Barrier}
	for range calls / 4 {
		if err := c.Do(ctx, sum); err != nil {
			return err
		}
	}
	for i := range calls {
		if err := c.Do(ctx, barrier); err != nil {
			return err
		}
		start := time.Now()
		if err := c.Do(ctx, sum); err != nil {
			return err
		}
		note(i, time.Since(start))
	}
	want := float32(c.Size()*(c.Size()+1)) / 2
	for i, got := range dst {
		if got != want {
			return fmt.Errorf("bench: rank %d has %v at element %d of %d, want %v", c.Rank(), got, i, len(dst), want)
		}
	}
	return nil
}

// filled returns o with its defaults, or what is wrong with it.
func (o Options) filled() (Options, error) {
	if o.Transport == "" {
		o.Transport = "mem"
	}
	if o.Ranks == 0 {
		o.Ranks = 2
	}
	if o.Sizes == nil {
		o.Sizes = Sizes
	}
	if o.Format == "" {
		o.Format = "plain"
	}
	if o.Name == "" {
		o.Name = "lockstep-" + o.Transport
	}
	switch {
	case Transports[o.Transport] == nil:
		return o, fmt.Errorf("bench: no transport %q: want mem or pipe", o.Transport)
	case o.Ranks < 1:
		return o, fmt.Errorf("bench: %d ranks: want at least 1", o.Ranks)
	case o.Format != "plain" && o.Format != "table":
		return o, fmt.Errorf("bench: no format %q: want plain or table", o.Format)
	}
	for _, size := range o.Sizes {
		if size < 4 || size%4 != 0 {
			return o, fmt.Errorf("bench: size %d: want a multiple of 4 bytes, the size of a float32", size)
		}
	}
	return o, nil
}
