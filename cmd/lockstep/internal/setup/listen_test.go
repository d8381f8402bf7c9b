package setup

import (
	"net"
	"strings"
	"testing"
)

// TestListenAddress: --interface accepts the name of an interface, or an address.
func TestListenAddress(t *testing.T) {
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	loopback := ""
	for _, i := range all {
		if i.Flags&net.FlagLoopback != 0 {
			loopback = i.Name
		}
	}
	if loopback == "" {
		t.Skip("this host has no loopback interface")
	}
	for name, want := range map[string]string{
		"": "", "10.1.2.3": "10.1.2.3", "fd00::1": "fd00::1",
		loopback: "127.0.0.1",
	} {
		if got, err := listenAddress(name); err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, want)
		}
	}
	if _, err := listenAddress("nosuch0"); err == nil ||
		!strings.Contains(err.Error(), "--interface nosuch0: want an address or a network interface") {
		t.Errorf("no such interface: %v", err)
	}
}
