package launch

import (
	"bytes"
	"io"
	"os"
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

// screen writes whole lines to the agent's own outputs, one at a time: both may be the same terminal.
type screen struct {
	mu      sync.Mutex
	outputs [2]io.Writer
	buffer  []byte
}

func (s *screen) line(to Stream, prefix string, text []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outputs[to] == nil {
		return
	}
	s.buffer = append(append(append(s.buffer[:0], prefix...), text...), '\n')
	_, _ = s.outputs[to].Write(s.buffer) // a terminal that is gone must not stop the workers
}

// say writes a text of the agent's own to its standard error.
func (s *screen) say(text string) {
	for line := range strings.Lines(text) {
		s.line(Stderr, "", []byte(strings.TrimSuffix(line, "\n")))
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
	mu    sync.Mutex
	last  []string
	crash []string
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
	if len(t.last) == tailLines {
		copy(t.last, t.last[1:])
		t.last = t.last[:tailLines-1]
	}
	t.last = append(t.last, s)
	switch {
	case crashBegins(s):
		t.crash = []string{s} // the last one ended it
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
