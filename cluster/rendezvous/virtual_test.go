package rendezvous_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// wire is a network of pipes, for virtual time: it has one address, which reaches the latest listener.
type wire struct {
	mu       sync.Mutex
	listener *pipes
	conns    []net.Conn // the clients' ends
}

// pipes is a listener on a wire.
type pipes struct {
	accept chan net.Conn
	done   chan struct{}
	once   sync.Once
}

func (w *wire) listen() *pipes {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listener = &pipes{accept: make(chan net.Conn), done: make(chan struct{})}
	return w.listener
}

func (w *wire) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	w.mu.Lock()
	l := w.listener
	w.mu.Unlock()
	if l == nil {
		return nil, errors.New("no listener")
	}
	ours, theirs := net.Pipe()
	select {
	case l.accept <- theirs:
		w.mu.Lock()
		w.conns = append(w.conns, ours)
		w.mu.Unlock()
		return ours, nil
	case <-l.done:
		return nil, errors.New("no listener any more")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// cut breaks all connections.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.conns {
		c.Close()
	}
	w.conns = nil
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 29500} }

// virtual runs a test in virtual time with a server and a client of it.
func virtual(t *testing.T, test func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store)) {
	synctest.Test(t, func(t *testing.T) {
		w := &wire{}
		server := serve(t, rendezvous.ServerConfig{Listener: w.listen()})
		client := open(t, server.URL(), rendezvous.Config{Dial: w.dial})
		defer server.Close()
		defer client.Close()
		test(t, w, server, client)
	})
}

// TestIdle: a wait of an hour without other traffic ends with the change that it waits for.
func TestIdle(t *testing.T) {
	virtual(t, func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store) {
		go func() {
			time.Sleep(time.Hour)
			s := server.Store()
			s.Set(t.Context(), "k", nil)
			s.Close()
		}()
		start := time.Now()
		entries, _, err := client.Changes(t.Context(), "k", 0)
		if err != nil || len(entries) != 1 || time.Since(start) != time.Hour {
			t.Fatalf("after %v: %v, %v", time.Since(start), entries, err)
		}
		if len(w.conns) != 1 {
			t.Errorf("%d connections were made", len(w.conns))
		}
	})
}

// TestServerEnds: calls that wait when the server ends return at once, with the error that the store has ended.
func TestServerEnds(t *testing.T) {
	virtual(t, func(t *testing.T, _ *wire, server *rendezvous.Server, client rendezvous.Store) {
		own := server.Store()
		defer own.Close()
		start := time.Now()
		time.AfterFunc(time.Minute, func() { server.Close() })
		var work sync.WaitGroup
		for _, s := range []rendezvous.Store{client, own} {
			work.Go(func() {
				if _, _, err := s.Changes(t.Context(), "k", 0); !errors.Is(err, rendezvous.ErrLost) ||
					!strings.Contains(err.Error(), "has ended") {
					t.Errorf("Changes: %v, want ErrLost", err)
				}
				if err := s.Set(t.Context(), "k", nil); !errors.Is(err, rendezvous.ErrLost) {
					t.Errorf("Set: %v, want ErrLost", err)
				}
			})
		}
		work.Wait()
		if took := time.Since(start); took != time.Minute {
			t.Errorf("after %v", took)
		}
	})
}

// TestServerVanishes: if the server ends without notice, as a killed process or host does, calls return after the
// reconnect timeout; when another server listens there, they return that the first one's content is lost.
func TestServerVanishes(t *testing.T) {
	virtual(t, func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store) {
		w.listen().Close()
		w.cut()
		start := time.Now()
		_, _, err := client.Changes(t.Context(), "k", 0)
		if took := time.Since(start); !errors.Is(err, rendezvous.ErrLost) || took < 15*time.Second || took > 17*time.Second {
			t.Fatalf("after %v: %v, want ErrLost after 15 s", took, err)
		}
		other := serve(t, rendezvous.ServerConfig{Listener: w.listen()})
		defer other.Close()
		if err := client.Set(t.Context(), "k", nil); !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(),
			"the content of the store is lost") {
			t.Fatalf("with another server: %v", err)
		}
	})
}

// TestShortBreak: a server that is back within the reconnect timeout causes no error.
func TestShortBreak(t *testing.T) {
	virtual(t, func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store) {
		first := w.listener
		w.listen().Close()
		w.cut()
		time.AfterFunc(10*time.Second, func() {
			w.mu.Lock()
			w.listener = first
			w.mu.Unlock()
		})
		start := time.Now()
		if err := client.Set(t.Context(), "k", []byte("v")); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 10*time.Second || took > 12*time.Second {
			t.Errorf("after %v", took)
		}
	})
}

// TestStoppedServer: a call ends with its context, even if the server's process is stopped; one that still waits when
// the server continues succeeds.
func TestStoppedServer(t *testing.T) {
	virtual(t, func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store) {
		first := w.listener
		stopped := w.listen() // accepts connections, as a kernel does, and sends nothing
		var work sync.WaitGroup
		work.Go(func() {
			var held []net.Conn
			for c, err := stopped.Accept(); err == nil; c, err = stopped.Accept() {
				held = append(held, c)
			}
			for _, c := range held {
				c.Close()
			}
		})
		w.cut()
		ctx, cancel := context.WithTimeout(t.Context(), 7*time.Second)
		defer cancel()
		start := time.Now()
		if err := client.Set(ctx, "k", []byte("v")); !errors.Is(err, context.DeadlineExceeded) ||
			time.Since(start) != 7*time.Second {
			t.Fatalf("after %v: %v, want the deadline", time.Since(start), err)
		}
		time.AfterFunc(5*time.Second, func() { // it continues
			stopped.Close()
			w.mu.Lock()
			w.listener = first
			w.mu.Unlock()
		})
		if err := client.Set(t.Context(), "k", []byte("v")); err != nil {
			t.Fatal(err)
		}
		work.Wait()
	})
}

// TestOpenWaits: Open waits for a server that starts late, and no longer than its context.
func TestOpenWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &wire{}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		start := time.Now()
		_, err := rendezvous.Open(ctx, "tcp://10.0.0.1:29500", rendezvous.Config{Dial: w.dial})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no listener") ||
			time.Since(start) != 10*time.Second {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		time.AfterFunc(time.Minute, func() { serve(t, rendezvous.ServerConfig{Listener: w.listen()}) })
		s, err := rendezvous.Open(t.Context(), "tcp://10.0.0.1:29500", rendezvous.Config{Dial: w.dial})
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	})
}

// TestSlowStranger: a connection without a hello is closed after 10 seconds, or in favour of newer ones; the job is not
// affected.
func TestSlowStranger(t *testing.T) {
	virtual(t, func(t *testing.T, w *wire, server *rendezvous.Server, client rendezvous.Store) {
		start := time.Now()
		for i := range 300 {
			c, err := w.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			go c.Write([]byte("LOCK"[:i%5])) // of the hello
			defer c.Close()
			if i == 299 {
				io.Copy(io.Discard, c)
			}
		}
		if took := time.Since(start); took < 10*time.Second || took > 13*time.Second {
			t.Errorf("the last one is closed after %v", took)
		}
		synctest.Wait()
		// A pipe that was closed on this side, in favour of newer ones, does not report that: it counts as damaged data of
		// the stranger.
		if n := server.Refused(); n["slow"]+n["magic"]+n["damaged"] != 300 || n["slow"] < 128 {
			t.Errorf("%v are refused, want 300", n)
		}
		if err := client.Set(t.Context(), "k", nil); err != nil {
			t.Error(err)
		}
	})
}
