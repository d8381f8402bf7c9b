package rendezvous

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// ServerConfig configures a [Server]. The zero value works, on loopback, without encryption.
type ServerConfig struct {
	// Listen is the address to listen on: "10.0.0.5:29500". Only that address is bound. Default
	// "127.0.0.1:0": any free port.
	Listen string
	// Listener is used instead of Listen, if not nil. The server closes it.
	Listener net.Listener
	// SharedListener is used instead of both, if not nil, with its own Logger: a listener that
	// the process shares with other services. The server does not close it.
	SharedListener *listener.Listener
	// TLS and Authenticate are as in [Config], for this side.
	TLS          *tls.Config
	Authenticate func(conn net.Conn, dialed bool, hello []byte) error
	// Clients is the number of clients that may connect at the same moment: so many handshakes may be incomplete.
	// A SharedListener has its own limit. Default, and minimum, 128.
	Clients int
	// Bytes bounds the store's content: all keys and values, plus 128 bytes for each. A larger change is
	// refused with [ErrFull]. Default, and maximum, [TotalMax].
	Bytes int
	// Logger receives the warnings about refused connections, at most one of each kind per second. Default
	// slog.Default().
	Logger *slog.Logger
}

const (
	silenceServer   = 60 * time.Second // a silent client is gone after this time; a live one pings more often
	waitsMax        = 256              // concurrent calls of Changes and Wait on one connection
	connectionsMax  = 1 << 14          // that have completed the handshake
	notifyEndWithin = 2 * time.Second  // to notify a client that the server ends, once its requests are answered
)

// Server serves a store over TCP. Its content is in memory, and is lost when the server ends.
type Server struct {
	cfg      ServerConfig
	listener *listener.Listener
	acceptor *listener.Acceptor
	memory   *Memory
	instance instance
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	release  func() bool // of the context passed to Serve
	work     sync.WaitGroup
	closing  sync.Once
	report   reporter

	mu       sync.Mutex // acquire before the memory's
	conns    map[*serverConn]struct{}
	sessions sessions
	closed   bool
}

// Serve starts a server. It ends with ctx, or with Close.
func Serve(ctx context.Context, cfg ServerConfig) (*Server, error) {
	s := &Server{
		cfg: cfg, listener: cfg.SharedListener, memory: NewMemory(), conns: map[*serverConn]struct{}{},
		sessions: newSessions(),
	}
	if cfg.Bytes > 0 {
		s.memory.table.limit = min(cfg.Bytes, TotalMax)
	}
	rand.Read(s.instance[:])
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.report = reporter{server: s}
	if err := s.open(); err != nil {
		s.cancel()
		return nil, fmt.Errorf("rendezvous: serving a store: %w", err)
	}
	s.mu.Lock() // Close may begin at once
	defer s.mu.Unlock()
	s.release = context.AfterFunc(ctx, func() { s.Close() })
	return s, nil
}

// open starts accepting clients.
func (s *Server) open() (err error) {
	if s.listener == nil {
		s.listener, err = listener.Open(listener.Config{
			Listen: s.cfg.Listen, Listener: s.cfg.Listener, Logger: s.cfg.Logger,
			HalfOpen: max(s.cfg.Clients, listener.HalfOpenDefault),
		})
		if err != nil {
			return err
		}
	}
	s.acceptor, err = s.listener.Serve(listener.ServiceConfig{
		Services: []listener.Service{listener.Store},
		Rules:    listener.Rules{TLS: s.cfg.TLS, Authenticate: s.cfg.Authenticate},
		Handle:   s.serve, Refused: s.report.add,
	})
	if err != nil {
		s.closeListener()
	}
	return err
}

func (s *Server) closeListener() {
	if s.cfg.SharedListener == nil {
		s.listener.Close()
	}
}

// Addr returns the address that the server listens on; others may dial it unless it is a wildcard.
func (s *Server) Addr() string { return s.listener.Addr() }

// URL returns the URL for [Open]: "tcp://" and the address.
func (s *Server) URL() string { return "tcp://" + s.Addr() }

// Store returns a handle on the store for this process itself. It ends with the server.
func (s *Server) Store() Store { return s.memory.Open() }

// Refused returns the number of connections that were refused, or closed because of their content, by reason:
// "magic", "version", "damaged", "service", "proof", "slow", "crowded", "frame". Reasons that did not occur
// are omitted.
func (s *Server) Refused() map[string]uint64 { return s.acceptor.Counts() }

// Clients returns the number of connected clients.
func (s *Server) Clients() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Close ends the server, and notifies its clients: their calls return [ErrLost] at once. A second Close waits
// for the first.
func (s *Server) Close() error {
	s.closing.Do(func() {
		s.mu.Lock()
		s.closed = true
		conns := s.conns
		s.conns = nil
		s.mu.Unlock()
		s.release()
		s.cancel()
		s.memory.end(fmt.Errorf("%w: the store at %s has ended", ErrEnded, s.Addr()))
		var notifications sync.WaitGroup
		for c := range conns {
			notifications.Go(c.notifyEnd)
		}
		notifications.Wait()
		s.acceptor.Close()
		s.closeListener()
		s.work.Wait()
	})
	return nil
}

// serve serves a client that has completed the handshake, until its connection ends.
func (s *Server) serve(a *listener.Accepted) error {
	id, err := clientOf(&a.Hello)
	if err != nil {
		return err
	}
	c, err := s.enter(a, id)
	if err != nil {
		return err
	}
	defer s.leave(c)
	if a.Answer(nil, s.instance[:]...) == nil {
		c.serve()
	}
	return nil
}

// enter registers a connection for serving, in place of the client's former one.
func (s *Server) enter(a *listener.Accepted, id clientID) (*serverConn, error) {
	if err := a.Establish(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, listener.Refuse(listener.Slow, "the store is shutting down")
	case len(s.conns) >= connectionsMax:
		return nil, listener.Refuse(listener.Crowded, "the store has %d connections, its maximum", len(s.conns))
	}
	c := &serverConn{server: s, raw: a.Raw, conn: idleConn{a.Conn, silenceServer}, waits: map[uint64]context.CancelFunc{}}
	former := s.sessions.enter(id, c)
	if former != nil {
		former.raw.Close()
	}
	s.memory.mu.Lock()
	c.session.owner = c
	s.memory.mu.Unlock()
	s.conns[c] = struct{}{}
	return c, nil
}

// leave undoes enter.
func (s *Server) leave(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.sessions.leave(c)
}
