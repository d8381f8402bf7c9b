package tcp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

// opening is a link that is not usable yet. A link with a process beyond the neighbours is opened when data or a query
// needs it, by either end. If both dial, the connection of the higher process counts: the other end is refused, and
// waits for it. An accepted link is usable after the first message of the dialer, since a dialer that closes its group
// meanwhile gives up its connection without a msgBye.
type opening struct {
	queue    []*message // to send when it is usable
	needed   bool       // not only for queries
	dialing  bool
	accepted *link              // without a message yet
	cancel   context.CancelFunc // of the dial
}

// post sends a message to a process: at once, or when their link is open. It opens the link if there is none. A nil
// message only opens it.
func (w *world) post(proc int, m *message) {
	if proc == w.self {
		if m != nil {
			w.receive(m, proc)
		}
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.links[proc]; l != nil {
		if m != nil {
			l.send(m)
		}
		return
	}
	if w.closed || w.gone[proc] != nil {
		return
	}
	o := w.opening[proc]
	if o == nil {
		o = &opening{}
		w.opening[proc] = o
	}
	if m != nil {
		o.queue = append(o.queue, m)
	}
	o.needed = o.needed || m == nil || m.kind != msgAsk
	w.dialLink(proc, o)
}

// dialLink dials a process, unless it is dialed or has dialed. The caller holds mu.
func (w *world) dialLink(proc int, o *opening) {
	if o.dialing || o.accepted != nil || w.graph.Linked(proc, w.self) {
		return
	}
	var ctx context.Context
	ctx, o.cancel = context.WithCancel(w.ctx)
	o.dialing = true
	w.work.Go(func() {
		defer o.cancel()
		a, err := w.node.dial(ctx, w.target(proc), w.hello(proc), w.redials())
		if err == nil {
			err = w.connected(a, proc)
		}
		if hasLeft(err) {
			select {
			case <-time.After(brokenGrace): // the news of a failure would arrive meanwhile
			case <-ctx.Done():
			}
		}
		if err != nil {
			w.notOpened(proc, o, err)
		}
	})
}

// redials returns a function that decides whether a process is dialed again, from the error and the time spent so far.
// An attempt at a process that is suspended may take any time, before it is refused or nothing listens any more.
func (w *world) redials() func(err error, spent time.Duration) bool {
	duplicate, absent := time.Duration(-1), time.Duration(-1) // time of the first such error
	retry := w.node.retries()
	since := func(first *time.Duration, spent time.Duration) time.Duration {
		if *first < 0 {
			*first = spent
		}
		return spent - *first
	}
	return func(err error, spent time.Duration) bool {
		switch {
		case isRefused(err, listener.Duplicate):
			return since(&duplicate, spent) < w.node.cfg.Handshake
		case noListener(err):
			return since(&absent, spent) < brokenGrace // the news of a loss would arrive meanwhile
		}
		return retry(err, spent)
	}
}

// notOpened handles the end of the attempts to dial a process.
func (w *world) notOpened(proc int, o *opening, err error) {
	w.mu.Lock()
	o.dialing = false
	over := w.closed || w.links[proc] != nil || w.gone[proc] != nil || o.accepted != nil
	if w.links[proc] == nil && o.accepted == nil {
		delete(w.opening, proc)
	}
	w.mu.Unlock()
	switch {
	case over:
	case hasLeft(err):
		w.leave(proc, transport.ErrClosed)
	case noListener(err):
		w.leave(proc, &ended{err})
	case o.needed:
		w.leave(proc, fmt.Errorf("no connection: %w", err))
	}
}

// connected uses a dialed connection as the link with a process.
func (w *world) connected(a *connection, proc int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.links[proc] != nil {
		a.raw.Close()
		return listener.Refuse(listener.Duplicate, "ranks %v are connected already", w.procs[proc].ranks)
	}
	l := newLink(w, proc, a, true)
	l.send(&message{kind: msgOpen})
	w.use(l)
	return nil
}

// use makes a link usable. The caller holds mu.
func (w *world) use(l *link) {
	w.links[l.proc] = l
	if o := w.opening[l.proc]; o != nil {
		delete(w.opening, l.proc)
		if o.cancel != nil {
			o.cancel()
		}
		for _, m := range o.queue {
			l.send(m)
		}
	}
	if j := w.joining; j != nil && w.graph.Linked(w.self, l.proc) {
		j.linked <- struct{}{} // has room for each neighbour once
	}
}

// acceptLink answers a control connection of another process, and uses it after its first message.
func (w *world) acceptLink(a *connection, proc int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	o := w.opening[proc]
	switch {
	case w.closed:
		return listener.Refuse(listener.Closed, "the group is closed")
	case w.links[proc] != nil || o != nil && o.accepted != nil:
		return listener.Refuse(listener.Duplicate, "ranks %v are connected already", w.procs[proc].ranks)
	case o != nil && o.dialing && w.self > proc:
		return listener.Refuse(listener.Duplicate, "ranks %v are being dialed", w.procs[proc].ranks)
	}
	if err := a.answer(nil); err != nil {
		return err
	}
	if o == nil {
		o = &opening{}
		w.opening[proc] = o
	}
	o.accepted = newLink(w, proc, a, false)
	return nil
}

// opened handles the first message on an accepted link.
func (w *world) opened(l *link) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if o := w.opening[l.proc]; o != nil && o.accepted == l && !w.closed {
		w.use(l)
	}
}

// ended handles the end of a link, after a msgBye or because of err.
func (w *world) ended(l *link, bye bool, err error) {
	w.mu.Lock()
	usable := w.links[l.proc] == l
	if o := w.opening[l.proc]; o != nil && o.accepted == l {
		o.accepted = nil
		if (o.needed || len(o.queue) > 0) && !w.closed && w.gone[l.proc] == nil {
			w.dialLink(l.proc, o)
		} else if !o.dialing {
			delete(w.opening, l.proc)
		}
	}
	w.mu.Unlock()
	switch {
	case !usable:
	case bye: // it did not announce the endpoints that it had closed before this link was open
		w.leave(l.proc, transport.ErrClosed)
	default:
		w.lose(l.proc, err)
	}
}

// ended is the error of a process where nothing listens any more. All processes had joined, and a loss would be
// reported: it has closed all its endpoints and has exited.
type ended struct{ err error }

func (e *ended) Error() string { return "its process has exited: " + e.err.Error() }

func (e *ended) Is(target error) bool { return target == transport.ErrClosed }

func (e *ended) Unwrap() error { return e.err }

// noListener reports whether dialing has failed because nothing listens at the address.
func noListener(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) // of unix sockets
}

// isSilent reports whether dialing has failed because the other end accepts connections, but does not answer.
func isSilent(err error) bool {
	timeout, op := net.Error(nil), (*net.OpError)(nil)
	return errors.As(err, &timeout) && timeout.Timeout() && !(errors.As(err, &op) && op.Op == "dial")
}

// hasLeft reports whether a process refused a connection because it has closed the group, or its last one.
func hasLeft(err error) bool {
	return isRefused(err, listener.Closed) || isRefused(err, listener.Epoch) || isRefused(err, listener.NoService)
}

func isRefused(err error, reason listener.Reason) bool {
	r := (*listener.Refusal)(nil)
	return errors.As(err, &r) && r.Reason == reason
}
