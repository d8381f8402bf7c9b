package tcp

import (
	"bufio"
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

// link is the control connection with another process. One goroutine reads, another writes.
type link struct {
	w    *world
	proc int
	a    *connection
	done sync.WaitGroup // the writer
	read chan struct{}  // closed when the reader has ended

	mu     sync.Mutex
	queue  []byte        // encoded messages to send
	kick   chan struct{} // a token: queue has data, or the link closes
	closed bool
}

const (
	// answersMax bounds the queue, in bytes, above which answers are dropped.
	answersMax = 1 << 20
	// closeTimeout bounds how long a closing link waits for the other end to receive the queued messages.
	closeTimeout = 500 * time.Millisecond
)

func newLink(w *world, proc int, a *connection) *link {
	limitSilence(a.raw, w.node.cfg.KeepAlive)
	l := &link{w: w, proc: proc, a: a, read: make(chan struct{}), kick: make(chan struct{}, 1)}
	l.done.Go(l.writeLoop)
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
	l.queue = m.append(l.queue)
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

func (l *link) writeLoop() {
	var out []byte
	for range l.kick {
		l.mu.Lock()
		out, l.queue = l.queue, out[:0]
		closed := l.closed
		l.mu.Unlock()
		if closed {
			l.a.conn.SetWriteDeadline(time.Now().Add(closeTimeout))
		}
		if _, err := l.a.conn.Write(out); err != nil {
			l.a.raw.Close() // readLoop reports the error
			return
		}
		if closed {
			return
		}
	}
}

func (l *link) readLoop() {
	defer close(l.read)
	in := bufio.NewReaderSize(l.a.conn, 8<<10)
	var err error
	for err == nil {
		var m message
		switch err = readMessage(in, &m); {
		case err == nil && m.kind == msgBye:
			err = io.EOF
		case err == nil:
			l.w.receive(&m, l.proc)
		}
	}
	if errors.Is(err, errMessage) {
		l.w.node.acceptor.Refuse(l.a.raw.RemoteAddr(), &listener.Refusal{Reason: listener.Frame, Text: err.Error()})
	}
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	l.a.raw.Close()
	if closed {
		return
	}
	l.w.lose(l.proc, lossReason(err))
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
	l.queue = (&message{kind: msgBye}).append(l.queue)
	select {
	case l.kick <- struct{}{}:
	default:
	}
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

// readMessage reads one message. Its text has at most transport.ReasonMax bytes.
func readMessage(r io.Reader, m *message) error {
	var b [messageBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return err
	}
	n, sum, err := m.decode(&b)
	if err != nil {
		return err
	}
	if n > 0 {
		m.text = make([]byte, n)
		if _, err := io.ReadFull(r, m.text); err != nil {
			return fmt.Errorf("%w: reading its text: %w", errMessage, err)
		}
	}
	if got := crc32.Checksum(m.text, castagnoli); got != sum {
		return fmt.Errorf("%w: its text has checksum %#x, but its head has %#x", errMessage, got, sum)
	}
	return nil
}
