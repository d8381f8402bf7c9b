package tcp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// target is the address of a process.
type target struct {
	addr  string
	plain bool // without TLS: its process is known to be on this host
}

// dial opens a connection and performs the handshake. It waits for the answer until ctx ends. It retries after
// temporary errors, for at most patience if that is not 0.
func (n *Node) dial(ctx context.Context, to target, h hello, patience time.Duration) (*connection, error) {
	h.secure = n.cfg.TLS != nil && !to.plain
	dialer := listener.Dialer{Rules: n.rules(), Dial: n.cfg.Dial, Handshake: n.cfg.Handshake, Patient: true}
	pause := 5 * time.Millisecond
	since := time.Now()
	for {
		conn, err := dialer.DialContext(ctx, to.addr, h.message())
		switch {
		case err == nil:
			return newConnection(h, conn), nil
		case !listener.Temporary(err):
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, err)
		case patience > 0 && time.Since(since) > patience:
			return nil, fmt.Errorf("connecting to %s: gave up after %v: %w", to.addr, patience, err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, errors.Join(context.Cause(ctx), err))
		}
	}
}
