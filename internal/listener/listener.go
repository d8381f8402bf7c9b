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

// Config sets up a [Listener]. The zero value works, on loopback.
type Config struct {
	// Listen is the address and the port, or the range of ports, to listen on: "10.0.0.5:0", "[::1]:7000-7099". Only that
	// address is bound. Default "127.0.0.1:0": any free port.
	Listen string
	// Listener is used instead of Listen, if given. The door closes it.
	Listener net.Listener
	// Handshake bounds the time of a new connection until its greeting is read and proven. Default 10 seconds.
	Handshake time.Duration
	// HalfOpen bounds the connections that have not greeted yet, or proven themselves; for one more, the oldest is dropped of
	// the address that has the most. Default 128.
	HalfOpen int
	// Logger gets the warnings about refused connections. Default slog.Default().
	Logger *slog.Logger
}

func (c Config) filled() Config {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.Handshake <= 0 {
		c.Handshake = 10 * time.Second
	}
	if c.HalfOpen <= 0 {
		c.HalfOpen = 128
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Listener is a process's listening port.
type Listener struct {
	cfg     Config
	inner   net.Listener
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup
	counted [reasons]atomic.Uint64
	logged  [reasons]atomic.Int64 // when one was logged last, in nanoseconds since 1970
	first   [HelloBytes]byte      // of the connection that was just accepted

	mu        sync.Mutex
	acceptors []*Acceptor
	half      halfOpen
	accepting bool
	closed    bool
}

// Open opens the port. Until a service is served there, connections wait: nobody is refused for coming early.
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

// Addr returns the address that the door listens on, as others may dial it if that is no wildcard.
func (l *Listener) Addr() string { return l.inner.Addr().String() }

// Close closes the port, ends what its services are being asked for, and waits for them. Closing again does nothing.
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
	l.half.makeRoom(0)
	l.mu.Unlock()
	l.work.Wait()
	return err
}

// acceptPause follows an Accept that failed.
const acceptPause = 50 * time.Millisecond

// accept takes connections until Close.
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
		// Out of descriptors, most likely: dropping strangers may help, and time does.
		l.mu.Lock()
		l.half.makeRoom(0)
		l.mu.Unlock()
		select {
		case <-time.After(acceptPause):
		case <-l.ctx.Done():
		}
	}
}

// begin sends away who is known for a stranger by what has come already, and leaves others to a goroutine.
func (l *Listener) begin(c net.Conn) {
	n, ended := look(c, l.first[:])
	if !mayBe(l.first[:n]) || ended {
		l.sendAway(c)
		return
	}
	a := &Accepted{Conn: c, Raw: c, listener: l, read: n}
	copy(a.bytes[:], l.first[:n])
	if n == HelloBytes {
		if err := a.decode(); err != nil {
			l.refuse(a.acceptor, c.RemoteAddr(), err)
			c.Write(answer(err)) // a fresh connection has room for it
			c.Close()
			return
		}
	}
	l.mu.Lock()
	closed := l.closed
	if !closed {
		l.half.makeRoom(l.cfg.HalfOpen - 1)
		l.half.add(c)
		l.work.Add(1)
	}
	l.mu.Unlock()
	if closed {
		c.Close()
		return
	}
	go func() {
		defer l.work.Done()
		a.greet()
	}()
}

// sendAway closes the connection of a stranger, of which nothing is to stay, in the kernel neither.
func (l *Listener) sendAway(c net.Conn) {
	l.refuse(nil, c.RemoteAddr(), errStranger)
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		t.SetLinger(0)
	}
	c.Close()
}

// refuse counts and logs a refusal, of each kind at most one a second: strangers must not fill the disk. Who did not come as far as to
// say what it wants is counted by all services.
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
		l.cfg.Logger.Warn("listener: a connection is refused", "from", from, "reason", err, "kind", reason.String(), "of_this_kind", count)
	}
}

// all returns the acceptors that are there.
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

// ParsePorts reads a port, 0 for any, or a range of them: "7000", "7000-7099".
func ParsePorts(text string) (first, last int, err error) {
	from, to, ranged := strings.Cut(text, "-")
	lo, err := strconv.ParseUint(from, 10, 16)
	hi := lo
	if err == nil && ranged {
		hi, err = strconv.ParseUint(to, 10, 16)
	}
	if err != nil || hi < lo || ranged && lo == 0 {
		return 0, 0, fmt.Errorf("%q is no port and no range of ports: want one such as 7000 or 7000-7099", text)
	}
	return int(lo), int(hi), nil
}

// listen opens the port, or the first free one of the range.
func listen(address string) (net.Listener, error) {
	host, ports, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("listener: address %q to listen on: %w", address, err)
	}
	first, last, err := ParsePorts(ports)
	if err != nil {
		return nil, fmt.Errorf("listener: address %q to listen on: %w", address, err)
	}
	// Whom a service lets in, it has kept alive; strangers have a deadline.
	lc := net.ListenConfig{KeepAlive: -1, Control: untilDataComes}
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
