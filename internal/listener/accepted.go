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

// Accepted is a connection that has greeted.
type Accepted struct {
	Hello
	Conn     net.Conn  // a *tls.Conn if there is TLS
	Raw      net.Conn  // the connection itself
	Deadline time.Time // until when the one who dials waits, at least

	listener *Listener
	acceptor *Acceptor // nil: not known yet
	bytes    [HelloBytes]byte
	read     int  // of them
	proven   bool // it is not counted as half open any more
	told     bool // it knows already that it is refused
}

// answerTimeout bounds the time to write an answer of a hundred bytes to a fresh connection.
const answerTimeout = 2 * time.Second

// Answer accepts the connection, and says more to it in the same breath, or refuses it for err and closes it.
func (a *Accepted) Answer(err error, more ...byte) error {
	a.Conn.SetDeadline(time.Now().Add(answerTimeout))
	_, failed := a.Conn.Write(append(answer(err), more...))
	a.leave()
	if err != nil || failed != nil {
		a.Raw.Close()
		return errors.Join(err, failed)
	}
	return a.Conn.SetDeadline(time.Time{})
}

// Enter takes the connection off the list of those that newer ones push out. It returns an error if that has happened.
func (a *Accepted) Enter() error {
	if a.proven {
		return nil
	}
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	if a.proven = a.listener.half.remove(a.Raw); !a.proven {
		return errPushedOut
	}
	return nil
}

// greet takes a new connection as far as it comes, and hands it to its service.
func (a *Accepted) greet() {
	l := a.listener
	defer func() {
		l.mu.Lock()
		l.half.remove(a.Raw)
		l.mu.Unlock()
	}()
	a.Deadline = time.Now().Add(l.cfg.Handshake)
	a.Raw.SetDeadline(a.Deadline)
	err := a.readHello()
	if err == nil {
		err = a.enter()
	}
	switch {
	case err == nil:
	case err == errStranger:
		l.sendAway(a.Raw)
	case a.over():
		a.Answer(errLeaving)
	case a.told:
		l.refuse(a.acceptor, a.Raw.RemoteAddr(), err)
		a.leave()
		a.Raw.Close()
	default:
		l.refuse(a.acceptor, a.Raw.RemoteAddr(), err)
		a.Answer(err)
	}
}

// leave takes the connection off the list of those that have no answer.
func (a *Accepted) leave() {
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	if a.acceptor != nil {
		delete(a.acceptor.waiting, a)
	}
}

// over reports whether the service that the connection is for has ended.
func (a *Accepted) over() bool {
	a.listener.mu.Lock()
	defer a.listener.mu.Unlock()
	return a.acceptor != nil && a.acceptor.closed
}

// readHello reads what is missing of the greeting. Who is known for a stranger by less may not send more.
func (a *Accepted) readHello() error {
	for a.read < HelloBytes {
		n, err := a.Raw.Read(a.bytes[a.read:])
		a.read += n
		switch {
		case !mayBe(a.bytes[:a.read]):
			return errStranger
		case a.read == HelloBytes:
		case err != nil && a.read < len(magic):
			return slowOr(Magic, "reading the greeting", err)
		case err != nil:
			return slowOr(Damaged, "reading the greeting", err)
		}
	}
	return a.decode()
}

// decode finds out whom the greeting is for.
func (a *Accepted) decode() error {
	if a.acceptor != nil {
		return nil
	}
	if err := a.Hello.Decode(a.bytes[:]); err != nil {
		return err
	}
	e := a.listener.to(a.Service)
	if e == nil {
		return Refuse(NoService, "no %v is at %v: this process does not serve it, or not any more", a.Service, a.listener.Addr())
	}
	a.acceptor = e
	switch {
	case e.Job != nil && a.Job != e.job:
		return Refuse(Job, "it belongs to another job than %q", *e.ServiceConfig.Job)
	case a.Secure && e.TLS == nil:
		return Refuse(Proof, "it wants TLS, which this end does not have: this end has no secret")
	case !a.Secure && e.TLS != nil && !(e.Plain && e.Authenticate != nil):
		return Refuse(Proof, "it does not speak TLS, as this end does: it has no secret")
	}
	return nil
}

// enter has a connection that has greeted prove itself, begins TLS, and hands it over. Strangers come no further than to the greeting
// or a proof by a hash: the work of TLS is for those only who have given one, if there is one to give.
func (a *Accepted) enter() error {
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

// prove says what has to follow the greeting, and asks for the proof that this is from one of the job, if there is any.
func (a *Accepted) prove() error {
	next := byte(nextProof)
	if a.acceptor.Authenticate == nil {
		if next = nextTLS; !a.Secure {
			return nil
		}
	}
	if next == nextTLS {
		if _, err := a.Raw.Write([]byte{next}); err != nil {
			return slowOr(Proof, "asking for TLS", err)
		}
		return nil
	}
	if err := a.acceptor.Authenticate(&ahead{a.Raw, []byte{next}}, false, a.bytes[:]); err != nil {
		a.told = true // by the proof itself: it reads no answer
		return slowOr(Proof, "authentication", err)
	}
	return a.Enter()
}

// ahead is a connection on which something goes ahead of what is said first, or before something is awaited.
type ahead struct {
	net.Conn
	first []byte
}

func (c *ahead) Write(b []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Write(b)
	}
	n, err := c.Conn.Write(append(c.first, b...))
	n = max(0, n-len(c.first))
	c.first = nil
	return n, err
}

func (c *ahead) Read(b []byte) (int, error) {
	if len(c.first) > 0 {
		if _, err := c.Write(nil); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(b)
}

// secure begins TLS, and hears the greeting again.
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
		return Refuse(Proof, "its greeting is another one inside of TLS: somebody has exchanged connections")
	}
	return nil
}

// slowOr returns the refusal of a connection for a failure, which may be that it was too slow.
func slowOr(reason Reason, doing string, err error) error {
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() || errors.Is(err, net.ErrClosed) {
		reason = Slow
	}
	return Refuse(reason, "%s: %v", doing, err)
}

// explained adds to an error of package tls what it does not say.
func explained(err error) error {
	var head tls.RecordHeaderError
	var alert tls.AlertError
	op := (*net.OpError)(nil)
	switch {
	case errors.As(err, &head):
		return fmt.Errorf("the other end does not speak TLS, as this end does: %w", err)
	case errors.As(err, &op) && op.Op == "remote error" || errors.As(err, &alert):
		return fmt.Errorf("the other end does not trust this end's certificate, as when it has another secret or is of another job: %w", err)
	case op != nil && op.Op == "local error":
		return fmt.Errorf("what came does not belong to this handshake: %w", err)
	}
	return err
}
