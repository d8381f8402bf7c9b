package tcp

import (
	"crypto/tls"
	"net"
	"sync"
)

// wire moves bytes over a connection without blocking. One goroutine at a time reads, one writes.
type wire interface {
	// read fills a, then b as far as it can at once: it returns how much came, at least one byte, or errAgain; io.EOF at the end.
	read(a, b []byte) (int, error)
	// held reports whether read may have something that came before awaitRead began.
	held() bool
	// write takes some of a, then of b, at least one byte, or returns errAgain. Both may be changed afterwards.
	write(a, b []byte) (int, error)
	// flush moves on what write took but the kernel has not; errAgain: there is more.
	flush() error
	// busy reports whether a goroutine is writing what write took.
	busy() bool
	// awaitRead blocks until read may have something, or the wire is closed.
	awaitRead()
	// awaitWrite calls more, and again whenever the wire may take more, until it returns true or the wire is closed.
	awaitWrite(more func() bool)
	// close ends the connection and all waits. It does not wait for goroutines.
	close()
	// join waits for the goroutines of a closed wire.
	join()
}

// again is the error of what would block. Package tls takes it for a timeout, after which one may go on.
type again struct{}

func (again) Error() string   { return "tcp: nothing can be moved now" }
func (again) Timeout() bool   { return true }
func (again) Temporary() bool { return true }

var errAgain error = again{}

// newWire returns the wire over a connection whose handshakes are done: straight to the socket where that can be done, or
// by goroutines; through TLS if s is not nil.
func newWire(c net.Conn, s *shim) wire {
	w := newSocket(c)
	if w == nil {
		w = newPump(c)
	}
	if s == nil {
		return w
	}
	s.base = w
	return &tlsWire{base: w, conn: s.tls, shim: s}
}

// shim is the connection below a tls.Conn. During the handshake it passes everything on; then it goes over to the wire.
type shim struct {
	net.Conn
	tls  *tls.Conn
	base wire // nil during the handshake

	ahead  []byte // ciphertext that was read and not yet decrypted, from lo to hi
	lo, hi int

	mu      sync.Mutex
	pending []byte // ciphertext that the wire has not taken, from sent on
	sent    int
}

// aheadBytes is how much ciphertext is read at once. Package tls asks for a record at a time.
const aheadBytes = 128 << 10

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

// Write never blocks: what it is given is kept. tlsWire gives little at a time.
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
	more  bool // the last read did not come to an end
}

// recordBytes is how much is encrypted at a time: some records, which go out in one system call.
const recordBytes = 128 << 10

// read decrypts records until p is full. There is nothing to be gained by reading into more: they lie decrypted or in memory.
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
			break // it comes again with the next read
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

func (w *tlsWire) busy() bool                  { return w.base.busy() }
func (w *tlsWire) awaitRead()                  { w.base.awaitRead() }
func (w *tlsWire) awaitWrite(more func() bool) { w.base.awaitWrite(more) }
func (w *tlsWire) close()                      { w.base.close() }
func (w *tlsWire) join()                       { w.base.join() }
