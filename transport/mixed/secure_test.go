package mixed_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// taps records whether the hello of each connection requests TLS, by dialer and acceptor.
type taps struct {
	mu    sync.Mutex
	of    map[string]int // process by address
	first map[string]bool
}

func (t *taps) dial(from int) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &tap{Conn: c, taps: t, from: from, to: address}, nil
	}
}

type tap struct {
	net.Conn
	taps *taps
	from int
	to   string
	once sync.Once
}

func (c *tap) Write(p []byte) (int, error) {
	c.once.Do(func() {
		c.taps.mu.Lock()
		defer c.taps.mu.Unlock()
		c.taps.first[fmt.Sprintf("%d-%d %s", c.taps.of[c.to], c.from, [...]string{"plain", "TLS"}[p[11]])] = true
	})
	return c.Conn.Write(p)
}

// TestSecure: connections between hosts are encrypted, those on one host are not, whether memory is shared there or
// not.
func TestSecure(t *testing.T) {
	if shm.HostID() == "" {
		t.Skip("processes cannot prove here that they are on one host")
	}
	s := secret.New()
	for _, c := range []struct {
		name   string
		hosts  []string // of each process
		memory []bool
		plain  bool   // without TLS
		want   string // the expected connections
	}{
		{
			"two hosts of two",
			[]string{"a", "a", "b", "b"},
			[]bool{true, true, true, true},
			false,
			`0-1 plain, 0-2 TLS, 0-3 TLS, 1-2 TLS, 1-3 TLS, 2-3 plain`,
		},
		{
			"two hosts, no shared memory",
			[]string{"a", "b", "a"},
			[]bool{false, false, false},
			false,
			`0-1 TLS, 0-2 plain, 1-2 TLS`,
		},
		{
			"shared memory for some",
			[]string{"a", "a", "a"},
			[]bool{true, false, true},
			false,
			`0-1 plain, 0-2 plain, 1-2 plain`,
		},
		{"plain text", []string{"a", "b"}, []bool{true, true}, true, `0-1 plain`},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := len(c.hosts)
			exchanges := transporttest.Exchanges(n)
			seen := taps{of: map[string]int{}, first: map[string]bool{}}
			ends := make([]transport.Endpoint, n)
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			var wg sync.WaitGroup
			for p := range n {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				seen.of[l.Addr().String()] = p
				cfg := mixed.Config{
					Ranks: []int{p}, Size: n, Exchange: exchanges[p], Apart: c.hosts[p], NoSharedMemory: !c.memory[p],
					TCP: tcp.Config{
						Job: "test", Authenticate: s.Authenticate(secret.Group, "test", 0), Listener: l,
						Dial: seen.dial(p), Logger: slog.New(slog.DiscardHandler),
					},
				}
				if !c.plain {
					if cfg.TCP.TLS, err = s.TLS("test", 0); err != nil {
						t.Fatal(err)
					}
				}
				wg.Go(func() {
					out, err := mixed.Open(ctx, cfg)
					if err != nil {
						t.Errorf("process %d: %v", p, err)
						return
					}
					ends[p] = out[0]
				})
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			for p, e := range ends {
				wg.Go(func() {
					in := make([]byte, 1)
					if err := e.Exchange(ctx, (p+1)%n, transport.Frame{Data: []byte{byte(p)}}, (p+n-1)%n, in); err != nil ||
						int(in[0]) != (p+n-1)%n {
						t.Errorf("rank %d: %v, %v", p, in, err)
					}
				})
			}
			wg.Wait()
			var got []string
			for k := range seen.first {
				got = append(got, k)
			}
			slices.Sort(got)
			if strings.Join(got, ", ") != c.want {
				t.Errorf("connections: %s, want %s", strings.Join(got, ", "), c.want)
			}
			for _, e := range ends {
				e.Close()
			}
		})
	}
}

// TestOtherSecret: a process that claims to be on this host and has another secret is refused, and reports it; the
// other keeps waiting.
func TestOtherSecret(t *testing.T) {
	if shm.HostID() == "" {
		t.Skip("processes cannot share memory on this system")
	}
	for _, memory := range []bool{true, false} {
		exchanges := transporttest.Exchanges(2)
		var wg sync.WaitGroup
		all, enough := context.WithTimeout(context.Background(), 2*time.Minute)
		defer enough()
		for p, want := range []string{"waiting for ranks [1]", "authentication: the other end refuses this end's proof"} {
			s := secret.New()
			secure, err := s.TLS("test", 0)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				if p == 1 {
					defer enough() // the refused process has ended; the other would wait without limit
				}
				_, err := mixed.Open(all, mixed.Config{
					Ranks: []int{p}, Size: 2, Exchange: exchanges[p], NoSharedMemory: !memory,
					TCP: tcp.Config{
						Job: "test", TLS: secure, Authenticate: s.Authenticate(secret.Group, "test", 0),
						Logger: slog.New(slog.DiscardHandler),
					},
				})
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("shared memory %v, process %d: %v, want %q", memory, p, err, want)
				}
			})
		}
		wg.Wait()
	}
}
