package tcp

import (
	"net"
	"sync"
)

// pumpBytes is the size of the buffer of each direction of a pump.
const pumpBytes = 256 << 10

// pump is a wire over any connection: two goroutines move the bytes through buffers. It is used for connections that
// are not sockets, and on systems without non-blocking access to sockets.
type pump struct {
	conn   net.Conn
	notify func() // called whenever data has arrived or was written
	done   sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond // broadcast when a goroutine can continue; its locker is mu
	in, out ring
	inErr   error
	outErr  error
	writing int // bytes that the writer has taken from out and not written yet
	closed  bool
}

func newPump(c net.Conn, notify func()) wire {
	p := &pump{conn: c, notify: notify}
	p.changed.L = &p.mu
	p.in.b, p.out.b = make([]byte, pumpBytes), make([]byte, pumpBytes)
	p.done.Go(p.reader)
	p.done.Go(p.writer)
	return p
}

func (p *pump) reader() {
	b := make([]byte, pumpBytes/4)
	for {
		n, err := p.conn.Read(b)
		p.mu.Lock()
		for rest := b[:n]; len(rest) > 0 && !p.closed; {
			k := p.in.put(rest)
			rest = rest[k:]
			p.mu.Unlock()
			p.notify()
			p.mu.Lock()
			for len(rest) > 0 && p.in.n == len(p.in.b) && !p.closed {
				p.changed.Wait()
			}
		}
		p.inErr = err
		end := p.closed || err != nil
		p.mu.Unlock()
		if end {
			p.notify()
			return
		}
	}
}

func (p *pump) writer() {
	b := make([]byte, pumpBytes/4)
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		for p.out.n == 0 && !p.closed {
			p.changed.Wait()
		}
		if p.closed {
			return
		}
		p.writing = p.out.get(b)
		p.mu.Unlock()
		_, err := p.conn.Write(b[:p.writing])
		p.mu.Lock()
		p.writing = 0
		p.outErr = err
		p.mu.Unlock()
		p.notify()
		p.mu.Lock()
		if err != nil {
			return
		}
	}
}

func (p *pump) read(a, b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.in.get(a)
	if n == len(a) {
		n += p.in.get(b)
	}
	switch {
	case n > 0:
		p.changed.Broadcast()
		return n, nil
	case p.inErr != nil:
		return 0, p.inErr
	case p.closed:
		return 0, net.ErrClosed
	}
	return 0, errAgain
}

func (p *pump) held() bool { return false } // notify was called for it

func (p *pump) watch(in, out bool) {} // it always notifies

func (p *pump) socket() *socket { return nil }

func (p *pump) write(a, b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.outErr != nil:
		return 0, p.outErr
	case p.closed:
		return 0, net.ErrClosed
	}
	n := p.out.put(a)
	if n == len(a) {
		n += p.out.put(b)
	}
	if n == 0 {
		return 0, errAgain
	}
	p.changed.Broadcast()
	return n, nil
}

func (p *pump) flush() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.outErr != nil:
		return p.outErr
	case p.out.n > 0 || p.writing > 0:
		return errAgain
	}
	return nil
}

func (p *pump) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.n+p.writing > 0 && p.outErr == nil && !p.closed
}

func (p *pump) close() {
	p.mu.Lock()
	p.closed = true
	p.changed.Broadcast()
	p.mu.Unlock()
	p.conn.Close()
}

func (p *pump) join() { p.done.Wait() }

// ring is a circular buffer. It holds n bytes, starting at index at.
type ring struct {
	b     []byte
	at, n int
}

// put copies as much of p as fits into the buffer, and returns its length.
func (r *ring) put(p []byte) int {
	total := 0
	for len(p) > 0 && r.n < len(r.b) {
		end := (r.at + r.n) % len(r.b)
		k := copy(r.b[end:min(len(r.b), end+len(r.b)-r.n)], p)
		p = p[k:]
		r.n += k
		total += k
	}
	return total
}

// get moves buffered bytes to p, and returns their number.
func (r *ring) get(p []byte) int {
	total := 0
	for len(p) > 0 && r.n > 0 {
		k := copy(p, r.b[r.at:min(len(r.b), r.at+r.n)])
		p = p[k:]
		r.at = (r.at + k) % len(r.b)
		r.n -= k
		total += k
	}
	return total
}
