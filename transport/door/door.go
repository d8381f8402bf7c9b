package door

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

// Config sets up a [Door]. The zero value works, on loopback.
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

// Door is a process's listening port.
type Door struct {
	cfg      Config
	listener net.Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	work     sync.WaitGroup
	counted  [reasons]atomic.Uint64
	logged   [reasons]atomic.Int64 // when one was logged last, in nanoseconds since 1970
	first    [GreetingBytes]byte   // of the connection that was just accepted

	mu        sync.Mutex
	entrances []*Entrance
	half      halfOpen
	accepting bool
	closed    bool
}

// Open opens the port. Until a service is served there, connections wait: nobody is refused for coming early.
func Open(cfg Config) (*Door, error) {
	cfg = cfg.filled()
	d := &Door{cfg: cfg, listener: cfg.Listener}
	if d.listener == nil {
		var err error
		if d.listener, err = listen(cfg.Listen); err != nil {
			return nil, err
		}
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Addr returns the address that the door listens on, as others may dial it if that is no wildcard.
func (d *Door) Addr() string { return d.listener.Addr().String() }

// Close closes the port, ends what its services are being asked for, and waits for them. Closing again does nothing.
func (d *Door) Close() error {
	d.mu.Lock()
	closed := d.closed
	d.closed = true
	d.mu.Unlock()
	if closed {
		return nil
	}
	d.cancel()
	err := d.listener.Close()
	for _, e := range d.all() {
		e.Close()
	}
	d.mu.Lock()
	d.half.makeRoom(0)
	d.mu.Unlock()
	d.work.Wait()
	return err
}

// acceptPause follows an Accept that failed.
const acceptPause = 50 * time.Millisecond

// accept takes connections until Close.
func (d *Door) accept() {
	for {
		c, err := d.listener.Accept()
		if d.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return
		}
		if err == nil {
			d.begin(c)
			continue
		}
		// Out of descriptors, most likely: dropping strangers may help, and time does.
		d.mu.Lock()
		d.half.makeRoom(0)
		d.mu.Unlock()
		select {
		case <-time.After(acceptPause):
		case <-d.ctx.Done():
		}
	}
}

// begin sends away who is known for a stranger by what has come already, and leaves others to a goroutine.
func (d *Door) begin(c net.Conn) {
	n, ended := look(c, d.first[:])
	if !mayBe(d.first[:n]) || ended {
		d.sendAway(c)
		return
	}
	a := &Arrival{Conn: c, Raw: c, door: d, read: n}
	copy(a.bytes[:], d.first[:n])
	if n == GreetingBytes {
		if err := a.decode(); err != nil {
			d.refuse(a.entrance, c.RemoteAddr(), err)
			c.Write(answer(err)) // a fresh connection has room for it
			c.Close()
			return
		}
	}
	d.mu.Lock()
	closed := d.closed
	if !closed {
		d.half.makeRoom(d.cfg.HalfOpen - 1)
		d.half.add(c)
		d.work.Add(1)
	}
	d.mu.Unlock()
	if closed {
		c.Close()
		return
	}
	go func() {
		defer d.work.Done()
		a.greet()
	}()
}

// sendAway closes the connection of a stranger, of which nothing is to stay, in the kernel neither.
func (d *Door) sendAway(c net.Conn) {
	d.refuse(nil, c.RemoteAddr(), errStranger)
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		t.SetLinger(0)
	}
	c.Close()
}

// refuse counts and logs a refusal, of each kind at most one a second: strangers must not fill the disk. Who did not come as far as to
// say what it wants is counted by all services.
func (d *Door) refuse(e *Entrance, from net.Addr, err error) {
	reason := reasonOf(err)
	if e != nil {
		e.note(from, reason, err)
	} else {
		for _, e := range d.all() {
			e.note(from, reason, err)
		}
	}
	count := d.counted[reason].Add(1)
	now := time.Now().UnixNano()
	before := d.logged[reason].Load()
	if d.ctx.Err() == nil && now-before >= int64(time.Second) && d.logged[reason].CompareAndSwap(before, now) {
		d.cfg.Logger.Warn("door: a connection is refused", "from", from, "reason", err, "kind", reason.String(), "of_this_kind", count)
	}
}

// all returns the entrances that are there.
func (d *Door) all() []*Entrance {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.entrances)
}

// to returns the entrance for a service, or nil.
func (d *Door) to(s Service) *Entrance {
	for _, e := range d.all() {
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
		return nil, fmt.Errorf("door: address %q to listen on: %w", address, err)
	}
	first, last, err := ParsePorts(ports)
	if err != nil {
		return nil, fmt.Errorf("door: address %q to listen on: %w", address, err)
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
	return nil, fmt.Errorf("door: no port to listen on: %w", errors.Join(errs...))
}
