package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Version is the version of the wire format, docs/wire.md. Both ends must speak the same.
const Version = 1

const (
	helloBytes    = 80
	replyBytes    = 20
	replyTextMax  = 256
	magic         = "LOCKSTEP"
	streamsMax    = 64
	purposeLink   = 1 // a control connection between two processes
	purposeStream = 2 // a data connection between two ranks

	// What has to follow a greeting, by the first byte of what it is answered; anything else is the answer itself.
	nextProof = 'A' // what Config.Authenticate says, then TLS, if the greeting says so
	nextTLS   = 'T'
)

// hello is the greeting: the first bytes on a connection, from the one who dials.
type hello struct {
	purpose uint8
	stream  uint8 // purposeStream: which of the pair
	streams uint8 // of each pair
	secure  bool  // TLS follows
	job     [16]byte
	world   uint64 // the group that Node.Group made
	group   uint64 // purposeStream: the group, the world or split from it
	members uint64 // hash of who is in the world or group
	epoch   uint32
	from    uint32 // the dialer's and the acceptor's rank in the group; purposeLink: the lowest ranks of their processes
	to      uint32
}

func (h *hello) encode() []byte {
	le := binary.LittleEndian
	b := make([]byte, 0, helloBytes)
	b = append(b, magic...)
	b = le.AppendUint16(b, Version)
	secure := byte(0)
	if h.secure {
		secure = 1
	}
	b = append(b, h.purpose, h.stream, h.streams, secure, 0, 0)
	b = append(b, h.job[:]...)
	b = le.AppendUint64(b, h.world)
	b = le.AppendUint64(b, h.group)
	b = le.AppendUint64(b, h.members)
	b = le.AppendUint32(b, h.epoch)
	b = le.AppendUint32(b, h.from)
	b = le.AppendUint32(b, h.to)
	b = le.AppendUint64(b, 0)
	return le.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// decode reads a greeting. It looks at the magic and the version first, so that a stranger and another version are told
// apart from damage.
func (h *hello) decode(b []byte) error {
	le := binary.LittleEndian
	switch {
	case len(b) != helloBytes || string(b[:8]) != magic:
		return refuse(refusedMagic, "the connection does not begin as Lockstep's do")
	case le.Uint16(b[8:]) != Version:
		return refuse(refusedVersion, "it speaks version %d of the wire format, this end version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:76], castagnoli) != le.Uint32(b[76:]):
		return refuse(refusedDamaged, "the greeting's checksum is wrong")
	}
	*h = hello{
		purpose: b[10], stream: b[11], streams: b[12], secure: b[13] == 1, job: [16]byte(b[16:32]),
		world: le.Uint64(b[32:]), group: le.Uint64(b[40:]), members: le.Uint64(b[48:]),
		epoch: le.Uint32(b[56:]), from: le.Uint32(b[60:]), to: le.Uint32(b[64:]),
	}
	if h.purpose != purposeLink && h.purpose != purposeStream || h.streams == 0 || h.streams > streamsMax || h.stream >= h.streams || b[13] > 1 {
		return refuse(refusedDamaged, "the greeting is for purpose %d, stream %d of %d", h.purpose, h.stream, h.streams)
	}
	return nil
}

// Refusal says why a connection was refused. Its text names what [Node.Refused] counts.
type Refusal uint8

// The reasons to refuse a connection, or to end one.
const (
	accepted         Refusal = iota
	refusedMagic             // not this protocol
	refusedVersion           // another version of it
	refusedDamaged           // a greeting with a wrong checksum or impossible fields
	refusedJob               // another job
	refusedEpoch             // an epoch that is over
	refusedGroup             // a group that is closed, or that has other members there
	refusedRank              // a rank that does not exist, or does not live there
	refusedDuplicate         // a rank that is connected already
	refusedProof             // TLS or the authenticator says no
	refusedSlow              // no greeting in time, or pushed out by newer ones
	refusedCrowded           // too many that came early
	refusedFrame             // a frame or message in an accepted connection that is none
	refusals
)

var refusalNames = [refusals]string{
	"accepted", "magic", "version", "damaged", "job", "epoch", "group", "rank", "duplicate", "proof", "slow", "crowded", "frame",
}

// String returns the reason's name: "version", "duplicate".
func (r Refusal) String() string {
	if r < refusals {
		return refusalNames[r]
	}
	return fmt.Sprintf("Refusal(%d)", uint8(r))
}

// refusal is the error of a refused connection, on both sides.
type refusal struct {
	reason Refusal
	text   string
}

func (r *refusal) Error() string { return r.text }

func refuse(reason Refusal, format string, args ...any) error {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// reply returns the answer to a greeting: err, or that all is well.
func reply(err error) []byte {
	le := binary.LittleEndian
	reason, text := accepted, ""
	if r := (*refusal)(nil); errors.As(err, &r) {
		reason, text = r.reason, r.text[:min(len(r.text), replyTextMax)]
	}
	b := make([]byte, 0, replyBytes+len(text))
	b = append(b, magic...)
	b = le.AppendUint16(b, Version)
	b = append(b, byte(reason), 0)
	b = le.AppendUint32(b, uint32(len(text)))
	b = le.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, text...)
}

// readReply reads the answer to a greeting: a *refusal if it is one.
func readReply(r io.Reader) error {
	le := binary.LittleEndian
	b := make([]byte, replyBytes, replyBytes+replyTextMax)
	if _, err := io.ReadFull(r, b[:1]); err != nil {
		return err // nothing came: the other end was not there yet, or is gone
	}
	if b[0] == nextProof {
		return refuse(refusedProof, "the other end asks for a proof that this end belongs to it, and this end has none: it has no secret")
	}
	if _, err := io.ReadFull(r, b[1:]); err != nil {
		return fmt.Errorf("the answer is cut short: %w", err)
	}
	n := le.Uint32(b[12:])
	switch {
	case string(b[:8]) != magic:
		return refuse(refusedMagic, "what listens there does not speak Lockstep's protocol")
	case le.Uint16(b[8:]) != Version && b[10] == byte(accepted):
		return refuse(refusedVersion, "it speaks version %d of the wire format, this end version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:16], castagnoli) != le.Uint32(b[16:]) || n > replyTextMax || b[10] >= byte(refusals):
		return refuse(refusedDamaged, "the answer to the greeting is damaged")
	case b[10] == byte(accepted):
		return nil
	}
	text := b[replyBytes : replyBytes+n]
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("the refusal is cut short: %w", err)
	}
	return &refusal{Refusal(b[10]), string(text)}
}
