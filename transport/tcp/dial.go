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

// forever retries after temporary errors, until the context ends.
func forever(err error, _ time.Duration) bool { return listener.Temporary(err) }

// retries returns a function that decides whether to dial again, from the error and the time spent so far: as long as
// the other end accepts connections and does not answer, since a stopped process is not lost, and for the time of a
// handshake after other temporary errors, which begin again when such a process continues.
func (n *Node) retries() func(err error, spent time.Duration) bool {
	silent := time.Duration(0) // until then
	return func(err error, spent time.Duration) bool {
		if isSilent(err) {
			silent = spent
			return true
		}
		return listener.Temporary(err) && spent-silent < n.cfg.Handshake
	}
}

// dial opens a connection and performs the handshake. It waits for the answer until ctx ends. retry decides from the
// error and the time spent whether to try again.
func (n *Node) dial(ctx context.Context, to target, h hello, retry func(err error, spent time.Duration) bool) (
	*connection, error,
) {
	h.secure = n.cfg.TLS != nil && !to.plain
	dialer := listener.Dialer{Rules: n.rules(), Dial: n.cfg.Dial, Handshake: n.cfg.Handshake, Patient: true}
	pause := 5 * time.Millisecond
	since := time.Now()
	for {
		conn, err := dialer.DialContext(ctx, to.addr, h.message())
		switch {
		case err == nil:
			return newConnection(h, conn), nil
		case !retry(err, time.Since(since)) && listener.Temporary(err):
			return nil, fmt.Errorf("connecting to %s: gave up after %v: %w", to.addr,
				time.Since(since).Round(time.Millisecond), err)
		case !retry(err, time.Since(since)):
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, time.Second)
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to %s: %w", to.addr, errors.Join(context.Cause(ctx), err))
		}
	}
}
