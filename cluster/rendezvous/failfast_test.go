package rendezvous_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// TestFailFast: a FailFast call does not wait for a store whose process has ended, whether it began before or after
// that; other calls do.
func TestFailFast(t *testing.T) {
	server := serve(t, rendezvous.ServerConfig{Logger: quiet})
	var gone atomic.Bool
	var last atomic.Pointer[net.Conn]
	s := open(t, server.URL(), rendezvous.Config{
		Logger: quiet, ReconnectTimeout: time.Hour,
		Dial: func(ctx context.Context,
			network, address string,
		) (net.Conn, error) {
			if gone.Load() {
				return nil, errors.New("connection refused")
			}
			c, err := (&net.Dialer{}).DialContext(ctx, network, address)
			last.Store(&c)
			return c, err
		},
	})
	defer s.Close()
	set(t, s, "k", "v")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	patient, waiting := make(chan error, 1), make(chan error, 1)
	go func() {
		_, _, err := s.Changes(ctx, "k", 1)
		patient <- err
	}()
	go func() {
		_, _, err := s.Changes(rendezvous.FailFast(ctx), "k", 1)
		waiting <- err
	}()
	gone.Store(true)
	(*last.Load()).Close()
	if err := <-waiting; !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("the call under way: %v, want ErrLost", err)
	}
	if err := s.Set(rendezvous.FailFast(ctx), "k", nil); !errors.Is(err, rendezvous.ErrLost) {
		t.Errorf("the next call: %v, want ErrLost", err)
	}
	select {
	case err := <-patient:
		t.Errorf("the waiting call: %v", err)
	default:
	}
	gone.Store(false)
	if err := s.Set(ctx, "k", []byte("w")); err != nil {
		t.Errorf("when the store is back: %v", err)
	}
	if err := <-patient; err != nil {
		t.Errorf("the call that has waited: %v", err)
	}
	if err := s.Set(rendezvous.FailFast(ctx), "k", nil); err != nil {
		t.Errorf("when the store is back: %v", err)
	}
}

// TestFailFastRetries: a FailFast call does not rely on an attempt of long ago, but waits for one attempt.
func TestFailFastRetries(t *testing.T) {
	t.Parallel()
	server := serve(t, rendezvous.ServerConfig{Logger: quiet})
	var gone atomic.Bool
	var dials atomic.Int64
	var last atomic.Pointer[net.Conn]
	s := open(t, server.URL(), rendezvous.Config{
		Logger: quiet, ReconnectTimeout: time.Nanosecond,
		Dial: func(ctx context.Context,
			network, address string,
		) (net.Conn, error) {
			dials.Add(1)
			if gone.Load() {
				return nil, errors.New("connection refused")
			}
			c, err := (&net.Dialer{}).DialContext(ctx, network, address)
			last.Store(&c)
			return c, err
		},
	})
	defer s.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	gone.Store(true)
	(*last.Load()).Close()
	for s.Set(ctx, "k", nil) == nil { // until the client notices
		time.Sleep(time.Millisecond)
	}
	const long = 1100 * time.Millisecond
	time.Sleep(long)
	before := dials.Load()
	if err := s.Set(rendezvous.FailFast(ctx), "k", nil); !errors.Is(err, rendezvous.ErrLost) || dials.Load() == before {
		t.Errorf("while the store is gone: %v after %d attempts, want ErrLost after one", err, dials.Load()-before)
	}
	gone.Store(false)
	time.Sleep(long)
	if err := s.Set(rendezvous.FailFast(ctx), "k", []byte("v")); err != nil {
		t.Errorf("when the store is back: %v", err)
	}
}
