package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/lockstep-ml/lockstep/transport"
)

// messageKind is the kind of a message on a control connection.
type messageKind uint8

const (
	msgClosed  messageKind = iota + 1 // rank from of the group has closed its end
	msgFailed                         // the group has failed at rank from, in the process of to; the text is the reason
	msgConnect                        // rank from requests that rank to dials it, or the reason of its refusal
	msgAsk                            // rank from queries the text of rank to's call seq
	msgAnswer                         // rank from answers the query tag of rank to
	msgBye                            // the process has closed all its endpoints; the last message
	msgOpen                           // the dialer uses the connection; its first message
	msgReady                          // to the parent: the subtree is connected; to a child: all processes are
	msgLost                           // from reports that process to is lost; the text is the reason
	msgKinds
)

// message is a message on a control connection: a head of messageBytes and at most transport.ReasonMax bytes of text.
type message struct {
	kind  messageKind
	known bool   // msgAnswer: the call has a text
	tag   uint32 // msgAsk, msgAnswer: number of the query; msgFailed, msgLost: number of processes that have passed it on
	from  uint32 // ranks in the group; msgLost: the lowest of a process, in the world
	to    uint32 // the same; also msgFailed: in the world
	group uint64
	seq   uint64
	text  []byte
}

const messageBytes = 40

var errMessage = errors.New("received an invalid message")

// append appends the encoded message to b.
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

// decode decodes the head of a message. It returns the length and the checksum of the text that follows.
func (m *message) decode(b *[messageBytes]byte) (textBytes int, sum uint32, err error) {
	le := binary.LittleEndian
	if sum := crc32.Checksum(b[:36], castagnoli); sum != le.Uint32(b[36:]) {
		return 0, 0, fmt.Errorf("%w: its head has checksum %#x, want %#x", errMessage, sum, le.Uint32(b[36:]))
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
