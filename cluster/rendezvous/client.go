package rendezvous

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

const (
	silenceClient = 15 * time.Second // a silent server is gone after this time; a live one answers pings
	pingEvery     = 5 * time.Second
	dialWithin    = 10 * time.Second // for one attempt
	dialPauseMin  = 5 * time.Millisecond
	dialPauseMax  = time.Second
	refusedFor    = time.Second // an attempt that failed longer ago is stale: about the time between two heartbeats
)

// client accesses a [Server] over TCP. All calls share one connection. When it breaks, a goroutine reconnects
// and sends every request again that has no response yet; the server recognises by the ids which ones it has
// executed already.
type client struct {
	cfg     Config
	address string
	id      clientID
	server  instance
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	work    sync.WaitGroup

	mu      sync.Mutex
	link    *link // nil: not connected
	calls   map[uint64]*call
	changes map[uint64]struct{} // the ids of calls that change something
	next    uint64
	wanted  chan struct{} // buffer of one: a call waits and there is no connection
	failed  error         // why no further connection will be made
	refused error         // why the last connection attempt failed; nil if it succeeded

	refusedAt time.Time
}

type failFastKey struct{}

// FailFast returns a context whose calls do not wait for a TCP store to come back: they return [ErrLost] as soon as one
// connection attempt has failed, and at once if one failed within the last second. Use it when leaving a job.
func FailFast(ctx context.Context) context.Context {
	return context.WithValue(ctx, failFastKey{}, true)
}

// call is a request without a response yet.
type call struct {
	request
	frames   []*response
	failFast bool          // fails instead of waiting for another connection
	done     chan struct{} // closed when frames or err are set
	err      error
}

// openTCP is the [Opener] of "tcp".
func openTCP(ctx context.Context, url string, cfg Config) (Store, error) {
	c := &client{
		cfg: cfg, address: strings.TrimSuffix(strings.TrimPrefix(url, "tcp://"), "/"),
		calls: map[uint64]*call{}, changes: map[uint64]struct{}{}, wanted: make(chan struct{}, 1),
	}
	if strings.Contains(c.address, "@") {
		return nil, fmt.Errorf("want tcp://host:port, without a user and a password: processes authenticate by the job's " +
			"secret")
	}
	if _, port, err := net.SplitHostPort(c.address); err != nil || port == "" {
		return nil, fmt.Errorf("want tcp://host:port (%v)", err)
	}
	rand.Read(c.id[:])
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	conn, server, err := c.dial(ctx, 0)
	if err != nil {
		c.cancel()
		return nil, err
	}
	c.server = server
	c.work.Go(func() { c.run(conn) })
	return c, nil
}

// Close implements [Store].
func (c *client) Close() error {
	c.fail(ErrClosed)
	c.work.Wait()
	return nil
}

// fail ends the client: current and later calls return err.
func (c *client) fail(err error) {
	c.mu.Lock()
	if c.failed == nil || err == ErrClosed {
		c.failed = err
	}
	c.mu.Unlock()
	c.cancel()
	c.endCalls(err)
}

// endCalls makes all current calls return err.
func (c *client) endCalls(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, call := range c.calls {
		call.err = err
		c.end(id)
		close(call.done)
	}
}

// end removes a call from the list. The caller holds c.mu.
func (c *client) end(id uint64) {
	delete(c.calls, id)
	delete(c.changes, id)
}

// run keeps a connection open as long as there are calls.
func (c *client) run(conn net.Conn) {
	for {
		err := c.use(conn)
		c.mu.Lock()
		failed, waiting := c.failed, len(c.calls) > 0
		c.mu.Unlock()
		if failed != nil {
			return
		}
		c.cfg.Logger.Debug("rendezvous: the connection to the store broke", "store", c.address, "error", err)
		for conn = nil; conn == nil; {
			if !waiting {
				select {
				case <-c.wanted:
				case <-c.ctx.Done():
					return
				}
			}
			if conn = c.again(err); c.ctx.Err() != nil {
				if conn != nil {
					conn.Close()
				}
				return
			}
			waiting = false
		}
	}
}

// again reconnects, or fails the calls that wait for a connection.
func (c *client) again(broke error) net.Conn {
	conn, server, err := c.dial(c.ctx, c.cfg.ReconnectTimeout)
	switch {
	case c.ctx.Err() != nil:
		return conn
	case err != nil && !listener.Temporary(err):
		c.fail(fmt.Errorf("%w: after its connection broke (%w): %w", ErrEnded, broke, err))
	case err != nil:
		c.endCalls(fmt.Errorf("%w: its connection broke (%w), then %w", ErrLost, broke, err))
	case server != c.server:
		conn.Close()
		c.fail(fmt.Errorf("%w: another server listens at %s now; the content of the store is lost", ErrEnded, c.address))
	default:
		return conn
	}
	return nil
}

// dial connects, sends the hello, and waits for the response until ctx ends, or for timeout if that is
// not 0. It retries temporary failures within that time.
func (c *client) dial(ctx context.Context, timeout time.Duration) (net.Conn, instance, error) {
	pause, since := dialPauseMin, time.Now()
	for {
		conn, server, err := c.dialOnce(ctx)
		c.dialed(err)
		switch {
		case err == nil:
			return conn, server, nil
		case !listener.Temporary(err):
			return nil, server, fmt.Errorf("connecting to %s: %w", c.address, err)
		case timeout > 0 && time.Since(since) > timeout:
			return nil, server, fmt.Errorf("connecting to %s failed for %v: %w", c.address, timeout, err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, dialPauseMax)
		case <-ctx.Done():
			return nil, server, fmt.Errorf("connecting to %s: %w (the last attempt: %w)", c.address, context.Cause(ctx), err)
		}
	}
}

// dialed records the result of a connection attempt. After a failure the calls that fail fast end.
func (c *client) dialed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused, c.refusedAt = err, time.Now()
	if err == nil {
		return
	}
	for id, call := range c.calls {
		if call.failFast {
			call.err = c.unreachable()
			c.end(id)
			close(call.done)
		}
	}
}

// unreachable returns the error of a call that fails fast. The caller holds c.mu.
func (c *client) unreachable() error {
	return fmt.Errorf("%w: connecting to %s: %w", ErrLost, c.address, c.refused)
}

// dialOnce connects, and identifies the server.
func (c *client) dialOnce(ctx context.Context) (conn net.Conn, server instance, err error) {
	dialer := listener.Dialer{
		Rules: listener.Rules{TLS: c.cfg.TLS, Authenticate: c.cfg.Authenticate}, Dial: c.cfg.Dial,
		Handshake: dialWithin,
	}
	g := c.id.hello()
	g.Secure = c.cfg.TLS != nil
	if conn, err = dialer.DialContext(ctx, c.address, g); err != nil {
		return nil, server, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	_, err = io.ReadFull(conn, server[:])
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, server, err
	}
	conn.SetDeadline(time.Time{})
	return conn, server, nil
}

// use sends the calls over a connection until it breaks.
func (c *client) use(conn net.Conn) error {
	l := newLink(conn)
	c.mu.Lock()
	for _, id := range slices.Sorted(maps.Keys(c.calls)) {
		call := c.calls[id]
		call.frames = nil // of a truncated response
		l.push(c.frame(call))
	}
	c.link = l
	c.mu.Unlock()
	stop := context.AfterFunc(c.ctx, l.close)
	defer stop()
	var writer sync.WaitGroup
	writer.Go(l.write)
	err := c.read(l)
	c.mu.Lock()
	c.link = nil
	c.mu.Unlock()
	l.close()
	writer.Wait()
	return err
}

// frame returns a function that encodes a call's request, unless the call has ended by then. The caller holds
// c.mu.
func (c *client) frame(call *call) func() []byte {
	return func() []byte {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.calls[call.id] == nil {
			return nil
		}
		call.oldest = c.next
		for id := range c.changes {
			call.oldest = min(call.oldest, id)
		}
		return call.encode()
	}
}

// read receives responses from a connection until it breaks.
func (c *client) read(l *link) error {
	for {
		b, err := readFrame(l.conn)
		if err != nil {
			return err
		}
		p := &response{}
		if err := p.decode(b); err != nil {
			return err
		}
		if p.status == statusClosing {
			c.fail(fmt.Errorf("%w: the store at %s has ended", ErrEnded, c.address))
			return nil
		}
		c.mu.Lock()
		if call := c.calls[p.id]; call != nil {
			if call.frames = append(call.frames, p); !p.more {
				c.end(p.id)
				close(call.done)
			}
		}
		c.mu.Unlock()
	}
}

// do sends a request and returns its response.
func (c *client) do(ctx context.Context, q request, err error) (*response, error) {
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	if q.op.changes() {
		q.token = tokenOf(ctx)
	}
	call := &call{request: q, done: make(chan struct{}), failFast: ctx.Value(failFastKey{}) != nil}
	if err := c.begin(call); err != nil {
		return nil, err
	}
	select {
	case <-call.done:
	case <-ctx.Done():
		c.abandon(call)
		return nil, context.Cause(ctx)
	}
	if call.err != nil {
		return nil, call.err
	}
	return call.response()
}

// begin sends a call's request, or has a connection made for it.
func (c *client) begin(call *call) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.failed != nil:
		return c.failed
	case call.failFast && c.link == nil && c.refused != nil && time.Since(c.refusedAt) < refusedFor:
		return c.unreachable()
	}
	c.next++
	call.id = c.next
	c.calls[call.id] = call
	if call.op.changes() {
		c.changes[call.id] = struct{}{}
	}
	if c.link != nil {
		c.link.push(c.frame(call))
		return nil
	}
	select {
	case c.wanted <- struct{}{}:
	default:
	}
	return nil
}

// abandon ends a call whose caller no longer waits.
func (c *client) abandon(call *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(call.id)
	if c.link != nil && call.op.waits() {
		cancel := request{op: opCancel, id: call.id}
		c.link.push(cancel.encode)
	}
}

// response joins the frames of a response, and returns the error of its status.
func (c *call) response() (*response, error) {
	all := c.frames[0]
	for _, p := range c.frames[1:] {
		all.entries = append(all.entries, p.entries...)
	}
	switch all.status {
	case statusCompacted:
		return nil, ErrCompacted
	case statusFull:
		return nil, ErrFull
	case statusFenced:
		return nil, ErrFenced
	case statusBusy:
		return nil, fmt.Errorf("rendezvous: this process has too many concurrent calls to the store (want less than %d of "+
			"Changes and Wait)", waitsMax)
	}
	return all, nil
}

// Get implements [Store].
func (c *client) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	p, err := c.do(ctx, request{op: opGet, key: key}, CheckPrefix(key))
	switch {
	case err != nil:
		return nil, 0, err
	case p.status == statusNo || len(p.entries) == 0:
		return nil, 0, ErrNotFound
	}
	return p.entries[0].Value, p.entries[0].Revision, nil
}

// Set implements [Store].
func (c *client) Set(ctx context.Context, key string, value []byte) error {
	_, err := c.do(ctx, request{op: opSet, key: key, value: value}, checkPair(key, value))
	return err
}

// Create implements [Store].
func (c *client) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	p, err := c.do(ctx, request{op: opCreate, key: key, value: value}, checkPair(key, value))
	switch {
	case err != nil:
		return nil, false, err
	case len(p.entries) > 0:
		return p.entries[0].Value, false, nil
	}
	return nil, p.status == statusOK, nil
}

// Swap implements [Store].
func (c *client) Swap(ctx context.Context, key string, revision uint64, value []byte) (bool, error) {
	p, err := c.do(ctx, request{op: opSwap, key: key, revision: revision, value: value}, checkPair(key, value))
	return err == nil && p.status == statusOK, err
}

// Delete implements [Store].
func (c *client) Delete(ctx context.Context, key string) error {
	_, err := c.do(ctx, request{op: opDelete, key: key}, CheckKey(key))
	return err
}

// List implements [Store].
func (c *client) List(ctx context.Context, prefix string) ([]Entry, uint64, error) {
	p, err := c.do(ctx, request{op: opList, key: prefix}, CheckPrefix(prefix))
	if err != nil {
		return nil, 0, err
	}
	return p.entries, p.revision, nil
}

// Changes implements [Store].
func (c *client) Changes(ctx context.Context, prefix string, after uint64) ([]Entry, uint64, error) {
	p, err := c.do(ctx, request{op: opChanges, key: prefix, revision: after}, CheckPrefix(prefix))
	if err != nil {
		return nil, 0, err
	}
	return p.entries, p.revision, nil
}

// Wait implements [Store].
func (c *client) Wait(ctx context.Context, prefix string, n int) ([]Entry, error) {
	p, err := c.do(ctx, request{op: opWait, key: prefix, revision: uint64(max(n, 0))}, CheckPrefix(prefix))
	if err != nil {
		return nil, err
	}
	return p.entries, nil
}
