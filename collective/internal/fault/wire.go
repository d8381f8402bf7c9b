package fault

import (
	"encoding/binary"
	"strings"
)

// The format of what processes send to each other about failures: a [Failure] and a [State]. Both begin with
// the version of this format; numbers are little-endian and of fixed length; texts and lists are preceded by
// their length in 16 bits. A decoder rejects what it does not know.
const version = 3

// Bounds of what is sent: longer texts and lists are truncated.
const (
	causeMax = 1750
	whoMax   = 1500
	nameMax  = 256
	peersMax = 64
	shapeMax = 32
)

// appendRanks appends a list of ranks, truncated if it is too long.
func appendRanks(b []byte, ranks []int) []byte {
	ranks = ranks[:min(len(ranks), peersMax)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(ranks)))
	for _, r := range ranks {
		b = binary.LittleEndian.AppendUint32(b, uint32(r))
	}
	return b
}

// appendText appends a text, truncated between two characters.
func appendText(b []byte, s string, most int) []byte {
	if len(s) > most {
		const ellipsis = "…"
		s = strings.ToValidUTF8(s[:most-len(ellipsis)], "") + ellipsis
	}
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// reader decodes numbers and texts; bad reports that the input was too short.
type reader struct {
	b   []byte
	bad bool
}

// finished reports whether the whole input was read, without an error, and has this format's version.
func (r *reader) finished(v byte) bool { return !r.bad && len(r.b) == 0 && v == version }

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
