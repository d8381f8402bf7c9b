package rendezvous_test

import (
	"net"
	"os"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

func TestRouteTo(t *testing.T) {
	for endpoint, want := range map[string]string{
		"127.0.0.1:80": "127.0.0.1", "tcp://127.0.0.1:29500": "127.0.0.1", "tcp://127.0.0.1:1/x": "127.0.0.1",
	} {
		if got, err := rendezvous.RouteTo(t.Context(), endpoint); err != nil || got.String() != want {
			t.Errorf("RouteTo(%q) = %v, %v, want %s", endpoint, got, err, want)
		}
	}
	if got, err := rendezvous.RouteTo(t.Context(), "localhost:29500"); err != nil || !got.IsLoopback() {
		t.Errorf("RouteTo(localhost) = %v, %v", got, err)
	}
	for _, endpoint := range []string{"", "host", ":80", "tcp://", "file:///x", "127.0.0.1:x", "[::1"} {
		if got, err := rendezvous.RouteTo(t.Context(), endpoint); err == nil {
			t.Errorf("RouteTo(%q) = %v, want an error", endpoint, got)
		}
	}
}

// TestRouteToOwnName: this host's name does not resolve to loopback, even if /etc/hosts maps it there.
func TestRouteToOwnName(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := net.DefaultResolver.LookupHost(t.Context(), name); err != nil {
		t.Skipf("this host's name has no address here: %v", err)
	}
	got, err := rendezvous.RouteTo(t.Context(), net.JoinHostPort(name, "29500"))
	if err != nil {
		t.Skipf("no address but loopback: %v", err)
	}
	if got.IsLoopback() {
		t.Fatalf("RouteTo(%s) = %v", name, got)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(got.String(), "0"))
	if err != nil {
		t.Fatalf("it cannot be listened on: %v", err)
	}
	l.Close()
}
