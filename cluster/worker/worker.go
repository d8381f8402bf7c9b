package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/internal/pause"
	"github.com/lockstep-ml/lockstep/timeline"
	"github.com/lockstep-ml/lockstep/transport/mixed"
)

// Worker is this process as a worker of its job. [Join] creates it, Close ends it. Its methods are safe for
// concurrent use.
type Worker struct {
	cfg      Config
	secret   secret.Secret // the job's or, if it has none, this host's; none with DataPlaintext unless oneHost
	job      *cluster.Job
	progress progress
	timeline *timeline.Recorder
	meter    linkMeter
	server   *rendezvous.Server // of the store; nil: another process serves it
	port     *listener.Listener // where it is served
	listener *mixed.Listener    // of this worker, until its replicas are connected
	*session
	world *group // the first group of the session

	closing  sync.Once
	closeErr error
}

// Job returns the job, this worker's index, and their source. The caller must not change it.
func (w *Worker) Job() *cluster.Job { return w.job }

// Opener returns the third-party backend from the configuration, or nil for the library's own transports.
func (w *Worker) Opener() *Opener { return w.cfg.Opener }

// Timeline returns the recorder of this worker's calls and steps.
func (w *Worker) Timeline() *timeline.Recorder { return w.timeline }

// Members returns all workers, by number.
func (w *Worker) Members() []Member { return append([]Member(nil), w.members...) }

// Group returns the communicators of this worker's replicas, connected to those of all other workers. It
// stays the same during the worker's whole life. A strategy that uses it may close it, and Close does.
func (w *Worker) Group() collective.Group { return w.world }

// Resolver returns the job as TensorFlow's cluster resolver.
func (w *Worker) Resolver() cluster.Resolver { return w.job.Resolver() }

// Store returns the rendezvous store, for use until Close: nil in a single-process job. Do not touch the keys
// of others: use keys of [rendezvous.Key] with the job, the epoch and a first part that is unique to the
// caller.
func (w *Worker) Store() rendezvous.Store { return w.store }

// Err returns the error that ended the job for this worker, such as the loss of another worker, or nil.
func (w *Worker) Err() error { return w.ended() }

// Compare compares the facts of all workers: "model", "global batch", …. All workers call it, with the same
// name, once per name. If a fact differs, each gets an error that matches [ErrDiffer] and lists the values
// and their workers. It waits for the others as long as Join does, but not for a worker that fails and leaves
// the job.
func (w *Worker) Compare(ctx context.Context, name string, facts []rendezvous.Fact) error {
	if w.store == nil {
		return nil
	}
	ctx, cancel := w.waiting(ctx)
	defer cancel()
	key := w.key("compare", name)
	err := w.unlessGone(ctx, key, func(ctx context.Context) error {
		return rendezvous.Compare(ctx, w.store, key, w.job.Worker, w.job.Workers, facts)
	})
	if err == nil {
		return nil
	}
	if differ := (*rendezvous.DifferError)(nil); errors.As(err, &differ) {
		differ.What = name
		return &differs{err}
	}
	return fmt.Errorf("worker: comparing %s: %w", name, w.explain(ctx, err))
}

// ErrDiffer is matched by the error of workers that differ in facts that must be equal.
var ErrDiffer = errors.New("the workers differ")

// differs is an error that lists the differences between workers.
type differs struct{ error }

func (d *differs) Error() string { return "worker: " + d.error.Error() }

func (d *differs) Unwrap() []error { return []error{ErrDiffer, d.error} }

// Exchange is an all-gather: it returns the values of all workers, by worker. All call it with the same name,
// once per name. It waits as Compare does.
func (w *Worker) Exchange(ctx context.Context, name string, mine []byte) ([][]byte, error) {
	if w.store == nil {
		return [][]byte{mine}, nil
	}
	ctx, cancel := w.waiting(ctx)
	defer cancel()
	key, all := w.key("exchange", name), [][]byte(nil)
	err := w.unlessGone(ctx, key, func(ctx context.Context) (err error) {
		all, err = rendezvous.Exchange(ctx, w.store, key, w.job.Worker, w.job.Workers, mine)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("worker: exchanging %s: %w", name, w.explain(ctx, err))
	}
	return all, nil
}

// waiting returns a context for a wait for the other workers, which is logged when it takes long. It ends
// when the job does.
func (w *Worker) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(rendezvous.WithWaiting(ctx, w.logWaiting))
	stop := context.AfterFunc(w.life, func() { end(context.Cause(w.life)) })
	ctx, cancel := context.WithTimeout(ctx, w.cfg.RendezvousTimeout)
	return ctx, func() { cancel(); stop(); end(nil) }
}

// logWaiting logs the workers that this one waits for. It is a warning, so that it is shown: nothing else is
// printed until all have joined.
func (w *Worker) logWaiting(wait rendezvous.Waiting) {
	text := wait.String()
	if wait.Store != "" && serves(w.job) {
		text = "waiting for worker 0, which serves the store at " + wait.Store + " and does not respond"
	}
	args := []any{"waited", wait.Waited.Round(time.Second), "at most", w.cfg.RendezvousTimeout}
	if wait.Key != "" {
		args = append(args, "for", wait.Key)
	}
	w.cfg.Logger.Warn("worker: "+text, args...)
}

// explain returns the error of a wait; if workers were missing, with their identity and last known state.
func (w *Worker) explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := w.Err(); cause != nil {
		return cause
	}
	missing := (*rendezvous.WaitError)(nil)
	if !errors.As(err, &missing) || context.Cause(ctx) != context.DeadlineExceeded {
		return err
	}
	e := &collective.Error{Kind: collective.ErrTimeout, Comm: w.cfg.Collective.Name, Rank: -1, Err: err}
	for _, worker := range missing.Missing {
		e.Peers = append(e.Peers, w.members[worker].Ranks()...)
	}
	e.Who = w.describe(e)
	return e
}

// key returns a key of this job and epoch.
func (w *Worker) key(parts ...any) string {
	words := make([]string, len(parts))
	for i, p := range parts {
		words[i] = fmt.Sprint(p)
	}
	return rendezvous.Key(w.job.ID, w.job.Epoch, words...)
}

// leaveWait bounds how long a worker that fails and serves the store keeps it for the others that fail with
// it; leaveSilent is the time without a heartbeat after which it does not keep the store for one of them any
// more.
const (
	leaveWait   = 10 * time.Second
	leaveSilent = 3 * time.Second
)

// Close leaves the job and releases everything that Join opened. If the job has ended well, the worker that
// serves the store waits until all others have left too. If a deferred function of a panicking goroutine
// calls it, it reports the panic to the others. Later calls do nothing and return the same error.
func (w *Worker) Close() error {
	w.closing.Do(func() {
		if err := panicking(); err != nil {
			_ = w.Fail(err) // there is no other way to report it
		}
		w.closeErr = errors.Join(w.closeGroup(), w.leave())
		if w.closeErr != nil {
			w.closeErr = fmt.Errorf("worker: leaving the job as worker %s: %w", strconv.Itoa(w.job.Worker), w.closeErr)
		}
	})
	return w.closeErr
}

// closeGroup closes the communicators in use, which their user may have closed already.
func (w *Worker) closeGroup() error {
	var errs []error
	for _, c := range w.communicators() {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// leave notifies the others, and closes the store.
func (w *Worker) leave() error {
	if w.store == nil {
		w.endLife(nil)
		return nil
	}
	w.reporting.Lock()
	failed := w.failure != nil || w.Err() != nil
	w.reporting.Unlock()
	var err error
	if failed {
		w.publishGone()
		w.leaveFailed()
	} else {
		ctx, cancel := w.waiting(context.Background())
		err = w.explain(ctx, w.leaveSucceeded(ctx))
		cancel()
	}
	w.stop()
	return err
}

// leaveSucceeded leaves a job that ended well. The worker that serves the store leaves last.
func (w *Worker) leaveSucceeded(ctx context.Context) error {
	if w.server == nil && w.job.Worker == 0 && !w.job.StoreTemporary {
		return nil // the store does not depend on a worker
	}
	return rendezvous.Leave(ctx, w.store, w.registration)
}

// leaveFailed leaves a job that failed. The worker that serves the store gives the others, except the lost
// ones, time to read the reason from it.
func (w *Worker) leaveFailed() {
	if w.member == nil { // it does not know which of them are alive
		w.keepStore()
		return
	}
	if w.server == nil && !w.removes() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveWait)
	defer cancel()
	var lost []int
	w.reporting.Lock()
	if w.failure != nil {
		lost = w.failure.blames
	}
	w.reporting.Unlock()
	for ctx.Err() == nil && w.othersAlive(lost) {
		pause.For(ctx, w.cfg.heartbeatInterval()/4)
	}
}

// othersAlive reports whether other workers are alive, besides those that are lost.
func (w *Worker) othersAlive(lost []int) bool {
	for _, v := range w.member.States() {
		if v.Worker != w.job.Worker && !v.Heartbeat.Final && v.Silent < leaveSilent && !slices.Contains(lost, v.Worker) {
			return true
		}
	}
	return false
}

// stop ends the goroutines, the last of which notifies the others that this worker has left, unless the store
// does not answer, and closes the store.
func (w *Worker) stop() {
	w.endLife(nil)
	if w.storeSilent() {
		w.store.Close()
	}
	w.stopWork()
	w.work.Wait()
	w.closeStore()
}
