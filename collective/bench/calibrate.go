package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/collective/chooser"
	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Calibration configures [Calibrate].
type Calibration struct {
	Transports []string      // of "mem", "shm" and "tcp"
	Machine    string        // the table's description of the machine
	Worker     WorkerCommand // as in [Options]
	Calls      int           // timed calls of each measurement; default 60
	Progress   func(format string, args ...any)
}

// What calibration measures: the sizes of the corrections, and the operations.
var (
	correctedSizes = []int{1 << 10, 16 << 10, 256 << 10, 4 << 20}
	correctedOps   = []collective.Op{
		collective.AllReduce, collective.Broadcast, collective.AllGather,
		collective.ReduceScatter,
	}
)

// Calibrate measures this machine and returns the result as a table for the chooser: rates of copying and
// combining, latency and bandwidth of each transport, and for each algorithm the ratio of measured to
// predicted time. The numbers for links between hosts are those of the built-in table.
func Calibrate(ctx context.Context, c Calibration) (*chooser.Table, error) {
	if c.Calls == 0 {
		c.Calls = 60
	}
	if c.Progress == nil {
		c.Progress = func(string, ...any) {}
	}
	c.Progress("copying and combining")
	t := &chooser.Table{
		Version: chooser.Version, Machine: c.Machine,
		Copy: copyRate(), Combine: combineRate(),
		Transports: map[string]chooser.Transport{"network": chooser.Default().Transports["network"]},
	}
	for _, name := range c.Transports {
		c.Progress("%s: latency and bandwidth", name)
		tr, err := c.transport(ctx, name)
		if err != nil {
			return nil, err
		}
		t.Transports[name] = tr
	}
	ranks := min(8, max(2, cores()))
	for _, name := range c.Transports {
		for _, op := range correctedOps {
			for _, a := range plan.Algorithms {
				if err := c.correct(ctx, t, name, op, a, ranks); err != nil {
					return nil, err
				}
			}
		}
	}
	return t, nil
}

// rateBytes is how much is copied and combined at a time: more than the first-level caches hold.
const rateBytes = 1 << 20

// best returns the shortest of some runs of f.
func best(f func()) time.Duration {
	shortest := time.Duration(1<<63 - 1)
	for range 30 {
		start := time.Now()
		f()
		shortest = min(shortest, max(1, time.Since(start)))
	}
	return shortest
}

func copyRate() float64 {
	dst, src := make([]byte, rateBytes), make([]byte, rateBytes)
	return rateBytes / best(func() { copy(dst, src) }).Seconds()
}

func combineRate() float64 {
	a, b, dst := make([]float32, rateBytes/4), make([]float32, rateBytes/4), make([]float32, rateBytes/4)
	return 2 * rateBytes / best(func() {
		kernel.Reduce(kernel.Sum, tensor.Float32, unsafe.Pointer(&dst[0]), unsafe.Pointer(&a[0]), unsafe.Pointer(&b[0]),
			len(dst))
	}).Seconds()
}

// median measures one size of an operation between two ranks.
func (c *Calibration) median(ctx context.Context, transport string, op collective.Op, size int, algorithm string,
	ranks int,
) (time.Duration, error) {
	results, err := Run(ctx, io.Discard, Options{
		Op: op, Transport: transport, Ranks: ranks, Sizes: []int{size}, Algorithm: algorithm, Calls: c.Calls,
		Worker: c.Worker, Average: AverageRank0, // as the times of the built-in table: a sender's, a root's
	})
	if err != nil {
		return 0, fmt.Errorf("%s, %v of %d bytes %s: %w", transport, op, size, algorithm, err)
	}
	return max(1, results[0].Median), nil
}

// transport measures a transport by a barrier, a broadcast and a send.
func (c *Calibration) transport(ctx context.Context, name string) (chooser.Transport, error) {
	const large = 4 << 20
	var t chooser.Transport
	small, err := c.median(ctx, name, collective.Send, 4, "", 2)
	if err != nil {
		return t, err
	}
	big, err := c.median(ctx, name, collective.Send, large, "", 2)
	if err != nil {
		return t, err
	}
	t.Frame, t.Send = int64(small), large/max(1e-9, (big-small).Seconds())
	if Transports[name].frames {
		return t, nil
	}
	sync, err := c.median(ctx, name, collective.Barrier, 0, "", 2)
	if err != nil {
		return t, err
	}
	read, err := c.median(ctx, name, collective.Broadcast, large, "direct", 2)
	if err != nil {
		return t, err
	}
	t.Sync, t.Read = int64(sync), large/max(1e-9, (read-2*sync).Seconds())
	return t, nil
}

// correct measures an algorithm at some sizes, if it fits, and adds the corrections.
func (c *Calibration) correct(ctx context.Context, t *chooser.Table, transport string, op collective.Op,
	a plan.Algorithm, ranks int,
) error {
	o := Options{Op: op, Transport: transport, Ranks: ranks, Type: tensor.Float32}
	p, w := o.problem(correctedSizes[0])
	if _, err := chooser.Named(a.Name, p, w); err != nil {
		return nil // it does not fit; there is nothing to correct
	}
	c.Progress("%s: %v by %s", transport, op, a.Name)
	for _, size := range correctedSizes {
		p, w := o.problem(size)
		ranked := t.Rank(p, w)
		i := slices.IndexFunc(ranked, func(x chooser.Candidate) bool { return x.Algorithm.Name == a.Name })
		if ranked[i].Err != nil || ranked[i].Cost <= 0 {
			continue // for example, it is too large for the algorithm
		}
		took, err := c.median(ctx, transport, op, size, a.Name, ranks)
		if err != nil {
			return err
		}
		t.Corrections = append(t.Corrections, chooser.Correction{
			Algorithm: a.Name, Operation: op.String(), Over: transport, Bytes: size,
			Factor: float64(took) / float64(ranked[i].Cost),
		})
	}
	return nil
}

// stageBytes is about what the transports' staging buffers hold for one call.
const stageBytes = 1 << 20

// problem returns the chooser's input for a size.
func (o *Options) problem(size int) (plan.Problem, chooser.Where) {
	t := Transports[o.Transport]
	p := plan.Problem{
		Op: o.Op, Reduce: o.Reduce, Size: o.Ranks, Count: o.count(size, o.Ranks), Root: o.Root,
		Places: make([]plan.Place, o.Ranks),
	}
	if o.Op == collective.Barrier {
		p.Count = 0
	}
	if o.Op == collective.Send {
		p.Peer = 1
	}
	w := chooser.Where{ElementBytes: o.Type.Bytes(), Cores: cores(), Frames: o.Transport}
	for i := range p.Places {
		if !t.Goroutines() {
			p.Places[i].Worker = i
		}
		if t.frames {
			p.Places[i].Domain = i
		}
	}
	if !t.frames {
		w.Memory = o.Transport
		p.Stage = stageBytes / o.Type.Bytes()
		p.Private = !t.Goroutines() && o.Buffers == "ordinary"
	}
	return p, w
}

// Explain describes, as one text for each size, which algorithm would be chosen, and why.
func Explain(opts Options) ([]string, error) {
	opts, err := opts.filled()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, size := range opts.Sizes {
		p, w := opts.problem(size)
		text, err := collective.Explain(opts.config(), p, w)
		if err != nil {
			return nil, err
		}
		out = append(out, text)
	}
	return out, nil
}
