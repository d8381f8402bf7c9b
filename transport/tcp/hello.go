package tcp

import (
	"encoding/binary"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// hello holds the fields of a [listener.Hello] that this package uses.
type hello struct {
	purpose listener.Service // Control: between two processes; Data: between two ranks
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
	_ = le.AppendUint32(b, h.to)
	return g
}

func (h *hello) encode() []byte { return h.message().Encode() }

// decode reads h from a message.
func (h *hello) decode(g *listener.Hello) error {
	le := binary.LittleEndian
	b := &g.Fields
	*h = hello{
		purpose: g.Service, secure: g.Secure, job: g.Job, world: le.Uint64(b[0:]), group: le.Uint64(b[8:]),
		members: le.Uint64(b[16:]), epoch: le.Uint32(b[24:]),
		from: le.Uint32(b[28:]), to: le.Uint32(b[32:]),
	}
	if rest := [8]byte(b[36:]); rest != [8]byte{} {
		return listener.Refuse(listener.Damaged, "the hello ends with % x, want zeros", rest)
	}
	return nil
}
