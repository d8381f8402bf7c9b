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

// ServerConfig says how a [Server] is reached. The zero value works, on loopback, without encryption.
type ServerConfig struct {
	// Listen is the address to listen on: "10.0.0.5:29500". Only that address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener is used instead of Listen, if given. The server closes it.
	Listener net.Listener
	// SharedListener is used instead of both, if given, with its own Handshake, HalfOpen and Logger: a port that the process shares with other
	// services. The server leaves it open.
	SharedListener *listener.Listener
	// TLS and Authenticate are as in [Config], for this side.
	TLS          *tls.Config
	Authenticate func(conn net.Conn, dialed bool, greeting []byte) error
	// Handshake bounds the time of a new connection until its greeting is read and proven. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the connections that have not greeted yet, or proven themselves; for one more, the oldest is dropped of the address
	// that has the most. Default 128.
	HalfOpen int
	// Connections bounds those that have. Default 16,384.
	Connections int
	// Bytes bounds what the store holds: all keys and values, each with 128 bytes more. What does not fit is refused
	// with [ErrFull]. Default, and most, [TotalMax].
	Bytes int
	// Logger gets the warnings about refused connections, of each kind at most one a second. Default slog.Default().
	Logger *slog.Logger
}

const (
	silenceServer  = 60 * time.Second // a client that says nothing for so long is gone; it pings more often
	waitsMax       = 256              // calls of Changes under way on one connection
	connectionsMax = 1 << 14          // unless it is said otherwise
	farewellWithin = 2 * time.Second  // to tell a client that the server ends, once what it has asked for is answered
)

// Server is a store that processes anywhere reach by TCP. What it holds is in memory, and ends with it.
type Server struct {
	cfg      ServerConfig
	listener *listener.Listener
	acceptor *listener.Acceptor
	memory   *Memory
	instance instance
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	release  func() bool // of the context that Serve was given
	work     sync.WaitGroup
	closing  sync.Once
	report   reporter

	mu       sync.Mutex // before the memory's
	conns    map[*serverConn]struct{}
	sessions sessions
	closed   bool
}

// Serve starts a server. It ends with ctx, or by Close.
func Serve(ctx context.Context, cfg ServerConfig) (*Server, error) {
	if cfg.Connections <= 0 {
		cfg.Connections = connectionsMax
	}
	s := &Server{cfg: cfg, listener: cfg.SharedListener, memory: NewMemory(), conns: map[*serverConn]struct{}{}, sessions: newSessions()}
	if cfg.Bytes > 0 {
		s.memory.table.most = min(cfg.Bytes, TotalMax)
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

// open has the door let clients in.
func (s *Server) open() (err error) {
	if s.listener == nil {
		s.listener, err = listener.Open(listener.Config{
			Listen: s.cfg.Listen, Listener: s.cfg.Listener, Handshake: s.cfg.Handshake, HalfOpen: s.cfg.HalfOpen, Logger: s.cfg.Logger,
		})
		if err != nil {
			return err
		}
	}
	s.acceptor, err = s.listener.Serve(listener.ServiceConfig{
		Services: []listener.Service{listener.Store}, Rules: listener.Rules{TLS: s.cfg.TLS, Authenticate: s.cfg.Authenticate}, Handle: s.serve,
		Refused: s.report.add,
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

// Addr returns the address that the server listens on, as others may dial it if that is no wildcard.
func (s *Server) Addr() string { return s.listener.Addr() }

// URL returns what [Open] takes: "tcp://" and the address.
func (s *Server) URL() string { return "tcp://" + s.Addr() }

// Store opens the store for use by this process itself. It ends with the server.
func (s *Server) Store() Store { return s.memory.Open() }

// Refused returns how many connections were refused, or ended for what came through them, by reason: "magic", "version",
// "damaged", "service", "proof", "slow", "crowded", "frame". Reasons that did not occur are left out.
func (s *Server) Refused() map[string]uint64 { return s.acceptor.Counts() }

// Clients returns how many clients are connected.
func (s *Server) Clients() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Close ends the server, and tells its clients: their calls return [ErrLost] at once. Closing again waits for the first Close.
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
		var told sync.WaitGroup
		for c := range conns {
			told.Go(c.farewell)
		}
		told.Wait()
		s.acceptor.Close()
		s.closeListener()
		s.work.Wait()
	})
	return nil
}

// serve serves a client that has greeted and proven itself, until its connection ends.
func (s *Server) serve(a *listener.Accepted) error {
	id, err := greeted(&a.Hello)
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

// enter makes a connection one that is served, in place of its client's former one.
func (s *Server) enter(a *listener.Accepted, id clientID) (*serverConn, error) {
	if err := a.Establish(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, listener.Refuse(listener.Slow, "the store ends")
	case len(s.conns) >= s.cfg.Connections:
		return nil, listener.Refuse(listener.Crowded, "the store has %d connections, it takes no more", len(s.conns))
	}
	c := &serverConn{server: s, raw: a.Raw, conn: lively{a.Conn, silenceServer}, waits: map[uint64]context.CancelFunc{}}
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

// leave ends what enter began.
func (s *Server) leave(c *serverConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	s.sessions.leave(c)
}
