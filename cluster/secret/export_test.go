package secret

import (
	"encoding/binary"
	"io"
	"net"
)

// Impostor returns an acceptor's side of the challenge, which claims that any dialer's proof is right, and proves
// itself with this secret.
func (s Secret) Impostor(purpose Purpose, job string, epoch uint32) func(conn net.Conn, hello []byte) {
	key := s.derive("challenge", string(purpose), job, string(binary.BigEndian.AppendUint32(nil, epoch)))
	return func(conn net.Conn, hello []byte) {
		c := challenge{key: key, conn: conn, hello: hello}
		conn.Write(c.acceptor[:])
		io.ReadFull(conn, c.dialer[:])
		io.ReadFull(conn, make([]byte, keyBytes))
		conn.Write(append([]byte{1}, c.proof("acceptor")...))
	}
}
