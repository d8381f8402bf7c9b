package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Node is a process's door: the port it listens on, and the groups whose ranks live here.
type Node struct {
	cfg      Config
	job      [16]byte
	listener net.Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	work     sync.WaitGroup
	refused  [refusals]atomic.Uint64
	logged   [refusals]atomic.Int64 // when one was logged last, in nanoseconds since 1970

	lastRefused atomic.Pointer[string] // for errors of those who wait in vain

	mu      sync.Mutex
	worlds  map[worldKey]*world
	changed chan struct{} // closed, and replaced, when a world is added
	past    []worldKey    // of worlds that have ended, the latest pastMax
	latest  uint32        // epoch of the latest world
	retire  bool          // Close with the last world
	half    halfOpen
	closed  bool
}

// worldKey names a group that Node.Group made.
type worldKey struct {
	epoch uint32
	id    uint64
}

// Listen opens a node.
func Listen(cfg Config) (*Node, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, job: cfg.job(), listener: cfg.Listener, worlds: map[worldKey]*world{}, changed: make(chan struct{})}
	if n.listener == nil {
		if n.listener, err = listen(cfg.Listen); err != nil {
			return nil, err
		}
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.work.Go(n.accept)
	return n, nil
}

// Addr returns the address that the node listens on, as others may dial it if that is no wildcard.
func (n *Node) Addr() string { return n.listener.Addr().String() }

// Refused returns how many connections were refused, or ended for what came through them, by reason: "magic", "version",
// "damaged", "job", "epoch", "group", "rank", "duplicate", "proof", "slow", "crowded", "frame". Reasons that did not occur
// are left out.
func (n *Node) Refused() map[string]uint64 {
	out := map[string]uint64{}
	for r := range n.refused {
		if c := n.refused[r].Load(); c > 0 {
			out[Refusal(r).String()] = c
		}
	}
	return out
}

// Close closes the port and all endpoints that are open. Closing again does nothing.
func (n *Node) Close() error {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	worlds := n.worlds
	n.worlds = map[worldKey]*world{}
	n.mu.Unlock()
	if closed {
		return nil
	}
	for _, w := range worlds {
		w.closeAll()
	}
	n.cancel()
	n.listener.Close()
	n.mu.Lock()
	n.half.makeRoom(0)
	n.mu.Unlock()
	n.work.Wait()
	return nil
}

// CloseWithGroups has the node close itself with the last end of its last group: at once, if it has none.
func (n *Node) CloseWithGroups() {
	n.mu.Lock()
	n.retire = true
	n.mu.Unlock()
	n.closeIfEmpty()
}

func (n *Node) closeIfEmpty() {
	n.mu.Lock()
	now := n.retire && len(n.worlds) == 0
	n.mu.Unlock()
	if now {
		n.Close()
	}
}

// accept takes connections until Close.
func (n *Node) accept() {
	for {
		c, err := n.listener.Accept()
		if n.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return
		}
		if err != nil {
			// Out of descriptors, most likely: dropping strangers may help, and time does.
			n.mu.Lock()
			n.half.makeRoom(0)
			n.mu.Unlock()
			select {
			case <-time.After(50 * time.Millisecond):
			case <-n.ctx.Done():
			}
			continue
		}
		n.mu.Lock()
		n.half.makeRoom(n.cfg.HalfOpen - 1)
		n.half.add(c)
		n.mu.Unlock()
		n.work.Go(func() { n.greet(c) })
	}
}

// known takes a connection off the list of those that have not greeted. It reports false if it was dropped.
func (n *Node) known(c net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.half.remove(c)
}

// arrival is a connection that has greeted.
type arrival struct {
	hello
	conn   net.Conn // tls.Conn if there is TLS
	raw    net.Conn // the connection itself
	shim   *shim    // if there is TLS
	proven bool     // by Config.Authenticate; it is not counted as half open any more
}

// answer accepts the connection, or refuses it for err and closes it.
func (a *arrival) answer(err error) error {
	a.conn.SetDeadline(time.Now().Add(replyTimeout))
	_, failed := a.conn.Write(reply(err))
	if err != nil || failed != nil {
		a.raw.Close()
		return errors.Join(err, failed)
	}
	return a.conn.SetDeadline(time.Time{})
}

// replyTimeout bounds the time to write an answer of a hundred bytes to a fresh connection.
const replyTimeout = 2 * time.Second

// greet reads the greeting of a new connection and hands it to whom it is for.
func (n *Node) greet(c net.Conn) {
	defer func() { n.known(c) }()
	deadline := time.Now().Add(n.cfg.Handshake)
	c.SetDeadline(deadline)
	a := &arrival{conn: c, raw: c}
	err := n.readHello(a)
	if err == nil {
		err = n.route(a, deadline)
	}
	if err != nil {
		n.refuse(c.RemoteAddr(), err)
		a.answer(err)
		c.Close()
	}
}

// readHello takes a new connection as far as its greeting and what proves it. Strangers come no further than to the greeting or
// a proof by a hash: the work of TLS is for those only who have given one, if there is one to give.
func (n *Node) readHello(a *arrival) error {
	b := make([]byte, helloBytes)
	const first = len(magic) + 2 // enough to know a stranger, who may not send more
	if _, err := io.ReadFull(a.raw, b[:first]); err != nil {
		return n.slowOr(refusedMagic, "reading the greeting", err)
	}
	if string(b[:len(magic)]) != magic {
		return a.hello.decode(nil)
	}
	if _, err := io.ReadFull(a.raw, b[first:]); err != nil {
		return n.slowOr(refusedDamaged, "reading the greeting", err)
	}
	if err := a.hello.decode(b); err != nil {
		return err
	}
	switch {
	case a.job != n.job:
		return refuse(refusedJob, "it belongs to another job than %q", n.cfg.Job)
	case a.secure && n.cfg.TLS == nil:
		return refuse(refusedProof, "it wants TLS, which this end does not have")
	case !a.secure && n.cfg.TLS != nil && n.cfg.Authenticate == nil:
		return errExposed
	}
	if err := n.prove(a, b); err != nil || !a.secure {
		return err
	}
	a.shim = &shim{Conn: a.raw}
	a.shim.tls = tls.Server(a.shim, n.cfg.TLS)
	a.conn = a.shim.tls
	if err := a.shim.tls.HandshakeContext(n.ctx); err != nil {
		return n.slowOr(refusedProof, "TLS", explained(err))
	}
	again := make([]byte, helloBytes)
	if _, err := io.ReadFull(a.conn, again); err != nil {
		return n.slowOr(refusedProof, "TLS", explained(err))
	}
	if !bytes.Equal(again, b) {
		return refuse(refusedProof, "its greeting is another one inside of TLS: somebody has exchanged connections")
	}
	return nil
}

// prove says what has to follow the greeting, and asks for the proof that this is from one of the job, if there is any.
func (n *Node) prove(a *arrival, greeting []byte) error {
	next := byte(nextProof)
	if n.cfg.Authenticate == nil {
		if next = nextTLS; !a.secure {
			return nil
		}
	}
	if _, err := a.raw.Write([]byte{next}); err != nil {
		return n.slowOr(refusedProof, "asking for a proof", err)
	}
	if next == nextTLS {
		return nil
	}
	if err := n.cfg.Authenticate(a.raw, false, greeting); err != nil {
		return n.slowOr(refusedProof, "authentication", err)
	}
	if a.proven = n.known(a.raw); !a.proven {
		return errPushedOut
	}
	return nil
}

// errPushedOut is for a connection that has greeted, but too late.
var errPushedOut = refuse(refusedSlow, "it was dropped for newer connections")

// errExposed is for a connection that should be encrypted and is not.
var errExposed = refuse(refusedProof, "it is not encrypted, and its process is not known to be on this host")

// explained adds to an error of package tls what it does not say.
func explained(err error) error {
	var head tls.RecordHeaderError
	var alert tls.AlertError
	op := (*net.OpError)(nil)
	switch {
	case errors.As(err, &head):
		return fmt.Errorf("the other end does not speak TLS, as this end does: %w", err)
	case errors.As(err, &op) && op.Op == "remote error" || errors.As(err, &alert):
		return fmt.Errorf("the other end does not trust this end's certificate: %w", err)
	case op != nil && op.Op == "local error":
		return fmt.Errorf("what came does not belong to this handshake: %w", err)
	}
	return err
}

// slowOr returns the refusal of a connection for a failure, which may be that it was too slow.
func (n *Node) slowOr(reason Refusal, doing string, err error) error {
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() || errors.Is(err, net.ErrClosed) {
		reason = refusedSlow
	}
	return refuse(reason, "%s: %v", doing, err)
}

// route hands a connection to the world that its greeting names. One that is not there yet is waited for until the deadline.
func (n *Node) route(a *arrival, deadline time.Time) error {
	key := worldKey{a.epoch, a.world}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	for {
		n.mu.Lock()
		w, changed, latest := n.worlds[key], n.changed, n.latest
		over := slices.Contains(n.past, key)
		n.mu.Unlock()
		switch {
		case w != nil:
			if !a.proven && !n.known(a.raw) {
				return errPushedOut
			}
			a.raw.SetDeadline(time.Time{})
			return w.welcome(a)
		case a.epoch < latest:
			return refuse(refusedEpoch, "it belongs to epoch %d, which is over: this is epoch %d", a.epoch, latest)
		case over:
			return refuse(refusedGroup, "the group is closed")
		}
		select {
		case <-changed:
		case <-timer.C:
			return refuse(refusedSlow, "the group %#x of epoch %d has not begun here within %v", a.world, a.epoch, n.cfg.Handshake)
		case <-n.ctx.Done():
			return refuse(refusedGroup, "the process is leaving")
		}
	}
}

// refuse counts and logs a refusal, of each kind at most one a second: strangers must not fill the disk.
func (n *Node) refuse(from net.Addr, err error) {
	reason := refusedDamaged
	if r := (*refusal)(nil); errors.As(err, &r) {
		reason = r.reason
	}
	count := n.refused[reason].Add(1)
	last := fmt.Sprintf("the last connection that was refused, from %v: %v", from, err)
	n.lastRefused.Store(&last)
	now := time.Now().UnixNano()
	before := n.logged[reason].Load()
	if n.ctx.Err() == nil && now-before >= int64(time.Second) && n.logged[reason].CompareAndSwap(before, now) {
		n.cfg.Logger.Warn("tcp: a connection is refused", "from", from, "reason", err, "kind", reason.String(), "of_this_kind", count)
	}
}

// target is where a connection goes.
type target struct {
	addr  string
	plain bool // without TLS: its process is known to be on this host
}

// dial makes a connection, greets, and waits for the answer until ctx ends. What can be temporary is tried again, for so
// long.
func (n *Node) dial(ctx context.Context, to target, h hello, patience time.Duration) (*arrival, error) {
	pause := 5 * time.Millisecond
	since := time.Now()
	for {
		a, err := n.dialOnce(ctx, to, h)
		switch {
		case err == nil:
			return a, nil
		case !temporary(err):
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, err)
		case patience > 0 && time.Since(since) > patience:
			return nil, fmt.Errorf("connecting to %s, in vain for %v: %w", to.addr, patience, err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, errors.Join(context.Cause(ctx), err))
		}
	}
}

// temporary reports whether a connection that could not be made may be made later: the other end is not there yet, or had
// too many at once.
func temporary(err error) bool {
	if r := (*refusal)(nil); errors.As(err, &r) {
		return r.reason == refusedSlow
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Op != "remote error" && op.Op != "local error" // of package tls
	}
	return errors.Is(err, errDial) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, context.DeadlineExceeded)
}

// errDial is that there is no connection at all.
var errDial = errors.New("no connection")

func (n *Node) dialOnce(ctx context.Context, to target, h hello) (a *arrival, err error) {
	short, cancel := context.WithTimeout(ctx, n.cfg.Handshake)
	defer cancel()
	c, err := n.cfg.Dial(short, "tcp", to.addr)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDial, err)
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			c.Close()
		}
	}()
	c.SetDeadline(time.Now().Add(n.cfg.Handshake))
	h.secure = n.cfg.TLS != nil && !to.plain
	a = &arrival{hello: h, conn: c, raw: c}
	b := h.encode()
	if _, err := c.Write(b); err != nil {
		return nil, err
	}
	if h.secure || n.cfg.Authenticate != nil {
		if err := n.proveDialed(a, b); err != nil {
			return nil, err
		}
	}
	if h.secure {
		if err := n.secureDialed(short, a, to.addr, b); err != nil {
			return nil, fmt.Errorf("TLS: %w", explained(err))
		}
	}
	c.SetDeadline(time.Time{}) // the other end may be long in coming to the group
	if err := readReply(a.conn); err != nil {
		return nil, explained(err)
	}
	return a, nil
}

// proveDialed hears what has to follow the greeting, and gives the proof that is asked for.
func (n *Node) proveDialed(a *arrival, greeting []byte) error {
	var next [1]byte
	if _, err := io.ReadFull(a.raw, next[:]); err != nil {
		return err
	}
	switch {
	case next[0] == nextProof && n.cfg.Authenticate != nil:
		if err := n.cfg.Authenticate(a.raw, true, greeting); err != nil {
			return fmt.Errorf("authentication: %w", err)
		}
		return nil
	case next[0] == nextTLS && n.cfg.Authenticate == nil:
		return nil
	case next[0] != nextTLS:
		if err := readReply(io.MultiReader(bytes.NewReader(next[:]), a.raw)); err != nil {
			return err
		}
	}
	return refuse(refusedProof, "the other end asks for no proof, as this end does: it has no secret")
}

// secureDialed begins TLS on a connection that this end has dialed.
func (n *Node) secureDialed(ctx context.Context, a *arrival, address string, greeting []byte) error {
	cfg := n.cfg.TLS
	if cfg.ServerName == "" && !cfg.InsecureSkipVerify {
		cfg = cfg.Clone()
		cfg.ServerName, _, _ = net.SplitHostPort(address)
	}
	a.shim = &shim{Conn: a.raw}
	a.shim.tls = tls.Client(a.shim, cfg)
	a.conn = a.shim.tls
	if err := a.shim.tls.HandshakeContext(ctx); err != nil {
		return err
	}
	_, err := a.conn.Write(greeting) // so that TLS, too, knows whose this connection is
	return err
}
