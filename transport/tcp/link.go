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

// link is the control connection with another process. It has a goroutine that reads and one that writes.
type link struct {
	w    *world
	proc int
	a    *arrival
	done sync.WaitGroup // the writer
	read chan struct{}  // closed when the reader has ended

	mu     sync.Mutex
	queue  []byte        // what is to be sent
	kick   chan struct{} // there is something in queue, or the link closes
	closed bool
}

const (
	// answersMax bounds what waits to be sent because the peer asked for it.
	answersMax = 1 << 20
	// partingTimeout bounds how long a link that closes waits for the other end to take what was sent.
	partingTimeout = 500 * time.Millisecond
)

func newLink(w *world, proc int, a *arrival) *link {
	limitSilence(a.raw, w.node.cfg.KeepAlive)
	l := &link{w: w, proc: proc, a: a, read: make(chan struct{}), kick: make(chan struct{}, 1)}
	l.done.Go(l.writeLoop)
	go l.readLoop() // close awaits it
	return l
}

// send queues a message. What this process has to say of itself is little; answers are left out when too many wait.
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
			l.a.conn.SetWriteDeadline(time.Now().Add(partingTimeout))
		}
		if _, err := l.a.conn.Write(out); err != nil {
			l.a.raw.Close() // the reader says why
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
			l.w.hear(&m, l.proc)
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
	l.w.lose(l.proc, whyLost(err))
}

// whyLost says what the end of a process's first connection tells of the process. That it is gone is known only where
// its side has closed the connection: a reset may come from something between, as a firewall, while the process
// lives.
func whyLost(err error) error {
	switch timeout := net.Error(nil); {
	case err == io.EOF || errors.Is(err, net.ErrClosed):
		return errLost
	case errors.As(err, &timeout) && timeout.Timeout(), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return fmt.Errorf("its host cannot be reached: %w", err)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("its connection was reset: its process has ended, "+
			"or something between the hosts cut the connection: %w", err)
	}
	return fmt.Errorf("its connection broke: %w", err)
}

// close sends what is queued and ends the connection, in good order if the other end takes part in it.
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
	timer := time.NewTimer(partingTimeout)
	defer timer.Stop()
	select {
	case <-l.read:
	case <-timer.C:
	}
	l.a.raw.Close()
	<-l.read
}

// readMessage reads one message, whose text is at most transport.ReasonMax long.
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
			return fmt.Errorf("%w: its text is cut short: %w", errMessage, err)
		}
	}
	if got := crc32.Checksum(m.text, castagnoli); got != sum {
		return fmt.Errorf("%w: its text has checksum %#x, its head says %#x", errMessage, got, sum)
	}
	return nil
}
