//go:build unix

package tcp_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

func init() {
	// ring exchanges around the ring until an error, which it prints. After the first exchange each must end within
	// PATIENCE milliseconds. When any rank is down it gives up, as communicators do.
	parts["ring"] = func(c *child) {
		node, e := c.join(tcp.Config{})
		all, cancel := context.WithCancelCause(context.Background())
		go func() {
			d := <-e.Down()
			cancel(&d)
		}()
		n := e.Size()
		out, in := make([]byte, 100_000), make([]byte, 100_000)
		var err error
		for round := 0; err == nil; round++ {
			patience := time.Minute
			if round > 5 {
				patience = time.Duration(envInt("PATIENCE", 60_000)) * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(all, patience)
			err = e.Exchange(ctx, (e.Rank()+1)%n, transport.Frame{Data: out}, (e.Rank()+n-1)%n, in)
			cancel()
			if round == 5 {
				c.say("turning")
			}
		}
		var down *transport.PeerDown
		switch {
		case errors.As(err, &down):
			c.say("lost %d %v", down.Rank, down.Err)
		case errors.Is(err, context.DeadlineExceeded):
			c.say("late")
		default:
			c.say("error %v", err)
		}
		c.read() // until the parent requests the end
		c.check(e.Close())
		c.check(node.Close())
		c.say("closed")
	}
}

// TestKill checks that when a process is killed during exchanges, all others are notified without a deadline, and their
// errors name its rank.
func TestKill(t *testing.T) {
	all := startAll(t, 4, "ring", nil)
	for _, p := range all {
		p.expect("turning")
	}
	killed := time.Now()
	all[2].cmd.Process.Kill()
	for r, p := range all {
		if r != 2 {
			if why := p.expect("lost 2 its"); !strings.HasPrefix(why, "process is gone") && !strings.HasPrefix(why,
				"connection was reset: its process has ended") {
				t.Errorf("rank %d reports the loss of rank 2: its %s", r, why)
			}
		}
	}
	t.Logf("all survivors were notified after %v", time.Since(killed).Round(time.Millisecond))
}

// TestKillFewLinks: the same where few processes are linked, and one of them is stopped: the news go around it.
func TestKillFewLinks(t *testing.T) {
	all := startAll(t, 8, "ring", nil, "MESH=0")
	for _, p := range all {
		p.expect("turning")
	}
	all[1].cmd.Process.Signal(syscall.SIGSTOP)
	all[2].cmd.Process.Kill()
	for r, p := range all {
		if r != 1 && r != 2 {
			if why := p.expect("lost 2 its"); !strings.HasPrefix(why, "process is gone") && !strings.HasPrefix(why,
				"connection was reset: its process has ended") {
				t.Errorf("rank %d reports the loss of rank 2: its %s", r, why)
			}
		}
	}
	all[1].cmd.Process.Signal(syscall.SIGCONT)
	all[1].expect("lost 2 its")
}

// TestStop: a stopped process is detected at the deadline; when it continues, its peers are down.
func TestStop(t *testing.T) {
	all := startAll(t, 2, "ring", nil, "PATIENCE=300")
	for _, p := range all {
		p.expect("turning")
	}
	all[1].cmd.Process.Signal(syscall.SIGSTOP)
	all[0].expect("late")
	all[0].tell("close")
	all[0].expect("closed")
	all[1].cmd.Process.Signal(syscall.SIGCONT)
	line, err := all[1].out.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "late") && !strings.HasPrefix(line, "lost 0") {
		t.Fatalf("the stopped process printed %q, %v", line, err)
	}
}

// proxy forwards connections to an address, and can cut them.
type proxy struct {
	net.Listener
	to string

	mu    sync.Mutex
	conns [][2]net.Conn // by connection
	touch func(conn int, b []byte)
}

func newProxy(t testing.TB, to string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, to: to}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", p.to)
			if err != nil {
				in.Close()
				continue
			}
			p.mu.Lock()
			at := len(p.conns)
			p.conns = append(p.conns, [2]net.Conn{in, out})
			p.mu.Unlock()
			done.Go(func() { p.pass(at, in, out, false) })
			done.Go(func() { p.pass(at, out, in, true) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.cut(0)
		done.Wait()
	})
	return p
}

func (p *proxy) pass(at int, to, from net.Conn, up bool) {
	defer to.Close()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		p.mu.Lock()
		if p.touch != nil && up {
			p.touch(at, b[:n])
		}
		p.mu.Unlock()
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return
		}
	}
}

// cut closes the connections from number first on.
func (p *proxy) cut(first int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns[min(first, len(p.conns)):] {
		c[0].Close()
		c[1].Close()
	}
}

// TestCut: a cut connection is an error on both sides without a deadline, whether or not the control connection still
// exists.
func TestCut(t *testing.T) {
	for _, cut := range []struct {
		name  string
		first int
	}{{"all connections", 0}, {"all but the control connection", 1}} {
		t.Run(cut.name, func(t *testing.T) {
			var p *proxy
			all := startAll(t, 2, "ring", func(rank int, addr string) string {
				if rank == 1 {
					return addr // rank 1 dials rank 0, through the proxy
				}
				p = newProxy(t, addr)
				return p.Addr().String()
			})
			for _, c := range all {
				c.expect("turning")
			}
			at := time.Now()
			p.cut(cut.first)
			for r, c := range all {
				c.expect(fmt.Sprintf("lost %d ", 1-r))
			}
			t.Logf("both were notified after %v", time.Since(at).Round(time.Millisecond))
		})
	}
}

// TestMissingMembers: joining a group with missing members ends with ctx, and the error names them.
func TestMissingMembers(t *testing.T) {
	node, err := tcp.Listen(tcp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = node.Group(ctx, tcp.GroupConfig{Addrs: []string{"127.0.0.1:1", node.Addr()}, Local: []int{1}})
	missing := (*transport.NotConnected)(nil)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &missing) || !slices.Equal(missing.Ranks, []int{0}) ||
		!strings.Contains(err.Error(), "not connected with ranks [0] at 127.0.0.1:1") {
		t.Errorf("got %v", err)
	}
}

// TestRefusedMember: the error of joining a group whose other member refuses the connection names that one's ranks,
// and no other that is not connected.
func TestRefusedMember(t *testing.T) {
	node, err := tcp.Listen(tcp.Config{Job: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	stranger, err := tcp.Listen(tcp.Config{Job: "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	_, err = node.Group(t.Context(), tcp.GroupConfig{
		Addrs: []string{"127.0.0.1:1", stranger.Addr(), node.Addr()}, Local: []int{2},
	})
	if e := (*transport.NotConnected)(nil); !errors.As(err, &e) || !slices.Equal(e.Ranks, []int{1}) {
		t.Errorf("got %v", err)
	}
}
