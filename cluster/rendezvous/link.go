package rendezvous

import (
	"net"
	"sync"
	"time"
)

// link is one connection of a client. Callers queue frames; a goroutine writes them, so that no caller blocks
// longer than its context allows on a server that does not read.
type link struct {
	raw  net.Conn
	conn idleConn

	mu     sync.Mutex
	queue  []func() []byte // frames; nil for a frame that was canceled
	ready  chan struct{}   // buffer of one
	closed bool
}

func newLink(conn net.Conn) *link {
	return &link{raw: conn, conn: idleConn{conn, silenceClient}, ready: make(chan struct{}, 1)}
}

// push queues a frame for writing.
func (l *link) push(frame func() []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, frame)
	l.wake()
}

func (l *link) wake() {
	select {
	case l.ready <- struct{}{}:
	default:
	}
}

// close closes the connection.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.raw.Close()
	l.wake()
}

// write writes queued frames, and pings, until the connection is closed or breaks.
func (l *link) write() {
	defer l.raw.Close()
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()
	ping := request{op: opPing}
	for {
		l.mu.Lock()
		queue, closed := l.queue, l.closed
		l.queue = nil
		l.mu.Unlock()
		if closed {
			return
		}
		for _, frame := range queue {
			if b := frame(); b != nil {
				if _, err := l.conn.Write(b); err != nil {
					return
				}
			}
		}
		select {
		case <-l.ready:
		case <-ticker.C:
			if _, err := l.conn.Write(ping.encode()); err != nil {
				return
			}
		}
	}
}
