package launch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// Stream is one of a worker's two outputs.
type Stream int

// The streams of a worker.
const (
	Stdout Stream = iota
	Stderr
)

func (s Stream) String() string { return [...]string{"stdout", "stderr"}[s] }

// screen writes whole lines to the agent's own outputs. An output that blocks keeps nobody waiting but, for a while,
// whose lines it gets.
type screen struct{ sinks [2]*sink } // nil: none

// open begins to write. Two outputs that are one file get their lines in the order in which these come.
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
			s.say("lockstep run: nobody reads standard output: what the workers write there is left out until somebody does\n")
		})
	}
}

// line writes a worker's line. It waits a while for an output that is slow.
func (s *screen) line(to Stream, prefix string, text []byte) {
	if s.sinks[to] != nil {
		s.sinks[to].put(prefix, text, true)
	}
}

// say writes a text of the agent's own to its standard error, and does not wait.
func (s *screen) say(text string) {
	if s.sinks[Stderr] == nil {
		return
	}
	for line := range strings.Lines(text) {
		s.sinks[Stderr].put("", []byte(strings.TrimSuffix(line, "\n")), false)
	}
}

// hurry has nobody wait for the outputs any more.
func (s *screen) hurry() {
	for _, k := range s.sinks {
		if k != nil {
			k.hurry()
		}
	}
}

// close waits until all is written, as [sink.close] does, and says what is not.
func (s *screen) close(ctx context.Context) {
	if k := s.sinks[Stdout]; k != nil && k != s.sinks[Stderr] {
		if left := k.close(ctx); left.lines > 0 {
			s.say(fmt.Sprintf("lockstep run: the last %d lines (%d bytes) of standard output are lost: nobody has read them\n",
				left.lines, left.bytes))
		}
	}
	if k := s.sinks[Stderr]; k != nil {
		k.close(ctx) // what is left there cannot be said anywhere
	}
}

// lineMax is where a line is broken that does not end, in bytes.
const lineMax = 64 << 10

// lines cuts what is written to it into lines. A carriage return ends one as well, so that a progress bar is seen.
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

// drainTime is how long a pipe is read on after its worker ended, twice: what it wrote is there already; only a process that it left behind could
// add to it. The first time may be over before the reading has begun, where this process gets no processor time.
const drainTime = 250 * time.Millisecond

// copyStream copies what a worker writes into a pipe to all of to, until the pipe's end or, once ended is closed, until nothing more comes.
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

// tail keeps the end of what a worker wrote to its standard error, and the beginning of what looks like a crash in it.
type tail struct {
	mu     sync.Mutex
	last   []string
	crash  []string
	native bool // the crash is one in native code, with what was written before
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
		t.native, t.crash = false, []string{s} // the last one ended it
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
