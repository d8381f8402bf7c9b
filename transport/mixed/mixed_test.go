package mixed_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/transporttest"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mixed"
	"github.com/lockstep-ml/lockstep/transport/shm"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// mode says how the ranks of a test's group are spread.
type mode struct {
	name   string
	each   int                // ranks of a process
	apart  func(p int) string // the host of a process; nil: no shared memory at all
	domain func(n, rank int) int
	reach  string // what Describe says of rank 0 and rank 3 of 5
	where  string // what Transport says then
}

func oneHost(int) string { return "" }

var modes = []mode{
	{"processes of two ranks", 2, nil, transporttest.Pairs, "tcp", "mem+tcp"},
	{"processes of one rank", 1, nil, nil, "tcp", "tcp"},
	{"one process", 8, nil, transporttest.OneDomain, "mem", "mem"},
	{"one host", 1, oneHost, transporttest.OneDomain, "shm", "shm"},
	{
		"hosts of two processes", 1, func(p int) string { return string(rune('a' + p/2)) }, transporttest.Pairs, "tcp",
		"shm+tcp",
	},
}

// open makes a group of n ranks.
func (m *mode) open(t testing.TB, n int) []transport.Endpoint {
	t.Helper()
	if m.apart != nil && shm.HostID() == "" {
		t.Skip("processes cannot share memory on this system")
	}
	processes := (n + m.each - 1) / m.each
	exchanges := transporttest.Exchanges(processes)
	out := make([]transport.Endpoint, n)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for p := range processes {
		wg.Go(func() {
			cfg := mixed.Config{
				Size: n, Epoch: 5, Exchange: exchanges[p], NoSharedMemory: m.apart == nil,
				TCP: tcp.Config{Job: "test", Logger: slog.New(slog.DiscardHandler)},
			}
			if m.apart != nil {
				cfg.Apart = m.apart(p)
			}
			for r := p * m.each; r < min(n, (p+1)*m.each); r++ {
				cfg.Ranks = append(cfg.Ranks, r)
			}
			ends, err := mixed.Open(ctx, cfg)
			if err != nil {
				t.Errorf("process %d: %v", p, err)
			}
			copy(out[p*m.each:], ends)
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return out
}

func TestConformance(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			if !strings.Contains(m.where, "+") && testing.Short() {
				t.Skip("all these ends are another package's, which tries them itself")
			}
			transporttest.Run(t, transporttest.Transport{
				Open:      func(t *testing.T, n int) []transport.Endpoint { return m.open(t, n) },
				Domain:    m.domain,
				Processes: m.apart != nil,
				Buffers:   true,
			})
		})
	}
}

func TestBy(t *testing.T) {
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			ends := m.open(t, 5)
			if got := mixed.By(ends[0], 3); got != m.reach {
				t.Errorf("rank 3 is reached by %s, want %s", got, m.reach)
			}
			if got := ends[0].Transport(); got != m.where {
				t.Errorf("Transport is %q, want %q", got, m.where)
			}
			places := ends[0].Capabilities().Places
			for r, p := range places {
				for s, q := range places {
					if together := m.domain != nil && m.domain(5, r) == m.domain(5, s) || r == s; together != (p.Domain == q.Domain) {
						t.Errorf("ranks %d and %d are at %+v and %+v", r, s, p, q)
					}
				}
			}
			for _, e := range ends {
				e.Close()
			}
		})
	}
}

// TestStagingBuffers: they are equally long in all domains, whatever their kind.
func TestStagingBuffers(t *testing.T) {
	for _, m := range modes {
		ends := m.open(t, 5)
		var lengths []int
		for _, e := range ends {
			if e.Memory() != nil {
				lengths = append(lengths, len(e.Memory().StagingBuffer(e.Rank())))
			}
		}
		for _, n := range lengths {
			if n != lengths[0] || n < 64<<10 {
				t.Errorf("%s: staging buffers of %v bytes", m.name, lengths)
				break
			}
		}
		for _, e := range ends {
			e.Close()
		}
	}
}

func anybody(net.Conn, bool, []byte) error { return nil }

// TestBadRegistrations: processes whose registrations conflict all get an error, and none hangs.
func TestBadRegistrations(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  [2]mixed.Config
		want string
	}{
		{
			"one rank twice",
			[2]mixed.Config{{Size: 3, Ranks: []int{0, 1}}, {Size: 3, Ranks: []int{1, 2}}},
			"both claim rank 1",
		},
		{
			"a rank of no process",
			[2]mixed.Config{{Size: 3, Ranks: []int{0}}, {Size: 3, Ranks: []int{2}}},
			"no process has rank 1 of 3",
		},
		{"another size", [2]mixed.Config{{Size: 2, Ranks: []int{0}}, {Size: 3, Ranks: []int{1}}}, "is in epoch 0 with"},
		{"another epoch", [2]mixed.Config{{Size: 2, Ranks: []int{0}}, {Size: 2, Ranks: []int{1}, Epoch: 1}}, "is in epoch"},
		{
			"another job",
			[2]mixed.Config{{Size: 2, Ranks: []int{0}}, {Size: 2, Ranks: []int{1}, TCP: tcp.Config{Job: "x"}}},
			`job "x"`,
		},
		{"no secret", [2]mixed.Config{
			{Size: 2, Ranks: []int{0}, TCP: tcp.Config{Authenticate: anybody}},
			{Size: 2, Ranks: []int{1}},
		}, "all need the same secret"},
		{"plain text", [2]mixed.Config{
			{Size: 2, Ranks: []int{0}, TCP: tcp.Config{TLS: &tls.Config{}}},
			{Size: 2, Ranks: []int{1}},
		}, "sends data in plain text"},
	} {
		exchanges := transporttest.Exchanges(2)
		var wg sync.WaitGroup
		for p, cfg := range c.cfg {
			cfg.Exchange = exchanges[p]
			wg.Go(func() {
				if _, err := mixed.Open(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s: process %d got %v, want %q", c.name, p, err, c.want)
				}
			})
		}
		wg.Wait()
	}
	for _, cfg := range []mixed.Config{
		{},
		{Size: 2, Ranks: []int{1, 0}},
		{Size: 2, Ranks: []int{2}},
		{Size: 2, Ranks: []int{0}},
	} {
		if _, err := mixed.Open(context.Background(), cfg); err == nil {
			t.Errorf("Open with ranks %v of %d and no Exchange: no error", cfg.Ranks, cfg.Size)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	cfg := mixed.Config{Size: 2, Ranks: []int{0}, Exchange: transporttest.Exchanges(2)[0]}
	if _, err := mixed.Open(ctx, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no other process joins: %v", err)
	}
}

// TestCollect: children that know only their parent learn of each other.
func TestCollect(t *testing.T) {
	var children []io.ReadWriter
	var wg sync.WaitGroup
	for i := range 3 {
		a, b := net.Pipe()
		children = append(children, a)
		wg.Go(func() {
			defer b.Close()
			all, err := mixed.Through(b)(context.Background(), bytes.Repeat([]byte{byte(i)}, i*1000))
			if err != nil || len(all) != 3 || len(all[2]) != 2000 || len(all[0]) != 0 {
				t.Errorf("child %d: %v", i, err)
			}
		})
	}
	if err := mixed.Collect(children); err != nil {
		t.Error(err)
	}
	wg.Wait()
	a, b := net.Pipe()
	go func() { b.Write([]byte{255, 255, 255, 255}); b.Close() }()
	if err := mixed.Collect([]io.ReadWriter{a}); err == nil || !strings.Contains(err.Error(), "want at most") {
		t.Errorf("a registration that claims 4 GiB: %v", err)
	}
	a.Close()
}

// TestAddressReused: a group whose node is closed does not affect a later group with the same address.
func TestAddressReused(t *testing.T) {
	if shm.HostID() == "" {
		t.Skip("processes cannot share memory on this system")
	}
	l, err := net.Listen("tcp", "127.83.83.83:0") // an unused loopback address
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	for range 2 {
		exchanges := transporttest.Exchanges(2)
		var all sync.WaitGroup
		for p, listen := range []string{l.Addr().String(), "127.0.0.1:0"} {
			all.Go(func() {
				cfg := mixed.Config{
					Ranks: []int{p}, Size: 2, Epoch: 5, Exchange: exchanges[p],
					TCP: tcp.Config{Job: "test", Listen: listen, Logger: slog.New(slog.DiscardHandler)},
				}
				ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
				defer cancel()
				ends, err := mixed.Open(ctx, cfg)
				if err != nil {
					t.Errorf("process %d: %v", p, err)
					return
				}
				t.Cleanup(func() { ends[0].Close() }) // not before the other group is there
			})
		}
		all.Wait()
	}
}
