package fault

import (
	"encoding/binary"
	"slices"

	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/collective/plan"
)

// State is the state of a rank at one moment, as the rank reports it.
type State struct {
	Call     fingerprint.Call // its latest call, or the call that was requested; none: it has made none
	Activity Activity
	Entered  uint64 // number of collectives that it has entered
	Waits    []int  // Waiting: the ranks that it waits for; else nil
}

// Activity is what a rank does in its latest call.
type Activity uint8

// The activities.
const (
	Idle    Activity = iota // it has made no call, or the latest one has ended
	Busy                    // it is in the call, and does not wait for a peer
	Waiting                 // it is in the call, and waits
	Broken                  // its communicator has failed
)

// LatestCall, as the number of a call, requests the state with the latest call, whatever its number.
const LatestCall = ^uint64(0)

// inCollective reports whether the rank is in a collective now.
func (s *State) inCollective() bool {
	return (s.Activity == Busy || s.Activity == Waiting) && s.Call.Collective()
}

// past reports whether a rank has done everything that a rank in the given call can wait for. For a message
// that is unknown.
func (s *State) past(call *fingerprint.Call) bool {
	seq := call.Header.Seq
	return call.Pair == 0 && (s.Entered > seq+1 || s.Entered == seq+1 && !s.inCollective())
}

// validate removes from Waits what the state of a rank cannot contain.
func (s *State) validate(rank, size int) {
	s.Waits = slices.DeleteFunc(s.Waits, func(r int) bool { return r < 0 || r >= size || r == rank })
	if s.Activity == Waiting && len(s.Waits) == 0 {
		s.Activity = Busy
	}
}

// Encode encodes the state.
func (s *State) Encode() []byte {
	c := &s.Call
	h := &c.Header
	b := []byte{version, h.Op, h.Reduce, h.Type, h.Order, byte(c.Pair), byte(s.Activity)}
	b = binary.LittleEndian.AppendUint32(b, uint32(c.Peer))
	b = binary.LittleEndian.AppendUint32(b, h.Epoch)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.Root))
	b = binary.LittleEndian.AppendUint32(b, h.Plan)
	for _, v := range []uint64{h.Comm, h.Seq, h.Count, h.Names, c.Back, s.Entered} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	b = appendText(b, c.Name, nameMax)
	b = appendText(b, c.Algorithm, nameMax)
	shape := c.Shape[:min(len(c.Shape), shapeMax)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(shape)))
	for _, d := range shape {
		b = binary.LittleEndian.AppendUint64(b, uint64(d))
	}
	return appendRanks(b, s.Waits)
}

// DecodeState decodes a state; ok is false if the encoding is invalid.
func DecodeState(b []byte) (s State, ok bool) {
	r := reader{b: b}
	v := r.byte()
	c := &s.Call
	h := &c.Header
	h.Op, h.Reduce, h.Type, h.Order = r.byte(), r.byte(), r.byte(), r.byte()
	c.Pair, s.Activity = plan.Op(r.byte()), Activity(r.byte())
	c.Peer = int(int32(r.uint32()))
	h.Epoch, h.Root, h.Plan = r.uint32(), int32(r.uint32()), r.uint32()
	h.Comm, h.Seq, h.Count, h.Names = r.uint64(), r.uint64(), r.uint64(), r.uint64()
	c.Back, s.Entered = r.uint64(), r.uint64()
	c.Name, c.Algorithm = r.text(), r.text()
	c.Shape = []int{}
	for range r.uint16() {
		if r.bad {
			break
		}
		c.Shape = append(c.Shape, int(r.uint64()))
	}
	s.Waits = r.ranks()
	ok = r.finished(v) && plan.Op(h.Op) <= plan.Recv && c.Pair <= plan.Recv && s.Activity <= Broken
	return s, ok && (len(s.Waits) > 0) == (s.Activity == Waiting)
}
