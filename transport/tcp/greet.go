package tcp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

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
	stop := context.AfterFunc(n.ctx, func() { a.raw.Close() }) // Close waits for no stranger
	defer stop()
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
	return n.secure(a, b)
}

// secure begins TLS on a connection that was accepted, and hears the greeting again.
func (n *Node) secure(a *arrival, greeting []byte) error {
	a.shim = &shim{Conn: a.raw}
	a.shim.tls = tls.Server(a.shim, n.cfg.TLS)
	a.conn = a.shim.tls
	again := make([]byte, helloBytes)
	err := a.shim.tls.HandshakeContext(n.ctx)
	if err == nil {
		_, err = io.ReadFull(a.conn, again)
	}
	if err != nil {
		return n.slowOr(refusedProof, "TLS", explained(err))
	}
	if !bytes.Equal(again, greeting) {
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
		return fmt.Errorf("the other end does not trust this end's certificate, as when it has another secret or is of another job: %w", err)
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
