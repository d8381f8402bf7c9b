package collective

import (
	"fmt"
	"math/bits"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Every frame and slot carries a header that says which call it belongs to; the receiver holds it against its own. All
// fields must agree for all operations of this package: the number of the call, the operation, the reduction, the
// dtype, the root, the count, names and shapes, the order with the accumulation type, and the algorithm. A field
// without meaning for an operation is 0 in its headers.

// fingerprint returns the header of a checked call.
func fingerprint(t *team, seq uint64, call *Call, count int, o *Options) transport.Header {
	h := transport.Header{
		Epoch: t.cfg.Epoch,
		Comm:  t.id,
		Seq:   seq,
		Op:    uint8(call.Op),
		Names: namesHash(call.Manifest, count),
		Plan:  uint32(hashString(hashSeed, o.Algorithm)),
	}
	switch call.Op {
	case AllReduce:
		h.Reduce = uint8(call.Reduce) + 1
		h.Order = uint8(o.Order)<<4 | uint8(o.Accumulate)
	case Broadcast:
		h.Root = int32(call.Root)
	case Barrier:
		return h
	}
	h.Count = uint64(count)
	h.Type = uint8(call.Type)
	return h
}

// label is what a call's header stands for, to say it in an error.
type label struct {
	name  string
	shape []int
	algo  string
}

// differ says what differs between two headers of the same moment: of other, whose label may be nil if its text is not
// known, and of own.
func differ(own, other *transport.Header, ownLabel, otherLabel *label) string {
	switch {
	case own.Epoch != other.Epoch:
		return fmt.Sprintf("the epochs differ: %d and %d", other.Epoch, own.Epoch)
	case own.Comm != other.Comm:
		return fmt.Sprintf("the communicators differ: %#x and %#x", other.Comm, own.Comm)
	case own.Seq != other.Seq:
		return fmt.Sprintf("the numbers of the calls differ: %d and %d", other.Seq, own.Seq)
	case own.Op != other.Op:
		return "the operations differ"
	case own.Reduce != other.Reduce:
		return "the reductions differ"
	case own.Type != other.Type:
		return "the dtypes differ"
	case own.Root != other.Root:
		return "the roots differ"
	case own.Names != other.Names && otherLabel != nil && ownLabel.name != otherLabel.name:
		return "the names differ"
	case own.Names != other.Names && otherLabel != nil:
		return "the shapes differ"
	case own.Count != other.Count:
		return "the counts differ"
	case own.Names != other.Names:
		return "the names or shapes differ"
	case own.Order>>4 != other.Order>>4:
		return "the orders of reduction differ: " + orderText(other) + " and " + orderText(own)
	case own.Order != other.Order:
		return "the accumulation types differ: " + accumulateText(other) + " and " + accumulateText(own)
	case own.Plan != other.Plan && otherLabel != nil:
		return fmt.Sprintf("the algorithms differ: %q and %q", otherLabel.algo, ownLabel.algo)
	case own.Plan != other.Plan:
		return "the algorithms differ"
	}
	return fmt.Sprintf("the frames differ: number %d came, %d was expected", other.Frame, own.Frame)
}

// describe writes a call as errors show it: all_reduce SUM float32 [3] of "w".
func describe(h *transport.Header, l *label) string {
	var b strings.Builder
	b.WriteString(Op(h.Op).String())
	if h.Reduce != 0 {
		fmt.Fprintf(&b, " %v", ReduceOp(h.Reduce-1))
	}
	if h.Type != 0 {
		fmt.Fprintf(&b, " %v", tensor.DType(h.Type))
		if l != nil && l.shape != nil {
			fmt.Fprintf(&b, " %v", l.shape)
		} else {
			fmt.Fprintf(&b, " [%d]", h.Count)
		}
	}
	if l != nil && l.name != "" {
		fmt.Fprintf(&b, " of %q", l.name)
	}
	if Op(h.Op) == Broadcast {
		fmt.Fprintf(&b, " from rank %d", h.Root)
	}
	return b.String()
}

func orderText(h *transport.Header) string {
	if Order(h.Order>>4) == Any {
		return "any"
	}
	return "canonical"
}

func accumulateText(h *transport.Header) string {
	if Accumulate(h.Order&15) == AccumulateFloat32 {
		return "float32"
	}
	return "the dtype"
}

// namesHash returns the hash of the name and the shape of a call's tensor; a nil shape is a vector of count elements.
func namesHash(m *Manifest, count int) uint64 {
	if m == nil {
		return 0
	}
	h := hashString(hashSeed, m.Name)
	if m.Shape == nil {
		return mix(mix(h, 1), uint64(count))
	}
	h = mix(h, uint64(len(m.Shape)))
	for _, d := range m.Shape {
		h = mix(h, uint64(d))
	}
	return h
}

// The hash is the same in every process and every build: it crosses the wire. It guards against mistakes, not malice. It
// multiplies to 128 bits and folds, a word at a time, as wyhash does.
const (
	hashSeed  = 0x9e3779b97f4a7c15 // 2^64 / golden ratio
	hashPrime = 0xd6e8feb86659fd93 // an odd number without pattern (Pelle Evensen's rrmxmx)
)

func mix(h, word uint64) uint64 {
	hi, lo := bits.Mul64(h^word, hashPrime)
	return (hi ^ lo) + hashSeed
}

func hashString(h uint64, s string) uint64 {
	h = mix(h, uint64(len(s)))
	b := unsafe.Slice(unsafe.StringData(s), len(s))
	for len(b) >= 8 {
		h = mix(h, uint64(b[0])|uint64(b[1])<<8|uint64(b[2])<<16|uint64(b[3])<<24|
			uint64(b[4])<<32|uint64(b[5])<<40|uint64(b[6])<<48|uint64(b[7])<<56)
		b = b[8:]
	}
	var last uint64
	for i, c := range b {
		last |= uint64(c) << (8 * i)
	}
	return mix(h, last)
}
