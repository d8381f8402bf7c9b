package tcp

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// errTakenBack is what a connection sends after a frame was taken back from it: nothing.
var errTakenBack = errors.New("tcp: an earlier frame was not sent to its end")

// moveBytes is how much one system call moves at most, so that both directions advance in turn.
const moveBytes = 256 << 10

// stream is one data connection with a peer.
type stream struct {
	w      wire
	number uint8
	from   net.Addr
	notify func() // something has changed: the rank may be waiting for it
	done   sync.WaitGroup
	quit   chan struct{}

	watching  atomic.Bool   // a goroutine waits for something to read
	watchCall chan struct{} // asks it to
	pushCall  chan struct{} // asks another one to finish what is queued

	sender
	receiver
}

func newStream(w wire, number uint8, from net.Addr, notify func()) *stream {
	s := &stream{w: w, number: number, from: from, notify: notify, quit: make(chan struct{}), watchCall: make(chan struct{}, 1), pushCall: make(chan struct{}, 1)}
	s.done.Go(s.watchLoop)
	s.done.Go(s.pushLoop)
	return s
}

// watch has notify called once when there may be something to read.
func (s *stream) watch() {
	if !s.watching.Swap(true) {
		s.watchCall <- struct{}{} // has room: one call per turn of watching
	}
}

func (s *stream) watchLoop() {
	for {
		select {
		case <-s.watchCall:
			s.w.awaitRead()
			s.watching.Store(false)
			s.notify()
		case <-s.quit:
			return
		}
	}
}

// finish has the writer goroutine write what is queued.
func (s *stream) finish() {
	select {
	case s.pushCall <- struct{}{}:
	default:
	}
}

func (s *stream) pushLoop() {
	more := func() bool {
		for before := s.sent.Load(); ; {
			s.sender.mu.Lock()
			blocked := s.pushLocked()
			empty := s.n == 0 || s.outErr != nil
			s.sender.mu.Unlock()
			if empty {
				return true
			}
			if blocked {
				if s.sent.Load() != before {
					s.notify() // the rank may wait for one of those that have gone, and for nothing else: the next one may need its help
				}
				return false
			}
		}
	}
	for {
		select {
		case <-s.pushCall:
			s.w.awaitWrite(more)
			s.notify()
		case <-s.quit:
			return
		}
	}
}

// close ends the connection and its goroutines.
func (s *stream) close() {
	close(s.quit)
	s.w.close()
	s.done.Wait()
	s.w.join()
}

// sender is the sending half: a queue of frames that whoever holds mu moves on, the rank's goroutine or the writer's.
type sender struct {
	sent     atomic.Uint64 // frames that have gone, since the beginning
	progress atomic.Uint64 // bytes

	mu     sync.Mutex
	queue  [transport.PostsMax]outgoing // n frames from first on
	first  int
	n      int
	queued uint64 // frames, since the beginning
	outErr error  // of the connection, or that frames were taken back
}

type outgoing struct {
	head [headBytes]byte
	data []byte
	off  int // what has gone, of head and data
}

// put queues a frame and returns its number on this connection, which sent reaches when it has gone.
func (s *sender) put(h *head, data []byte) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.queue[(s.first+s.n)%len(s.queue)]
	f.data, f.off = data, 0
	h.encode(&f.head)
	s.n++
	s.queued++
	return s.queued
}

// push writes a piece of what is queued, if the wire takes it and no other goroutine is about to. The error is the
// connection's.
func (s *stream) push() error {
	if !s.sender.mu.TryLock() {
		return nil
	}
	defer s.sender.mu.Unlock()
	s.pushLocked()
	return s.outErr
}

// pushLocked writes a piece of the first frame queued, and reports whether the wire does not take any more now.
func (s *stream) pushLocked() (blocked bool) {
	if s.n == 0 || s.outErr != nil {
		return false
	}
	f := &s.queue[s.first]
	err := s.pushPiece(f)
	if err == nil && f.off == headBytes+len(f.data) {
		if err = s.w.flush(); err == nil {
			f.data = nil
			s.first = (s.first + 1) % len(s.queue)
			s.n--
			s.sent.Add(1)
		}
	}
	if err != nil && err != errAgain {
		s.outErr = err
	}
	return err == errAgain
}

// pushPiece writes what one system call takes of a frame, if anything is left.
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

// takeBack empties the queue: nobody reads the frames' data any more. The connection cannot send after that if there were
// any.
func (s *sender) takeBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n == 0 {
		return
	}
	for i := range s.queue {
		s.queue[i].data = nil
	}
	s.n = 0
	if s.outErr == nil {
		s.outErr = errTakenBack
	}
}

// receiver is the receiving half, which only the rank's goroutine uses. What it reads ahead, the heads and small frames,
// goes through a buffer of its own; the rest of a frame goes straight where it belongs.
type receiver struct {
	buf     [headBytes + smallBytes]byte
	lo, hi  int // what is in buf
	head    head
	hasHead bool // head is that of the next frame, which nobody has received yet
	filled  int  // of its data
	inErr   error
}

// next reads the head of the next frame, and reports whether it is there.
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
	if s.head.stream != s.number {
		s.inErr = fmt.Errorf("%w: it says stream %d, and came on %d", errFrame, s.head.stream, s.number)
		return false, s.inErr
	}
	s.lo += headBytes
	s.hasHead, s.filled = true, 0
	return true, nil
}

// held reports whether something may be here that watch does not see: it came with what was read before.
func (s *stream) held() bool { return s.hasHead || s.hi-s.lo >= headBytes || s.w.held() }

// fill reads what has come into the buffer, and returns how much.
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

// inEnd keeps the error that ends the connection's receiving half.
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

// ahead returns where the head of the frame after this one goes, if what is left of this one is read now. The buffer is empty then.
func (s *stream) ahead(in []byte) []byte {
	s.lo, s.hi = 0, 0
	if len(in)-s.filled > moveBytes {
		return nil
	}
	return s.buf[:headBytes]
}

// take moves on the data of the frame whose head is there into in, which it fills exactly, and reports whether it is full.
func (s *stream) take(in []byte) (bool, error) {
	if n := copy(in[s.filled:], s.buf[s.lo:s.hi]); n > 0 {
		s.lo += n
		s.filled += n
	}
	if rest := in[s.filled:]; len(rest) > 0 {
		if s.inErr != nil {
			return false, s.inErr
		}
		var err error
		if len(rest) < smallBytes {
			_, err = s.fill() // what follows this frame may come along
			n := copy(rest, s.buf[s.lo:s.hi])
			s.lo += n
			s.filled += n
		} else {
			var n int
			rest = rest[:min(len(rest), moveBytes)]
			n, err = s.w.read(rest, s.ahead(in))
			s.filled += min(n, len(rest))
			s.hi += n - min(n, len(rest))
			err = s.inEnd(err)
		}
		if s.filled < len(in) {
			return false, err
		}
	}
	s.hasHead = false
	if s.head.summed {
		if sum := crc32.Checksum(in, castagnoli); sum != s.head.sum {
			s.inErr = fmt.Errorf("%w: its data has checksum %#x, its head says %#x", errFrame, sum, s.head.sum)
			return false, s.inErr
		}
	}
	return true, nil
}
