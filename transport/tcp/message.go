package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/lockstep-ml/lockstep/transport"
)

// messageKind is what a message on a control connection says.
type messageKind uint8

const (
	msgClosed  messageKind = iota + 1 // rank from of the group has closed its end
	msgFailed                         // rank from's group has failed; the text is the reason
	msgConnect                        // rank from would like rank to to dial it
	msgAsk                            // rank from asks rank to for the text of its call seq
	msgAnswer                         // rank from answers rank to's question tag
	msgBye                            // the process has closed all its ends; nothing follows
	msgKinds
)

// message is one on a control connection: a head of messageBytes and at most transport.ReasonMax bytes of text.
type message struct {
	kind  messageKind
	known bool // msgAnswer: there is a text
	tag   uint32
	from  uint32 // ranks in the group
	to    uint32
	group uint64
	seq   uint64
	text  []byte
}

const messageBytes = 40

var errMessage = errors.New("what arrived is no valid message")

// append appends the message as it is sent.
func (m *message) append(b []byte) []byte {
	le := binary.LittleEndian
	at := len(b)
	known := byte(0)
	if m.known {
		known = 1
	}
	b = append(b, byte(m.kind), known)
	b = le.AppendUint16(b, uint16(len(m.text)))
	b = le.AppendUint32(b, m.tag)
	b = le.AppendUint32(b, m.from)
	b = le.AppendUint32(b, m.to)
	b = le.AppendUint64(b, m.group)
	b = le.AppendUint64(b, m.seq)
	b = le.AppendUint32(b, crc32.Checksum(m.text, castagnoli))
	b = le.AppendUint32(b, crc32.Checksum(b[at:], castagnoli))
	return append(b, m.text...)
}

// decode reads the head of a message and returns the length of its text, which the text's checksum sum is for.
func (m *message) decode(b *[messageBytes]byte) (textBytes int, sum uint32, err error) {
	le := binary.LittleEndian
	if sum := crc32.Checksum(b[:36], castagnoli); sum != le.Uint32(b[36:]) {
		return 0, 0, fmt.Errorf("%w: its head has checksum %#x, and says %#x", errMessage, sum, le.Uint32(b[36:]))
	}
	*m = message{
		kind: messageKind(b[0]), known: b[1] == 1, tag: le.Uint32(b[4:]), from: le.Uint32(b[8:]), to: le.Uint32(b[12:]),
		group: le.Uint64(b[16:]), seq: le.Uint64(b[24:]),
	}
	textBytes = int(le.Uint16(b[2:]))
	if m.kind == 0 || m.kind >= msgKinds || b[1] > 1 || textBytes > transport.ReasonMax {
		return 0, 0, fmt.Errorf("%w: kind %d with %d bytes of text", errMessage, m.kind, textBytes)
	}
	return textBytes, le.Uint32(b[32:]), nil
}
