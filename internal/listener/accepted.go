package listener

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Accepted is an accepted connection whose hello has been read.
type Accepted struct {
	Hello
	Conn     net.Conn  // a *tls.Conn if there is TLS
	Raw      net.Conn  // the TCP connection
	Deadline time.Time // the dialer waits at least until then

	listener    *Listener
	acceptor    *Acceptor // nil until the hello is decoded
	bytes       [HelloBytes]byte
	read        int  // of them
	established bool // no longer counted as half open
	informed    bool // the dialer knows of the refusal
}

// answerTimeout bounds the time to write an answer of a hundred bytes to a fresh connection.
const answerTimeout = 2 * time.Second

// Answer accepts the connection if err is nil, and sends more in the same write. Otherwise it refuses the connection
// because of err and closes it.
func (a *Accepted) Answer(err error, more ...byte) error {
	a.Conn.SetDeadline(time.Now().Add(answerTimeout))
	_, failed := a.Conn.Write(append(answer(err), more...))
	a.answered()
	if err != nil || failed != nil {
		a.Raw.Close()
		return errors.Join(err, failed)
	}
	return a.Conn.SetDeadline(time.Time{})
}

// Establish removes the connection from the half-open connections, which newer ones may evict. It returns an error if
// the connection was evicted before.
func (a *Accepted) Establish() error {
	if a.established {
		return nil
	}
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	if a.established = a.listener.half.Remove(a.Raw); !a.established {
		return errEvicted
	}
	return nil
}

// handshake performs the handshake of a new connection and passes it to its service.
func (a *Accepted) handshake() {
	l := a.listener
	defer func() {
		l.mu.Lock()
		l.half.Remove(a.Raw)
		l.mu.Unlock()
	}()
	a.Deadline = time.Now().Add(l.cfg.Handshake)
	a.Raw.SetDeadline(a.Deadline)
	err := a.readHello()
	if err == nil {
		err = a.establish()
	}
	switch {
	case err == nil:
	case err == errStranger:
		l.reset(a.Raw)
	case a.serviceClosed():
		a.Answer(errLeaving)
	case a.informed:
		l.refuse(a.acceptor, a.Raw.RemoteAddr(), err)
		a.answered()
		a.Raw.Close()
	default:
		l.refuse(a.acceptor, a.Raw.RemoteAddr(), err)
		a.Answer(err)
	}
}

// answered removes the connection from those that wait for an answer.
func (a *Accepted) answered() {
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	if a.acceptor != nil {
		delete(a.acceptor.waiting, a)
	}
}

// serviceClosed reports whether the connection's service was closed.
func (a *Accepted) serviceClosed() bool {
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	return a.acceptor != nil && a.acceptor.closed
}

// readHello reads the rest of the hello. It stops at the first byte that no hello has at that position.
func (a *Accepted) readHello() error {
	for a.read < HelloBytes {
		n, err := a.Raw.Read(a.bytes[a.read:])
		a.read += n
		switch {
		case !mayBe(a.bytes[:a.read]):
			return errStranger
		case a.read == HelloBytes:
		case err != nil && a.read < len(magic):
			return slowOr(Magic, "reading the hello", err)
		case err != nil:
			return slowOr(Damaged, "reading the hello", err)
		}
	}
	return a.decode()
}

// decode decodes the hello and finds its service.
func (a *Accepted) decode() error {
	if a.acceptor != nil {
		return nil
	}
	if err := a.Hello.Decode(a.bytes[:]); err != nil {
		return err
	}
	e := a.listener.to(a.Service)
	if e == nil {
		return Refuse(NoService, "no %v at %v: this process does not serve it or has stopped serving it", a.Service,
			a.listener.Addr())
	}
	a.acceptor = e
	switch {
	case e.Job != nil && a.Job != e.job:
		return Refuse(Job, "it belongs to another job; this one is %q", *e.ServiceConfig.Job)
	case a.Secure && e.TLS == nil:
		return Refuse(Proof, "it requests TLS, but this end has no TLS: this end has no secret")
	case !a.Secure && e.TLS != nil && !(e.Plain && e.Authenticate != nil):
		return Refuse(Proof, "it does not use TLS, but this end requires TLS: it has no secret")
	}
	return nil
}

// establish authenticates the dialer, starts TLS, and passes the connection to the service. An unauthenticated dialer
// gets as far as the hello or the proof, which is a hash: where a proof is required, TLS starts only after it.
func (a *Accepted) establish() error {
	e := a.acceptor
	a.listener.mu.Lock()
	if e.closed {
		a.listener.mu.Unlock()
		return errLeaving
	}
	e.waiting[a] = struct{}{}
	e.work.Add(1)
	a.listener.mu.Unlock()
	defer e.work.Done()
	if err := a.prove(); err != nil {
		return err
	}
	if a.Secure {
		if err := a.secure(); err != nil {
			return err
		}
	}
	return e.Handle(a)
}

// prove tells the dialer what follows the hello, and verifies the proof that it belongs to the job, if one is required.
func (a *Accepted) prove() error {
	next := byte(nextProof)
	if a.acceptor.Authenticate == nil {
		if next = nextTLS; !a.Secure {
			return nil
		}
	}
	if next == nextTLS {
		if _, err := a.Raw.Write([]byte{next}); err != nil {
			return slowOr(Proof, "requesting TLS", err)
		}
		return nil
	}
	if err := a.acceptor.Authenticate(&prefixed{a.Raw, []byte{next}}, false, a.bytes[:]); err != nil {
		a.informed = true // by the failed proof: the dialer reads no answer
		return slowOr(Proof, "authentication", err)
	}
	return a.Establish()
}

// prefixed is a connection that sends first before its first write, or before its first read.
type prefixed struct {
	net.Conn
	first []byte
}

func (c *prefixed) Write(b []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Write(b)
	}
	n, err := c.Conn.Write(append(c.first, b...))
	n = max(0, n-len(c.first))
	c.first = nil
	return n, err
}

func (c *prefixed) Read(b []byte) (int, error) {
	if len(c.first) > 0 {
		if _, err := c.Write(nil); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(b)
}

// secure starts TLS and verifies that the dialer repeats its hello inside.
func (a *Accepted) secure() error {
	below := a.Raw
	if a.acceptor.Below != nil {
		below = a.acceptor.Below(below)
	}
	t := tls.Server(below, a.acceptor.TLS)
	a.Conn = t
	var again [HelloBytes]byte
	err := t.HandshakeContext(a.listener.ctx)
	if err == nil {
		_, err = io.ReadFull(t, again[:])
	}
	if err != nil {
		return slowOr(Proof, "TLS", explained(err))
	}
	if !bytes.Equal(again[:], a.bytes[:]) {
		return Refuse(Proof, "its hello differs inside TLS: connections were exchanged on the path")
	}
	return nil
}

// slowOr returns a refusal with the reason, or with Slow if err is a timeout or the connection was closed here.
func slowOr(reason Reason, doing string, err error) error {
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() || errors.Is(err, net.ErrClosed) {
		reason = Slow
	}
	return Refuse(reason, "%s: %v", doing, err)
}

// explained adds the likely cause to an error of package tls.
func explained(err error) error {
	var head tls.RecordHeaderError
	var alert tls.AlertError
	op := (*net.OpError)(nil)
	switch {
	case errors.As(err, &head):
		return fmt.Errorf("the other end does not use TLS, but this end requires TLS: %w", err)
	case errors.As(err, &op) && op.Op == "remote error" || errors.As(err, &alert):
		return fmt.Errorf("the other end does not trust this end's certificate; "+
			"it may have another secret or belong to another job: %w", err)
	case op != nil && op.Op == "local error":
		return fmt.Errorf("the received data does not belong to this handshake: %w", err)
	}
	return err
}
