package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// link is the control connection with another process. One goroutine reads; another writes while messages are queued:
// most links of a large job are idle.
type link struct {
	w    *world
	proc int
	a    *connection
	done sync.WaitGroup // the writer
	read chan struct{}  // closed when the reader has ended

	// Used by the reader only.
	open bool // the dialer's first message is msgOpen
	bye  bool // received msgBye

	mu      sync.Mutex
	queue   []byte // encoded messages to send
	writing bool   // the writer runs
	broken  error  // why no more messages are sent
	closed  bool
}

const (
	// answersMax bounds the queue, in bytes, above which answers are dropped.
	answersMax = 1 << 20
	// queueMax bounds the queue, in bytes. The connection ends if the other end does not read for so long.
	queueMax = 16 << 20
	// closeTimeout bounds how long a closing link waits for the other end to receive the queued messages.
	closeTimeout = 500 * time.Millisecond
	// readAhead is the size of the buffer of a control connection, for a few messages without text.
	readAhead = 256
)

// errQueue ends a connection whose other end does not read.
var errQueue = fmt.Errorf("it has not read the last %d MiB of messages", queueMax>>20)

func newLink(w *world, proc int, a *connection, dialed bool) *link {
	limitSilence(a.raw, w.node.cfg.KeepAlive)
	l := &link{w: w, proc: proc, a: a, read: make(chan struct{}), open: dialed}
	go l.readLoop() // close awaits it
	return l
}

// send queues a message. It drops answers while the queue is too long, since a peer determines their number; this
// process sends few other messages.
func (l *link) send(m *message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || m.kind == msgAnswer && len(l.queue) > answersMax {
		return
	}
	l.put(m)
}

// put queues a message, and starts the writer if it does not run. The caller holds mu.
func (l *link) put(m *message) {
	if l.broken != nil {
		return
	}
	if len(l.queue)+messageBytes+len(m.text) > queueMax {
		l.breaks(errQueue)
		return
	}
	l.queue = m.append(l.queue)
	if !l.writing {
		l.writing = true
		l.done.Go(l.write)
	}
}

// write writes the queued messages.
func (l *link) write() {
	for {
		l.mu.Lock()
		out, closed := l.queue, l.closed
		l.queue = nil
		l.writing = len(out) > 0
		l.mu.Unlock()
		if len(out) == 0 {
			return
		}
		if closed {
			l.a.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
		}
		if _, err := l.a.conn.Write(out); err != nil {
			l.mu.Lock()
			l.breaks(err)
			l.mu.Unlock()
			return
		}
	}
}

// breaks ends the connection, since no more messages can be sent. What the other end has sent, such as a msgBye, is
// still received where the system allows that; then readLoop reports the error. The caller holds mu.
func (l *link) breaks(err error) {
	l.broken = err
	l.queue = nil
	if c, ok := l.a.raw.(interface{ CloseRead() error }); ok {
		c.CloseRead() // fails if the connection has ended, which the reader notices by itself
	} else {
		l.a.raw.Close()
	}
}

// readLoop waits with a shallow stack, and so with little memory: most links of a large job are idle.
func (l *link) readLoop() {
	defer close(l.read)
	in := make([]byte, 0, readAhead)
	for {
		n, err := l.a.conn.Read(in[len(in):cap(in)])
		if in, err = l.received(in[:len(in)+n], err, l.handle); err != nil {
			l.ended(err)
			return
		}
	}
}

// handle handles a message other than msgBye.
func (l *link) handle(m *message) {
	if m.kind == msgOpen {
		l.w.opened(l)
	} else {
		l.w.receive(m, l.proc)
	}
}

// received passes the complete messages at the start of in to handle. It returns the rest, with room for the next
// message, and the error that ends the connection: err, that of an invalid message, or io.EOF after msgBye.
func (l *link) received(in []byte, err error, handle func(*message)) ([]byte, error) {
	rest := in
	for {
		var m message
		n, failed := m.split(rest)
		switch {
		case failed != nil:
			return nil, failed
		case n > len(rest) && err == io.EOF && len(rest) > 0:
			return nil, io.ErrUnexpectedEOF
		case n > len(rest) && err != nil:
			return nil, err
		case n > cap(in):
			return append(make([]byte, 0, n), rest...), nil
		case n > len(rest):
			return in[:copy(in, rest)], nil
		case m.kind == msgOpen:
			l.open = true
			handle(&m)
		case m.kind == msgBye:
			l.bye = true
			return nil, io.EOF
		case !l.open:
			return nil, fmt.Errorf("%w: kind %d before the first one, of kind %d", errMessage, m.kind, msgOpen)
		default:
			handle(&m)
		}
		rest = rest[n:]
	}
}

// ended handles the end of the connection.
func (l *link) ended(err error) {
	if errors.Is(err, errMessage) {
		l.w.node.acceptor.Refuse(l.a.raw.RemoteAddr(), &listener.Refusal{Reason: listener.Frame, Text: err.Error()})
	}
	l.mu.Lock()
	closed := l.closed
	if timeout := net.Error(nil); l.broken == errQueue || errors.As(l.broken, &timeout) && timeout.Timeout() {
		err = l.broken // the reader does not see why
	}
	l.mu.Unlock()
	l.a.raw.Close()
	if closed {
		return
	}
	l.w.ended(l, l.bye, lossReason(err))
}

// lossReason returns why a peer process is lost, from the error that ended its control connection. Only if the other
// end closed the connection, the process has certainly ended: a reset may come from a device on the path, such as a
// firewall, while the process still runs.
func lossReason(err error) error {
	switch timeout := net.Error(nil); {
	case err == io.EOF || errors.Is(err, net.ErrClosed):
		return errLost
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err,
		syscall.ENETUNREACH):
		return fmt.Errorf("its host cannot be reached: %w", err)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("its connection was reset: its process has ended, "+
			"or something between the hosts cut the connection: %w", err)
	}
	return fmt.Errorf("its connection broke: %w", err)
}

// close sends the queued messages and a msgBye, waits shortly for the end of the other side, and closes the connection.
func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.a.conn.SetWriteDeadline(time.Now().Add(closeTimeout)) // of a write that is under way too
	l.put(&message{kind: msgBye})
	l.mu.Unlock()
	l.done.Wait()
	timer := time.NewTimer(closeTimeout)
	defer timer.Stop()
	select {
	case <-l.read:
	case <-timer.C:
	}
	l.a.raw.Close()
	<-l.read
}

// split decodes the message at the start of b, whose text has at most transport.ReasonMax bytes. It returns the
// message's length. If b is shorter, the message is incomplete, and the length is that of its head if that is
// incomplete too.
func (m *message) split(b []byte) (length int, err error) {
	if len(b) < messageBytes {
		return messageBytes, nil
	}
	n, sum, err := m.decode((*[messageBytes]byte)(b))
	if err != nil || len(b) < messageBytes+n {
		return messageBytes + n, err
	}
	if n > 0 {
		m.text = bytes.Clone(b[messageBytes : messageBytes+n])
	}
	if got := crc32.Checksum(m.text, castagnoli); got != sum {
		return 0, fmt.Errorf("%w: its text has checksum %#x, but its head has %#x", errMessage, got, sum)
	}
	return messageBytes + n, nil
}
