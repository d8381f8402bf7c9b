package tcp

import (
	"encoding/binary"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

const streamsMax = 64

// hello holds the fields of a [listener.Hello] that this package uses.
type hello struct {
	purpose listener.Service // Control: between two processes; Data: between two ranks
	stream  uint8            // Data: index of this connection, among those of the pair
	streams uint8            // data connections of each pair
	secure  bool             // TLS follows
	job     [16]byte
	world   uint64 // the group that Node.Group created
	group   uint64 // Data: the group, which is the world or was split from it
	members uint64 // hash of the members of the world or group
	epoch   uint32
	from    uint32 // the dialer's and the acceptor's rank in the group; Control: the lowest ranks of their processes
	to      uint32
}

func (h *hello) message() *listener.Hello {
	le := binary.LittleEndian
	g := &listener.Hello{Service: h.purpose, Secure: h.secure, Job: h.job}
	b := g.Fields[:0]
	b = le.AppendUint64(b, h.world)
	b = le.AppendUint64(b, h.group)
	b = le.AppendUint64(b, h.members)
	b = le.AppendUint32(b, h.epoch)
	b = le.AppendUint32(b, h.from)
	b = le.AppendUint32(b, h.to)
	_ = append(b, h.stream, h.streams)
	return g
}

func (h *hello) encode() []byte { return h.message().Encode() }

// decode reads h from a message.
func (h *hello) decode(g *listener.Hello) error {
	le := binary.LittleEndian
	b := &g.Fields
	*h = hello{
		purpose: g.Service, secure: g.Secure, job: g.Job, world: le.Uint64(b[0:]), group: le.Uint64(b[8:]), members: le.Uint64(b[16:]),
		epoch: le.Uint32(b[24:]), from: le.Uint32(b[28:]), to: le.Uint32(b[32:]), stream: b[36], streams: b[37],
	}
	if h.streams == 0 || h.streams > streamsMax || h.stream >= h.streams || [6]byte(b[38:]) != [6]byte{} {
		return listener.Refuse(listener.Damaged, "the hello is for stream %d of %d", h.stream, h.streams)
	}
	return nil
}
