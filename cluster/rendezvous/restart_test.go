package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestRestartedStore: a server that was started again at the same address is another store: its clients get an error,
// since the content is lost.
func TestRestartedStore(t *testing.T) {
	before, after := serve(t, rendezvous.ServerConfig{}), serve(t, rendezvous.ServerConfig{})
	dialed := make(chan net.Conn, 2)
	at := before.Addr() // of the second server too
	s := open(t, before.URL(), rendezvous.Config{Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, at)
		if err == nil {
			at = after.Addr()
			dialed <- c
		}
		return c, err
	}})
	defer s.Close()
	set(t, s, "k", "v")
	(<-dialed).Close() // as when it is killed
	for {
		_, _, err := s.Get(t.Context(), "k") // until the client notices
		if err == nil {
			continue
		}
		if !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(), "another server listens") {
			t.Errorf("got %v, want ErrLost: another one", err)
		}
		return
	}
}

// TestChangeBeforeTheEnd: a change that others see is answered, even if one of them then ends the server. So the worker
// that serves the store may leave once all others have announced that they leave, and these leave without an error.
func TestChangeBeforeTheEnd(t *testing.T) {
	const clients = 8
	for range 100 {
		server := serve(t, rendezvous.ServerConfig{})
		var work sync.WaitGroup
		work.Go(func() {
			if _, err := server.Store().Wait(t.Context(), "left/", clients); err != nil {
				t.Error(err)
			}
			server.Close()
		})
		for i := range clients {
			work.Go(func() {
				s := open(t, server.URL(), rendezvous.Config{})
				defer s.Close()
				if err := s.Set(t.Context(), fmt.Sprintf("left/%d", i), nil); err != nil {
					t.Error(err)
				}
			})
		}
		work.Wait()
	}
}
