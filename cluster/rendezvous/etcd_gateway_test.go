package rendezvous

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// played is an etcd with scripted answers. Module cluster/etcd tests a real one with the conformance suite.
type played struct {
	mu      sync.Mutex
	user    bool     // requires a token
	tokens  int      // issued so far
	broken  []string // the next answers: errors as JSON, "": no answer
	serving int      // answered requests
}

func (p *played) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var q map[string]any
	_ = json.NewDecoder(r.Body).Decode(&q)
	switch {
	case r.URL.Path == "/v3/auth/authenticate" && q["name"] == "me" && q["password"] == "pw":
		p.tokens++
		fmt.Fprintf(w, `{"token":"T%d"}`, p.tokens)
		return
	case r.URL.Path == "/v3/auth/authenticate":
		http.Error(w, `{"code":3,"message":"etcdserver: authentication failed, invalid user ID or password"}`,
			http.StatusBadRequest)
		return
	case p.user && (p.tokens == 0 || r.Header.Get("Authorization") != fmt.Sprintf("T%d", p.tokens)):
		http.Error(w, `{"code":16,"message":"etcdserver: invalid auth token"}`, http.StatusUnauthorized)
		return
	case len(p.broken) > 0:
		text := p.broken[0]
		p.broken = p.broken[1:]
		if text == "" {
			panic(http.ErrAbortHandler)
		}
		http.Error(w, text, http.StatusServiceUnavailable)
		return
	}
	p.serving++
	switch r.URL.Path {
	case "/v3/kv/range":
		// p/k: v
		fmt.Fprint(w, `{"header":{"revision":"7"},"kvs":[{"key":"cC9r","value":"AHY=","mod_revision":"3"}],"count":"1"}`)
	case "/v3/kv/txn":
		fmt.Fprint(w, `{"header":{"revision":"8"},"succeeded":true,"responses":[{"response_put":{}}]}`)
	case "/v3/watch":
		fmt.Fprint(w, `{"result":{"header":{"revision":"7"},"created":true}}`+"\n")
		fmt.Fprint(w, `{"result":{"header":{"revision":"9"},"events":[{"kv":{"key":"cC9r","value":"AHc=","mod_revision":"9"}}]}}`+"\n")
	default:
		http.NotFound(w, r)
	}
}

func (p *played) breakNext(answers ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken = answers
}

func openPlayed(t *testing.T, p *played, cfg Config) Store {
	t.Helper()
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	// The first address does not answer.
	s, err := Open(t.Context(), "etcd://127.0.0.1:1,"+strings.TrimPrefix(server.URL, "http://")+"/p", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

const unavailable = `{"code":14,"message":"etcdserver: no leader"}`

// TestEtcdRetries: calls retry after unreachable endpoints, missing answers and expired tokens, but never repeat a
// change that may have been made.
func TestEtcdRetries(t *testing.T) {
	t.Parallel() // it mostly waits to retry
	p := &played{user: true}
	s := openPlayed(t, p, Config{Etcd: &EtcdConfig{User: "me", Password: "pw"}})
	get := func(name string) {
		t.Helper()
		if v, revision, err := s.Get(t.Context(), "k"); string(v) != "v" || revision != 3 || err != nil {
			t.Errorf("%s: got %q, %d, %v", name, v, revision, err)
		}
	}
	get("well")
	p.mu.Lock()
	p.tokens++ // the client's token has expired
	p.mu.Unlock()
	get("a new token")
	p.breakNext(unavailable, "", unavailable)
	get("errors")
	p.breakNext("", unavailable)
	if entries, revision, err := s.Changes(t.Context(), "k", 7); err != nil || revision != 9 || len(entries) != 1 ||
		string(entries[0].Value) != "w" {
		t.Errorf("changes: %+v, %d, %v", entries, revision, err)
	}
	for _, broken := range []string{"", unavailable} {
		p.breakNext(broken)
		if err := s.Set(t.Context(), "k", nil); err == nil {
			t.Errorf("a change that may have been made, with answer %q: it was made again", broken)
		}
	}
	if err := s.Set(t.Context(), "k", nil); err != nil {
		t.Error(err)
	}
}

// TestEtcdLost: an etcd that does not answer for longer than ReconnectTimeout is lost.
func TestEtcdLost(t *testing.T) {
	p := &played{}
	s := openPlayed(t, p, Config{ReconnectTimeout: time.Millisecond, Etcd: &EtcdConfig{}})
	p.breakNext(strings.Split(strings.Repeat(unavailable+"\n", 1000), "\n")...)
	if _, _, err := s.Get(t.Context(), "k"); !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "no leader") {
		t.Errorf("got %v, want %v", err, ErrLost)
	}
}

func TestEtcdErrors(t *testing.T) {
	t.Parallel() // it mostly waits to retry
	for _, bad := range []string{"", "host", "h:1,,h:2", ":1"} {
		if _, err := Open(t.Context(), "etcd://"+bad, Config{Etcd: &EtcdConfig{}}); err == nil ||
			!strings.Contains(err.Error(), "want host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	server := httptest.NewServer(&played{user: true})
	defer server.Close()
	where := "etcd://" + strings.TrimPrefix(server.URL, "http://")
	for want, login := range map[string]EtcdConfig{"invalid auth token": {}, "authentication failed": {
		User:     "me",
		Password: "no",
	}} {
		if _, err := Open(t.Context(), where, Config{Etcd: &login}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("user %q: %v, want %s", login.User, err, want)
		}
	}
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	if _, err := Open(t.Context(), "etcd://"+strings.TrimPrefix(other.URL, "http://"),
		Config{Etcd: &EtcdConfig{}}); err == nil || !strings.Contains(err.Error(), "not an etcd with a JSON gateway") {
		t.Errorf("another server: %v", err)
	}
	nobody, cancel := context.WithTimeout(t.Context(), 2*time.Second) // for the first attempt, on a busy machine
	defer cancel()
	if _, err := Open(nobody, "etcd://127.0.0.1:1", Config{Etcd: &EtcdConfig{}}); !errors.Is(err,
		context.DeadlineExceeded) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("nobody there: %v", err)
	}
}

func TestEtcdFromEnvironment(t *testing.T) {
	server := httptest.NewTLSServer(&played{user: true})
	defer server.Close()
	environment := map[string]string{"ETCDCTL_CACERT": "ca.pem", "ETCDCTL_USER": "me:pw"}
	cfg, err := etcdFromEnvironment(func(n string) string { return environment[n] }, func(string) ([]byte, error) {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), "etcds://"+strings.TrimPrefix(server.URL, "https://")+"/p", Config{Etcd: &cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if v, _, err := s.Get(t.Context(), "k"); err != nil || string(v) != "v" {
		t.Errorf("got %q, %v", v, err)
	}
	for name, environment := range map[string]map[string]string{
		"ETCDCTL_CACERT: ":               {"ETCDCTL_CACERT": "/no/such"},
		"holds no certificate":           {"ETCDCTL_CACERT": "etcd_gateway_test.go"},
		"ETCDCTL_CERT and ETCDCTL_KEY: ": {"ETCDCTL_CERT": "etcd_gateway_test.go", "ETCDCTL_KEY": "etcd_gateway_test.go"},
	} {
		if _, err := etcdFromEnvironment(func(n string) string { return environment[n] }, os.ReadFile); err == nil ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if runtime.GOOS != "windows" {
		t.Setenv("ETCDCTL_CACERT", "/dev/zero")
		if _, err := Open(t.Context(), "etcds://127.0.0.1:1/p", Config{}); err == nil ||
			!strings.Contains(err.Error(), "/dev/zero has more than") {
			t.Errorf("an authority without an end: %v", err)
		}
	}
}
