package worker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective"
)

// Worker is this process as a worker of its job. [Join] makes it, Close ends it. Its methods may be called from any goroutine.
type Worker struct {
	cfg     Config
	job     *cluster.Job
	card    rendezvous.Card
	cards   []rendezvous.Card // of all, by worker
	members []Member          // by worker
	current current
	group   *group
	doing   doing
	watch   *watch             // nil: a job of one worker
	store   rendezvous.Store   // nil: a job of one worker
	server  *rendezvous.Server // nil: another serves it

	life    context.Context // ends with Close, or with what ends the job; the cause says what
	fate    context.CancelCauseFunc
	beating context.CancelFunc // ends the goroutines
	work    sync.WaitGroup
	leaving atomic.Bool

	mu       sync.Mutex
	failed   bool
	failedAt uint64 // progress then

	closing  sync.Once
	closeErr error
}

// Job returns who this worker is, and who said so. The caller must not change it.
func (w *Worker) Job() *cluster.Job { return w.job }

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
// Join does.
func (w *Worker) Compare(ctx context.Context, name string, facts []rendezvous.Fact) error {
	if w.store == nil {
		return nil
	}
	ctx, cancel := w.waiting(ctx)
	defer cancel()
	err := rendezvous.Compare(ctx, w.store, w.key("compare", name), w.job.Worker, w.job.Workers, facts)
	if err == nil {
		return nil
	}
	if differ := (*rendezvous.DifferError)(nil); errors.As(err, &differ) {
		differ.What = name
		return fmt.Errorf("worker: %w: %w", ErrDiffer, err)
	}
	return fmt.Errorf("worker: comparing %s: %w", name, w.because(ctx, err))
}

// ErrDiffer is matched by the error of workers that differ in what must be equal.
var ErrDiffer = errors.New("the workers differ")

// Exchange gives every worker what every worker gave, by worker. All call it with the same name, once for each. It waits as
// Compare does.
func (w *Worker) Exchange(ctx context.Context, name string, mine []byte) ([][]byte, error) {
	if w.store == nil {
		return [][]byte{mine}, nil
	}
	ctx, cancel := w.waiting(ctx)
	defer cancel()
	all, err := rendezvous.Exchange(ctx, w.store, w.key("exchange", name), w.job.Worker, w.job.Workers, mine)
	if err != nil {
		return nil, fmt.Errorf("worker: exchanging %s: %w", name, w.because(ctx, err))
	}
	return all, nil
}

// waiting returns a context for a wait for the other workers. It ends when the job does.
func (w *Worker) waiting(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(w.life, func() { end(context.Cause(w.life)) })
	ctx, cancel := context.WithTimeout(ctx, w.cfg.RendezvousTimeout)
	return ctx, func() { cancel(); stop(); end(nil) }
}

// because returns the error of a wait; of one that was for workers that did not come it says who they are and what they were last
// seen doing.
func (w *Worker) because(ctx context.Context, err error) error {
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

// serves reports whether worker 0 serves the store.
func (w *Worker) serves() bool { return serves(w.job) }

// leaveWait bounds how long a worker that fails takes to leave, and one that serves the store for those that fail with it.
const leaveWait = 3 * time.Second

// Close leaves the job and frees what Join has opened. If the job has gone well, the worker that serves the store waits until all
// others have left too. Later calls do nothing and return the same.
func (w *Worker) Close() error {
	w.closing.Do(func() {
		w.leaving.Store(true)
		w.closeErr = errors.Join(w.closeGroup(), w.leave())
		if w.closeErr != nil {
			w.closeErr = fmt.Errorf("worker: %s leaves: %w", strconv.Itoa(w.job.Worker), w.closeErr)
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
	ctx, cancel := w.waiting(context.Background())
	w.mu.Lock()
	failed := w.failed
	w.mu.Unlock()
	if failed || w.Err() != nil {
		cancel()
		ctx, cancel = context.WithTimeout(context.Background(), leaveWait)
	}
	defer cancel()
	err := w.store.Set(ctx, w.key("alive", w.job.Worker), []byte(farewell))
	if err == nil && (w.server != nil || w.job.Worker > 0) {
		err = rendezvous.Leave(ctx, w.store, w.card)
	}
	if failed || w.Err() != nil {
		err = nil // the store may have gone with another worker, and those that are lost never leave
	}
	w.stop()
	return err
}

// stop ends the goroutines and closes the store.
func (w *Worker) stop() {
	w.fate(nil)
	w.beating()
	w.work.Wait()
	w.store.Close()
	if w.server != nil {
		w.server.Close()
	}
}
