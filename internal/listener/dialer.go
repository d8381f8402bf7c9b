package listener

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

// Dialer dials a service.
type Dialer struct {
	Rules
	// Dial makes connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Handshake bounds the time of a connection until the greeting is heard and both have proven themselves. Default 10 seconds.
	Handshake time.Duration
	// Patient callers wait for the answer until their ctx ends, for the other end may be long in coming to what is asked for.
	// Others wait no longer than Handshake in all, and leave the connection that deadline.
	Patient bool
}

// Call makes a connection, greets, and waits for the answer. The connection is a *tls.Conn if the greeting says so. Of the errors some
// are [Temporary].
func (c *Dialer) DialContext(ctx context.Context, address string, g *Hello) (conn net.Conn, err error) {
	dial, handshake := c.Dial, c.Handshake
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	if handshake <= 0 {
		handshake = 10 * time.Second
	}
	short, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	raw, err := dial(short, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDial, err)
	}
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			raw.Close()
		}
	}()
	raw.SetDeadline(time.Now().Add(handshake))
	conn = raw
	b := g.Encode()
	if _, err := raw.Write(b); err != nil {
		return nil, err
	}
	if g.Secure || c.Authenticate != nil {
		if err := c.prove(raw, b); err != nil {
			return nil, err
		}
	}
	if g.Secure {
		if conn, err = c.secure(short, raw, address, b); err != nil {
			return nil, fmt.Errorf("TLS: %w", explained(err))
		}
	}
	if c.Patient {
		raw.SetDeadline(time.Time{})
	}
	if err := ReadAnswer(conn); err != nil {
		return nil, explained(err)
	}
	return conn, nil
}

// prove hears what has to follow the greeting, and gives the proof that is asked for.
func (c *Dialer) prove(raw net.Conn, greeting []byte) error {
	var next [1]byte
	if _, err := io.ReadFull(raw, next[:]); err != nil {
		return err
	}
	switch {
	case next[0] == nextProof && c.Authenticate != nil:
		if err := c.Authenticate(raw, true, greeting); err != nil {
			return fmt.Errorf("authentication: %w", err)
		}
		return nil
	case next[0] == nextTLS && c.Authenticate == nil:
		return nil
	case next[0] != nextTLS:
		if err := ReadAnswer(io.MultiReader(bytes.NewReader(next[:]), raw)); err != nil {
			return err
		}
	}
	return Refuse(Proof, "the other end asks for no proof, as this end does: it has no secret")
}

// secure begins TLS on a connection that this end has dialed.
func (c *Dialer) secure(ctx context.Context, raw net.Conn, address string, greeting []byte) (net.Conn, error) {
	cfg := c.TLS
	if cfg.ServerName == "" && !cfg.InsecureSkipVerify {
		cfg = cfg.Clone()
		cfg.ServerName, _, _ = net.SplitHostPort(address)
	}
	below := raw
	if c.Below != nil {
		below = c.Below(below)
	}
	t := tls.Client(below, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	_, err := t.Write(greeting) // so that TLS, too, knows whose this connection is
	return t, err
}

// errDial is that there is no connection at all.
var errDial = errors.New("no connection")

// Temporary reports whether a connection that could not be made may be made later: the other end is not there yet, or had too
// many at once.
func Temporary(err error) bool {
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return r.Reason == Slow || r.Reason == Crowded
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Op != "remote error" && op.Op != "local error" // of package tls
	}
	return errors.Is(err, errDial) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.ErrClosedPipe) || errors.Is(err, context.DeadlineExceeded)
}
