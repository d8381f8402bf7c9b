package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/pause"
)

// Changes implements [rendezvous.Store].
func (s *store) Changes(
	ctx context.Context, prefix string, after uint64,
) (entries []rendezvous.Entry, revision uint64, err error) {
	err = s.call(ctx, rendezvous.CheckPrefix(prefix), func(ctx context.Context) error {
		if after == 0 {
			if entries, revision, err = s.list(ctx, prefix, clientv3.SortByModRevision); len(entries) > 0 || err != nil {
				return err
			}
			after = revision
		}
		for {
			events, err := s.watch(ctx, prefix, after)
			if err != nil {
				return err
			}
			after = uint64(events[len(events)-1].Kv.ModRevision)
			if entries, err = s.latest(ctx, events); len(entries) > 0 || err != nil {
				revision = after
				return err
			}
		}
	})
	return entries, revision, err
}

// Wait implements [rendezvous.Store]: it reads the keys once, and counts them by etcd's events.
func (s *store) Wait(ctx context.Context, prefix string, n int) (entries []rendezvous.Entry, err error) {
	err = s.call(ctx, rendezvous.CheckPrefix(prefix), func(ctx context.Context) error {
		for {
			var revision uint64
			if entries, revision, err = s.list(ctx, prefix, clientv3.SortByKey); len(entries) >= n || err != nil {
				return err
			}
			there := map[string]bool{}
			for _, e := range entries {
				there[s.prefix+e.Key] = true
			}
			for len(there) < n {
				events, err := s.watch(ctx, prefix, revision)
				if errors.Is(err, rpctypes.ErrCompacted) {
					break
				}
				if err != nil {
					return err
				}
				for _, e := range events {
					revision = uint64(e.Kv.ModRevision)
					if delete(there, string(e.Kv.Key)); e.Type == clientv3.EventTypePut && !s.isPart(e.Kv) {
						there[string(e.Kv.Key)] = true
					}
				}
			}
		}
	})
	return entries, err
}

// watch waits for the first events after a revision. etcd's client continues a broken watch at another endpoint. A
// watch that etcd ends is started again until etcd has not answered for the store's timeout.
func (s *store) watch(ctx context.Context, prefix string, after uint64) ([]*clientv3.Event, error) {
	begin := time.Now()
	for {
		events, started, err := s.watchOnce(ctx, prefix, after)
		if started {
			begin = time.Now()
		}
		switch {
		case err == nil:
			return events, nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case !temporary(err):
			return nil, err
		case time.Since(begin) > s.timeout:
			return nil, fmt.Errorf("%w: etcd: %w", rendezvous.ErrLost, err)
		}
		if err := pause.For(ctx, retryPause); err != nil {
			return nil, err
		}
	}
}

// errWatchEnded reports that a watch ended without an error: its context or its client was closed.
var errWatchEnded = fmt.Errorf("%w: the watch in etcd has ended", rendezvous.ErrLost)

// watchOnce waits for the first events of one watch, and reports whether etcd has started it.
func (s *store) watchOnce(
	ctx context.Context, prefix string, after uint64,
) (events []*clientv3.Event, started bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	guarded := make(chan struct{})
	go func() {
		defer close(guarded)
		cancel(s.connectionLost(ctx))
	}()
	defer func() { cancel(nil); <-guarded }()
	for r := range s.client.Watch(ctx, s.prefix+prefix, clientv3.WithPrefix(), clientv3.WithRev(int64(after)+1),
		clientv3.WithCreatedNotify()) {
		if err := r.Err(); err != nil {
			return nil, started, err
		}
		if started = true; len(r.Events) > 0 {
			return r.Events, true, nil
		}
	}
	if cause := context.Cause(ctx); errors.Is(cause, rendezvous.ErrLost) {
		return nil, started, cause
	}
	return nil, started, errWatchEnded // by Close or the end of ctx, which the callers check
}

// connectionLost waits until no endpoint of etcd could be reached for the store's timeout, or until ctx ends. A watch
// alone would not end.
func (s *store) connectionLost(ctx context.Context) error {
	conn := s.client.ActiveConnection()
	if conn == nil { // only a test's client has none
		return nil
	}
	for ctx.Err() == nil {
		if conn.GetState() == connectivity.Ready {
			conn.WaitForStateChange(ctx, connectivity.Ready)
			continue
		}
		short, cancel := context.WithTimeout(ctx, s.timeout)
		for state := conn.GetState(); state != connectivity.Ready && short.Err() == nil; state = conn.GetState() {
			conn.Connect()
			conn.WaitForStateChange(short, state)
		}
		ended := short.Err()
		cancel()
		if ended != nil && ctx.Err() == nil {
			return fmt.Errorf("%w: etcd at %s could not be reached for %v", rendezvous.ErrLost, s.hosts, s.timeout)
		}
	}
	return nil
}

// latest returns the last state of each key in a batch of events, in order.
func (s *store) latest(ctx context.Context, events []*clientv3.Event) ([]rendezvous.Entry, error) {
	last := map[string]int{}
	for i, e := range events {
		last[string(e.Kv.Key)] = i
	}
	var entries []rendezvous.Entry
	for i, e := range events {
		if last[string(e.Kv.Key)] != i || s.isPart(e.Kv) {
			continue
		}
		if e.Type == clientv3.EventTypeDelete {
			entries = append(entries, rendezvous.Entry{
				Key: string(e.Kv.Key[len(s.prefix):]), Revision: uint64(e.Kv.ModRevision), Deleted: true,
			})
			continue
		}
		entry, whole, err := s.entry(ctx, e.Kv)
		if err != nil {
			return nil, err
		}
		if whole { // else it was replaced meanwhile: a later event has its current value
			entries = append(entries, entry)
		}
	}
	return entries, nil
}
