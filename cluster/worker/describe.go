package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport"
)

// Bounds of a description: it is part of an error, and others wait for it.
const (
	describedMost = 4
	describeWait  = 5 * time.Second
)

// How long a failing worker waits for the store, to report the failure or to look up its cause: on a busy
// machine the store is slow. A store that has most likely ended with the failed worker is waited for only
// shortly.
const (
	storeWait = 4 * time.Second
	goneWait  = time.Second
)

// silentWait is how long it waits for a store that has not answered for half the heartbeat timeout.
const silentWait = 100 * time.Millisecond

// storeWait returns how long to wait for the store after these workers have failed.
func (w *Worker) storeWait(failed ...int) time.Duration {
	switch {
	case w.unanswered():
		return silentWait
	case serves(w.job) && slices.Contains(failed, 0):
		return goneWait
	}
	return storeWait
}

// unanswered reports whether the store has not acknowledged this worker's heartbeats for half the heartbeat
// timeout.
func (w *Worker) unanswered() bool {
	return w.member != nil && w.cfg.HeartbeatTimeout > 0 && w.member.Silence() >= w.cfg.HeartbeatTimeout/2
}

// markStoreSilent records that the store has not answered.
func (w *Worker) markStoreSilent() {
	now := time.Now()
	w.silentAt.Store(&now)
}

// storeSilent reports whether the store has not answered this worker, and has not acknowledged a heartbeat since. Then
// it is not queried: each query would wait in vain.
func (w *Worker) storeSilent() bool {
	at := w.silentAt.Load()
	return at != nil && (w.member == nil || w.member.Silence() >= time.Since(*at))
}

// accessStore is access for a worker that fails, but returns errNoAnswer while the store does not answer.
func (w *Worker) accessStore(most time.Duration, use func(context.Context) error) error {
	if w.storeSilent() {
		return errNoAnswer
	}
	err := access(context.Background(), most, use)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, rendezvous.ErrLost) {
		w.markStoreSilent()
	}
	return err
}

// access accesses the store for at most most, and does not wait for a store that cannot be reached.
func access(ctx context.Context, most time.Duration, use func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(rendezvous.FailFast(ctx), most)
	defer cancel()
	return use(ctx)
}

var errNoAnswer = errors.New("the store does not answer")

// describe identifies the workers that a failure concerns: [collective.Config.Describe].
func (w *Worker) describe(e *collective.Error) string {
	concerned := slices.DeleteFunc(w.concerned(e),
		func(worker int) bool { return strings.Contains(e.Who, w.name(worker)) })
	ctx, cancel := context.WithTimeout(w.life, describeWait)
	defer cancel()
	stuck := e.Kind == collective.ErrTimeout && e.Who == ""
	texts := make([]string, min(len(concerned), describedMost))
	var all sync.WaitGroup
	for i := range texts {
		all.Go(func() { texts[i] = w.describeWorker(ctx, concerned[i], e, stuck) })
	}
	all.Wait()
	if n := len(concerned) - len(texts); n > 0 {
		texts = append(texts, fmt.Sprintf("%d more workers: %s", n, w.names(concerned[len(texts):])))
	}
	return strings.Join(texts, "\n")
}

// concerned returns the workers that a failure is about: those that it waited for or that are lost and, if
// another worker reported it, that one.
func (w *Worker) concerned(e *collective.Error) []int {
	var ranks []int
	if w.foreign(e.Rank) {
		ranks = append(ranks, e.Rank)
	}
	if e.Who == "" { // else the reporting worker has described them
		ranks = append(ranks, e.Peers...)
	}
	return w.owners(ranks)
}

// foreign reports whether a rank is another worker's.
func (w *Worker) foreign(rank int) bool {
	me := &w.members[w.job.Worker]
	return rank >= 0 && (rank < me.First || rank >= me.First+me.Replicas)
}

// describeWorker returns a description of a worker: its name, its last reported position, the failure that it
// reported before it ended and, if it may be stuck, its goroutine stacks. e is the failure that the
// description is for, or nil.
func (w *Worker) describeWorker(ctx context.Context, worker int, e *collective.Error, stuck bool) string {
	text := w.name(worker)
	if w.member == nil {
		return text
	}
	if e != nil && w.foreign(e.Rank) && len(e.Peers) > 0 && !slices.Contains(w.owners(e.Peers), worker) {
		text += ", which detected it,"
	}
	seen, r := w.member.States()[worker], (*failure.Record)(nil)
	if w.storeSilent() || access(ctx, w.storeWait(worker), func(ctx context.Context) (err error) {
		if seen, err = w.member.Latest(ctx, worker); err == nil {
			r, err = w.recordOf(ctx, worker)
		}
		return err
	}) != nil {
		stuck = false // it cannot be queried
	}
	text += " " + lastSeen(&seen)
	if r != nil {
		if line, _, _ := strings.Cut(r.Message, "\n"); e != nil && e.Err != nil && strings.Contains(e.Err.Error(), line) {
			return text // the error contains it
		}
		return text + "; it reported: " + clip(r.Message, recordShown)
	}
	if !stuck || seen.Heartbeat.Final {
		return text
	}
	if stacks := w.stacksOf(ctx, worker); stacks != "" {
		return text + "\n  " + strings.ReplaceAll(stacks, "\n", "\n  ")
	}
	return text + "; it did not respond to the request for its goroutine stacks"
}

// recordShown is how much of another worker's failure message an error repeats, in bytes.
const recordShown = 600

// recordOf returns the failure that a worker has reported as its own, or nil. The error is the store's.
func (w *Worker) recordOf(ctx context.Context, worker int) (*failure.Record, error) {
	text, _, err := w.store.Get(ctx, w.key("failure", worker))
	if err != nil {
		return nil, ifFound(err)
	}
	r, err := failure.Decode(text)
	if err != nil || len(r.Blames) > 0 {
		return nil, nil // this failure is a consequence of another one
	}
	return r, nil
}

// ifFound returns an error of the store, except ErrNotFound.
func ifFound(err error) error {
	if errors.Is(err, rendezvous.ErrNotFound) {
		return nil
	}
	return err
}

// blames returns the workers at fault for an error: none for a cause in this worker.
func (w *Worker) blames(err error) []int {
	joining := (*rendezvous.JoinError)(nil)
	if errors.As(err, &joining) {
		return slices.DeleteFunc(slices.Clone(joining.Workers), func(worker int) bool { return worker == w.job.Worker })
	}
	if connecting := (*transport.NotConnected)(nil); errors.As(err, &connecting) {
		return w.owners(connecting.Ranks)
	}
	if from := (interface{ FromWorker() int })(nil); errors.As(err, &from) && from.FromWorker() != w.job.Worker {
		return []int{from.FromWorker()}
	}
	e := (*collective.Error)(nil)
	if !errors.As(err, &e) {
		return nil
	}
	switch {
	case e.Kind == collective.ErrPeerLost || e.Kind == collective.ErrTimeout:
		if lost := w.owners(e.Peers); len(lost) > 0 {
			return lost
		}
	case e.Kind == collective.ErrMismatch || e.Kind == collective.ErrDesync:
		return nil // of two that differ, it is unknown which one is wrong
	}
	if w.foreign(e.Rank) {
		return w.owners([]int{e.Rank})
	}
	return nil
}
