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

// Dialer connects to a service and performs the handshake. Its zero value works. It may be used concurrently.
type Dialer struct {
	Rules
	// Dial opens TCP connections. Default: a [net.Dialer]'s.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Handshake bounds the time from dialing until both ends are authenticated. Default 10 seconds.
	Handshake time.Duration
	// Patient waits for the answer until ctx ends, because the other end may start the requested service late.
	// Otherwise Handshake bounds the wait for the answer too, and the connection keeps that deadline.
	Patient bool
}

// DialContext opens a connection, sends the hello, and waits for the answer. The connection is a *tls.Conn if the hello
// requests TLS. The error is a [*Refusal] if the other end refused; [Temporary] reports whether a retry may succeed.
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

// prove reads what follows the hello, and gives the proof that the other end requires.
func (c *Dialer) prove(raw net.Conn, hello []byte) error {
	var next [1]byte
	if _, err := io.ReadFull(raw, next[:]); err != nil {
		return err
	}
	switch {
	case next[0] == nextProof && c.Authenticate != nil:
		if err := c.Authenticate(raw, true, hello); err != nil {
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
	return Refuse(Proof, "the other end requests no proof, but this end requires one: it has no secret")
}

// secure starts TLS on a connection that this end dialed.
func (c *Dialer) secure(ctx context.Context, raw net.Conn, address string, hello []byte) (net.Conn, error) {
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
	_, err := t.Write(hello) // binds the hello to this TLS connection
	return t, err
}

// errDial marks errors of opening the TCP connection.
var errDial = errors.New("no connection")

// Temporary reports whether dialing may succeed later: the other end does not listen yet, or had too many connections.
func Temporary(err error) bool {
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return r.Reason == Slow || r.Reason == Crowded
	}
	if op := (*net.OpError)(nil); errors.As(err, &op) {
		return op.Op != "remote error" && op.Op != "local error" // of package tls
	}
	return errors.Is(err, errDial) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, net.ErrClosed) ||
		errors.Is(err, io.ErrClosedPipe) || errors.Is(err, context.DeadlineExceeded)
}
