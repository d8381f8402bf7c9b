package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// Worker is this process as a worker of its job. [Join] makes it, Close ends it. Its methods may be called from any goroutine.
type Worker struct {
	cfg     Config
	secret  secret.Secret // the job's or, if it has none, this host's; none with DataPlaintext
	job     *cluster.Job
	card    rendezvous.Card
	cards   []rendezvous.Card // of all, by worker
	members []Member          // by worker
	links   string            // what joins this one with the others
	current current
	group   *group
	doing   doing
	watch   *rendezvous.Watch  // nil: a job of one worker
	store   rendezvous.Store   // nil: a job of one worker
	server  *rendezvous.Server // nil: another serves it
	port    *listener.Listener // the store's

	life   context.Context // ends with Close, or with what ends the job; the cause says what
	fate   context.CancelCauseFunc
	absent context.CancelFunc // ends the goroutines
	work   sync.WaitGroup

	unheard atomic.Bool // the store has not answered this worker, which fails: nothing more is asked of it

	mu       sync.Mutex
	failed   bool
	failedAt uint64 // progress then
	lost     []int  // the workers that it was laid on

	closing  sync.Once
	closeErr error
}

// Job returns who this worker is, and who said so. The caller must not change it.
func (w *Worker) Job() *cluster.Job { return w.job }

// Opener returns what the worker was to be joined by, if not the library's own transports.
func (w *Worker) Opener() *Opener { return w.cfg.Opener }

// Members returns all workers, by number.
func (w *Worker) Members() []Member { return append([]Member(nil), w.members...) }

// Group returns the communicators of this worker's replicas, with those of all other workers. It is one for the worker's whole life: a strategy
// that is given it may close it, and Close does.
func (w *Worker) Group() collective.Group { return w.group }

// Resolver returns the job in TensorFlow's words.
func (w *Worker) Resolver() cluster.Resolver { return w.job.Resolver() }

// Store returns the store where the workers meet, for use until Close: nil if the job is this process alone. The keys of others
// must not be touched: those below [rendezvous.Key] of the job and epoch, and a part that is the caller's own, are free.
func (w *Worker) Store() rendezvous.Store { return w.store }

// Err returns what ended the job for this worker, such as another worker that is lost, or nil.
func (w *Worker) Err() error { return w.current.why() }

// Compare holds facts of all workers against each other: "model", "global batch", …. All workers call it, with the same name, once for
// each. If something differs, each gets an error that matches [ErrDiffer] and says whose value is which. It waits for the others as long as
// Join does, but not for one that fails and leaves the job.
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
	return fmt.Errorf("worker: comparing %s: %w", name, w.because(ctx, err))
}

// ErrDiffer is matched by the error of workers that differ in what must be equal.
var ErrDiffer = errors.New("the workers differ")

// differs is an error that says in what the workers differ.
type differs struct{ error }

func (d *differs) Error() string { return "worker: " + d.error.Error() }

func (d *differs) Unwrap() []error { return []error{ErrDiffer, d.error} }

// Exchange gives every worker what every worker gave, by worker. All call it with the same name, once for each. It waits as
// Compare does.
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
		return nil, fmt.Errorf("worker: exchanging %s: %w", name, w.because(ctx, err))
	}
	return all, nil
}

// waiting returns a context for a wait for the other workers, which is logged when it takes long. It ends when the job
// does.
func (w *Worker) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(rendezvous.WithWaiting(ctx, w.logWaiting))
	stop := context.AfterFunc(w.life, func() { end(context.Cause(w.life)) })
	ctx, cancel := context.WithTimeout(ctx, w.cfg.RendezvousTimeout)
	return ctx, func() { cancel(); stop(); end(nil) }
}

// logWaiting says whom this worker waits for. It is a warning, so that it is seen: nothing else is printed until all
// are there.
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

// because returns the error of a wait; of one that was for workers that did not come it says who they are and what they were last
// seen doing.
func (w *Worker) because(ctx context.Context, err error) error {
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

// leaveWait bounds how long a worker that fails and serves the store keeps it for those that fail with it; leaveSilent is after how long without
// a pulse it is not kept for one of them any more.
const (
	leaveWait   = 10 * time.Second
	leaveSilent = 3 * time.Second
)

// Close leaves the job and frees what Join has opened. If the job has gone well, the worker that serves the store waits until all
// others have left too. Called by a deferred function of a goroutine that panics, it tells the others so. Later calls do nothing
// and return the same.
func (w *Worker) Close() error {
	w.closing.Do(func() {
		if err := panicking(); err != nil {
			_ = w.Fail(err) // what cannot be told now cannot be told by anybody
		}
		w.closeErr = errors.Join(w.closeGroup(), w.leave())
		if w.closeErr != nil {
			w.closeErr = fmt.Errorf("worker: leaving the job as worker %s: %w", strconv.Itoa(w.job.Worker), w.closeErr)
		}
	})
	return w.closeErr
}

// closeGroup closes the communicators in use, which whoever was given them may have closed.
func (w *Worker) closeGroup() error {
	var errs []error
	for _, c := range w.current.now() {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// leave says so to the others, and closes the store.
func (w *Worker) leave() error {
	if w.store == nil {
		w.fate(nil)
		return nil
	}
	w.mu.Lock()
	failed := w.failed || w.Err() != nil
	w.mu.Unlock()
	var err error
	if failed {
		w.sayGone()
		w.leaveFailed()
	} else {
		ctx, cancel := w.waiting(context.Background())
		err = w.because(ctx, w.leaveWell(ctx))
		cancel()
	}
	w.stop()
	return err
}

// leaveWell leaves a job that went well: the one who serves the store, last.
func (w *Worker) leaveWell(ctx context.Context) error {
	if w.server == nil && w.job.Worker == 0 && !w.job.StoreTemporary {
		return nil // the store needs nobody who stays
	}
	return rendezvous.Leave(ctx, w.store, w.card)
}

// leaveFailed leaves a job that failed. The one who serves the store gives the others, but for those that are gone, time to read in it
// why.
func (w *Worker) leaveFailed() {
	if w.server == nil && !w.removes() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveWait)
	defer cancel()
	w.mu.Lock()
	lost := w.lost
	w.mu.Unlock()
	for ctx.Err() == nil && w.somebodyStays(lost) {
		pause(ctx, w.cfg.beat()/4)
	}
}

// somebodyStays reports whether there are other workers that still live, besides those that are lost.
func (w *Worker) somebodyStays(lost []int) bool {
	for _, v := range w.watch.Vitals() {
		if v.Worker != w.job.Worker && !v.Pulse.Gone && v.Silent < leaveSilent && !slices.Contains(lost, v.Worker) {
			return true
		}
	}
	return false
}

// stop ends the goroutines, the last of which says to the others that this worker has left, unless the store does not
// answer, and closes the store.
func (w *Worker) stop() {
	w.fate(nil)
	if w.unheard.Load() {
		w.store.Close()
	}
	w.absent()
	w.work.Wait()
	w.closeStore()
}
