package listener

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Reason is the reason why a connection was refused, or closed because of invalid data.
type Reason uint8

// The reasons.
const (
	accepted Reason = iota

	Magic     // not this protocol
	Versions  // another version of it
	Damaged   // a hello with a wrong checksum or invalid fields
	NoService // a service that the process does not have
	Job       // another job
	Epoch     // an epoch that is over
	Group     // a group that has other members at the acceptor
	Rank      // a rank that does not exist, or is in another process
	Duplicate // the pair is connected already
	Proof     // TLS or Rules.Authenticate failed
	Slow      // no hello in time, or evicted by newer connections
	Crowded   // too many connections
	Frame     // an invalid message on an established connection
	Closed    // a group or an endpoint that is closed
	reasons
)

var reasonNames = [reasons]string{
	"accepted", "magic", "version", "damaged", "service", "job", "epoch", "group", "rank", "duplicate", "proof", "slow",
	"crowded", "frame", "closed",
}

// String returns the reason's name: "version", "duplicate".
func (r Reason) String() string {
	if r < reasons {
		return reasonNames[r]
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// Refusal is the error of a refused connection, at both ends.
type Refusal struct {
	Reason Reason
	Text   string
}

// Error returns Text.
func (r *Refusal) Error() string { return r.Text }

// Refuse returns a [Refusal].
func Refuse(reason Reason, format string, args ...any) error {
	return &Refusal{reason, fmt.Sprintf(format, args...)}
}

// reasonOf returns the reason of an error, Damaged if it is no [Refusal].
func reasonOf(err error) Reason {
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return r.Reason
	}
	return Damaged
}

const (
	answerBytes   = 20
	answerTextMax = 256
)

// answer encodes the answer to a hello: acceptance if err is nil.
func answer(err error) []byte {
	le := binary.LittleEndian
	reason, text := accepted, ""
	if r := (*Refusal)(nil); errors.As(err, &r) {
		reason, text = r.Reason, r.Text[:min(len(r.Text), answerTextMax)]
	}
	b := make([]byte, 0, answerBytes+len(text))
	b = append(b, magic...)
	b = le.AppendUint16(b, Version)
	b = append(b, byte(reason), 0)
	b = le.AppendUint32(b, uint32(len(text)))
	b = le.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, text...)
}

// ReadAnswer reads the answer to a hello, as [Dialer.DialContext] does: nil if the other end accepts it, a [*Refusal]
// if it refuses it.
func ReadAnswer(r io.Reader) error {
	le := binary.LittleEndian
	b := make([]byte, answerBytes, answerBytes+answerTextMax)
	if _, err := io.ReadFull(r, b[:1]); err != nil {
		return err // no data: the other end did not listen yet, or has closed
	}
	switch b[0] {
	case magic[0]:
	case nextProof:
		return Refuse(Proof, "the other end requests a proof, but this end has none: it has no secret")
	default:
		return errNotOurs // another protocol may send fewer bytes than an answer
	}
	if _, err := io.ReadFull(r, b[1:]); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	n := le.Uint32(b[12:])
	switch {
	case string(b[:8]) != magic:
		return errNotOurs
	case le.Uint16(b[8:]) != Version && b[10] == byte(accepted):
		return Refuse(Versions, "it has version %d of the wire format, this end has version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:16], castagnoli) != le.Uint32(b[16:]) || n > answerTextMax || b[10] >= byte(reasons):
		return Refuse(Damaged, "the answer to the hello is damaged")
	case b[10] == byte(accepted):
		return nil
	}
	text := b[answerBytes : answerBytes+n]
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("reading the refusal: %w", err)
	}
	return &Refusal{Reason(b[10]), string(text)}
}

var (
	errStranger = Refuse(Magic, "the connection does not start with a Lockstep hello")
	errNotOurs  = Refuse(Magic, "the server at that address does not use Lockstep's protocol")
	errEvicted  = Refuse(Slow, "evicted by newer connections")
	errLeaving  = Refuse(NoService, "the process is shutting down")
)
