package rendezvous

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ServerConfig says how a [Server] is reached. The zero value works, on loopback, without encryption.
type ServerConfig struct {
	// Listen is the address to listen on: "10.0.0.5:29500". Only that address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener is used instead of Listen, if given. The server closes it.
	Listener net.Listener
	// TLS and Authenticate are as in [Config], for this side.
	TLS          *tls.Config
	Authenticate func(conn net.Conn, dialed bool, greeting []byte) error
	// Handshake bounds the time of a new connection until its greeting is read and proven. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the connections that have not greeted yet; the oldest is dropped for one more. Default 128.
	HalfOpen int
	// Connections bounds those that have. Default 16,384.
	Connections int
	// Logger gets the warnings about refused connections, at most one a second. Default slog.Default().
	Logger *slog.Logger
}

func (c ServerConfig) filled() ServerConfig {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Handshake <= 0 {
		c.Handshake = 10 * time.Second
	}
	if c.HalfOpen <= 0 {
		c.HalfOpen = 128
	}
	if c.Connections <= 0 {
		c.Connections = 1 << 14
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

const (
	silenceServer  = 60 * time.Second       // a client that says nothing for so long is gone; it pings more often
	waitsMax       = 256                    // calls of Changes under way on one connection
	answerTimeout  = 2 * time.Second        // to write an answer of a hundred bytes to a fresh connection
	acceptPause    = 50 * time.Millisecond  // after an Accept that failed
	farewellWithin = 500 * time.Millisecond // to tell a client that the server ends
)

// Server is a store that processes anywhere reach by TCP. What it holds is in memory, and ends with it.
type Server struct {
	cfg      ServerConfig
	listener net.Listener
	memory   *Memory
	instance instance
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	release  func() bool // of the context that Serve was given
	work     sync.WaitGroup
	refused  [refusals]atomic.Uint64
	report   reporter

	mu       sync.Mutex // before the memory's
	half     []net.Conn // accepted, not yet greeted, the oldest first
	conns    map[*serverConn]struct{}
	sessions sessions
	closed   bool
}

// Serve starts a server. It ends with ctx, or by Close.
func Serve(ctx context.Context, cfg ServerConfig) (*Server, error) {
	cfg = cfg.filled()
	s := &Server{cfg: cfg, listener: cfg.Listener, memory: NewMemory(), conns: map[*serverConn]struct{}{}, sessions: newSessions()}
	if s.listener == nil {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
		if err != nil {
			return nil, fmt.Errorf("rendezvous: serving a store: %w", err)
		}
		s.listener = l
	}
	rand.Read(s.instance[:])
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.report = reporter{server: s}
	s.work.Go(s.accept)
	s.release = context.AfterFunc(ctx, func() { s.Close() })
	return s, nil
}

// Addr returns the address that the server listens on, as others may dial it if that is no wildcard.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// URL returns what [Open] takes: "tcp://" and the address.
func (s *Server) URL() string { return "tcp://" + s.Addr() }

// Store opens the store for use by this process itself. It ends with the server.
func (s *Server) Store() Store { return s.memory.Open() }

// Refused returns how many connections were refused, or ended for what came through them, by reason: "magic", "version",
// "damaged", "proof", "slow", "crowded", "frame". Reasons that did not occur are left out.
func (s *Server) Refused() map[string]uint64 {
	out := map[string]uint64{}
	for r := range s.refused {
		if n := s.refused[r].Load(); n > 0 {
			out[Refusal(r).String()] = n
		}
	}
	return out
}

// Close ends the server, and tells its clients: their calls return [ErrLost] at once. Closing again waits for the first Close.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.closed
	s.closed = true
	half, conns := s.half, s.conns
	s.half, s.conns = nil, nil
	s.mu.Unlock()
	if first {
		s.release()
		s.cancel()
		s.memory.end(fmt.Errorf("%w: the store at %s has ended", ErrLost, s.Addr()))
		s.listener.Close()
		for _, c := range half {
			c.Close()
		}
		var told sync.WaitGroup
		for c := range conns {
			told.Go(c.farewell)
		}
		told.Wait()
	}
	s.work.Wait()
	return nil
}

// accept takes connections until Close.
func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if s.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return
		}
		if err != nil {
			// Out of descriptors, most likely: dropping the strangers may help, and time does.
			s.dropOldest(0)
			select {
			case <-time.After(acceptPause):
			case <-s.ctx.Done():
			}
			continue
		}
		s.dropOldest(s.cfg.HalfOpen - 1)
		s.mu.Lock()
		if s.closed {
			c.Close()
		} else {
			s.half = append(s.half, c)
			s.work.Go(func() { s.greet(c) })
		}
		s.mu.Unlock()
	}
}

// dropOldest closes the oldest connections that have not greeted until at most keep are left.
func (s *Server) dropOldest(keep int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.half) > keep {
		s.half[0].Close()
		s.half = s.half[1:]
	}
}

// known takes a connection off the list of those that have not greeted. It reports false if it was dropped.
func (s *Server) known(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.half {
		if s.half[i] == c {
			s.half = append(s.half[:i], s.half[i+1:]...)
			return true
		}
	}
	return false
}

// greet reads the greeting of a new connection, and serves it.
func (s *Server) greet(raw net.Conn) {
	defer raw.Close()
	defer s.known(raw)
	raw.SetDeadline(time.Now().Add(s.cfg.Handshake))
	conn, id, err := s.readGreeting(raw)
	var c *serverConn
	if err == nil {
		c, err = s.enter(raw, conn, id)
	}
	if err != nil {
		s.refuse(raw.RemoteAddr(), err)
	}
	raw.SetDeadline(time.Now().Add(answerTimeout))
	_, failed := conn.Write(encodeAnswer(s.instance, err))
	if err != nil {
		return
	}
	defer s.leave(c)
	if failed == nil {
		raw.SetDeadline(time.Time{})
		c.serve()
	}
}

// readGreeting returns the connection, encrypted if it is to be, and who is at its other end.
func (s *Server) readGreeting(raw net.Conn) (conn net.Conn, id clientID, err error) {
	conn = raw
	if s.cfg.TLS != nil {
		if conn, err = s.encrypt(raw); err != nil {
			return conn, id, err
		}
	}
	b := make([]byte, greetingBytes)
	const first = len(magic) // enough to know a stranger, who may not send more
	if _, err := io.ReadFull(conn, b[:first]); err != nil {
		return conn, id, slowOr(refusedMagic, "reading the greeting", err)
	}
	if string(b[:first]) != magic {
		_, err := decodeGreeting(b[:first])
		return conn, id, err
	}
	if _, err := io.ReadFull(conn, b[first:]); err != nil {
		return conn, id, slowOr(refusedDamaged, "reading the greeting", err)
	}
	if id, err = decodeGreeting(b); err != nil {
		return conn, id, err
	}
	if s.cfg.Authenticate == nil {
		return conn, id, nil
	}
	if _, err := conn.Write([]byte{goOn}); err != nil {
		return conn, id, slowOr(refusedProof, "asking for a proof", err)
	}
	if err := s.cfg.Authenticate(conn, false, b); err != nil {
		return conn, id, slowOr(refusedProof, "authentication", err)
	}
	return conn, id, nil
}

// encrypt lets the client begin TLS. One that does not want to is told so in its own words.
func (s *Server) encrypt(raw net.Conn) (net.Conn, error) {
	var first [1]byte
	if _, err := io.ReadFull(raw, first[:]); err != nil {
		return raw, slowOr(refusedMagic, "waiting for TLS", err)
	}
	if first[0] == magic[0] {
		return raw, refuse(refusedProof, "it does not speak TLS, as this end does: it has no secret")
	}
	t := tls.Server(&unread{raw, first[:]}, s.cfg.TLS)
	err := t.HandshakeContext(s.ctx)
	if err == nil {
		return t, nil
	}
	reason := refusedProof
	if head := (tls.RecordHeaderError{}); errors.As(err, &head) {
		reason = refusedMagic
	}
	return raw, slowOr(reason, "TLS", explained(err))
}

// unread is a connection whose first bytes were read already.
type unread struct {
	net.Conn
	first []byte
}

func (u *unread) Read(b []byte) (int, error) {
	if len(u.first) == 0 {
		return u.Conn.Read(b)
	}
	n := copy(b, u.first)
	u.first = u.first[n:]
	return n, nil
}

// explained adds to an error of package tls what it does not say.
func explained(err error) error {
	var head tls.RecordHeaderError
	var alert tls.AlertError
	op := (*net.OpError)(nil)
	switch {
	case errors.As(err, &head):
		return fmt.Errorf("the other end does not speak TLS, as this end does: %w", err)
	case errors.As(err, &alert) || errors.As(err, &op) && op.Op == "remote error":
		return fmt.Errorf("the other end does not trust this end's certificate, as when it has another secret or is of another job: %w", err)
	}
	return err
}

// slowOr returns the refusal of a connection for a failure, which may be that it was too slow.
func slowOr(reason Refusal, doing string, err error) error {
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() || errors.Is(err, net.ErrClosed) {
		reason = refusedSlow
	}
	return refuse(reason, "%s: %v", doing, err)
}

// enter makes a connection one that is served, in place of its client's former one.
func (s *Server) enter(raw, conn net.Conn, id clientID) (*serverConn, error) {
	if !s.known(raw) {
		return nil, refuse(refusedSlow, "it was dropped for newer connections")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, refuse(refusedSlow, "the store ends")
	case len(s.conns) >= s.cfg.Connections:
		return nil, refuse(refusedCrowded, "the store has %d connections, it takes no more", len(s.conns))
	}
	c := &serverConn{server: s, raw: raw, conn: lively{conn, silenceServer}, waits: map[uint64]context.CancelFunc{}}
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

// refuse counts a refusal, and reports it: at most one a second, strangers must not fill the disk.
func (s *Server) refuse(from net.Addr, err error) {
	reason := refusedDamaged
	if r := (*refusal)(nil); errors.As(err, &r) {
		reason = r.reason
	}
	s.refused[reason].Add(1)
	if s.ctx.Err() == nil {
		s.report.add(from, reason, err)
	}
}
