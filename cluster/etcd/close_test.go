package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// closing is a watcher of a client that is closed as soon as it is used: its watches end without an error, as etcd's
// own do.
type closing struct {
	clientv3.Watcher
	store *store
}

func (c closing) Watch(context.Context, string, ...clientv3.OpOption) clientv3.WatchChan {
	close(c.store.done)
	ended := make(chan clientv3.WatchResponse)
	close(ended)
	return ended
}

// TestCloseDuringChanges: a call of Changes that Close ends returns ErrClosed, even if the watch has ended before its
// context.
func TestCloseDuringChanges(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := &store{client: clientv3.NewCtxClient(t.Context()), done: make(chan struct{})}
		s.client.Watcher = closing{store: s}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, _, err := s.Changes(ctx, "k/", 1)
		cancel()
		if !errors.Is(err, rendezvous.ErrClosed) {
			t.Fatalf("got %v, want %v", err, rendezvous.ErrClosed)
		}
	}
}
