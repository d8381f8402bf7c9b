package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Stream is one of a worker's two outputs.
type Stream int

// The streams of a worker.
const (
	Stdout Stream = iota
	Stderr
)

// String returns the stream's name.
func (s Stream) String() string { return [...]string{"stdout", "stderr"}[s] }

// Shown selects output of workers: the lines of some streams, of the workers with some ranks, or of all if Ranks is
// nil.
type Shown struct {
	Streams [2]bool
	Ranks   []int
}

// has reports whether a stream of a worker is shown. On nil all are.
func (s *Shown) has(rank int, stream Stream) bool {
	return s == nil || s.Streams[stream] && (s.Ranks == nil || slices.Contains(s.Ranks, rank))
}

// screen writes whole lines to the agent's outputs. A blocked output delays, for a limited time, only
// the workers whose lines it receives.
type screen struct{ sinks [2]*sink } // nil: none

// open starts writing. Two outputs that are one file receive their lines in order of arrival.
func (s *screen) open(stdout, stderr io.Writer) {
	if stderr != nil {
		s.sinks[Stderr] = newSink(stderr, nil)
	}
	switch {
	case stdout == nil:
	case sameOutput(stdout, stderr):
		s.sinks[Stdout] = s.sinks[Stderr]
	default:
		s.sinks[Stdout] = newSink(stdout, func() {
			s.print("lockstep run: standard output is not being read: lines of the workers are dropped until it is read again\n")
		})
		s.sinks[Stdout].failed = func(err error) {
			s.print(fmt.Sprintf("lockstep run: standard output cannot be written, and the workers continue: %v\n", err))
		}
	}
}

// line writes a worker's line. It waits for a slow output, for a limited time.
func (s *screen) line(to Stream, prefix string, text []byte) {
	if s.sinks[to] != nil {
		s.sinks[to].put(prefix, text, true)
	}
}

// print writes a message of the agent to its standard error, without waiting.
func (s *screen) print(text string) {
	if s.sinks[Stderr] == nil {
		return
	}
	for line := range strings.Lines(text) {
		s.sinks[Stderr].put("", []byte(strings.TrimSuffix(line, "\n")), false)
	}
}

// hurry stops all waiting for the outputs.
func (s *screen) hurry() {
	for _, k := range s.sinks {
		if k != nil {
			k.hurry()
		}
	}
}

// close waits until everything is written, like [sink.close], and reports what is lost. The error is the first one of
// writing to standard output. EPIPE does not count: the reader has closed the output.
func (s *screen) close(ctx context.Context) error {
	k := s.sinks[Stdout]
	if k != nil && k != s.sinks[Stderr] {
		if left := k.close(ctx); left.lines > 0 {
			s.print(fmt.Sprintf("lockstep run: the last %d lines (%d bytes) of standard output are lost: they were not read\n",
				left.lines, left.bytes))
		}
	}
	if k := s.sinks[Stderr]; k != nil {
		k.close(ctx) // there is no output left to report it on
	}
	if k == nil {
		return nil
	}
	err := k.failedWrite()
	if err == nil || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return fmt.Errorf("launch: standard output lacks lines of the workers: %w", err)
}

// lineMax is the length, in bytes, at which a long line is split.
const lineMax = 64 << 10

// lines splits its input into lines. A carriage return ends a line too, so that progress bars are shown.
type lines struct {
	emit    func(line []byte)
	partial []byte
	cr      bool // the last byte was a carriage return
}

func (l *lines) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if l.cr && p[0] == '\n' { // the second half of a line's end
			l.cr, p = false, p[1:]
			continue
		}
		i := bytes.IndexAny(p, "\r\n")
		if i < 0 {
			i = len(p)
		}
		if room := lineMax - len(l.partial); i > room {
			l.end(p[:room])
			p = p[room:]
			continue
		}
		if i == len(p) {
			l.partial, l.cr = append(l.partial, p...), false
			break
		}
		l.cr = p[i] == '\r'
		if !l.cr || i > 0 || len(l.partial) > 0 {
			l.end(p[:i])
		}
		p = p[i+1:]
	}
	return n, nil
}

func (l *lines) end(rest []byte) {
	l.emit(append(l.partial, rest...))
	l.partial = l.partial[:0]
}

// flush ends the last line, if there is one.
func (l *lines) flush() {
	if len(l.partial) > 0 {
		l.end(nil)
	}
}

// drainTime is how long a pipe is read after its worker ended, twice: the worker's output is in the pipe
// already; only a process that it left behind could add to it. The first period may be over before reading
// has begun, if this process gets no processor time.
const drainTime = 250 * time.Millisecond

// copyStream copies a worker's output from a pipe to all of to, until the pipe's end or, once ended is
// closed, until no more data arrives.
func copyStream(pipe *os.File, ended <-chan struct{}, to io.Writer) {
	soon := func() { _ = pipe.SetReadDeadline(time.Now().Add(drainTime)) }
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-ended:
			soon()
		case <-over:
		}
	}()
	buffer := make([]byte, 32<<10)
	for silent := 0; ; {
		select {
		case <-ended:
			soon()
		default:
		}
		n, err := pipe.Read(buffer)
		_, _ = to.Write(buffer[:n])
		switch {
		case err == nil:
			silent = 0
			continue
		case !os.IsTimeout(err):
			return
		}
		if silent++; silent == 2 {
			return
		}
	}
}

// tail keeps the end of a worker's standard error, and the beginning of a crash in it.
type tail struct {
	mu     sync.Mutex
	last   []string
	crash  []string
	native bool // the crash is a native one, with the output before it
}

const (
	tailLines  = 12
	crashLines = 60
	tailLine   = 400 // bytes
)

func (t *tail) add(line []byte) {
	if len(line) > tailLine {
		line = append(line[:tailLine:tailLine], "…"...)
	}
	s := string(line)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.native && signalRegister.MatchString(s) {
		return
	}
	if n := len(t.last); n > 0 && signalPlace.MatchString(s) && signalHeader.MatchString(t.last[n-1]) {
		t.native, t.crash = true, slices.Clone(t.last)
	}
	if len(t.last) == tailLines {
		copy(t.last, t.last[1:])
		t.last = t.last[:tailLines-1]
	}
	t.last = append(t.last, s)
	switch {
	case crashBegins(s):
		t.native, t.crash = false, []string{s} // the last line ended the crash
	case len(t.crash) > 0 && len(t.crash) < crashLines:
		t.crash = append(t.crash, s)
	}
}

// lines returns the last lines and those of the crash.
func (t *tail) lines() (last, crash []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.last...), append([]string(nil), t.crash...)
}
