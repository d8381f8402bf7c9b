package launch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"
)

// sink is a queue of lines in front of an output that may block: a paused terminal, a pager, a slow pipe. One
// goroutine writes them, in order.
//
// Like a pipe, a slow output slows down its writers once the queue is full. An output that accepts nothing
// does so for a short time only, since a blocked terminal must not stop a job: lines are dropped then, and a
// line in their place gives their number.
type sink struct {
	out io.Writer
	// stalled is called, without a lock, when the first lines are dropped, and failed at the first error of a write; both
	// may be nil.
	stalled func()
	failed  func(error)
	done    chan struct{} // closed when the writer has ended

	mu          sync.Mutex // guards the fields below
	pending     []byte     // whole lines
	size, lines int        // bytes and lines that are not written yet, including those that the writer has taken
	progress    time.Time  // when the output last took data, or received data after it had taken everything
	changed     chan struct{}
	unread      bool     // the output accepts nothing
	left        omission // what was dropped since the last line
	failure     error    // the first of a write
	hurried     bool     // callers must not wait any more
	closed      bool     // no more lines arrive
	abandoned   bool     // close waits no more
	started     bool     // the writer is running
}

// omission counts what was not written.
type omission struct {
	lines, bytes int
	since        time.Time
}

const (
	queueMax   = 16 << 20          // bytes queued for an output
	queueOwn   = queueMax / 4      // and of the agent's messages in addition
	stallTime  = 5 * time.Second   // an output that accepts nothing for so long is stalled
	hurryTime  = 2 * time.Second   // the same for the rest when the user has ended the job
	writeBytes = 4 << 10           // bytes per write: small, so that the progress of a slow output is seen
	spareBytes = 64 << 10          // of a buffer that is kept
	noTime     = time.Duration(-1) // no bound
)

var newline = []byte("\n")

func newSink(out io.Writer, stalled func()) *sink {
	return &sink{out: out, stalled: stalled, done: make(chan struct{}), changed: make(chan struct{})}
}

// put queues a line. Without wait it returns at once.
func (s *sink) put(prefix string, text []byte, wait bool) {
	s.mu.Lock()
	n, most := len(prefix)+len(text)+1, queueMax
	if !wait {
		most += queueOwn
	}
	began := false
	for s.size > 0 && s.size+n > most && !s.closed {
		patience := stallTime - time.Since(s.progress)
		if patience <= 0 || s.unread || s.hurried || !wait {
			began, s.unread = !s.unread, true
			break
		}
		s.await(patience)
	}
	switch {
	case s.closed:
	case s.unread && s.size+n > most:
		if s.left.lines == 0 {
			s.left.since = s.progress
		}
		s.left.lines++
		s.left.bytes += n
	default:
		s.note()
		s.push(prefix, text)
	}
	s.mu.Unlock()
	if began && s.stalled != nil {
		s.stalled()
	}
}

// push appends a line. The caller holds s.mu.
func (s *sink) push(prefix string, text []byte) {
	if s.size == 0 {
		s.progress = time.Now()
	}
	if !s.started {
		s.started = true
		go s.run()
	}
	before := len(s.pending)
	s.pending = append(append(append(s.pending, prefix...), text...), '\n')
	s.size, s.lines = s.size+len(s.pending)-before, s.lines+1
	s.change()
}

// note reports in its place what was dropped. The caller holds s.mu.
func (s *sink) note() {
	if s.left.lines == 0 {
		return
	}
	s.push("", fmt.Appendf(nil,
		"lockstep run: %d lines (%d bytes) of this output were dropped here: it was not read for %v",
		s.left.lines, s.left.bytes, time.Since(s.left.since).Round(time.Second)))
	s.left = omission{}
}

// await waits for a change or the writer's end, for some time. The caller holds s.mu, which is released
// meanwhile.
func (s *sink) await(patience time.Duration) {
	changed := s.changed
	s.mu.Unlock()
	defer s.mu.Lock()
	var late <-chan time.Time
	if patience != noTime {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-changed:
	case <-s.done:
	case <-late:
	}
}

// change wakes up all that wait for a change. The caller holds s.mu.
func (s *sink) change() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// run writes lines until the sink is closed and empty.
func (s *sink) run() {
	defer close(s.done)
	s.mu.Lock()
	defer s.mu.Unlock()
	var spare []byte
	for {
		for len(s.pending) == 0 {
			if s.closed && s.left.lines == 0 {
				return
			}
			if s.closed {
				s.note()
				break
			}
			s.await(noTime)
		}
		batch := s.pending
		s.pending = spare[:0]
		for rest := batch; len(rest) > 0; {
			n := lineEnd(rest)
			s.mu.Unlock()
			s.write(rest[:n])
			s.mu.Lock()
			s.size, s.lines = s.size-n, s.lines-bytes.Count(rest[:n], newline)
			rest = rest[n:]
			s.progress, s.unread = time.Now(), false
			s.change()
		}
		if spare = nil; cap(batch) <= spareBytes {
			spare = batch
		}
	}
}

// write writes lines. An error does not stop the workers.
func (s *sink) write(lines []byte) {
	_, err := s.out.Write(lines)
	if err == nil {
		return
	}
	s.mu.Lock()
	first := s.failure == nil
	if first {
		s.failure = err
	}
	s.mu.Unlock()
	if first && s.failed != nil {
		s.failed(err)
	}
}

// failedWrite returns the first error of a write.
func (s *sink) failedWrite() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failure
}

// lineEnd returns the number of bytes that are written at once: whole lines, at least one.
func lineEnd(b []byte) int {
	if len(b) <= writeBytes {
		return len(b)
	}
	if i := bytes.LastIndexByte(b[:writeBytes], '\n'); i >= 0 {
		return i + 1
	}
	return bytes.IndexByte(b, '\n') + 1
}

// hurry stops all waiting for the output: the user ends the job. Once the sink is closing it ends that too.
func (s *sink) hurry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hurried, s.abandoned = true, s.closed
	s.change()
}

// close waits until everything is written. When the user has ended the job, or ctx has ended, it does not
// wait for an output that accepts nothing; after a second signal it does not wait at all. It returns what is
// left then.
func (s *sink) close(ctx context.Context) omission {
	stop := context.AfterFunc(ctx, s.hurry)
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.change()
	if !s.started {
		return omission{}
	}
	for begin := time.Now(); ; {
		patience := noTime
		if s.hurried {
			patience = hurryTime - min(time.Since(begin), time.Since(s.progress))
		}
		select {
		case <-s.done:
			return omission{}
		default:
		}
		if s.abandoned || s.hurried && patience <= 0 {
			return omission{lines: s.lines + s.left.lines, bytes: s.size + s.left.bytes}
		}
		s.await(patience)
	}
}

// sameOutput reports whether two outputs are one file: a terminal or a pipe, for example.
func sameOutput(a, b io.Writer) bool {
	type file interface{ Stat() (fs.FileInfo, error) }
	x, ok := a.(file)
	y, also := b.(file)
	if !ok || !also {
		return false
	}
	i, err := x.Stat()
	if err != nil {
		return false
	}
	j, err := y.Stat()
	return err == nil && os.SameFile(i, j)
}
