package tcp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// target is where a connection goes.
type target struct {
	addr  string
	plain bool // without TLS: its process is known to be on this host
}

// dial makes a connection, greets, and waits for the answer until ctx ends. What can be temporary is tried again, for so
// long.
func (n *Node) dial(ctx context.Context, to target, h hello, patience time.Duration) (*arrival, error) {
	h.secure = n.cfg.TLS != nil && !to.plain
	dialer := listener.Dialer{Rules: n.rules(), Dial: n.cfg.Dial, Handshake: n.cfg.Handshake, Patient: true}
	pause := 5 * time.Millisecond
	since := time.Now()
	for {
		conn, err := dialer.DialContext(ctx, to.addr, h.greeting())
		switch {
		case err == nil:
			return newArrival(h, conn), nil
		case !listener.Temporary(err):
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
