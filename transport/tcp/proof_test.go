package tcp_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// lines is a log that several goroutines write to.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// firsts records whether the hellos of a node's dialed connections request TLS, by address.
type firsts struct {
	mu  sync.Mutex
	all map[string][]byte
}

const secureAt = 11 // in a hello

func (f *firsts) dial(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	return &first{Conn: c, to: address, all: f}, err
}

type first struct {
	net.Conn
	to   string
	all  *firsts
	once sync.Once
}

func (c *first) Write(p []byte) (int, error) {
	c.once.Do(func() {
		c.all.mu.Lock()
		defer c.all.mu.Unlock()
		c.all.all[c.to] = append(c.all.all[c.to], p[secureAt])
	})
	return c.Conn.Write(p)
}

// TestSameHost: of three nodes with TLS and Authenticate, the two that are verified to be on one host use no TLS
// between them; the third uses it with both.
func TestSameHost(t *testing.T) {
	seen := firsts{all: map[string][]byte{}}
	cfg := tcp.Config{TLS: authority(t), Authenticate: proves("a"), Dial: seen.dial, Logger: slog.New(slog.DiscardHandler)}
	var nodes []*tcp.Node
	var addrs []string
	for range 3 {
		n, err := tcp.Listen(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			g := tcp.GroupConfig{Addrs: addrs, Local: []int{i}}
			if i != 1 {
				g.SameHost = []int{0, 2}
			}
			ends, err := n.Group(ctx, g)
			if err != nil {
				t.Error(err)
				return
			}
			for _, e := range []transport.Endpoint{ends[0], split(t, ends[0], 3)} {
				for step := 1; step < 3; step++ {
					in := make([]byte, 1)
					if err := e.Exchange(ctx, (i+step)%3, transport.Frame{Data: []byte{byte(i)}}, (i+3-step)%3, in); err != nil ||
						int(in[0]) != (i+3-step)%3 {
						t.Errorf("rank %d: %v, %v", i, in, err)
					}
				}
			}
		})
	}
	wg.Wait()
	const secure, plain = "\x01", "\x00"
	// rank 0 is dialed by ranks 1 and 2, rank 1 by rank 2: a link, and two data connections
	for to, want := range map[string]string{
		addrs[0]: strings.Repeat(secure, 3) + strings.Repeat(plain, 3),
		addrs[1]: strings.Repeat(secure, 3),
	} {
		got := string(seen.all[to])
		if strings.Count(got, secure) != strings.Count(want, secure) ||
			strings.Count(got, plain) != strings.Count(want, plain) || len(got) != len(want) {
			t.Errorf("connections to %s are %q, want %q in any order", to, got, want)
		}
	}
}

// babble dials, and sends bytes that start no known protocol.
func babble(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		_, err = c.Write([]byte("babble"))
	}
	return c, err
}

func split(t *testing.T, e transport.Endpoint, n int) transport.Endpoint {
	ranks := make([]int, n)
	for i := range ranks {
		ranks[i] = i
	}
	sub, err := e.Split(1, ranks)
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

// TestRefusals: two processes of different jobs or with different settings both report the reason.
func TestRefusals(t *testing.T) {
	secure := authority(t)
	for _, c := range []struct {
		name     string
		cfg      [2]tcp.Config
		sameHost [2][]int
		dials    string // what rank 1 returns
		logs     string // what the node of rank 0 logs; empty: nothing
	}{
		{
			"another job",
			[2]tcp.Config{{Job: "a", Authenticate: proves("a")}, {Job: "b", Authenticate: proves("a")}},
			[2][]int{},
			`it belongs to another job; this one is "a"`, `it belongs to another job; this one is \"a\"`,
		},
		{
			"another secret",
			[2]tcp.Config{{Authenticate: proves("a")}, {Authenticate: proves("b")}},
			[2][]int{},
			"refuses this end's proof", "its proof is wrong",
		},
		{
			"another authority",
			[2]tcp.Config{{TLS: secure}, {TLS: authority(t)}},
			[2][]int{},
			"failed to verify certificate", "the other end does not trust this end's certificate",
		},
		{
			"no secret to give",
			[2]tcp.Config{{Authenticate: proves("a")}, {}},
			[2][]int{},
			"requests a proof, but this end has none", "authentication",
		},
		{
			"no secret to ask for",
			[2]tcp.Config{{}, {Authenticate: proves("a")}},
			[2][]int{},
			"the other end requests no proof", "",
		},
		{
			"plain to TLS",
			[2]tcp.Config{{TLS: secure}, {}},
			[2][]int{},
			"does not use TLS", "does not use TLS",
		},
		{
			"garbage",
			[2]tcp.Config{{TLS: secure}, {Dial: babble}},
			[2][]int{},
			"", "does not start with a Lockstep hello",
		},
		{
			"plain and proven to TLS",
			[2]tcp.Config{{TLS: secure, Authenticate: proves("a")}, {Authenticate: proves("a")}},
			[2][]int{},
			"it is not encrypted, and its process is not known to be on this host", "it is not encrypted",
		},
		{
			"TLS, and no secret to ask for",
			[2]tcp.Config{{TLS: secure}, {TLS: secure, Authenticate: proves("a")}},
			[2][]int{},
			"the other end requests no proof", "TLS: EOF",
		},
		{
			"TLS, and no secret to give",
			[2]tcp.Config{{TLS: secure, Authenticate: proves("a")}, {TLS: secure}},
			[2][]int{},
			"requests a proof, but this end has none", "authentication",
		},
		{
			"TLS to plain",
			[2]tcp.Config{{}, {TLS: secure}},
			[2][]int{},
			"it requests TLS, but this end has no TLS", "it requests TLS, but this end has no TLS",
		},
		{
			"TLS to plain and proven",
			[2]tcp.Config{{Authenticate: proves("a")}, {TLS: secure, Authenticate: proves("a")}},
			[2][]int{},
			"it requests TLS, but this end has no TLS", "it requests TLS, but this end has no TLS",
		},
		{
			"one host, by the word of one",
			[2]tcp.Config{{TLS: secure, Authenticate: proves("a")}, {TLS: secure, Authenticate: proves("a")}},
			[2][]int{nil, {0, 1}},
			"it is not encrypted, and its process is not known to be on this host", "it is not encrypted",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log lines
			var nodes []*tcp.Node
			var addrs []string
			for i, cfg := range c.cfg {
				cfg.Logger = slog.New(slog.DiscardHandler)
				if i == 0 {
					cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
				}
				n, err := tcp.Listen(cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer n.Close()
				nodes, addrs = append(nodes, n), append(addrs, n.Addr())
			}
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			dialing, enough := context.WithCancel(ctx)
			defer enough()
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			wg.Go(func() {
				_, err := nodes[0].Group(ctx, tcp.GroupConfig{Addrs: addrs, Local: []int{0}, SameHost: c.sameHost[0]})
				if c.logs != "" && (err == nil || !strings.Contains(err.Error(), "(last refused connection, from 127.0.0.1:")) {
					t.Errorf("rank 0 got %v", err)
				}
			})
			result := make(chan error, 1)
			wg.Go(func() {
				_, err := nodes[1].Group(dialing, tcp.GroupConfig{Addrs: addrs, Local: []int{1}, SameHost: c.sameHost[1]})
				result <- err
			})
			for c.logs != "" && !strings.Contains(log.String(), c.logs) {
				if time.Sleep(time.Millisecond); ctx.Err() != nil {
					t.Fatalf("rank 0 logs %s, want %q", log.String(), c.logs)
				}
			}
			if c.logs != "" && !strings.Contains(log.String(), "from=127.0.0.1:") {
				t.Errorf("the address is missing in %s", log.String())
			}
			if c.dials == "" {
				enough()
			}
			if err := <-result; err == nil || !strings.Contains(err.Error(), c.dials) {
				t.Errorf("rank 1 got %v, want %q", err, c.dials)
			}
		})
	}
	node, err := tcp.Listen(tcp.Config{TLS: secure})
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	group := tcp.GroupConfig{Addrs: []string{"h:1"}, Local: []int{0}, SameHost: []int{0}}
	if _, err := node.Group(context.Background(), group); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("ranks on one host without Authenticate: %v", err)
	}
}

// TestExchanged: an attacker on the path forwards the unencrypted starts of two connections, and then exchanges their
// ends. Each TLS connection joins two processes of the job, but not the two that the hellos name.
func TestExchanged(t *testing.T) {
	cfg := tcp.Config{TLS: authority(t), Authenticate: proves("a"), Logger: slog.New(slog.DiscardHandler)}
	var nodes []*tcp.Node
	var addrs []string
	var path path
	for range 3 {
		cfg.Dial = path.dial
		n, err := tcp.Listen(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
	}
	path.to = addrs[0]
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			if _, err := n.Group(ctx, tcp.GroupConfig{Addrs: addrs, Local: []int{i}}); err == nil {
				t.Errorf("rank %d has joined", i)
			}
		})
	}
	for nodes[0].Refused()["proof"] < 2 {
		if time.Sleep(time.Millisecond); ctx.Err() != nil {
			t.Fatalf("refused: %v, want both connections", nodes[0].Refused())
		}
	}
	cancel()
	wg.Wait()
	path.done.Wait()
}

// path forwards connections to one address, and exchanges the first two of them after the proof.
type path struct {
	to   string
	done sync.WaitGroup

	mu   sync.Mutex
	held [][2]net.Conn // dialer's side, acceptor's side
}

const (
	openOut = 80 + 64 // hello, nonce, proof
	openIn  = 1 + 64
)

func (p *path) dial(ctx context.Context, network, address string) (net.Conn, error) {
	far, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil || address != p.to {
		return far, err
	}
	dialer, near := net.Pipe()
	p.done.Go(func() {
		back := make(chan struct{})
		go func() {
			io.CopyN(near, far, openIn)
			close(back)
		}()
		io.CopyN(far, near, openOut)
		<-back
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.held = append(p.held, [2]net.Conn{near, far}); len(p.held) == 2 {
			p.join(p.held[0][0], p.held[1][1])
			p.join(p.held[1][0], p.held[0][1])
		}
	})
	return dialer, nil
}

func (p *path) join(a, b net.Conn) {
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		p.done.Go(func() {
			io.Copy(way[0], way[1])
			way[0].Close()
			way[1].Close()
		})
	}
}
