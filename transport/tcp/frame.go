package tcp

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/lockstep-ml/lockstep/transport"
)

// A frame is a head of headBytes and its data. docs/wire.md has the layout.
const (
	headBytes = 84
	frameMark = 0x46 // "F", the first byte of every head; then 1 if the head has a checksum of the data, then zeros
	checkedAt = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// head precedes the data of a frame.
type head struct {
	bytes  uint64 // length of the data
	number uint64 // of the frame from its sender to its receiver in the group, from 0

	checked bool   // sum is the checksum of the data
	sum     uint32 // 0 if it is not checked
	transport.Header
}

func (h *head) encode(b *[headBytes]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], frameMark)
	if h.checked {
		b[checkedAt] = 1
	}
	le.PutUint64(b[8:], h.bytes)
	le.PutUint64(b[16:], h.number)
	le.PutUint64(b[24:], h.Comm)
	le.PutUint64(b[32:], h.Seq)
	le.PutUint64(b[40:], h.Count)
	le.PutUint64(b[48:], h.Names)
	le.PutUint32(b[56:], h.Epoch)
	le.PutUint32(b[60:], h.Header.Frame)
	le.PutUint32(b[64:], uint32(h.Root))
	le.PutUint32(b[68:], h.Plan)
	b[72], b[73], b[74], b[75] = h.Op, h.Reduce, h.Type, h.Order
	le.PutUint32(b[76:], h.sum)
	le.PutUint32(b[80:], crc32.Checksum(b[:80], castagnoli))
}

// errFrame is the error of received data that is not a frame of this protocol, or a damaged one.
var errFrame = fmt.Errorf("%w: received an invalid frame", transport.ErrCorrupt)

func (h *head) decode(b *[headBytes]byte) error {
	le := binary.LittleEndian
	if sum := crc32.Checksum(b[:80], castagnoli); sum != le.Uint32(b[80:]) {
		return fmt.Errorf("%w: its head has checksum %#x, want %#x", errFrame, sum, le.Uint32(b[80:]))
	}
	if le.Uint64(b[0:])&^(1<<(8*checkedAt)) != frameMark {
		return fmt.Errorf("%w: it starts with % x", errFrame, b[:8])
	}
	*h = head{
		bytes: le.Uint64(b[8:]), number: le.Uint64(b[16:]), checked: b[checkedAt] == 1, sum: le.Uint32(b[76:]),
		Header: transport.Header{
			Comm: le.Uint64(b[24:]), Seq: le.Uint64(b[32:]), Count: le.Uint64(b[40:]), Names: le.Uint64(b[48:]),
			Epoch: le.Uint32(b[56:]), Frame: le.Uint32(b[60:]), Root: int32(le.Uint32(b[64:])), Plan: le.Uint32(b[68:]),
			Op: b[72], Reduce: b[73], Type: b[74], Order: b[75],
		},
	}
	return nil
}
