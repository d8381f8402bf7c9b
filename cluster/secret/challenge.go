package secret

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
)

// Purpose is what a connection is for. A proof for one purpose is worthless for another.
type Purpose string

// The purposes.
const (
	// Store is for connections to the rendezvous store.
	Store Purpose = "store"
	// Group is for connections between the ranks of a group: over TCP, over unix sockets, and to set up shared memory.
	// Their hellos distinguish them further.
	Group Purpose = "group"
)

// ErrRefused is matched by the error of [Secret.Authenticate] at an end whose proof the other end rejects.
var ErrRefused = errors.New("the other end refuses this end's proof")

var errProof = errors.New("has another secret, job or epoch")

// Authenticate returns the challenge, by which the two ends of a connection prove to each other that they have the same
// secret, purpose, job and epoch. It does not encrypt the connection. It panics for the zero Secret.
//
// hello is the dialer's first message, as the dialer sent it and as the acceptor received it. dialed is true on the
// dialer's side. conn must have a deadline. The messages, which docs/wire.md specifies, follow the hello:
//
//	acceptor  nonce                                         32 bytes
//	dialer    nonce, HMAC-SHA256(key, "dialer", transcript) 64 bytes
//	acceptor  1 if that is right, and the same for          33 bytes
//	          "acceptor"; else zeros
//
// The transcript is both nonces, the hello and, inside TLS, a value that only the two ends of this TLS connection have
// (RFC 5705). So a proof is worthless on any other connection, for any other hello and on the other side. The dialer
// authenticates first: a stranger that dials learns nothing about the secret.
func (s Secret) Authenticate(
	purpose Purpose, job string, epoch uint32,
) func(conn net.Conn, dialed bool, hello []byte) error {
	key := s.derive("challenge", string(purpose), job, string(binary.BigEndian.AppendUint32(nil, epoch)))
	return func(conn net.Conn, dialed bool, hello []byte) error {
		c := challenge{key: key, conn: conn, hello: hello}
		if t, ok := conn.(*tls.Conn); ok {
			state := t.ConnectionState()
			var err error
			if c.channel, err = state.ExportKeyingMaterial("EXPORTER-lockstep challenge", nil, keyBytes); err != nil {
				return fmt.Errorf("binding the proof to the TLS connection: %w", err)
			}
		}
		if dialed {
			return c.dial()
		}
		return c.accept()
	}
}

// challenge is the state of one end of a challenge.
type challenge struct {
	key              []byte
	conn             net.Conn
	hello            []byte
	channel          []byte         // inside TLS: the channel binding
	dialer, acceptor [keyBytes]byte // the nonces
}

func (c *challenge) dial() error {
	rand.Read(c.dialer[:])
	if _, err := io.ReadFull(c.conn, c.acceptor[:]); err != nil {
		return err
	}
	if _, err := c.conn.Write(append(c.dialer[:], c.proof("dialer")...)); err != nil {
		return err
	}
	var verdict [1 + keyBytes]byte
	if _, err := io.ReadFull(c.conn, verdict[:]); err != nil {
		return err
	}
	if verdict[0] != 1 {
		return fmt.Errorf("%w: it %w", ErrRefused, errProof)
	}
	return c.verify("acceptor", verdict[1:])
}

func (c *challenge) accept() error {
	rand.Read(c.acceptor[:])
	if _, err := c.conn.Write(c.acceptor[:]); err != nil {
		return err
	}
	var response [2 * keyBytes]byte // the nonce and the proof
	if _, err := io.ReadFull(c.conn, response[:]); err != nil {
		return err
	}
	copy(c.dialer[:], response[:])
	var verdict [1 + keyBytes]byte
	err := c.verify("dialer", response[keyBytes:])
	if err == nil {
		verdict[0] = 1
		copy(verdict[1:], c.proof("acceptor"))
	}
	_, failed := c.conn.Write(verdict[:])
	return errors.Join(err, failed)
}

// proof returns the proof of a side for this connection.
func (c *challenge) proof(side string) []byte {
	mac := hmac.New(sha256.New, c.key)
	for _, part := range [][]byte{[]byte(side), c.dialer[:], c.acceptor[:], c.hello, c.channel} {
		mac.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		mac.Write(part)
	}
	return mac.Sum(nil)
}

// verify compares in constant time.
func (c *challenge) verify(side string, proof []byte) error {
	if !hmac.Equal(proof, c.proof(side)) {
		return fmt.Errorf("its proof is wrong: it %w", errProof)
	}
	return nil
}
