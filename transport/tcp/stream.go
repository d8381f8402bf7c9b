package tcp

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// errCanceled is the error of sending on a connection after a queued frame was canceled.
var errCanceled = errors.New("tcp: an earlier frame was not sent completely")

// moveBytes bounds the bytes that one system call moves, so that both directions advance in turn.
const moveBytes = 256 << 10

// stream is one data connection with a peer. Only the rank's goroutine uses it, except for close, the counters, and
// what the wire does itself.
type stream struct {
	w    wire
	from net.Addr
	// checks: the frames that this end sends have a checksum of their data.
	checks bool

	received atomic.Int64 // nanoseconds that the rank has waited for frames; only with a Meter

	sender
	receiver
}

func newStream(w wire, from net.Addr, checks bool) *stream {
	return &stream{w: w, from: from, checks: checks}
}

// close ends the connection and its goroutines.
func (s *stream) close() {
	s.w.close()
	s.w.join()
}

// sender is the sending half: a queue of frames.
type sender struct {
	progress atomic.Uint64 // number of bytes sent

	queue  [transport.PostsMax]outgoing // a ring: n frames, starting at first
	first  int
	n      int
	queued uint64 // number of frames queued
	sent   uint64 // number of frames sent
	outErr error  // of the connection, or errCanceled
}

type outgoing struct {
	head [headBytes]byte
	data []byte
	off  int // bytes sent, of head and data
}

// put queues a frame and returns its number on this connection: the value of sent once the frame was sent.
func (s *stream) put(h *head, data []byte) uint64 {
	if s.checks {
		h.checked, h.sum = true, crc32.Checksum(data, castagnoli)
	}
	f := &s.queue[(s.first+s.n)%len(s.queue)]
	f.data, f.off = data, 0
	h.encode(&f.head)
	s.n++
	s.queued++
	return s.queued
}

// push writes a piece of the first queued frame if the wire has room. It returns the connection's error.
func (s *stream) push() error {
	if s.n == 0 || s.outErr != nil {
		return s.outErr
	}
	f := &s.queue[s.first]
	err := s.pushPiece(f)
	if err == nil && f.off == headBytes+len(f.data) {
		if err = s.w.flush(); err == nil {
			f.data = nil
			s.first = (s.first + 1) % len(s.queue)
			s.n--
			s.sent++
		}
	}
	if err != nil && err != errAgain {
		s.outErr = err
	}
	return s.outErr
}

// sending reports whether frames are queued that the connection can send.
func (s *sender) sending() bool { return s.n > 0 && s.outErr == nil }

// pushPiece writes as much of the rest of a frame as one system call takes.
func (s *stream) pushPiece(f *outgoing) error {
	var head []byte
	data := f.data
	if f.off < headBytes {
		head = f.head[f.off:]
	} else {
		data = data[f.off-headBytes:]
	}
	data = data[:min(len(data), moveBytes)]
	if len(head)+len(data) == 0 {
		return nil
	}
	n, err := s.w.write(head, data)
	f.off += n
	s.progress.Add(uint64(n))
	return err
}

// cancel empties the queue, so that the data of its frames is no longer read. If there were any, the connection cannot
// send afterwards.
func (s *sender) cancel() {
	if s.n == 0 {
		return
	}
	for i := range s.queue {
		s.queue[i].data = nil
	}
	s.n = 0
	if s.outErr == nil {
		s.outErr = errCanceled
	}
}

// receiver is the receiving half, which only the rank's goroutine uses. Heads and small frames are read ahead into buf;
// the rest of a frame is read directly into the caller's memory.
type receiver struct {
	buf     [headBytes + smallBytes]byte
	lo, hi  int // the buffered data is buf[lo:hi]
	head    head
	hasHead bool   // head is the head of the next frame
	filled  int    // bytes of its data received
	sum     uint32 // of these bytes, if the frame is checked
	inErr   error
}

// next reads the head of the next frame, and reports whether it is complete.
func (s *stream) next() (bool, error) {
	if s.hasHead {
		return true, nil
	}
	for s.hi-s.lo < headBytes {
		if n, err := s.fill(); err != nil || n == 0 {
			return false, err
		}
	}
	if err := s.head.decode((*[headBytes]byte)(s.buf[s.lo:])); err != nil {
		s.inErr = err
		return false, err
	}
	s.lo += headBytes
	s.hasHead = true
	return true, nil
}

// fill reads available data into buf, and returns its length.
func (s *stream) fill() (int, error) {
	if s.inErr != nil {
		return 0, s.inErr
	}
	if s.lo > 0 {
		s.hi = copy(s.buf[:], s.buf[s.lo:s.hi])
		s.lo = 0
	}
	n, err := s.w.read(s.buf[s.hi:], nil)
	s.hi += n
	return n, s.inEnd(err)
}

// inEnd records the error that ends the receiving half.
func (s *stream) inEnd(err error) error {
	if err == nil || err == errAgain {
		return nil
	}
	if err == io.EOF && (s.hasHead || s.hi > s.lo) {
		err = io.ErrUnexpectedEOF
	}
	s.inErr = err
	return err
}

// ahead returns the memory for the head of the following frame, if one read may complete this frame. It empties buf.
func (s *stream) ahead(in []byte) []byte {
	s.lo, s.hi = 0, 0
	if len(in)-s.filled > moveBytes {
		return nil
	}
	return s.buf[:headBytes]
}

// take receives data of the current frame into in, whose length is that of the data, and reports whether in is full.
func (s *stream) take(in []byte) (bool, error) {
	if n := copy(in[s.filled:], s.buf[s.lo:s.hi]); n > 0 {
		s.lo += n
		s.add(in, n)
	}
	if rest := in[s.filled:]; len(rest) > 0 {
		if s.inErr != nil {
			return false, s.inErr
		}
		var err error
		if len(rest) < smallBytes {
			_, err = s.fill() // may also read what follows this frame
			n := copy(rest, s.buf[s.lo:s.hi])
			s.lo += n
			s.add(in, n)
		} else {
			var n int
			rest = rest[:min(len(rest), moveBytes)]
			n, err = s.w.read(rest, s.ahead(in))
			s.add(in, min(n, len(rest)))
			s.hi += n - min(n, len(rest))
			err = s.inEnd(err)
		}
		if s.filled < len(in) {
			return false, err
		}
	}
	if s.head.checked && s.sum != s.head.sum {
		s.inErr = fmt.Errorf("%w: the data of frame %d has checksum %#x, want %#x: memory or the network has changed it",
			errFrame, s.head.number, s.sum, s.head.sum)
		return false, s.inErr
	}
	s.hasHead, s.filled, s.sum = false, 0, 0
	return true, nil
}

// add records that the next n bytes of the current frame were received into in.
func (s *receiver) add(in []byte, n int) {
	if s.head.checked {
		s.sum = crc32.Update(s.sum, castagnoli, in[s.filled:s.filled+n])
	}
	s.filled += n
}
