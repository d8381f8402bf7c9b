package worker

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective"
)

// A worker that has failed may continue: a strategy rebuilds its group. One that leaves the job after a
// failure publishes it, and the others stop waiting for it.

// publishGone notifies the others that this worker leaves a job that has failed.
func (w *Worker) publishGone() {
	_ = w.accessStore(min(goneWait, w.storeWait()), func(ctx context.Context) error {
		return w.store.Set(ctx, w.key("gone", w.job.Worker), nil)
	}) // otherwise the others notice the missing heartbeat
}

// unlessGone runs a wait for a value of every worker under a key. The wait ends early if a worker has left
// the job without writing its value. Without a key it ends as soon as any worker has left.
func (w *Worker) unlessGone(ctx context.Context, key string, wait func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { w.watchGone(ctx, key) })
	return wait(ctx)
}

// watchGone ends the job for this worker, and so all its waits, when another worker has left it without
// writing a value under the key, or, without a key, when another worker has left at all.
func (w *Worker) watchGone(ctx context.Context, key string) {
	prefix := w.key("gone") + "/"
	_ = rendezvous.Watch(ctx, w.store, prefix, new(uint64), func(changes []rendezvous.Entry) error {
		for _, e := range changes {
			n, err := strconv.Atoi(strings.TrimPrefix(e.Key, prefix))
			if err != nil || n < 0 || n >= len(w.members) || n == w.job.Worker || e.Deleted {
				continue
			}
			if key != "" && rendezvous.Contributed(ctx, w.store, key, n) {
				continue // before the worker left
			}
			ctx, cancel := context.WithTimeout(ctx, endWait)
			defer cancel()
			gone := &collective.Error{
				Kind: collective.ErrPeerLost, Comm: w.cfg.Collective.Name, Rank: -1, Peers: w.members[n].Ranks(),
				Err: fmt.Errorf("worker %d has failed and left the job", n), Who: w.describeWorker(ctx, n, nil, false),
			}
			w.endSession(gone)
			return gone
		}
		return nil
	}) // a lost store ends the wait too
}
