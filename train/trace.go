package train

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// Trace makes each Fit write a timeline of its last steps over all workers, in Chrome's trace format, which
// https://ui.perfetto.dev displays. See docs/observability.md.
type Trace struct {
	// Path is the file, which the chief writes at the end of Fit. If Fit fails, the file has the chief's events only.
	Path string
	// Steps is how many of the last steps the file has at most. Default 100. All workers together write at most a
	// million events, so there may be fewer steps.
	Steps int
}

const (
	traceSteps     = 100
	traceEventsMax = 1 << 20 // of all workers
	perBucket      = 7       // events: the backward pass, at most four calls, a wait, an update
	clockVisits    = 32      // calls by which the clocks are compared, at each end
)

// completeTrace sets the defaults of Trace and returns an error if it is invalid.
func (c *Config) completeTrace() error {
	if c.Trace == nil {
		return nil
	}
	trace := *c.Trace
	if trace.Steps == 0 {
		trace.Steps = traceSteps
	}
	if trace.Steps < 0 {
		return fmt.Errorf("train: Config.Trace.Steps is %d: want the number of steps to keep, at least 1", trace.Steps)
	}
	c.Trace = &trace
	return nil
}

// tracing is the trace of one Fit.
type tracing struct {
	first, last []timeline.Visit // of the calls by which the clocks are compared
	began       time.Duration    // by the recorder's clock
}

// startTrace prepares the trace of a Fit whose steps accumulate so many batches.
func (t *Trainer) startTrace(ctx context.Context, accumulate int) (*tracing, error) {
	c := t.config.Trace
	if c == nil {
		return nil, nil
	}
	perReplica := 10 + accumulate + perBucket*len(t.buckets)
	share := traceEventsMax / t.workers
	t.Timeline().Keep(min(c.Steps*perReplica*len(t.parts)*3/2, share))
	first, err := t.visit(ctx)
	if err != nil {
		return nil, fmt.Errorf("train: Config.Trace: comparing the workers' clocks: %w", err)
	}
	return &tracing{first: first, began: t.Timeline().Now()}, nil
}

// visit makes some small calls with all workers, and returns when this one entered and left them.
func (t *Trainer) visit(ctx context.Context) (list []timeline.Visit, err error) {
	if !t.others() {
		return nil, nil
	}
	err = t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		sum := []float64{1}
		for range clockVisits {
			enter := t.Timeline().Now()
			h, err := r.StartAllReduce(ctx, distribute.Sum, distribute.Bucket{Scalars: sum})
			if err == nil {
				err = h.Wait(ctx)
			}
			if err != nil {
				return err
			}
			if r.LocalID() == 0 {
				list = append(list, timeline.Visit{Enter: enter, Leave: t.Timeline().Now()})
			}
		}
		return nil
	})
	return list, err
}

// record is what a worker sends to the chief for the trace.
type record struct {
	Worker      int
	Host        string
	PID         int
	First, Last []timeline.Visit
	Events      []timeline.Event
	Dropped     int
}

// endTrace writes the trace. failed is the error that ended Fit, or nil.
func (t *Trainer) endTrace(ctx context.Context, tr *tracing, failed error) error {
	if tr == nil {
		return nil
	}
	var list []record
	var err error
	if failed != nil {
		if !t.IsChief() {
			return nil
		}
		list = []record{t.record(tr)}
	} else if list, err = t.gatherTrace(ctx, tr); err != nil {
		return fmt.Errorf("train: Config.Trace: gathering the events of all workers: %w", err)
	}
	if list == nil {
		return nil // only the chief has them
	}
	all := joinRecords(list, t.config.Trace.Steps)
	if failed != nil && t.others() {
		all.Workers[0].Note = "the training failed, so the events of the other workers are missing"
	}
	if err := checkpoint.WriteFile(t.config.Trace.Path, func(w io.Writer) error { return all.Write(w) }); err != nil {
		return fmt.Errorf("train: Config.Trace: %w", err)
	}
	return nil
}

// record returns what this worker contributes.
func (t *Trainer) record(tr *tracing) record {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	r := record{
		Worker: t.worker, Host: host, PID: os.Getpid(), First: tr.first, Last: tr.last, Dropped: t.Timeline().Dropped(),
	}
	own := timeline.Timeline{Workers: []timeline.Worker{{Events: t.Timeline().Events()}}}
	own.Trim(t.config.Trace.Steps, tr.began)
	r.Events = own.Workers[0].Events
	if most := traceEventsMax / t.workers; len(r.Events) > most {
		r.Events = r.Events[len(r.Events)-most:]
	}
	return r
}

// gatherTrace returns, on the chief, the records of all workers, by number. Other workers get nil.
func (t *Trainer) gatherTrace(ctx context.Context, tr *tracing) (list []record, err error) {
	if tr.last, err = t.visit(ctx); err != nil {
		return nil, err
	}
	mine := t.record(tr)
	if !t.others() {
		return []record{mine}, nil
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	parts, err := t.bytesToChief(ctx, "trace", text)
	if err != nil || parts == nil {
		return nil, err
	}
	for worker, part := range parts {
		var r record
		if err := json.Unmarshal(part, &r); err != nil {
			return nil, fmt.Errorf("the events of worker %d: %w", worker, err)
		}
		list = append(list, r)
	}
	return list, nil
}

// bytesToChief returns, on the chief, what every worker gives, by worker. Other workers get nil.
func (t *Trainer) bytesToChief(ctx context.Context, name string, text []byte) (parts [][]byte, err error) {
	var lengths []int64
	err = t.run(ctx, func(ctx context.Context, r *distribute.Replica) error {
		var length int64
		if r.LocalID() == 0 {
			length = int64(len(text))
		}
		v, err := r.AllGather(ctx, tensor.From([]int64{length}, 1), 0)
		if err == nil && r.LocalID() == 0 {
			lengths = tensor.Data[int64](v.(*tensor.Tensor))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	counts, total := make([]int, len(lengths)), 0
	for replica, n := range lengths {
		counts[replica] = int(n)
		total += int(n)
	}
	values := make([]*tensor.Tensor, len(t.parts))
	for local := range values {
		values[local] = tensor.From(text, len(text))
	}
	var all *tensor.Tensor
	if t.IsChief() {
		all = tensor.New(tensor.Uint8, total)
	}
	if err := t.sendToChief(ctx, name, all, values, counts); err != nil || all == nil {
		return nil, err
	}
	rest := tensor.Data[uint8](all)
	for _, n := range counts {
		if n > 0 {
			parts, rest = append(parts, rest[:n]), rest[n:]
		}
	}
	return parts, nil
}

// joinRecords joins the records of workers, of which the first one has the clock of the timeline.
func joinRecords(list []record, steps int) *timeline.Timeline {
	all := &timeline.Timeline{Steps: steps}
	for i, r := range list {
		w := timeline.Worker{Worker: r.Worker, Host: r.Host, PID: r.PID, Events: r.Events, Dropped: r.Dropped}
		if i > 0 {
			first, ok := timeline.OffsetOf(r.First, list[0].First)
			last, also := timeline.OffsetOf(r.Last, list[0].Last)
			if !ok || !also {
				w.Unknown = "its clock and that of worker 0 contradict each other"
			} else {
				w.Clock = timeline.Clock{
					First: first, Last: last, FirstAt: r.First[len(r.First)-1].Leave, LastAt: r.Last[0].Enter,
				}
			}
		}
		all.Workers = append(all.Workers, w)
	}
	return all
}
