package listener

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Version is the version of the wire format, docs/wire.md. Both ends must speak the same.
const Version = 1

// Service is what a connection is for.
type Service uint8

// The services. What their connections carry is theirs.
const (
	Control  Service = 1 + iota // between two processes of a group, package tcp
	Data                        // between two ranks of a group, package tcp
	Store                       // with the rendezvous' store, package rendezvous
	services                    // the first that is none
)

var serviceNames = [services]string{1: "group's control", 2: "group's data", 3: "store"}

// String names the service in errors: "store".
func (s Service) String() string {
	if s > 0 && s < services {
		return serviceNames[s]
	}
	return fmt.Sprintf("service %d", uint8(s))
}

const (
	// HelloBytes is the length of a greeting.
	HelloBytes = 80
	// FieldsBytes is how much of it is the service's own.
	FieldsBytes = 44

	magic = "LOCKSTEP"

	// What has to follow a greeting, by the first byte of what it is answered; anything else is the answer itself.
	nextProof = 'A' // what Rules.Authenticate says, then TLS, if the greeting says so
	nextTLS   = 'T'
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Hello is the first bytes on a connection, from the one who dials.
type Hello struct {
	Service Service
	Secure  bool // TLS follows
	Job     [16]byte
	Fields  [FieldsBytes]byte // the service's
}

// JobID returns what stands in greetings for a job's name.
func JobID(name string) [16]byte {
	sum := sha256.Sum256([]byte(name))
	return [16]byte(sum[:16])
}

// Encode returns the greeting's bytes.
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

// Decode reads a greeting. It looks at the magic and the version first, so that a stranger and another version are told apart
// from damage. Its errors are of type [*Refusal].
func (g *Hello) Decode(b []byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) != HelloBytes || string(b[:8]) != magic:
		return errStranger
	case le.Uint16(b[8:]) != Version:
		return Refuse(Versions, "it speaks version %d of the wire format, this end version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:76], castagnoli) != le.Uint32(b[76:]):
		return Refuse(Damaged, "the greeting's checksum is wrong")
	case b[11] > 1 || le.Uint32(b[12:]) != 0:
		return Refuse(Damaged, "the greeting has impossible fields")
	}
	*g = Hello{Service: Service(b[10]), Secure: b[11] == 1, Job: [16]byte(b[16:32]), Fields: [FieldsBytes]byte(b[32:76])}
	return nil
}

// mayBe reports whether a greeting may begin like this.
func mayBe(b []byte) bool {
	n := min(len(b), len(magic))
	return string(b[:n]) == magic[:n]
}
