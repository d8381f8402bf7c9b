package collective

import (
	"fmt"
	"math/bits"
	"strings"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// Every frame and slot carries a header that identifies its call; the receiver compares it with its own.

// field is a part of a call that all ranks must agree on.
type field uint16

const (
	fieldReduce field = 1 << iota
	fieldType
	fieldRoot
	fieldCount  // elements of the whole vector
	fieldCounts // of each rank, if they are given
	fieldName
	fieldShape // of the ranks' tensors
	fieldOrder // of the reduction, and its accumulation type
	fieldAlgorithm
)

// agreed lists the fields that must agree, by operation. A field that need not agree, or has no meaning, is 0
// in the headers. The epoch, the communicator, the number of the call and the operation always must agree
// (Send and Recv match each other). The length of a rank's own memory is not compared; the count of the whole
// vector and the Counts are. Shapes are compared where every rank contributes, or receives, a tensor of the
// same shape.
var agreed = [...]field{
	AllReduce:     fieldReduce | fieldType | fieldCount | fieldName | fieldShape | fieldOrder | fieldAlgorithm,
	Broadcast:     fieldType | fieldRoot | fieldCount | fieldName | fieldShape | fieldAlgorithm,
	Barrier:       fieldName | fieldAlgorithm,
	Reduce:        fieldReduce | fieldType | fieldRoot | fieldCount | fieldName | fieldShape | fieldOrder | fieldAlgorithm,
	ReduceScatter: fieldReduce | fieldType | fieldCount | fieldCounts | fieldName | fieldOrder | fieldAlgorithm,
	AllGather:     fieldType | fieldCount | fieldCounts | fieldName | fieldAlgorithm,
	Gather:        fieldType | fieldRoot | fieldCount | fieldCounts | fieldName | fieldAlgorithm,
	Scatter:       fieldType | fieldRoot | fieldCount | fieldCounts | fieldName | fieldAlgorithm,
	AllToAll:      fieldType | fieldCount | fieldName | fieldShape | fieldAlgorithm,
	Send:          fieldType | fieldCount | fieldName | fieldShape,
	Recv:          fieldType | fieldCount | fieldName | fieldShape,
}

// fingerprint returns the header of a checked call that an algorithm executes.
func fingerprint(t *team, seq uint64, call *Call, count int, o *Options, row uint32) transport.Header {
	must := agreed[call.Op]
	h := transport.Header{Epoch: t.cfg.Epoch, Comm: t.id, Seq: seq, Op: uint8(call.Op), Names: namesHash(call, count, must)}
	if call.Op == Recv {
		h.Op = uint8(Send)
	}
	if must&fieldReduce != 0 {
		h.Reduce = uint8(call.Reduce) + 1
	}
	if must&fieldType != 0 {
		h.Type = uint8(call.Type)
	}
	if must&fieldRoot != 0 {
		h.Root = int32(call.Root)
	}
	if must&fieldCount != 0 {
		h.Count = uint64(count)
	}
	if must&fieldOrder != 0 {
		h.Order = uint8(o.Order)<<4 | uint8(o.Accumulate)
	}
	if must&fieldAlgorithm != 0 {
		h.Plan = row
	}
	return h
}

// label describes a call in errors, beyond its header.
type label struct {
	op    Op // Send and Recv: which of the two
	peer  int
	back  uint64 // Send and Recv: how many calls of the opposite kind this rank has begun with peer
	name  string
	shape []int // where fieldCounts must agree: the counts by rank, or nil
	algo  string
}

// differ describes how two headers at the same position differ. Their labels may be nil if they are unknown.
func differ(own, other *transport.Header, ownLabel, otherLabel *label) string {
	known := ownLabel != nil && otherLabel != nil
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
	case own.Names != other.Names && known && ownLabel.name != otherLabel.name:
		return "the names differ"
	case own.Names != other.Names && known && countsByRank(Op(own.Op)):
		return "the counts by rank differ"
	case own.Names != other.Names && known:
		return "the shapes differ"
	case own.Count != other.Count:
		return "the counts differ"
	case own.Names != other.Names:
		return "the names, shapes or counts by rank differ"
	case own.Order>>4 != other.Order>>4:
		return "the orders of reduction differ: " + orderText(other) + " and " + orderText(own)
	case own.Order != other.Order:
		return "the accumulation types differ: " + accumulateText(other) + " and " + accumulateText(own)
	case own.Plan != other.Plan && known:
		return fmt.Sprintf("the algorithms differ: %q and %q", otherLabel.algo, ownLabel.algo)
	case own.Plan != other.Plan:
		return "the algorithms differ"
	}
	return fmt.Sprintf("the frames differ: got number %d, want %d", other.Frame, own.Frame)
}

// describe formats a call for errors: all_reduce SUM float32 [3] of "w".
func describe(h *transport.Header, l *label) string {
	var b strings.Builder
	op := Op(h.Op)
	if l != nil && l.op != 0 {
		op = l.op
	}
	b.WriteString(op.String())
	if h.Reduce != 0 {
		fmt.Fprintf(&b, " %v", ReduceOp(h.Reduce-1))
	}
	if h.Type != 0 {
		fmt.Fprintf(&b, " %v", tensor.DType(h.Type))
		if l != nil && l.shape != nil && !countsByRank(op) {
			fmt.Fprintf(&b, " %v", l.shape)
		} else {
			fmt.Fprintf(&b, " [%d]", h.Count)
		}
	}
	if l != nil && len(l.shape) > 0 && countsByRank(op) {
		fmt.Fprintf(&b, " in parts of %v", l.shape)
	}
	if l != nil && l.name != "" {
		fmt.Fprintf(&b, " of %q", l.name)
	}
	switch {
	case op == Broadcast || op == Scatter:
		fmt.Fprintf(&b, " from rank %d", h.Root)
	case op == Reduce || op == Gather:
		fmt.Fprintf(&b, " to rank %d", h.Root)
	case op == Send && l != nil && l.op != 0:
		fmt.Fprintf(&b, " to rank %d", l.peer)
	case op == Recv && l != nil:
		fmt.Fprintf(&b, " from rank %d", l.peer)
	}
	return b.String()
}

// countsByRank reports whether a call's label has the counts by rank instead of a shape.
func countsByRank(op Op) bool { return int(op) < len(agreed) && agreed[op]&fieldCounts != 0 }

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

// namesHash returns the hash of the name and the shape of a call's tensor, and of its counts by rank. A nil
// shape is a vector.
func namesHash(call *Call, count int, must field) uint64 {
	var h uint64
	if m := call.Manifest; m != nil {
		h = hashString(hashSeed, m.Name)
		switch {
		case must&fieldShape == 0:
		case m.Shape == nil:
			h = mix(mix(h, 1), uint64(count))
		default:
			h = hashInts(h, m.Shape)
		}
	}
	if must&fieldCounts != 0 && call.Counts != nil {
		h = hashInts(h+1, call.Counts)
	}
	return h
}

func hashInts(h uint64, ns []int) uint64 {
	h = mix(h, uint64(len(ns)))
	for _, n := range ns {
		h = mix(h, uint64(n))
	}
	return h
}

// The hash is the same in every process and every build, because it is sent to other processes. It protects
// against mistakes, not against attacks. It multiplies to 128 bits and folds, a word at a time, as wyhash
// does.
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
