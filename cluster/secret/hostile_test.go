package secret_test

import (
	"context"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/transport/tcp"
)

// attack is a kind of hostile connection; run returns when either end has closed it, or it is kept.
type attack struct {
	name string
	run  func(c net.Conn, r *rand.Rand, a *attacker)
}

// attacker has recorded all traffic, and does not have the secret.
type attacker struct {
	tapes    map[string][][]byte // by address: what workers sent on connections to it
	otherJob []byte              // what a worker of another job sent
	wrong    secret.Secret

	mu   sync.Mutex
	held []net.Conn // open connections
	kept map[net.Conn]bool
}

var attacks = []attack{
	{"garbage", func(c net.Conn, r *rand.Rand, a *attacker) {
		c.Write(random(r, 1+r.IntN(4000)))
		a.linger(c)
	}},
	{"garbage that begins like TLS", func(c net.Conn, r *rand.Rand, a *attacker) {
		c.Write(append([]byte{0x16, 3, 1}, random(r, 1+r.IntN(4000))...))
		a.linger(c)
	}},
	{"slow", func(c net.Conn, r *rand.Rand, a *attacker) {
		c.Write([][]byte{nil, {0x16}, {0x16, 3, 1, 2, 0, 1}, []byte("L"), []byte("LOCKSTEP")}[r.IntN(5)])
		a.keep(c)
	}},
	{"oversized", func(c net.Conn, r *rand.Rand, a *attacker) {
		// A TLS handshake message of 16 MiB, in records of 16 KiB, or a hello that does not end.
		record := append([]byte{0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, make([]byte, 1<<14-4)...)
		if r.IntN(2) == 0 {
			record = append([]byte("LOCKSTEP"), make([]byte, 1<<14)...)
		}
		for range 64 {
			if _, err := c.Write(record); err != nil {
				return
			}
		}
		a.linger(c)
	}},
	{"TLS at once", func(c net.Conn, _ *rand.Rand, a *attacker) { a.handshake(c) }},
	{"wrong certificate", func(c net.Conn, r *rand.Rand, a *attacker) {
		if a.sendHello(c, r) {
			a.handshake(c)
		}
	}},
	{"wrong secret", func(c net.Conn, r *rand.Rand, a *attacker) {
		if a.sendHello(c, r) {
			a.wrong.Authenticate(secret.Group, job, 0)(c, true, a.recordedFor(c)[0][:helloBytes])
		}
	}},
	{"other job", func(c net.Conn, _ *rand.Rand, a *attacker) {
		c.Write(a.otherJob)
		a.linger(c)
	}},
	{"replay", func(c net.Conn, r *rand.Rand, a *attacker) {
		all := a.recordedFor(c)
		c.Write(all[r.IntN(len(all))])
		a.linger(c)
	}},
	{"a valid hello, then nothing", func(c net.Conn, r *rand.Rand, a *attacker) {
		if a.sendHello(c, r) {
			a.keep(c)
		}
	}},
}

const (
	helloBytes = 80 // docs/wire.md
	secureAt   = 11 // in it: whether TLS follows
)

// sendHello sends a recorded hello, and reads the request for a proof.
func (a *attacker) sendHello(c net.Conn, r *rand.Rand) bool {
	all := a.recordedFor(c)
	c.Write(all[r.IntN(len(all))][:helloBytes])
	var next [1]byte
	_, err := io.ReadFull(c, next[:])
	return err == nil && next[0] == 'A'
}

// handshake begins TLS with a certificate of another secret.
func (a *attacker) handshake(c net.Conn) {
	cfg, err := a.wrong.TLS(job, 0)
	if err != nil {
		panic(err)
	}
	cfg.VerifyConnection = nil // it accepts any certificate
	if s := tls.Client(c, cfg); s.Handshake() == nil {
		panic("TLS with another secret")
	}
}

// recordedFor returns what workers sent to the other end, or to any, if that one was not dialed.
func (a *attacker) recordedFor(c net.Conn) [][]byte {
	if all := a.tapes[c.RemoteAddr().String()]; len(all) > 0 {
		return all
	}
	return slices.Concat(slices.Collect(maps.Values(a.tapes))...)
}

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// linger waits a moment for the other end to close the connection, and keeps it open if it does not.
func (a *attacker) linger(c net.Conn) {
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		a.keep(c)
	}
}

// keep keeps a connection open, along with the latest others.
func (a *attacker) keep(c net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.kept[c] = true
	if a.held = append(a.held, c); len(a.held) > heldMax {
		a.held[0].Close()
		delete(a.kept, a.held[0])
		a.held = a.held[1:]
	}
}

const heldMax = 400 // more than a node allows

func (a *attacker) release() {
	for _, c := range a.held {
		c.Close()
	}
}

// TestHostile: thousands of hostile connections to a job of three processes, two of which share a host, while they
// reduce and make new groups: the result is the same, nothing grows, and the log names the attackers in few lines.
func TestHostile(t *testing.T) {
	total := 10_000
	if testing.Short() {
		total = 1000
		t.Logf("%d connections in the short run, instead of 10,000", total)
	}
	s := secret.New()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var all []*process
	for r, host := range []string{"a", "a", "b"} {
		all = append(all, start(t, worker{Rank: r, Size: 3, Secret: s.Text(), Encrypt: true, Host: host}, nil))
	}
	joinAll(t, all)
	const batch = 5
	ask(t, all, "train %d", batch)
	steps := batch
	before := reports(t, all)

	a := newAttacker(t, s, all...)
	began := time.Now()
	over := make(chan struct{})
	go func() {
		defer close(over)
		a.run(t, all, total, seed)
	}()
	most := append([]usage{}, before...)
	var hashes []string
	for attacked := true; attacked; {
		select {
		case <-over:
			attacked = false
		default:
		}
		hashes = ask(t, all, "train %d", batch)
		steps += batch
		for i, u := range reports(t, all) {
			most[i] = usage{max(most[i].Memory, u.Memory), max(most[i].Goroutines, u.Goroutines), max(most[i].Files, u.Files)}
		}
	}
	a.release()

	want := trained(t, 3, steps)
	for r, got := range hashes {
		if got != want {
			t.Errorf("rank %d has %s after %d steps, want %s", r, got, steps, want)
		}
	}
	for r := range all {
		t.Logf("rank %d, %d steps: at first %+v, at most %+v", r, steps, before[r], most[r])
		const half = 128 // tcp.Config.HalfOpen
		if most[r].Memory > before[r].Memory+64<<20 || most[r].Goroutines > before[r].Goroutines+3*half ||
			most[r].Files > before[r].Files+2*half {
			t.Errorf("rank %d: %+v became %+v", r, before[r], most[r])
		}
	}
	checkLogs(t, all, time.Since(began))
	ask(t, all, "leave")
}

// reports returns the resource usage of every worker.
func reports(t *testing.T, all []*process) []usage {
	t.Helper()
	out := make([]usage, len(all))
	for i, text := range ask(t, all, "report") {
		if err := json.Unmarshal([]byte(text), &out[i]); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// newAttacker returns an attacker that has recorded what the workers sent.
func newAttacker(t testing.TB, s secret.Secret, all ...*process) *attacker {
	t.Helper()
	a := &attacker{tapes: map[string][][]byte{}, kept: map[net.Conn]bool{}, wrong: secret.New(), otherJob: recorded(t, s,
		"another job", nil)}
	if len(all) == 0 {
		return a
	}
	plain := 0
	for _, text := range ask(t, all, "tapes") {
		for f := strings.Fields(text); len(f) > 1; f = f[2:] {
			sent, err := hex.DecodeString(f[1])
			if err != nil {
				t.Fatal(err)
			}
			if a.tapes[f[0]] = append(a.tapes[f[0]], sent); sent[secureAt] == 0 {
				plain++
			}
		}
	}
	if len(a.tapes) != 2 || plain == 0 {
		t.Fatalf("tapes of %d workers with %d in plain text, want two who are dialed, one in plain text", len(a.tapes), plain)
	}
	return a
}

// run makes the connections, many at a time.
func (a *attacker) run(t *testing.T, all []*process, total int, seed uint64) {
	var addrs []string
	for _, p := range all {
		addrs = append(addrs, p.addr)
	}
	next := make(chan int)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for i := range next {
				a.one(t, addrs, i, seed)
			}
		})
	}
	for i := range total {
		next <- i
	}
	close(next)
	wg.Wait()
}

// one makes the i-th connection.
func (a *attacker) one(t testing.TB, addrs []string, i int, seed uint64) {
	r := rand.New(rand.NewPCG(seed, uint64(i)))
	kind := attacks[i%len(attacks)]
	c, err := net.Dial("tcp", addrs[i/len(attacks)%len(addrs)])
	if err != nil {
		t.Errorf("hostile connection %d (%s) fails: %v", i, kind.name, err)
		return
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	kind.run(c, r, a)
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.kept[c] {
		c.Close()
	}
}

// checkLogs checks the workers' logs: at most one line a second for each kind of refusal.
func checkLogs(t *testing.T, all []*process, took time.Duration) {
	t.Helper()
	for _, p := range all {
		log := p.log.String()
		for _, want := range []string{"from=127.0.0.1:", "kind=proof", "kind=magic", "of_this_kind="} {
			if !strings.Contains(log, want) {
				t.Errorf("rank %d does not log %q", p.worker.Rank, want)
			}
		}
		const kinds = 13
		if n := strings.Count(log, "\n"); n > kinds*(1+int(took.Seconds())) {
			t.Errorf("rank %d has logged %d lines in %v", p.worker.Rank, n, took)
		}
	}
}

// TestLogs: the log line of each kind of hostile connection.
func TestLogs(t *testing.T) {
	s := secret.New()
	for name, want := range map[string][]string{
		"garbage":                      {"kind=magic", "does not start with a Lockstep hello"},
		"garbage that begins like TLS": {"kind=magic"},
		"oversized":                    {"kind="},
		"TLS at once":                  {"kind=magic"},
		"wrong certificate":            {"kind=proof", "authentication: its proof is wrong"},
		"wrong secret": {
			"kind=proof",
			"authentication: its proof is wrong: it has another secret, job or epoch",
		},
		"other job": {"kind=job", `it belongs to another job; this one is \"job under test\"`},
		"replay":    {"kind=proof", "authentication: its proof is wrong"},
	} {
		t.Run(name, func(t *testing.T) {
			var log lines
			secure, err := s.TLS(job, 0)
			if err != nil {
				t.Fatal(err)
			}
			node, err := tcp.Listen(tcp.Config{
				Job: job, TLS: secure, Authenticate: s.Authenticate(secret.Group, job, 0),
				Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			defer node.Close()
			a := newAttacker(t, s)
			defer a.release()
			a.tapes[node.Addr()] = [][]byte{recorded(t, s, job, nil), recorded(t, s, job, []int{0, 1})}
			i := slices.IndexFunc(attacks, func(a attack) bool { return a.name == name })
			since := time.Now()
			for seed := uint64(0); ; seed++ {
				a.one(t, []string{node.Addr()}, i, seed)
				logged := log.String()
				if !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(logged, w) }) {
					break
				}
				if time.Since(since) > 2*time.Minute {
					t.Fatalf("the log is %s, want %q", logged, want)
				}
				time.Sleep(100 * time.Millisecond) // a line a second
			}
			if !strings.Contains(log.String(), "from=127.0.0.1:") {
				t.Errorf("the address is missing in %s", log.String())
			}
		})
	}
}

// recorded returns what a worker of a job sends first, over TLS or to a process of the same host.
func recorded(t testing.TB, s secret.Secret, job string, sameHost []int) []byte {
	t.Helper()
	var tape tapes
	secure, err := s.TLS(job, 0)
	if err != nil {
		t.Fatal(err)
	}
	var nodes []*tcp.Node
	var addrs []string
	for range 2 {
		n, err := tcp.Listen(tcp.Config{
			Job: job, TLS: secure, Authenticate: s.Authenticate(secret.Group, job, 0),
			Dial: tape.dial,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		nodes, addrs = append(nodes, n), append(addrs, n.Addr())
	}
	var wg sync.WaitGroup
	for r, n := range nodes {
		wg.Go(func() {
			if _, err := n.Group(context.Background(), tcp.GroupConfig{
				Addrs: addrs, Local: []int{r},
				SameHost: sameHost,
			}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	first := tape.all[0]
	first.mu.Lock()
	defer first.mu.Unlock()
	return slices.Clone(first.wrote)
}
