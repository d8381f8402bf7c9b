package tcp

import (
	"crypto/tls"
	"net"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// connection is a connection after the handshake, at either end.
type connection struct {
	hello
	conn net.Conn // a *tls.Conn with TLS
	raw  net.Conn // the TCP connection
	shim *shim    // nil without TLS
	at   *listener.Accepted
}

func newConnection(h hello, conn net.Conn) *connection {
	a := &connection{hello: h, conn: conn, raw: conn}
	if t, ok := conn.(*tls.Conn); ok {
		a.shim = t.NetConn().(*shim)
		a.shim.tls = t
		a.raw = a.shim.Conn
	}
	return a
}

// answer accepts the connection if err is nil; otherwise it refuses it because of err and closes it.
func (a *connection) answer(err error) error { return a.at.Answer(err) }

// errExposed refuses a connection that is not encrypted and should be.
var errExposed = listener.Refuse(listener.Proof, "it is not encrypted, and its process is not known to be on this host")

// handle passes an authenticated connection to its world.
func (n *Node) handle(at *listener.Accepted) error {
	var h hello
	if err := h.decode(&at.Hello); err != nil {
		return err
	}
	a := newConnection(h, at.Conn)
	a.at = at
	return n.route(a)
}
