package rendezvous

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// etcdEvents is one message of a watch.
type etcdEvents struct {
	Result struct {
		Header          etcdHeader `json:"header"`
		Canceled        bool       `json:"canceled"`
		CancelReason    string     `json:"cancel_reason"`
		CompactRevision uint64     `json:"compact_revision,string"`
		Events          []struct {
			Type string `json:"type"` // "DELETE", else a put
			KV   etcdKV `json:"kv"`
		} `json:"events"`
	} `json:"result"`
	Error *etcdError `json:"error"`
}

// last is the revision of the last event.
func (e *etcdEvents) last() uint64 { return e.Result.Events[len(e.Result.Events)-1].KV.ModRevision }

// A user of Changes continues from the revision where it was. So a watch stays open between two calls, for
// the next call with the same keys and revision; events in between are buffered in the connection.

// watch is an open watch.
type watch struct {
	prefix string
	at     uint64 // all events up to this revision have been read
	body   io.ReadCloser
	limit  *io.LimitedReader
	events *json.Decoder
	cancel context.CancelCauseFunc
	unused *time.Timer
}

func (w *watch) close() {
	w.cancel(nil)
	w.body.Close()
}

// next waits for the next events. When ctx ends, so does the watch.
func (w *watch) next(ctx context.Context) (got etcdEvents, err error) {
	stop := context.AfterFunc(ctx, func() { w.cancel(context.Cause(ctx)) })
	for w.limit.N = answerMax; err == nil; {
		got = etcdEvents{}
		switch err = w.events.Decode(&got); {
		case err != nil:
		case got.Error != nil:
			err = got.Error
		case got.Result.CompactRevision > 0:
			err = ErrCompacted
		case got.Result.Canceled:
			err = &etcdError{codeUnavailable, "the watch was ended: " + got.Result.CancelReason}
		case len(got.Result.Events) > 0:
			if w.at = got.last(); !stop() {
				err = context.Cause(ctx)
			}
			return got, err
		}
	}
	stop()
	return got, err
}

// watches are the open watches that are not in use, the most recently used last.
type watches struct {
	keep time.Duration // without use

	mu     sync.Mutex
	unused []*watch
	closed bool
}

// Watches of one-time waits are not used again.
const (
	watchesMax  = 16
	watchUnused = 30 * time.Second // one or two heartbeats: then it is closed
)

// take returns a watch at the caller's revision, or nil.
func (ws *watches) take(prefix string, at uint64) *watch {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	i := slices.IndexFunc(ws.unused, func(w *watch) bool { return w.prefix == prefix && w.at == at })
	if i < 0 {
		return nil
	}
	w := ws.unused[i]
	ws.unused = slices.Delete(ws.unused, i, i+1)
	w.unused.Stop()
	return w
}

// put keeps a watch for the next call.
func (ws *watches) put(w *watch) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.closed {
		w.close()
		return
	}
	if len(ws.unused) == watchesMax {
		ws.unused[0].unused.Stop()
		ws.unused[0].close()
		ws.unused = slices.Delete(ws.unused, 0, 1)
	}
	ws.unused = append(ws.unused, w)
	w.unused = time.AfterFunc(ws.keep, func() {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		if i := slices.Index(ws.unused, w); i >= 0 { // else another call has just taken it
			ws.unused = slices.Delete(ws.unused, i, i+1)
			w.close()
		}
	})
}

// close closes all watches, and those that are put back later.
func (ws *watches) close() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.closed = true
	for _, w := range ws.unused {
		w.unused.Stop()
		w.close()
	}
	ws.unused = nil
}

// watch waits for the first events after a revision. A broken watch loses nothing: another starts at its
// revision.
func (s *etcdStore) watch(ctx context.Context, prefix string, since uint64) (got etcdEvents, err error) {
	if w := s.watches.take(prefix, since); w != nil {
		if got, err = w.next(ctx); err == nil {
			s.watches.put(w)
			return got, nil
		}
		w.close()
		if errors.Is(err, ErrCompacted) || ctx.Err() != nil {
			return got, err
		}
	}
	err = s.gateway.insist(ctx, true, func(endpoint string, there func()) error {
		w, err := s.openWatch(ctx, endpoint, prefix, since)
		if err != nil {
			return err
		}
		there()
		if got, err = w.next(ctx); err != nil {
			w.close()
			return err
		}
		s.watches.put(w)
		return nil
	})
	return got, err
}

// openWatch starts a watch at one endpoint. It outlives ctx unless ctx ends before the watch has started.
func (s *etcdStore) openWatch(ctx context.Context, endpoint, prefix string, since uint64) (*watch, error) {
	own, cancel := context.WithCancelCause(s.ctx)
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	defer stop()
	slow := s.gateway.hurry(endpoint, cancel)
	key := []byte(s.prefix + prefix)
	request := map[string]any{"create_request": map[string]any{
		"key": key, "range_end": after(key),
		"start_revision": fmt.Sprint(since + 1),
	}}
	body, err := s.gateway.begin(own, endpoint, "watch", request)
	if slow.Stop(); err != nil {
		cancel(nil)
		return nil, err
	}
	w := &watch{prefix: prefix, at: since, body: body, limit: &io.LimitedReader{R: body, N: answerMax}, cancel: cancel}
	w.events = json.NewDecoder(w.limit)
	return w, nil
}
