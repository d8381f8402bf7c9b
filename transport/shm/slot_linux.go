package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// slot is a transport.Slot in shared memory. A rank has two, for its odd and its even calls. The fields that peers read
// in every call are one cache line, the first: they read the header only if its sum differs from that of their header.
type slot struct {
	progress atomic.Uint64 // number of flags set, up to the last call of this slot
	sum      uint64        // of the header; 0: unknown
	text     uint32        // twice the version of the text, and 1 if src and dst are set
	_        uint32
	data     [inlineBytes / 8]uint64 // of small calls
	_        uint64

	header
	_ uint64

	src, dst  place
	_         [64 - 2*24]byte
	textBytes [slotTextBytes]byte
}

// inlineBytes is the length of the data on the cache line of the progress.
const inlineBytes = 32

// header is a transport.Header, and 4 bytes.
type header struct {
	comm, seq, count, names  uint64
	epoch, frame             uint32
	root                     int32
	plan                     uint32
	op, reduce, dtype, order uint8
	_                        uint32
}

// place identifies memory in a way that is valid in all processes.
type place struct {
	process uint64 // number of the process whose arena has it, + 1; 0: it cannot be reached
	offset  uint64
	bytes   uint64
}

// slotTextBytes makes a slot 1 KiB long.
const slotTextBytes = 1024 - 3*64

// The capacity of the text of a slot. Longer text is truncated, since it is only shown to people.
const (
	textHeader   = 4 // lengths: 2 bytes of the name, 1 of the algorithm, 1 of the shape
	algorithmMax = 64
	dimsMax      = 32
	nameMax      = slotTextBytes - textHeader - algorithmMax - 8*dimsMax
)

func (s *header) set(h *transport.Header) {
	s.comm, s.seq, s.count, s.names = h.Comm, h.Seq, h.Count, h.Names
	s.epoch, s.frame, s.root, s.plan = h.Epoch, h.Frame, h.Root, h.Plan
	s.op, s.reduce, s.dtype, s.order = h.Op, h.Reduce, h.Type, h.Order
}

func (s *header) get(h *transport.Header) {
	h.Comm, h.Seq, h.Count, h.Names = s.comm, s.seq, s.count, s.names
	h.Epoch, h.Frame, h.Root, h.Plan = s.epoch, s.frame, s.root, s.plan
	h.Op, h.Reduce, h.Type, h.Order = s.op, s.reduce, s.dtype, s.order
}

// encodeText writes the text of a slot.
func encodeText(b *[slotTextBytes]byte, name, algorithm string, shape []int) {
	name, algorithm = name[:min(len(name), nameMax)], algorithm[:min(len(algorithm), algorithmMax)]
	shape = shape[:min(len(shape), dimsMax)]
	binary.LittleEndian.PutUint16(b[0:], uint16(len(name)))
	b[2], b[3] = uint8(len(algorithm)), uint8(len(shape))
	at := textHeader
	at += copy(b[at:], name)
	at += copy(b[at:], algorithm)
	for _, d := range shape {
		binary.LittleEndian.PutUint64(b[at:], uint64(d))
		at += 8
	}
}

// decodeText reads the text of a slot: the name and the algorithm share the memory of b, the shape is appended to
// shape.
func decodeText(b *[slotTextBytes]byte, shape []int) (name, algorithm []byte, dims []int, err error) {
	names, algorithms, count := int(binary.LittleEndian.Uint16(b[0:])), int(b[2]), int(b[3])
	if names > nameMax || algorithms > algorithmMax || count > dimsMax {
		return nil, nil, shape, fmt.Errorf("its slot claims a name of %d bytes, an algorithm of %d, "+
			"a shape of %d dimensions", names, algorithms, count)
	}
	at := textHeader
	name, at = b[at:at+names], at+names
	algorithm, at = b[at:at+algorithms], at+algorithms
	for range count {
		d := int64(binary.LittleEndian.Uint64(b[at:]))
		if d < 0 || int64(int(d)) != d {
			return nil, nil, shape, errors.New("its slot claims an invalid shape")
		}
		shape = append(shape, int(d))
		at += 8
	}
	return name, algorithm, shape, nil
}
