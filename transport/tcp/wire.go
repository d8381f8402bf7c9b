package tcp

import (
	"crypto/tls"
	"net"
	"sync"
)

// wire moves bytes over a connection without blocking. One goroutine at a time reads, one writes.
type wire interface {
	// read reads available data into a, then b, and returns its length, which is at least 1. It returns errAgain if
	// there is none, and io.EOF at the end.
	read(a, b []byte) (int, error)
	// held reports whether data may be buffered of which watch does not report.
	held() bool
	// write takes at least one byte of a, then b, or returns errAgain. The caller may change both afterwards.
	write(a, b []byte) (int, error)
	// flush passes data that write took to the kernel; errAgain: some is left.
	flush() error
	// busy reports whether a goroutine is writing data that write took.
	busy() bool
	// watch makes the wire notify its endpoint once, now or later, when data may be available (in), or when it may have
	// room (out).
	watch(in, out bool)
	// socket returns the socket, for waits by system calls; nil if there is none.
	socket() *socket
	// close closes the connection and ends all waits. It does not wait for goroutines.
	close()
	// join waits for the goroutines of a closed wire.
	join()
}

// again is the error of an operation that would block. Package tls treats it as a timeout, after which the connection
// stays usable.
type again struct{}

func (again) Error() string   { return "tcp: operation would block" }
func (again) Timeout() bool   { return true }
func (again) Temporary() bool { return true }

var errAgain error = again{}

// smallBytes is the largest size of data that is received together with its head.
const smallBytes = 16 << 10

// newWire returns the wire over a connection after its handshake: directly on the socket where possible, else with
// goroutines; through TLS if s is not nil.
func newWire(c net.Conn, s *shim, p *poller) wire {
	w := newSocket(c, p)
	if w == nil {
		w = newPump(c, p.notify)
	}
	if s == nil {
		return w
	}
	s.base = w
	return &tlsWire{base: w, conn: s.tls, shim: s}
}

// shim is the connection below a tls.Conn. During the handshake it uses the connection; afterwards it uses the wire.
type shim struct {
	net.Conn
	tls  *tls.Conn
	base wire // nil during the handshake

	ahead  []byte // ciphertext; ahead[lo:hi] was read and not decrypted yet
	lo, hi int

	mu      sync.Mutex
	pending []byte // ciphertext; the wire has taken the first sent bytes
	sent    int
}

// aheadBytes is how much ciphertext is read at once. Package tls reads one record at a time. This and [recordBytes] are
// small, because package tls copies from and to these buffers: 128 KiB each takes a quarter longer at 10 Gbit/s.
const aheadBytes = 32 << 10

func (s *shim) Read(p []byte) (int, error) {
	if s.base == nil {
		return s.Conn.Read(p)
	}
	if s.lo == s.hi {
		if s.ahead == nil {
			s.ahead = make([]byte, aheadBytes)
		}
		n, err := s.base.read(s.ahead, nil)
		if s.lo, s.hi = 0, n; n == 0 {
			return 0, err
		}
	}
	n := copy(p, s.ahead[s.lo:s.hi])
	s.lo += n
	return n, nil
}

// Write never blocks: it appends p to pending. tlsWire bounds the length of p.
func (s *shim) Write(p []byte) (int, error) {
	if s.base == nil {
		return s.Conn.Write(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = append(s.pending, p...)
	return len(p), nil
}

// flush writes what is pending.
func (s *shim) flush() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.sent < len(s.pending) {
		n, err := s.base.write(s.pending[s.sent:], nil)
		s.sent += n
		if err != nil {
			return err
		}
	}
	s.pending, s.sent = s.pending[:0], 0
	return nil
}

// tlsWire is a wire through TLS: frames in records.
type tlsWire struct {
	base  wire
	conn  *tls.Conn
	shim  *shim
	plain []byte
	more  bool // the last read may have left decrypted data
}

// recordBytes is how much is encrypted at a time: several records, which one system call sends.
const recordBytes = 32 << 10

// read decrypts records until p is full. It ignores the second slice: following records are in memory already.
func (w *tlsWire) read(p, _ []byte) (int, error) {
	total := 0
	for total < len(p) {
		n, err := w.conn.Read(p[total:])
		total += n
		if w.more = err == nil; err != nil && total == 0 {
			if _, ok := err.(again); ok {
				err = errAgain
			}
			return 0, err
		}
		if err != nil {
			break // the next read returns it again
		}
	}
	return total, nil
}

func (w *tlsWire) held() bool { return w.more }

func (w *tlsWire) write(a, b []byte) (int, error) {
	if err := w.shim.flush(); err != nil {
		return 0, err
	}
	chunk := b
	if len(a) > 0 {
		if len(b) > smallBytes {
			chunk = a
		} else {
			w.plain = append(append(w.plain[:0], a...), b...)
			chunk = w.plain
		}
	}
	chunk = chunk[:min(len(chunk), recordBytes)]
	n, err := w.conn.Write(chunk)
	if err != nil {
		return n, err
	}
	if err := w.shim.flush(); err != nil && err != errAgain {
		return n, err
	}
	return n, nil
}

func (w *tlsWire) flush() error {
	if err := w.shim.flush(); err != nil {
		return err
	}
	return w.base.flush()
}

func (w *tlsWire) busy() bool         { return w.base.busy() }
func (w *tlsWire) watch(in, out bool) { w.base.watch(in, out) }
func (w *tlsWire) socket() *socket    { return w.base.socket() }
func (w *tlsWire) close()             { w.base.close() }
func (w *tlsWire) join()              { w.base.join() }
