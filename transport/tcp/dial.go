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
