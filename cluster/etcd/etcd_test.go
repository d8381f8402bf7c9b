package etcd

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// openAt opens a store below /p; the first of its addresses does not answer.
func openAt(t *testing.T, s *server, login Config, timeout time.Duration) rendezvous.Store {
	t.Helper()
	open := Opener(login)
	r, err := rendezvous.Open(t.Context(), "etcd://127.0.0.1:1,"+s.address+"/p", rendezvous.Config{
		ReconnectTimeout: timeout, Schemes: map[string]rendezvous.Opener{"etcd": open},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func TestConformance(t *testing.T) {
	storetest.Run(t, storetest.Stores{Slow: true, New: func(t *testing.T) func() rendezvous.Store {
		s := newServer(t)
		return func() rendezvous.Store {
			r, err := rendezvous.Open(t.Context(), "etcd://"+s.address+"/p", rendezvous.Config{Schemes: Schemes()})
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
	}})
}

// TestRetries: calls are repeated after errors that pass, cut connections and expired tokens, but never a change that
// may have been made.
func TestRetries(t *testing.T) {
	t.Parallel() // it mostly waits to retry
	s := newServer(t)
	s.auth = true
	r := openAt(t, s, Config{Username: "me", Password: "pw"}, time.Minute)
	get := func(name string) {
		t.Helper()
		if v, revision, err := r.Get(t.Context(), "k"); string(v) != "v" || revision != 2 || err != nil {
			t.Errorf("%s: got %q, %d, %v", name, v, revision, err)
		}
	}
	if err := r.Set(t.Context(), "k", []byte("v")); err != nil {
		t.Fatal(err)
	}
	get("without faults")
	s.mu.Lock()
	s.token = "another" // the client's has expired
	s.mu.Unlock()
	get("with a new token")
	s.fail(slices.Repeat([]error{noLeader}, 2*tokenAttempts)...)
	get("after errors")
	s.fail(errCut, noLeader, errCut)
	get("after cuts")
	s.cut(true)
	for conn := r.(*store).client.ActiveConnection(); conn.GetState() == connectivity.Ready; {
		time.Sleep(time.Millisecond)
	}
	time.AfterFunc(3*retryPause, func() { s.cut(false) })
	if err := r.Set(t.Context(), "sent when the connection is back", nil); err != nil {
		t.Error(err)
	}
	for _, fault := range []error{errCut, noLeader} {
		before := s.revision()
		s.fail(fault)
		if err := r.Set(t.Context(), "x", nil); err == nil || errors.Is(err, rendezvous.ErrLost) {
			t.Errorf("a change that may have been made, after %v: %v", fault, err)
		}
		if s.revision() != before {
			t.Errorf("after %v it was made again", fault)
		}
	}
	if err := r.Set(t.Context(), "x", nil); err != nil {
		t.Error(err)
	}
}

// TestLost: an etcd that does not answer for longer than ReconnectTimeout is lost, for calls and for watches.
func TestLost(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	r := openAt(t, s, Config{}, 50*time.Millisecond)
	s.fail(slices.Repeat([]error{noLeader}, 1000)...)
	if _, _, err := r.Get(t.Context(), "k"); !errors.Is(err, rendezvous.ErrLost) ||
		!strings.Contains(err.Error(), "no leader") {
		t.Errorf("got %v, want %v", err, rendezvous.ErrLost)
	}
	s.fail()
	lost := make(chan error)
	begun := s.watches.Load()
	go func() {
		_, _, err := r.Changes(t.Context(), "k", 1)
		lost <- err
	}()
	for s.watches.Load() == begun {
		time.Sleep(time.Millisecond)
	}
	s.cut(true)
	if err := <-lost; !errors.Is(err, rendezvous.ErrLost) || !strings.Contains(err.Error(), s.address) {
		t.Errorf("a watch: got %v, want %v", err, rendezvous.ErrLost)
	}
	for name, call := range map[string]func() error{
		"a read":   func() error { _, _, err := r.Get(t.Context(), "k"); return err },
		"a change": func() error { return r.Set(t.Context(), "k", nil) },
	} {
		if err := call(); !errors.Is(err, rendezvous.ErrLost) {
			t.Errorf("%s: got %v, want %v", name, err, rendezvous.ErrLost)
		}
	}
	s.cut(false)
	for { // it is back, but its connection may take longer than the 50 ms
		err := r.Set(t.Context(), "k", nil)
		if err == nil {
			break
		}
		if !errors.Is(err, rendezvous.ErrLost) {
			t.Fatal(err)
		}
	}
}

// TestErrors: what cannot succeed later is an error at once, the rest when ctx ends, with the last attempt's error.
func TestErrors(t *testing.T) {
	t.Parallel()
	open := func(ctx context.Context, url string, login Config) error {
		r, err := rendezvous.Open(ctx, url, rendezvous.Config{Schemes: map[string]rendezvous.Opener{"etcd": Opener(login)}})
		if err == nil {
			err = errors.Join(errors.New("opened"), r.Close())
		}
		return err
	}
	for _, bad := range []string{"host:http", "", "host", "h:1,,h:2", ":1"} {
		if err := open(t.Context(), "etcd://"+bad, Config{}); !strings.Contains(err.Error(), "want host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	s := newServer(t)
	s.auth = true
	for want, login := range map[string]Config{
		"user name is empty": {}, "authentication failed": {Username: "me", Password: "no"},
	} {
		if err := open(t.Context(), "etcd://"+s.address, login); !strings.Contains(err.Error(), want) {
			t.Errorf("user %q: %v, want %s", login.Username, err, want)
		}
	}
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	for want, address := range map[string]string{
		"HTTP/1.1": strings.TrimPrefix(other.URL, "http://"), "refused": "127.0.0.1:1",
	} {
		for wait := time.Second; ; wait *= 4 { // a slow machine may need longer for the first attempt
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			err := open(ctx, "etcd://"+address, Config{})
			cancel()
			if errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), want) {
				break
			}
			if !errors.Is(err, context.DeadlineExceeded) || wait > time.Minute {
				t.Errorf("%s: %v, want %s", address, err, want)
				break
			}
		}
	}
	full := newServer(t)
	r := openAt(t, full, Config{}, time.Minute)
	full.fail(rpctypes.ErrGRPCNoSpace)
	if err := r.Set(t.Context(), "k", nil); !errors.Is(err, rendezvous.ErrFull) {
		t.Errorf("got %v, want %v", err, rendezvous.ErrFull)
	}
}

// TestWatch: readers receive every change once, in order, however often their connections break.
func TestWatch(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	const changes, readers = 200, 2
	for name, cuts := range map[string]float64{"sound": 0, "cut": 0.05} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t)
			r := openAt(t, s, Config{}, time.Minute)
			var work sync.WaitGroup
			for reader := range readers {
				work.Go(func() {
					for at, seen := uint64(1), 0; seen < changes; {
						entries, now, err := r.Changes(t.Context(), "k/", at)
						if err != nil || len(entries) == 0 {
							t.Errorf("reader %d after revision %d: %v, %v", reader, at, entries, err)
							return
						}
						for _, e := range entries {
							if seen++; e.Revision != at+1 || string(e.Value) != fmt.Sprint(at) {
								t.Errorf("reader %d after revision %d: %+v", reader, at, e)
								return
							}
							at++
						}
						if now != at {
							t.Errorf("reader %d: revision %d, want %d", reader, now, at)
						}
					}
				})
			}
			random := rand.New(rand.NewPCG(seed, 1))
			for i := range changes {
				s.set(fmt.Sprint("p/k/", i), fmt.Sprint(i+1))
				if random.Float64() < cuts {
					s.cut(false)
				}
				time.Sleep(time.Duration(random.IntN(300)) * time.Microsecond)
			}
			work.Wait()
		})
	}
}

// TestCompacted: a reader whose revision is compacted gets an error, and can continue from the current revision.
func TestCompacted(t *testing.T) {
	s := newServer(t)
	r := openAt(t, s, Config{}, time.Minute)
	for range 3 {
		s.set("p/k", "v")
	}
	s.mu.Lock()
	s.compacted = 3
	s.mu.Unlock()
	if entries, _, err := r.Changes(t.Context(), "k", 1); !errors.Is(err, rendezvous.ErrCompacted) {
		t.Errorf("got %v, %v", entries, err)
	}
	if entries, at, err := r.Changes(t.Context(), "k", 3); err != nil || len(entries) != 1 || at != 4 {
		t.Errorf("got %v, %d, %v", entries, at, err)
	}
}

// closing is a watcher of a client that is closed as soon as it is used: its watches end without an error, as etcd's
// own do.
type closing struct {
	clientv3.Watcher
	store *store
}

func (c closing) Watch(context.Context, string, ...clientv3.OpOption) clientv3.WatchChan {
	c.store.end(rendezvous.ErrClosed)
	ended := make(chan clientv3.WatchResponse)
	close(ended)
	return ended
}

// TestCloseDuringChanges: a call of Changes that Close ends returns ErrClosed, even if the watch has ended before its
// context.
func TestCloseDuringChanges(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := &store{client: clientv3.NewCtxClient(t.Context()), timeout: time.Minute}
		s.ctx, s.end = context.WithCancelCause(t.Context())
		s.client.Watcher = closing{store: s}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, _, err := s.Changes(ctx, "k/", 1)
		cancel()
		if !errors.Is(err, rendezvous.ErrClosed) {
			t.Fatalf("got %v, want %v", err, rendezvous.ErrClosed)
		}
	}
}

// TestFromEnvironment: etcdctl's variables configure certificates and users.
func TestFromEnvironment(t *testing.T) {
	web := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate
	defer web.Close()
	s := newServer(t, grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: web.TLS.Certificates, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12,
	})))
	s.auth = true
	environment := map[string]string{"ETCDCTL_CACERT": "ca.pem", "ETCDCTL_USER": "me:pw"}
	cfg, err := FromEnvironment(func(n string) string { return environment[n] }, func(string) ([]byte, error) {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := rendezvous.Open(t.Context(), "etcds://"+s.address+"/p", rendezvous.Config{
		Schemes: map[string]rendezvous.Opener{"etcds": Opener(cfg)},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Set(t.Context(), "k", []byte("v")); err != nil {
		t.Error(err)
	}
	if v, _, err := r.Get(t.Context(), "k"); err != nil || !bytes.Equal(v, []byte("v")) {
		t.Errorf("got %q, %v", v, err)
	}
	for name, environment := range map[string]map[string]string{
		"ETCDCTL_CACERT: ":               {"ETCDCTL_CACERT": "/no/such"},
		"holds no certificate":           {"ETCDCTL_CACERT": "etcd_test.go"},
		"ETCDCTL_CERT and ETCDCTL_KEY: ": {"ETCDCTL_CERT": "etcd_test.go", "ETCDCTL_KEY": "etcd_test.go"},
	} {
		if _, err := FromEnvironment(func(n string) string { return environment[n] }, os.ReadFile); err == nil ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if runtime.GOOS != "windows" {
		t.Setenv("ETCDCTL_CACERT", "/dev/zero")
		if _, err := rendezvous.Open(t.Context(), "etcds://127.0.0.1:1/p", rendezvous.Config{
			Schemes: Schemes(),
		}); err == nil || !strings.Contains(err.Error(), "/dev/zero has more than") {
			t.Errorf("an authority without an end: %v", err)
		}
	}
}

// TestDial: connections are made by Config.Dial.
func TestDial(t *testing.T) {
	s := newServer(t)
	r, err := rendezvous.Open(t.Context(), "etcd://etcd.invalid:2379/p", rendezvous.Config{
		Schemes: Schemes(),
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if address != "etcd.invalid:2379" {
				return nil, errors.New(address)
			}
			return (&net.Dialer{}).DialContext(ctx, network, s.address)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Set(t.Context(), "k", nil), r.Close()); err != nil {
		t.Error(err)
	}
}

// TestNoPassword: a password in an address is an error that does not show it.
func TestNoPassword(t *testing.T) {
	for _, url := range []string{
		"etcd://root:hunter2@127.0.0.1:1/x", "etcds://a:1,root:hunter2@b:2", "etcd://hunter2@a",
		"etcd://root:hunter2/x@b:2/x",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err := rendezvous.Open(ctx, url, rendezvous.Config{Schemes: Schemes()})
		cancel()
		if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "ETCDCTL_PASSWORD") {
			t.Errorf("%s: %v, want an error without the password", url, err)
		}
	}
}
