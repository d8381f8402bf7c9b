package fault

import (
	"encoding/binary"

	"github.com/lockstep-ml/lockstep/collective/plan"
)

// Failure is why a communicator has failed, as one process reports it to the others.
type Failure struct {
	Kind  Kind
	Comm  string  // the communicator's name
	Rank  int     // the rank that detected the failure, or -1
	Op    plan.Op // the operation of the call; 0: outside of a call
	Seq   uint64  // number of the call, from 0
	Name  string  // name of the call's tensor
	Peers []int   // the other ranks concerned
	Cause string  // may be empty
	Who   string  // the workers concerned and their last reported state: lines, or empty
}

// Kind is a kind of failure, by its number in the encoding; 0: another kind, which no process can decode.
type Kind uint8

// The kinds.
const (
	KindTimeout Kind = iota + 1
	KindPeerLost
	KindMismatch
	KindDesync
	KindInvalid
	KindClosed
	KindBusy
	KindAborted
)

// Encode encodes the failure in at most [github.com/lockstep-ml/lockstep/transport.ReasonMax] bytes.
func (f *Failure) Encode() []byte {
	b := []byte{version, byte(f.Kind), byte(f.Op)}
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Rank))
	b = binary.LittleEndian.AppendUint64(b, f.Seq)
	b = appendText(b, f.Comm, nameMax)
	b = appendText(b, f.Name, nameMax)
	b = appendRanks(b, f.Peers)
	b = appendText(b, f.Cause, causeMax)
	return appendText(b, f.Who, whoMax)
}

// DecodeFailure decodes a failure; ok is false if the encoding is invalid.
func DecodeFailure(b []byte) (f Failure, ok bool) {
	r := reader{b: b}
	v := r.byte()
	f.Kind, f.Op = Kind(r.byte()), plan.Op(r.byte())
	f.Rank, f.Seq = int(int32(r.uint32())), r.uint64()
	f.Comm, f.Name = r.text(), r.text()
	f.Peers = r.ranks()
	f.Cause, f.Who = r.text(), r.text()
	return f, r.finished(v) && KindTimeout <= f.Kind && f.Kind <= KindAborted && f.Op <= plan.Recv && f.Rank >= -1
}
