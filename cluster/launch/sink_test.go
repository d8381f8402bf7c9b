package launch

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// paused is an output that accepts nothing while it is paused, and then each write after some time.
type paused struct {
	until chan struct{} // nil: it is not paused
	slow  time.Duration
	b     bytes.Buffer
}

func (p *paused) Write(b []byte) (int, error) {
	time.Sleep(p.slow)
	if p.until != nil {
		<-p.until
	}
	return p.b.Write(b)
}

// TestSinkOfASlowReader: writers wait for an output that is slow, and no line is dropped.
func TestSinkOfASlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &paused{slow: stallTime / 2}
		s := newSink(out, func() { t.Error("said to be unread") })
		line := bytes.Repeat([]byte("x"), 64<<10)
		const lines = 2 * queueMax / (64 << 10)
		begin := time.Now()
		for i := range lines {
			s.put(fmt.Sprintf("%d ", i), line, true)
		}
		if waited := time.Since(begin); waited < lines/3*out.slow {
			t.Errorf("the writer waited for %v only", waited)
		}
		if left := s.close(t.Context()); left.lines != 0 {
			t.Errorf("%+v are left", left)
		}
		got := strings.Split(strings.TrimSuffix(out.b.String(), "\n"), "\n")
		for i, l := range got {
			if !strings.HasPrefix(l, fmt.Sprintf("%d x", i)) {
				t.Fatalf("line %d: %.20q", i, l)
			}
		}
		if len(got) != lines {
			t.Errorf("%d lines, want %d", len(got), lines)
		}
	})
}

// TestSinkOfAPausedReader: an output that accepts nothing delays writers only for a moment. A line in place of the
// dropped ones gives their number.
func TestSinkOfAPausedReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out, stalled := &paused{until: make(chan struct{})}, 0
		s := newSink(out, func() { stalled++ })
		line := bytes.Repeat([]byte("x"), 1<<10)
		const lines = 2 * queueMax / (1 << 10)
		begin := time.Now()
		for i := range lines {
			s.put(fmt.Sprintf("%d ", i), line, true)
		}
		if waited := time.Since(begin); waited != stallTime {
			t.Errorf("the writer waited for %v in all, want %v", waited, stallTime)
		}
		s.put("", []byte("the agent's own"), false)
		time.Sleep(time.Minute - stallTime)
		close(out.until)
		synctest.Wait()
		s.put("", []byte("afterwards"), true)
		s.close(t.Context())
		if stalled != 1 {
			t.Errorf("reported a missing reader %d times", stalled)
		}
		got := strings.Split(strings.TrimSuffix(out.b.String(), "\n"), "\n")
		n := 0
		for n < len(got) && strings.HasPrefix(got[n], fmt.Sprintf("%d x", n)) {
			n++
		}
		left := lines - n
		size := 0
		for i := n; i < lines; i++ {
			size += len(fmt.Sprintf("%d ", i)) + len(line) + 1
		}
		want := []string{
			fmt.Sprintf("lockstep run: %d lines (%d bytes) of this output were dropped here: it was not read for 5s", left,
				size), "the agent's own", "afterwards",
		}
		if n < lines/3 || fmt.Sprint(got[n:]) != fmt.Sprint(want) {
			t.Errorf("after %d lines of %d: %q, want %q", n, lines, got[n:min(len(got), n+5)], want)
		}
	})
}

// TestSinkThatIsLeft: at the end the sink waits for an output that accepts nothing, unless the user has ended the
// job, or ends it then.
func TestSinkThatIsLeft(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(s *sink)
		want time.Duration // 0: until it is read, after an hour
	}{
		"not ended":   {func(*sink) {}, 0},
		"ended":       {(*sink).hurry, hurryTime},
		"ended then":  {func(s *sink) { time.AfterFunc(time.Minute, s.hurry) }, time.Minute},
		"ended twice": {func(s *sink) { s.hurry(); time.AfterFunc(time.Second, s.hurry) }, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				out := &paused{until: make(chan struct{})}
				s := newSink(out, nil)
				for range 3 {
					s.put("", []byte("line"), true)
				}
				c.do(s)
				time.AfterFunc(time.Hour, func() { close(out.until) })
				begin := time.Now()
				left := s.close(context.Background())
				want, lines := c.want, 3
				if want == 0 {
					want, lines = time.Hour, 0
				}
				if waited := time.Since(begin); waited != want || left.lines != lines || left.bytes != lines*len("line\n") {
					t.Errorf("waited %v, want %v; %+v are left, want %d lines", waited, want, left, lines)
				}
				<-s.done
			})
		})
	}
}

// TestSinkDoesNotStart: a sink without output has no goroutine.
func TestSinkDoesNotStart(t *testing.T) {
	s := newSink(&bytes.Buffer{}, nil)
	if left := s.close(t.Context()); left != (omission{}) || s.started {
		t.Errorf("%+v are left", left)
	}
}
