package launch

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// gateway plays etcd's JSON gateway with one key. A real etcd is tested in cluster/etcd.
type gateway struct {
	mu    sync.Mutex
	value string // base64; "": not there
	user  bool   // it wants a token
}

func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var q map[string]string
	_ = json.NewDecoder(r.Body).Decode(&q)
	switch {
	case r.URL.Path == "/v3/auth/authenticate" && q["name"] == "me" && q["password"] == "pw":
		fmt.Fprint(w, `{"token":"T"}`)
	case r.URL.Path == "/v3/auth/authenticate" || g.user && r.Header.Get("Authorization") != "T":
		http.Error(w, `{"error":"etcdserver: authentication failed"}`, http.StatusBadRequest)
	case r.URL.Path == "/v3/lease/grant":
		fmt.Fprint(w, `{"ID":"7587","TTL":"20"}`)
	case r.URL.Path == "/v3/kv/put" && q["lease"] == "7587":
		g.value = q["value"]
		fmt.Fprint(w, `{}`)
	case r.URL.Path == "/v3/lease/revoke" && q["ID"] == "7587":
		g.value = ""
		fmt.Fprint(w, `{}`)
	case r.URL.Path == "/v3/kv/range" && g.value == "":
		fmt.Fprint(w, `{"header":{"revision":"1"}}`)
	case r.URL.Path == "/v3/kv/range":
		fmt.Fprintf(w, `{"kvs":[{"key":%q,"value":%q,"mod_revision":"3"}],"count":"1"}`, q["key"], g.value)
	default:
		http.NotFound(w, r)
	}
}

func TestEtcd(t *testing.T) {
	for _, c := range []struct {
		name      string
		tls, user bool
	}{{"plain", false, false}, {"TLS and a user", true, true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			g := &gateway{user: c.user}
			server, environment := httptest.NewUnstartedServer(g), map[string]string{}
			if c.tls {
				server.StartTLS()
				environment["ETCDCTL_CACERT"] = "ca.pem"
			} else {
				server.Start()
			}
			defer server.Close()
			if c.user {
				environment["ETCDCTL_USER"] = "me:pw"
			}
			cfg, err := EtcdFromEnvironment(func(n string) string { return environment[n] }, func(name string) ([]byte, error) {
				return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), nil
			})
			if err != nil {
				t.Fatal(err)
			}
			m := Meeting{Backend: "etcd", Endpoint: "127.0.0.1:1," + strings.TrimPrefix(server.URL, "http://") + "/p", ID: "j", Secret: secret.New(), Etcd: cfg}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			// The address of a run that was killed: nobody answers there.
			g.value = base64.StdEncoding.EncodeToString([]byte("tcp://127.0.0.1:1"))
			found := make(chan error, 1)
			go func() {
				p, err := m.Open(ctx)
				if err == nil {
					err = p.Close()
				}
				found <- err
			}()
			first := m
			first.Serve = true
			place, err := first.Open(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if err := <-found; err != nil {
				t.Error(err)
			}
			err = place.Close()
			g.mu.Lock()
			defer g.mu.Unlock()
			if err != nil || g.value != "" {
				t.Errorf("closed: %v; the key holds %q", err, g.value)
			}
		})
	}
}

func TestEtcdErrors(t *testing.T) {
	for _, bad := range []string{"", "host", "ftp://h:1", "h:1,,h:2", "http://"} {
		if _, err := openEtcd(bad, "j", EtcdConfig{}); err == nil || !strings.Contains(err.Error(), "want host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	server := httptest.NewServer(&gateway{user: true})
	defer server.Close()
	m := Meeting{Backend: "etcd", Endpoint: server.URL, ID: "j", Serve: true}
	if _, err := m.Open(t.Context()); err == nil || !strings.Contains(err.Error(), "authentication failed") {
		t.Errorf("without a user: %v", err)
	}
	for name, environment := range map[string]map[string]string{
		"ETCDCTL_CACERT: ":               {"ETCDCTL_CACERT": "/no/such"},
		"holds no certificate":           {"ETCDCTL_CACERT": "etcd_test.go"},
		"ETCDCTL_CERT and ETCDCTL_KEY: ": {"ETCDCTL_CERT": "etcd_test.go", "ETCDCTL_KEY": "etcd_test.go"},
	} {
		if _, err := EtcdFromEnvironment(func(n string) string { return environment[n] }, os.ReadFile); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
