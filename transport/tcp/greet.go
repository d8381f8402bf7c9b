package tcp

import (
	"crypto/tls"
	"net"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// arrival is a connection that has greeted, or was greeted on.
type arrival struct {
	hello
	conn net.Conn // tls.Conn if there is TLS
	raw  net.Conn // the connection itself
	shim *shim    // if there is TLS
	at   *listener.Accepted
}

func newArrival(h hello, conn net.Conn) *arrival {
	a := &arrival{hello: h, conn: conn, raw: conn}
	if t, ok := conn.(*tls.Conn); ok {
		a.shim = t.NetConn().(*shim)
		a.shim.tls = t
		a.raw = a.shim.Conn
	}
	return a
}

// answer accepts the connection, or refuses it for err and closes it.
func (a *arrival) answer(err error) error { return a.at.Answer(err) }

// errExposed is for a connection that should be encrypted and is not.
var errExposed = listener.Refuse(listener.Proof, "it is not encrypted, and its process is not known to be on this host")

// greeted hands a connection that has greeted and proven itself to whom it is for.
func (n *Node) greeted(at *listener.Accepted) error {
	var h hello
	if err := h.read(&at.Hello); err != nil {
		return err
	}
	a := newArrival(h, at.Conn)
	a.at = at
	return n.route(a)
}
