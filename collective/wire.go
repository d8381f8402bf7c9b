package collective

import (
	"encoding/binary"
	"errors"
	"strings"
)

// The format of what processes send to each other about failures: the reason of a failure
// ([transport.Endpoint.Fail]), and a rank's state ([transport.Asker]). Both begin with the version of this
// format, 3; numbers are little-endian and of fixed length; texts and lists are preceded by their length in
// 16 bits. A decoder rejects what it does not know.
const wireVersion = 3

// Bounds of what is sent: longer texts and lists are truncated.
const (
	wireTextMax  = 1750
	wireWhoMax   = 1500
	wireNameMax  = 256
	wirePeersMax = 64
	wireShapeMax = 32
)

// wireKinds are the kinds of failure by their number on the wire, from 1.
var wireKinds = []error{ErrTimeout, ErrPeerLost, ErrMismatch, ErrDesync, ErrInvalid, ErrClosed, ErrBusy, ErrAborted}

// encodeFailure encodes why a communicator has failed, in at most [transport.ReasonMax] bytes.
func encodeFailure(err error, m *member) []byte {
	e := (*Error)(nil)
	if !errors.As(err, &e) {
		e = &Error{Kind: ErrAborted, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}
	}
	kind := 0
	for i, k := range wireKinds {
		if e.Kind == k {
			kind = i + 1
		}
	}
	b := []byte{wireVersion, byte(kind), byte(e.Op)}
	b = binary.LittleEndian.AppendUint32(b, uint32(e.Rank))
	b = binary.LittleEndian.AppendUint64(b, e.Seq)
	b = appendText(b, e.Comm, wireNameMax)
	b = appendText(b, e.Name, wireNameMax)
	b = appendRanks(b, e.Peers)
	say := ""
	if e.Err != nil {
		say = e.Err.Error()
	}
	b = appendText(b, say, wireTextMax)
	return appendText(b, e.Who, wireWhoMax)
}

// decodeFailure decodes it. The error has the rank that detected the failure; ok is false if the encoding is
// invalid.
func decodeFailure(b []byte) (e *Error, ok bool) {
	r := reader{b: b}
	version, kind, op := r.byte(), int(r.byte()), Op(r.byte())
	e = &Error{Op: op, Rank: int(int32(r.uint32())), Seq: r.uint64(), Comm: r.text(), Name: r.text()}
	e.Peers = r.ranks()
	if say := r.text(); say != "" {
		e.Err = errors.New(say)
	}
	e.Who = r.text()
	if r.bad || len(r.b) > 0 || version != wireVersion || kind < 1 || kind > len(wireKinds) || op > Recv || e.Rank < -1 {
		return nil, false
	}
	e.Kind = wireKinds[kind-1]
	if e.Kind == ErrClosed { // to the other ranks it is lost
		e.Kind = ErrPeerLost
		e.Peers = []int{e.Rank}
	}
	return e, true
}

// encodeAnswer encodes a rank's state.
func encodeAnswer(s *peerState) []byte {
	c := &s.call
	h := &c.Header
	b := []byte{wireVersion, h.Op, h.Reduce, h.Type, h.Order, byte(c.Pair), byte(s.state)}
	b = binary.LittleEndian.AppendUint32(b, uint32(c.Peer))
	b = binary.LittleEndian.AppendUint32(b, h.Epoch)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.Root))
	b = binary.LittleEndian.AppendUint32(b, h.Plan)
	for _, v := range []uint64{h.Comm, h.Seq, h.Count, h.Names, c.Back, s.entered} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	b = appendText(b, c.Name, wireNameMax)
	b = appendText(b, c.Algorithm, wireNameMax)
	shape := c.Shape[:min(len(c.Shape), wireShapeMax)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(shape)))
	for _, d := range shape {
		b = binary.LittleEndian.AppendUint64(b, uint64(d))
	}
	return appendRanks(b, s.waits)
}

// decodeAnswer decodes it.
func decodeAnswer(b []byte) (s peerState, ok bool) {
	r := reader{b: b}
	version := r.byte()
	c := &s.call
	h := &c.Header
	h.Op, h.Reduce, h.Type, h.Order = r.byte(), r.byte(), r.byte(), r.byte()
	c.Pair, s.state = Op(r.byte()), doing(r.byte())
	c.Peer = int(int32(r.uint32()))
	h.Epoch, h.Root, h.Plan = r.uint32(), int32(r.uint32()), r.uint32()
	h.Comm, h.Seq, h.Count, h.Names = r.uint64(), r.uint64(), r.uint64(), r.uint64()
	c.Back, s.entered = r.uint64(), r.uint64()
	c.Name, c.Algorithm = r.text(), r.text()
	c.Shape = []int{}
	for range r.uint16() {
		if r.bad {
			break
		}
		c.Shape = append(c.Shape, int(r.uint64()))
	}
	s.waits = r.ranks()
	waits := len(s.waits) > 0
	return s, !r.bad && len(r.b) == 0 && version == wireVersion && Op(h.Op) <= Recv && c.Pair <= Recv && waits == (s.state == waiting) && s.state <= broken
}

// appendRanks appends a list of ranks, truncated if it is too long.
func appendRanks(b []byte, ranks []int) []byte {
	ranks = ranks[:min(len(ranks), wirePeersMax)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(ranks)))
	for _, r := range ranks {
		b = binary.LittleEndian.AppendUint32(b, uint32(r))
	}
	return b
}

// appendText appends a text, truncated between two characters.
func appendText(b []byte, s string, most int) []byte {
	if len(s) > most {
		const cut = "…"
		s = strings.ToValidUTF8(s[:most-len(cut)], "") + cut
	}
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// reader decodes numbers and texts; bad reports that the input was too short.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if n > len(r.b) {
		r.bad = true
		r.b = nil
		return make([]byte, min(n, 8))
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) byte() byte     { return r.take(1)[0] }
func (r *reader) uint16() uint16 { return binary.LittleEndian.Uint16(r.take(2)) }
func (r *reader) uint32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }
func (r *reader) uint64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *reader) text() string {
	n := int(r.uint16())
	if n > len(r.b) {
		r.bad = true
		return ""
	}
	return string(r.take(n))
}

func (r *reader) ranks() (out []int) {
	for range r.uint16() {
		if r.bad {
			break
		}
		out = append(out, int(int32(r.uint32())))
	}
	return out
}
