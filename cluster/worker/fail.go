package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/stacks"
	"github.com/lockstep-ml/lockstep/transport"
)

// ErrInterrupted is matched by a failure that no worker caused: the job was asked to stop.
var ErrInterrupted = errors.New("interrupted")

// Fail reports why this worker fails: to the other workers, whose errors then include it, and, by a file in
// the folder named by LOCKSTEP_RECORDS, to the launcher. Strategies call it for a failed Run; a program calls
// it for other errors, before Close. The first failure is kept; one that happens after further progress
// replaces it, and [Worker.Recovered] withdraws it. If err, or an error that it wraps, has a method
// FromWorker() int, it is a consequence of that worker's failure; if it has a method Plain() error, that error
// is reported instead. The returned error describes what could not be reported, and is not err.
func (w *Worker) Fail(err error) error {
	if err == nil {
		return nil
	}
	w.reporting.Lock()
	defer w.reporting.Unlock()
	count := w.progress.count.Load()
	if w.failure != nil && count == w.failure.at {
		return nil
	}
	r := w.record(err)
	w.failure = &ownFailure{blames: r.Blames}
	defer func() { w.failure.at = w.progress.count.Load() }()
	var errs []error
	if folder, ok := w.cfg.Getenv(cluster.EnvRecords); ok && folder != "" {
		errs = append(errs, failure.Write(folder, r))
		if r.Kind != "interrupted" {
			errs = append(errs, w.writeFlights(r.Kind))
		}
	}
	if w.store != nil {
		text, e := failure.Encode(r)
		if e == nil {
			most := w.storeWait(r.Blames...)
			if r.Kind == "store" {
				most = goneWait
			}
			e = w.accessStore(most, func(ctx context.Context) error {
				e := w.store.Set(ctx, w.key("failure", w.job.Worker), text)
				if e == nil && r.Kind != "interrupted" {
					e = w.requestFlights(ctx, fmt.Sprintf("worker %d failed: %s", w.job.Worker, r.Kind))
				}
				return e
			})
		}
		errs = append(errs, e)
	}
	if e := errors.Join(errs...); e != nil {
		return fmt.Errorf("worker: reporting the failure: %w", e)
	}
	return nil
}

// Recovered withdraws the failure that Fail has reported, if any: this worker continues the job, so that neither the
// launcher nor a later error of another worker counts it. Strategies call it for a Run that succeeds. The error
// describes what could not be withdrawn.
func (w *Worker) Recovered() error {
	w.reporting.Lock()
	defer w.reporting.Unlock()
	if w.failure == nil || w.Err() != nil {
		return nil
	}
	var errs []error
	if folder, ok := w.cfg.Getenv(cluster.EnvRecords); ok && folder != "" {
		r := failure.Record{Epoch: w.job.Epoch, Worker: w.job.Worker}
		if err := os.Remove(filepath.Join(folder, r.Name())); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if w.store != nil {
		errs = append(errs, w.accessStore(w.storeWait(), func(ctx context.Context) error {
			return w.store.Delete(ctx, w.key("failure", w.job.Worker))
		}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("worker: withdrawing the report of a failure: %w", err)
	}
	w.failure = nil
	return nil
}

// failRendezvous is Fail for a worker whose rendezvous failed: it reports to the launcher only. In the store
// another process may have registered as this worker.
func (w *Worker) failRendezvous(err error) {
	folder, ok := w.cfg.Getenv(cluster.EnvRecords)
	if !ok || folder == "" {
		return
	}
	if e := failure.Write(folder, w.record(err)); e != nil {
		w.cfg.Logger.Warn("worker: writing the record of this worker's failure failed", "error", e)
	}
}

// record builds the record of a failure.
func (w *Worker) record(err error) *failure.Record {
	if plain := (interface{ Plain() error })(nil); errors.As(err, &plain) {
		err = plain.Plain()
	}
	s := w.heartbeat()
	r := &failure.Record{
		Job: w.job.ID, Epoch: w.job.Epoch, Worker: w.job.Worker, Host: w.hostName(), PID: os.Getpid(), Time: time.Now(),
		Kind: kindOf(err), Message: err.Error(), Blames: w.blames(err), Step: s.Step, Phase: s.Phase, ExitCode: -1,
	}
	if len(w.members) == w.job.Workers { // else the rendezvous has not succeeded
		r.Ranks = w.members[w.job.Worker].Ranks()
	}
	if self := stacks.Self(); r.Kind == "panic" && panicAt(&self) >= 0 {
		self.Frames = self.Frames[panicAt(&self)+1:] // the message of a replica's panic contains the stack
		r.Stack = stacksText([]stacks.Goroutine{self}, recordFrames)
	}
	return r
}

const recordFrames = 40

// panicked is the failure of a worker that is closed while its program panics.
type panicked struct{ at string }

func (p *panicked) Error() string { return "the program panics" + p.at }

// panicking returns an error if the calling goroutine runs deferred functions because of a panic, or nil.
func panicking() error {
	self := stacks.Self()
	at := panicAt(&self)
	if at < 0 {
		return nil
	}
	p := &panicked{}
	for _, f := range self.Frames[at:] {
		if f.User() {
			p.at = " at " + f.String()
			break
		}
	}
	return p
}

// panicAt returns the index of the frame that panicked, or -1.
func panicAt(g *stacks.Goroutine) int {
	return slices.IndexFunc(g.Frames, func(f stacks.Frame) bool { return f.Func == "panic" })
}

// kindOf returns the kind of a failure, as defined by [failure.Record].
func kindOf(err error) string {
	e, joining, connecting := (*collective.Error)(nil), (*rendezvous.JoinError)(nil), (*transport.NotConnected)(nil)
	found := errors.As(err, &e)
	switch {
	case errors.Is(err, ErrInterrupted), errors.Is(err, context.Canceled):
		return "interrupted"
	case errors.Is(err, errStoreLost), errors.Is(err, errLeaseEnded):
		return "store"
	case errors.As(err, &joining):
		return kindOfRendezvous(joining.Kind)
	case errors.As(err, &connecting) && errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.As(err, &connecting):
		return "lost"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "disk"
	case errors.Is(err, syscall.ENOMEM):
		return "memory"
	case found && e.Kind == collective.ErrPeerLost:
		return "lost"
	case found && e.Kind == collective.ErrTimeout, errors.Is(err, os.ErrDeadlineExceeded):
		return "timeout"
	case errors.Is(err, collective.ErrMismatch), errors.Is(err, collective.ErrDesync):
		return "mismatch"
	case errors.As(err, new(*panicked)), errors.Is(err, collective.ErrPeerLost): // of a replica of this process
		return "panic"
	}
	return "error"
}

// kindOfRendezvous returns the kind of a failed rendezvous.
func kindOfRendezvous(kind rendezvous.JoinErrorKind) string {
	switch kind {
	case rendezvous.Missing:
		return "timeout"
	case rendezvous.Interrupted:
		return "lost"
	}
	return "mismatch"
}
