package tensorboard

import (
	"encoding/binary"
	"math"
)

// message is the wire form of a protocol buffer. The fields of TensorBoard's messages (event.proto, summary.proto,
// plugin_data.proto of its hparams plugin) are encoded by hand: they are few.
type message []byte

// Wire types of fields.
const (
	varint  = 0
	fixed64 = 1
	bytes   = 2
	fixed32 = 5
)

func (m *message) key(field, wire int) { *m = binary.AppendUvarint(*m, uint64(field)<<3|uint64(wire)) }

func (m *message) int(field int, x int64) {
	m.key(field, varint)
	*m = binary.AppendUvarint(*m, uint64(x))
}

func (m *message) double(field int, x float64) {
	m.key(field, fixed64)
	*m = binary.LittleEndian.AppendUint64(*m, math.Float64bits(x))
}

func (m *message) float(field int, x float32) {
	m.key(field, fixed32)
	*m = binary.LittleEndian.AppendUint32(*m, math.Float32bits(x))
}

func (m *message) string(field int, x string) {
	m.key(field, bytes)
	*m = binary.AppendUvarint(*m, uint64(len(x)))
	*m = append(*m, x...)
}

func (m *message) sub(field int, x message) { m.string(field, string(x)) }

func (m *message) doubles(field int, list []float64) {
	var packed message
	for _, x := range list {
		packed = binary.LittleEndian.AppendUint64(packed, math.Float64bits(x))
	}
	m.sub(field, packed)
}
