package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/transport"
)

// TestLeaveUnread: a process that leaves while this one is suspended has left. It is not lost, also if this one sends
// messages to it before it reads that.
func TestLeaveUnread(t *testing.T) {
	const stays, leaves = 0, 1
	j := few(t, 6)
	w := j.ends[stays].group.world
	l := w.links[leaves]
	w.mu.Lock() // so it handles no message
	for range readAhead/messageBytes + 1 {
		j.ends[leaves].group.world.links[stays].send(&message{kind: msgReady})
	}
	j.ends[leaves].Close()
	for begin := time.Now(); time.Since(begin) < time.Minute && !l.isBroken(); time.Sleep(time.Millisecond) {
		l.send(&message{kind: msgReady})
	}
	w.mu.Unlock()
	if d := j.next(j.ends[stays]); d.Rank != leaves || !errors.Is(d.Err, transport.ErrClosed) {
		t.Errorf("rank %d is down: %v, want that rank %d has closed its endpoint", d.Rank, d.Err, leaves)
	}
	if sent := w.news.Load(); sent != 0 {
		t.Errorf("%d messages about a loss", sent)
	}
}

func (l *link) isBroken() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.broken != nil
}

// fakeConn is a connection on which nothing arrives. Its writes fail.
type fakeConn struct {
	net.Conn
	failure error
	over    chan struct{}
	once    sync.Once
}

func (c *fakeConn) Read([]byte) (int, error) {
	<-c.over
	return 0, net.ErrClosed
}

func (c *fakeConn) Write([]byte) (int, error) { return 0, c.failure }

func (c *fakeConn) Close() error {
	c.once.Do(func() { close(c.over) })
	return nil
}

func (c *fakeConn) SetWriteDeadline(time.Time) error { return nil }

// TestFailedWrite: if the writer notices that a host cannot be reached, the error says so.
func TestFailedWrite(t *testing.T) {
	const from, to = 0, 6
	j := few(t, 12)
	w := j.ends[from].group.world
	c := &fakeConn{failure: os.NewSyscallError("write", syscall.ETIMEDOUT), over: make(chan struct{})}
	if err := w.connected(&connection{conn: c, raw: c}, to); err != nil {
		t.Fatal(err)
	}
	if d := j.next(j.ends[from]); d.Rank != to || !strings.Contains(d.Err.Error(), "its host cannot be reached") {
		t.Errorf("rank %d is down: %v, want that the host of rank %d cannot be reached", d.Rank, d.Err, to)
	}
}

// TestMessageBeforeOpen: the first message on an accepted connection is msgOpen. Others would be queued without bound.
func TestMessageBeforeOpen(t *testing.T) {
	const dialer, acceptor = 6, 0
	j := few(t, 12)
	w, other := j.ends[acceptor].group.world, j.ends[dialer].group.world
	a, err := other.node.dial(t.Context(), other.target(acceptor), other.hello(acceptor), forever)
	if err != nil {
		t.Fatal(err)
	}
	defer a.raw.Close()
	ask := &message{kind: msgAsk, from: dialer, to: acceptor}
	if _, err := a.raw.Write(ask.append(nil)); err != nil {
		t.Fatal(err)
	}
	a.raw.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := a.raw.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("reading from the other end: %v, want that it has closed the connection", err)
	}
	w.mu.Lock()
	if o := w.opening[dialer]; o != nil && len(o.queue) > 0 {
		t.Errorf("%d messages are queued", len(o.queue))
	}
	w.mu.Unlock()
	if got := j.nodes[acceptor].Refused()["frame"]; got != 1 {
		t.Errorf("%d connections were closed because of invalid messages, want 1", got)
	}
	j.quiet(j.ends[acceptor])
}

// TestQueueBound: the messages for a process that does not read need bounded memory.
func TestQueueBound(t *testing.T) {
	const sends, suspended = 0, 1
	j := few(t, 6)
	w := j.ends[suspended].group.world
	w.mu.Lock() // so it handles no message
	defer w.mu.Unlock()
	l := j.ends[sends].group.world.links[suspended]
	m := &message{kind: msgFailed, group: 99, text: make([]byte, transport.ReasonMax)}
	for total := 0; total < 4*queueMax && !l.isBroken(); total += messageBytes + len(m.text) {
		l.send(m)
		l.mu.Lock()
		queued := len(l.queue)
		l.mu.Unlock()
		if queued > queueMax {
			t.Fatalf("%d bytes are queued, more than %d", queued, queueMax)
		}
	}
	if d := j.next(j.ends[sends]); d.Rank != suspended || !errors.Is(d.Err, errQueue) {
		t.Errorf("rank %d is down: %v, want %q of rank %d", d.Rank, d.Err, errQueue, suspended)
	}
}

// TestRedials: the times after which a process is no longer dialed begin with the first error of their kind, since an
// attempt before, at a suspended process, may have taken longer.
func TestRedials(t *testing.T) {
	w := &world{node: &Node{cfg: Config{Handshake: 10 * time.Second}}}
	duplicate := listener.Refuse(listener.Duplicate, "")
	for _, c := range []struct {
		name string
		errs []error
		at   []time.Duration
		want []bool
	}{
		{
			"ended after a wait",
			[]error{io.EOF, syscall.ECONNREFUSED, syscall.ECONNREFUSED, syscall.ECONNREFUSED},
			[]time.Duration{8 * time.Second, 8 * time.Second, 8*time.Second + brokenGrace/2, 8*time.Second + brokenGrace},
			[]bool{true, true, true, false},
		},
		{
			"dialed by the other end after a wait",
			[]error{duplicate, duplicate, duplicate},
			[]time.Duration{time.Minute, 69 * time.Second, 70 * time.Second},
			[]bool{true, true, false},
		},
		{
			"silent",
			[]error{os.ErrDeadlineExceeded, io.EOF, io.EOF},
			[]time.Duration{time.Hour, time.Hour + 9*time.Second, time.Hour + 10*time.Second},
			[]bool{true, true, false},
		},
	} {
		again := w.redials()
		for i, err := range c.errs {
			for range 2 {
				if got := again(err, c.at[i]); got != c.want[i] {
					t.Errorf("%s: %v after %v: dialed again %v, want %v", c.name, err, c.at[i], got, c.want[i])
				}
			}
		}
	}
}

// TestCloseWhileSplitting: no endpoint stays open when its node closes.
func TestCloseWhileSplitting(t *testing.T) {
	for range 30 {
		j := few(t, 1)
		var created []*endpoint
		var splitting sync.WaitGroup
		begun := make(chan struct{})
		splitting.Go(func() {
			for id := uint64(1); ; id++ {
				e, err := j.ends[0].Split(id, []int{0})
				if err != nil {
					return
				}
				if created = append(created, e.(*endpoint)); id == 100 {
					close(begun)
				}
			}
		})
		<-begun
		j.nodes[0].Close()
		splitting.Wait()
		for i, e := range created {
			if !e.closed.Load() {
				t.Fatalf("endpoint %d of %d is open", i, len(created))
			}
		}
	}
}

// TestCloseWhileJoining: a group whose node closes fails for that reason. No other rank is named.
func TestCloseWhileJoining(t *testing.T) {
	for _, rank := range []int{0, 1} {
		absent, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer absent.Close()
		node, err := Listen(Config{Job: "news"})
		if err != nil {
			t.Fatal(err)
		}
		addrs := []string{absent.Addr().String(), absent.Addr().String()}
		addrs[rank] = node.Addr()
		failed := make(chan error)
		go func() {
			_, err := node.Group(t.Context(), GroupConfig{Addrs: addrs, Local: []int{rank}})
			failed <- err
		}()
		for joining := false; !joining; time.Sleep(time.Millisecond) {
			node.mu.Lock()
			joining = len(node.worlds) == 1
			node.mu.Unlock()
		}
		node.Close()
		missing := (*transport.NotConnected)(nil)
		if err := <-failed; !errors.Is(err, transport.ErrClosed) || errors.As(err, &missing) ||
			errors.Is(err, context.Canceled) {
			t.Errorf("rank %d: %v, want %v", rank, err, transport.ErrClosed)
		}
	}
}

// TestHostileRanks: a hello with ranks that do not exist is refused, also where int has 32 bits.
func TestHostileRanks(t *testing.T) {
	_, ends := pair(t, Config{Job: "news"})
	w := ends[0].group.world
	for _, purpose := range []listener.Service{listener.Control, listener.Data} {
		for _, rank := range []uint32{2, 1 << 31, 1<<32 - 1} {
			for _, h := range []hello{{from: rank, to: 0}, {from: 1, to: rank}, {from: rank, to: rank - 1}} {
				h.purpose, h.members = purpose, w.hash
				if purpose == listener.Data {
					h.members = ends[0].group.members
				}
				if err := w.accept(&connection{hello: h}); !isRefused(err, listener.Rank) {
					t.Errorf("%v, from %d to %d: %v", purpose, h.from, h.to, err)
				}
			}
		}
	}
}
