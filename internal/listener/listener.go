package listener

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Config configures a [Listener]. The zero value listens on loopback.
type Config struct {
	// Listen is the address, and the port or the range of ports, to listen on: "10.0.0.5:0", "[::1]:7000-7099". Only
	// that address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener replaces Listen if it is not nil. Listener.Close closes it.
	Listener net.Listener
	// Handshake bounds the time of the handshake of a new connection. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the number of connections whose handshake is incomplete. One more evicts the oldest of the
	// address that has the most. Default 128.
	HalfOpen int
	// Logger receives the warnings about refused connections. Default slog.Default().
	Logger *slog.Logger
}

// HalfOpenDefault is the default of [Config.HalfOpen].
const HalfOpenDefault = 128

func (c Config) filled() Config {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Handshake <= 0 {
		c.Handshake = 10 * time.Second
	}
	if c.HalfOpen <= 0 {
		c.HalfOpen = HalfOpenDefault
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Listener is the listening port of a process. Its methods may be called concurrently.
type Listener struct {
	cfg     Config
	inner   net.Listener
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup
	counted [reasons]atomic.Uint64
	logged  [reasons]atomic.Int64 // time of the last log line, in nanoseconds since 1970
	first   [HelloBytes]byte      // scratch of begin

	mu        sync.Mutex
	acceptors []*Acceptor
	half      Conns
	accepting bool
	closed    bool
}

// Open opens the port. Connections wait until the first call of Serve, so early ones are not refused.
func Open(cfg Config) (*Listener, error) {
	cfg = cfg.filled()
	l := &Listener{cfg: cfg, inner: cfg.Listener}
	if l.inner == nil {
		var err error
		if l.inner, err = listen(cfg.Listen); err != nil {
			return nil, err
		}
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// Addr returns the address that the listener is bound to. Others can dial it unless it is a wildcard.
func (l *Listener) Addr() string { return l.inner.Addr().String() }

// Close closes the port and all acceptors, cancels running handshakes, and waits for them. Closing again does nothing.
func (l *Listener) Close() error {
	l.mu.Lock()
	closed := l.closed
	l.closed = true
	l.mu.Unlock()
	if closed {
		return nil
	}
	l.cancel()
	err := l.inner.Close()
	for _, e := range l.all() {
		e.Close()
	}
	l.mu.Lock()
	l.half.MakeRoom(0)
	l.mu.Unlock()
	l.work.Wait()
	return err
}

// acceptPause is the pause after a failed Accept.
const acceptPause = 50 * time.Millisecond

// accept accepts connections until Close.
func (l *Listener) accept() {
	for {
		c, err := l.inner.Accept()
		if l.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return
		}
		if err == nil {
			l.begin(c)
			continue
		}
		// Probably out of file descriptors: close half-open connections, and wait.
		l.mu.Lock()
		l.half.MakeRoom(0)
		l.mu.Unlock()
		select {
		case <-time.After(acceptPause):
		case <-l.ctx.Done():
		}
	}
}

// begin refuses a connection if the data that has arrived is not a valid hello, and starts a goroutine for any other.
func (l *Listener) begin(c net.Conn) {
	n, ended := readAvailable(c, l.first[:])
	if !mayBe(l.first[:n]) || ended {
		l.reset(c)
		return
	}
	a := &Accepted{Conn: c, Raw: c, listener: l, read: n}
	copy(a.bytes[:], l.first[:n])
	if n == HelloBytes {
		if err := a.decode(); err != nil {
			l.refuse(a.acceptor, c.RemoteAddr(), err)
			c.Write(answer(err)) // does not block: the socket buffer is empty
			c.Close()
			return
		}
	}
	l.mu.Lock()
	closed := l.closed
	if !closed {
		l.half.MakeRoom(l.cfg.HalfOpen - 1)
		l.half.Add(c)
		l.work.Add(1)
	}
	l.mu.Unlock()
	if closed {
		c.Close()
		return
	}
	go func() {
		defer l.work.Done()
		a.handshake()
	}()
}

// reset refuses a connection that sent no hello. It closes it with RST, so that the kernel keeps no state of it.
func (l *Listener) reset(c net.Conn) {
	l.refuse(nil, c.RemoteAddr(), errStranger)
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		t.SetLinger(0)
	}
	c.Close()
}

// refuse counts and logs a refusal. It logs at most one a second for each reason, so that unauthenticated hosts cannot
// fill the disk. All acceptors count a connection whose service is unknown.
func (l *Listener) refuse(e *Acceptor, from net.Addr, err error) {
	reason := reasonOf(err)
	if e != nil {
		e.note(from, reason, err)
	} else {
		for _, e := range l.all() {
			e.note(from, reason, err)
		}
	}
	count := l.counted[reason].Add(1)
	now := time.Now().UnixNano()
	before := l.logged[reason].Load()
	if l.ctx.Err() == nil && now-before >= int64(time.Second) && l.logged[reason].CompareAndSwap(before, now) {
		l.cfg.Logger.Warn("listener: connection refused", "from", from, "reason", err, "kind", reason.String(),
			"of_this_kind", count)
	}
}

// all returns the registered acceptors.
func (l *Listener) all() []*Acceptor {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.acceptors)
}

// to returns the entrance for a service, or nil.
func (l *Listener) to(s Service) *Acceptor {
	for _, e := range l.all() {
		if slices.Contains(e.Services, s) {
			return e
		}
	}
	return nil
}

// ParsePorts parses a port, 0 for any free one, or a range of ports: "7000", "7000-7099".
func ParsePorts(text string) (first, last int, err error) {
	from, to, ranged := strings.Cut(text, "-")
	lo, err := strconv.ParseUint(from, 10, 16)
	hi := lo
	if err == nil && ranged {
		hi, err = strconv.ParseUint(to, 10, 16)
	}
	if err != nil || hi < lo || ranged && lo == 0 {
		return 0, 0, fmt.Errorf("%q is not a port or a range of ports: want one such as 7000 or 7000-7099", text)
	}
	return int(lo), int(hi), nil
}

// listen opens the port, or the first free one of the range.
func listen(address string) (net.Listener, error) {
	host, ports, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listener: listen address %q: %w", address, err)
	}
	first, last, err := ParsePorts(ports)
	if err != nil {
		return nil, fmt.Errorf("listener: listen address %q: %w", address, err)
	}
	// The services enable keep-alive on accepted connections; half-open ones have a deadline.
	lc := net.ListenConfig{KeepAlive: -1, Control: deferAccept}
	var errs []error
	for port := first; port <= last; port++ {
		l, err := lc.Listen(context.Background(), "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			return l, nil
		}
		if errs = append(errs, err); len(errs) > 3 {
			errs = errs[1:]
		}
	}
	return nil, fmt.Errorf("listener: no port to listen on: %w", errors.Join(errs...))
}
