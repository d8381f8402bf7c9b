package listener

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Reason says why a connection was refused, or ended for what came through it.
type Reason uint8

// The reasons.
const (
	accepted Reason = iota

	Magic     // not this protocol
	Versions  // another version of it
	Damaged   // a greeting with a wrong checksum or impossible fields
	NoService // a service that is not there
	Job       // another job
	Epoch     // an epoch that is over
	Group     // a group that is closed, or that has other members there
	Rank      // a rank that does not exist, or does not live there
	Duplicate // who is connected already
	Proof     // TLS or the authenticator says no
	Slow      // no greeting in time, or pushed out by newer ones
	Crowded   // too many at once
	Frame     // something in an accepted connection that does not belong there
	reasons
)

var reasonNames = [reasons]string{
	"accepted", "magic", "version", "damaged", "service", "job", "epoch", "group", "rank", "duplicate", "proof", "slow", "crowded", "frame",
}

// String returns the reason's name: "version", "duplicate".
func (r Reason) String() string {
	if r < reasons {
		return reasonNames[r]
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// Refusal is the error of a connection that is refused, on both sides.
type Refusal struct {
	Reason Reason
	Text   string
}

// Error returns the text.
func (r *Refusal) Error() string { return r.Text }

// Refuse returns a [Refusal].
func Refuse(reason Reason, format string, args ...any) error {
	return &Refusal{reason, fmt.Sprintf(format, args...)}
}

// reasonOf returns the reason of an error: what is no refusal was damaged on its way.
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

// answer returns the answer to a greeting: err, or that all is well.
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

// ReadAnswer reads the answer to a greeting, as [Dialer.Call] does: nil if the other end accepts it, a [*Refusal] if it refuses it.
func ReadAnswer(r io.Reader) error {
	le := binary.LittleEndian
	b := make([]byte, answerBytes, answerBytes+answerTextMax)
	if _, err := io.ReadFull(r, b[:1]); err != nil {
		return err // nothing came: the other end was not there yet, or is gone
	}
	switch b[0] {
	case magic[0]:
	case nextProof:
		return Refuse(Proof, "the other end asks for a proof that this end belongs to it, and this end has none: it has no secret")
	default:
		return errNotOurs // which may not send as much as an answer has
	}
	if _, err := io.ReadFull(r, b[1:]); err != nil {
		return fmt.Errorf("the answer is cut short: %w", err)
	}
	n := le.Uint32(b[12:])
	switch {
	case string(b[:8]) != magic:
		return errNotOurs
	case le.Uint16(b[8:]) != Version && b[10] == byte(accepted):
		return Refuse(Versions, "it speaks version %d of the wire format, this end version %d", le.Uint16(b[8:]), Version)
	case crc32.Checksum(b[:16], castagnoli) != le.Uint32(b[16:]) || n > answerTextMax || b[10] >= byte(reasons):
		return Refuse(Damaged, "the answer to the greeting is damaged")
	case b[10] == byte(accepted):
		return nil
	}
	text := b[answerBytes : answerBytes+n]
	if _, err := io.ReadFull(r, text); err != nil {
		return fmt.Errorf("the refusal is cut short: %w", err)
	}
	return &Refusal{Reason(b[10]), string(text)}
}

var (
	errStranger  = Refuse(Magic, "the connection does not begin as Lockstep's do")
	errNotOurs   = Refuse(Magic, "what listens there does not speak Lockstep's protocol")
	errPushedOut = Refuse(Slow, "it was dropped for newer connections")
	errLeaving   = Refuse(NoService, "the process is leaving")
)
