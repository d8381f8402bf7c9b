package mixed

import "github.com/lockstep-ml/lockstep/transport"

// By returns the transport between the rank of an endpoint, of any package, and a peer: "mem", "shm", "unix", "tcp", or "tcp+tls" if
// it is encrypted.
func By(e transport.Endpoint, peer int) string {
	if m, ok := e.(*end); ok {
		if m.shares(peer) {
			return m.near.Transport()
		}
		e = m.allEnd
	}
	name := e.Transport()
	if c, ok := e.(transport.Encrypter); ok && c.Encrypts(peer) {
		name += "+tls"
	}
	return name
}
