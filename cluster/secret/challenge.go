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

// The challenge. It follows the protocol's greeting, which both ends have seen:
//
//	acceptor  nonce                                        32 bytes
//	dialer    nonce                                        32 bytes
//	dialer    HMAC-SHA256(key, "dialer", transcript)       32 bytes
//	acceptor  1 if that is right, else 0; and the same     33 bytes
//	          for "acceptor", or zeros
//
// The transcript is both nonces, the greeting, and inside of TLS a value that only the two ends of this TLS connection have
// (RFC 5705). So a proof serves no other connection, no other greeting and not the other side, whoever passes it on. The
// dialer proves itself first: a stranger that dials learns nothing.
const (
	proofRight = 1
	proofWrong = 0
)

// Authenticate returns a function by which the two ends of a connection prove to each other that they have
// the secret and the same job and epoch, for tcp.Config.Authenticate. greeting is the dialer's greeting,
// dialed is true on the dialer's side, and conn must have a deadline. It does not encrypt the connection. It
// panics for the zero Secret.
func (s Secret) Authenticate(job string, epoch uint32) func(conn net.Conn, dialed bool, greeting []byte) error {
	key := s.derive("challenge", job, string(binary.BigEndian.AppendUint32(nil, epoch)))
	return func(conn net.Conn, dialed bool, greeting []byte) error {
		c := challenge{key: key, conn: conn, greeting: greeting}
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

// challenge is the state of one end of the challenge on a connection.
type challenge struct {
	key      []byte
	conn     net.Conn
	greeting []byte
	channel  []byte         // inside of TLS: the channel binding
	dialer   [keyBytes]byte // nonces
	acceptor [keyBytes]byte
}

var errProof = errors.New("has another secret, job or epoch")

// ErrRefused is matched by the error of [Secret.Authenticate] at an end whose proof the other end rejects.
var ErrRefused = errors.New("the other end refuses this end's proof")

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
	if verdict[0] != proofRight {
		return fmt.Errorf("%w: it %w", ErrRefused, errProof)
	}
	return c.check("acceptor", verdict[1:])
}

func (c *challenge) accept() error {
	rand.Read(c.acceptor[:])
	if _, err := c.conn.Write(c.acceptor[:]); err != nil {
		return err
	}
	var said [2 * keyBytes]byte // the nonce and the proof
	if _, err := io.ReadFull(c.conn, said[:]); err != nil {
		return err
	}
	copy(c.dialer[:], said[:])
	var verdict [1 + keyBytes]byte
	err := c.check("dialer", said[keyBytes:])
	if err == nil {
		verdict[0] = proofRight
		copy(verdict[1:], c.proof("acceptor"))
	} else {
		verdict[0] = proofWrong
	}
	_, failed := c.conn.Write(verdict[:])
	return errors.Join(err, failed)
}

// proof returns the proof of the key for this connection and role.
func (c *challenge) proof(role string) []byte {
	mac := hmac.New(sha256.New, c.key)
	for _, part := range [][]byte{[]byte(role), c.dialer[:], c.acceptor[:], c.greeting, c.channel} {
		mac.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		mac.Write(part)
	}
	return mac.Sum(nil)
}

// check compares in constant time.
func (c *challenge) check(role string, proof []byte) error {
	if !hmac.Equal(proof, c.proof(role)) {
		return fmt.Errorf("its proof is wrong: it %w", errProof)
	}
	return nil
}
