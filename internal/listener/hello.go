package listener

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Version is the version of the wire format, docs/wire.md. It must be equal at both ends.
const Version = 3

// Service identifies the service that a connection is for.
type Service uint8

// The services. Each defines what its connections carry.
const (
	Control  Service = 1 + iota // between two processes of a group, package tcp
	Data                        // between two ranks of a group, package tcp
	Store                       // of the rendezvous store, package rendezvous
	services                    // the number of services, plus one
)

var serviceNames = [services]string{1: "group's control", 2: "group's data", 3: "store"}

// String returns the name of the service, as in errors: "store".
func (s Service) String() string {
	if s > 0 && s < services {
		return serviceNames[s]
	}
	return fmt.Sprintf("service %d", uint8(s))
}

const (
	// HelloBytes is the length of a hello.
	HelloBytes = 80
	// FieldsBytes is the length of the service's fields in it.
	FieldsBytes = 44

	magic = "LOCKSTEP"

	// The first byte after a hello says what follows; any other byte starts the answer.
	nextProof = 'A' // the messages of Rules.Authenticate, then TLS, if the hello requests it
	nextTLS   = 'T'
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Hello is the first message on a connection, sent by the dialer.
type Hello struct {
	Service Service
	Secure  bool              // TLS follows
	Job     [16]byte          // see [JobID]
	Fields  [FieldsBytes]byte // defined by the service
}

// JobID returns the id of a job in hellos: a hash of its name.
func JobID(name string) [16]byte {
	sum := sha256.Sum256([]byte(name))
	return [16]byte(sum[:16])
}

// Encode returns the encoded hello.
func (g *Hello) Encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, HelloBytes)
	b = append(b, magic...)
	b = le.AppendUint16(b, Version)
	secure := byte(0)
	if g.Secure {
		secure = 1
	}
	b = append(b, byte(g.Service), secure, 0, 0, 0, 0)
	b = append(b, g.Job[:]...)
	b = append(b, g.Fields[:]...)
	return le.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// Decode decodes a hello. It checks the magic and the version first, to distinguish another protocol and another
// version from damage. Its errors are of type [*Refusal].
func (g *Hello) Decode(b []byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) != HelloBytes || string(b[:8]) != magic:
		return errStranger
	case le.Uint16(b[8:]) != Version:
		return Refuse(Versions, "it has version %d of the wire format, this end has version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:76], castagnoli) != le.Uint32(b[76:]):
		return Refuse(Damaged, "the checksum of the hello is wrong")
	case b[11] > 1 || le.Uint32(b[12:]) != 0:
		return Refuse(Damaged, "the hello has invalid fields")
	}
	*g = Hello{Service: Service(b[10]), Secure: b[11] == 1, Job: [16]byte(b[16:32]), Fields: [FieldsBytes]byte(b[32:76])}
	return nil
}

// mayBe reports whether b may be the beginning of a hello.
func mayBe(b []byte) bool {
	n := min(len(b), len(magic))
	return string(b[:n]) == magic[:n]
}
