package train

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
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
	most := traceEventsMax / len(t.replicasOf)
	t.Timeline().Keep(min(c.Steps*perReplica*len(t.local)*3/2, most))
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

// TraceError reports that Fit could not write the file of [Trace]. The training itself did not fail by it.
type TraceError struct {
	Err error // of the file
}

// Error implements error.
func (e *TraceError) Error() string { return fmt.Sprintf("train: Config.Trace: %v", e.Err) }

// Unwrap returns Err.
func (e *TraceError) Unwrap() error { return e.Err }

// endTrace writes the trace. failed is the error that ended Fit, or nil. If only the file fails, the error is a
// *TraceError.
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
		return &TraceError{err}
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
	if most := traceEventsMax / len(t.replicasOf); len(r.Events) > most {
		r.Events = r.Events[len(r.Events)-most:]
	}
	return r
}

// gatherTrace returns, on the chief, the records of all workers, by number. Other workers get nil.
func (t *Trainer) gatherTrace(ctx context.Context, tr *tracing) (list []record, err error) {
	if tr.last, err = t.visit(ctx); err != nil {
		return nil, err
	}
	return toChief(ctx, t, "trace", t.record(tr))
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
