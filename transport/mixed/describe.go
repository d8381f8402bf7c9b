package mixed

import (
	"strings"

	"github.com/lockstep-ml/lockstep/transport"
)

// By returns the transport between the rank of an endpoint, of any package, and a peer: "mem", "shm", "tcp", or
// "tcp+tls" if it is encrypted.
func By(e transport.Endpoint, peer int) string {
	c := e.Capabilities()
	near, far, both := strings.Cut(e.Transport(), "+")
	if !both || c.Places[peer].Domain == c.Places[e.Rank()].Domain {
		far = near
	}
	if c.Encrypted != nil && c.Encrypted[peer] {
		far += "+tls"
	}
	return far
}
