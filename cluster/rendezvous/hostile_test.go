package rendezvous_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/internal/listener"
)

// guarded returns the two sides' configurations for a job with a secret.
func guarded(t testing.TB, s secret.Secret, job string) (rendezvous.ServerConfig, rendezvous.Config) {
	t.Helper()
	cfg, err := s.TLS(job, 0)
	if err != nil {
		t.Fatal(err)
	}
	prove := s.Authenticate(secret.Store, job, 0)
	return rendezvous.ServerConfig{TLS: cfg, Authenticate: prove}, rendezvous.Config{
		TLS: cfg, Authenticate: prove,
		Logger: quiet,
	}
}

// TestSecrets: a client with another secret, without one, or with one for a store without gets an error at once, which
// names the reason.
func TestSecrets(t *testing.T) {
	a, b := secret.New(), secret.New()
	serverA, clientA := guarded(t, a, "digits")
	_, clientB := guarded(t, b, "digits")
	_, otherJob := guarded(t, a, "other")
	proofA, proofB := clientA, clientB
	proofA.TLS, proofB.TLS = nil, nil
	proofServer := serverA
	proofServer.TLS = nil
	for _, c := range []struct {
		name   string
		server rendezvous.ServerConfig
		client rendezvous.Config
		want   string // "": accepted
	}{
		{"the right secret", serverA, clientA, ""},
		{"another secret", serverA, clientB, "secret"},
		{"another job", serverA, otherJob, "job"},
		{"no secret", serverA, rendezvous.Config{}, "it does not use TLS, but this end requires TLS: it has no secret"},
		{"a secret for a store without", rendezvous.ServerConfig{}, clientA, "it requests TLS, but this end has no TLS"},
		{"plain, the right secret", proofServer, proofA, ""},
		{"plain, another secret", proofServer, proofB, "secret"},
		{"plain, no secret", proofServer, rendezvous.Config{}, "requests a proof"},
		{"plain, a secret for a store without", rendezvous.ServerConfig{}, proofA, "requests no proof"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := serve(t, c.server)
			c.client.Logger = quiet
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := rendezvous.Open(ctx, server.URL(), c.client)
			if err == nil {
				defer s.Close()
				err = s.Set(ctx, "k", nil)
			}
			switch {
			case c.want == "" && err != nil:
				t.Fatal(err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || ctx.Err() != nil):
				t.Fatalf("got %v, want %q in it, at once", err, c.want)
			}
		})
	}
}

// TestJoinWithWrongSecret: the workers that wait for one with the wrong secret get an error that names the refused
// connection.
func TestJoinWithWrongSecret(t *testing.T) {
	right, wrong := secret.New(), secret.New()
	serverConfig, client := guarded(t, right, "digits")
	_, other := guarded(t, wrong, "digits")
	server := serve(t, serverConfig)
	if _, err := rendezvous.Open(t.Context(), server.URL(), other); err == nil {
		t.Fatal("it was accepted")
	}
	ctx, end := context.WithCancelCause(t.Context())
	time.AfterFunc(0, func() { // the deadline, when all that can have joined
		s := server.Store()
		defer s.Close()
		if _, _, err := s.Changes(ctx, "@refused", 0); err != nil {
			t.Error(err)
		}
		if _, err := s.Wait(ctx, rendezvous.Key("digits", 0, "worker/join/registration/"), 2); err != nil {
			t.Error(err)
		}
		end(context.DeadlineExceeded)
	})
	handle := func() rendezvous.Store { return open(t, server.URL(), client) }
	for _, r := range joinAll(ctx, handle, time.Hour, registration(0, 3), registration(2, 3)) {
		wantJoinError(t, r.err, rendezvous.Missing, "missing: worker 1", "the store refused a connection from 127.0.0.1:",
			"(proof): authentication: its proof is wrong")
	}
}

// TestHostile: thousands of connections of all kinds that do not belong to the job, while clients work: these are not
// affected, memory does not grow, and the log stays short.
func TestHostile(t *testing.T) {
	total := 2000
	if testing.Short() {
		total = 300
		t.Log("-short: 300 connections instead of 2,000")
	}
	s := secret.New()
	serverConfig, client := guarded(t, s, "digits")
	var log lines
	serverConfig.Logger = slog.New(slog.NewTextHandler(&log, nil))
	server, err := rendezvous.Serve(t.Context(), serverConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)

	start := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	var work sync.WaitGroup
	var done [2]int
	for i := range done {
		u := open(t, server.URL(), client)
		defer u.Close()
		work.Go(func() {
			for ctx.Err() == nil {
				if err := u.Set(t.Context(), "n", nil); err != nil {
					t.Errorf("after %d: %v", done[i], err)
					return
				}
				done[i]++
			}
		})
	}
	before := usage()
	var strangers sync.WaitGroup
	slots := make(chan struct{}, 150)
	for i := range total {
		slots <- struct{}{}
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		strangers.Go(func() {
			attack(server.Addr(), random)
			<-slots
		})
		if i == total/2 {
			if after := usage(); after.goroutines > before.goroutines+1500 || after.heap > before.heap+256<<20 {
				t.Errorf("%+v under attack, %+v before", after, before)
			}
		}
	}
	strangers.Wait()
	stop()
	work.Wait()
	if done[0] == 0 || done[1] == 0 {
		t.Errorf("the clients made %v changes meanwhile", done)
	}
	refused := uint64(0)
	for ended := time.Now(); refused < uint64(total)*9/10 && time.Since(ended) < time.Minute; { // some are counted later
		time.Sleep(time.Millisecond)
		refused = 0
		for _, n := range server.Refused() {
			refused += n
		}
	}
	t.Logf("%v refused; %v changes were made meanwhile, in %v", server.Refused(), done, time.Since(start))
	if refused < uint64(total)*9/10 {
		t.Errorf("%d of %d were refused: %v", refused, total, server.Refused())
	}
	const kinds = 5 // magic, damaged, service, proof, slow
	if n, most := log.count(), kinds*(int(time.Since(start)/time.Second)+2); n == 0 || n > most ||
		!strings.Contains(log.String(), "from=127.0.0.1:") {
		t.Errorf("%d lines in the log, want 1 to %d, with addresses:\n%s", n, most, log.String())
	}
}

// attack makes one connection of a stranger without the secret.
func attack(address string, random *rand.Rand) {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	hello := (&listener.Hello{Service: listener.Store, Secure: true}).Encode()
	switch random.IntN(8) {
	case 0: // garbage
		b := make([]byte, 1+random.IntN(4096))
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		c.Write(b)
	case 1: // another protocol
		c.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
	case 2: // silence, then the end
		time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond)
		return
	case 3: // another secret's certificate, at once or after a hello
		if cfg, err := secret.New().TLS("digits", 0); err == nil {
			if random.IntN(2) == 0 {
				c.Write(hello)
			}
			cfg.VerifyConnection = nil
			tls.Client(c, cfg).Handshake()
		}
		return
	case 4: // no TLS where it is required, with a frame that claims 4 GiB
		hello = (&listener.Hello{Service: listener.Store}).Encode()
		c.Write(binary.LittleEndian.AppendUint32(hello, 1<<32-1))
	case 5: // another secret's proof
		c.Write(hello)
		if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
			secret.New().Authenticate(secret.Store, "digits", 0)(c, true, hello)
		}
		return
	case 6: // another service
		c.Write((&listener.Hello{Service: listener.Data}).Encode())
	case 7: // TLS records that are too long
		c.Write(append([]byte{0x16, 3, 1, 0xff, 0xff}, bytes.Repeat([]byte{1}, 1<<16)...))
	}
	c.Read(make([]byte, 256))
}

// TestInvalidRequest: the connection of an authenticated client that sends an invalid request is closed and counted,
// whether it is too long or not.
func TestInvalidRequest(t *testing.T) {
	le := binary.LittleEndian
	for name, bad := range map[string][]byte{
		"oversized":    le.AppendUint32(nil, 1<<31),
		"short":        append(le.AppendUint32(nil, 3), 1, 2, 3),
		"no operation": append(le.AppendUint32(nil, 28), make([]byte, 28)...),
		"a wrong key":  append(append(append(le.AppendUint32(nil, 32), 2, 0, 4, 0), make([]byte, 24)...), "@own"...),
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, rendezvous.ServerConfig{})
			var raw net.Conn
			s := open(t, server.URL(), rendezvous.Config{Dial: func(ctx context.Context, network, address string) (c net.Conn,
				err error,
			) {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				raw = c
				return c, err
			}})
			defer s.Close()
			if _, err := raw.Write(bad); err != nil {
				t.Fatal(err)
			}
			// The client's calls continue over another connection.
			for server.Refused()["frame"] == 0 {
				if err := s.Set(t.Context(), "k", nil); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestManyWaits: a connection may have only so many waits at a time; more are refused.
func TestManyWaits(t *testing.T) {
	s := open(t, serve(t, rendezvous.ServerConfig{}).URL(), rendezvous.Config{})
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	refused := make(chan error, 300)
	for range 257 {
		work.Go(func() {
			if _, _, err := s.Changes(ctx, "k", 0); !errors.Is(err, context.Canceled) {
				refused <- err
			}
		})
	}
	if err := <-refused; err == nil || !strings.Contains(err.Error(), "too many concurrent calls") {
		t.Errorf("got %v", err)
	}
	cancel()
	work.Wait()
	if n := len(refused); n > 0 {
		t.Errorf("%d more were refused", n)
	}
	if err := s.Set(t.Context(), "k", nil); err != nil {
		t.Error(err)
	}
}

type used struct {
	goroutines int
	heap       uint64
}

func usage() used {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return used{runtime.NumGoroutine(), m.HeapInuse}
}

// lines collects a log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *lines) count() int { return strings.Count(l.String(), "\n") }
