package data

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
)

// The framing of TFRecord files (tensorflow/core/lib/io/record_writer.h), all little-endian: uint64 length, uint32
// masked CRC-32C of those 8 bytes, the record, uint32 masked CRC-32C of the record.
const (
	formatTFRecord  = "TFRecord"
	recordHeadBytes = 12
	recordFootBytes = 4
)

// recordBytesMax is the largest accepted record. TensorFlow's records are protocol buffers, which are limited
// to 2 GiB.
const recordBytesMax = math.MaxInt32

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maskedCRC returns the checksum of b in TensorFlow's form: rotated and offset, so that a checksum of data
// that contains checksums is still strong.
func maskedCRC(b []byte) uint32 {
	crc := crc32.Checksum(b, castagnoli)
	return (crc>>15 | crc<<17) + 0xa282ead8
}

// AppendTFRecord appends record to dst in the framing of a TFRecord file, and returns the extended slice.
func AppendTFRecord(dst, record []byte) []byte {
	at := len(dst)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(len(record)))
	dst = binary.LittleEndian.AppendUint32(dst, maskedCRC(dst[at:]))
	dst = append(dst, record...)
	return binary.LittleEndian.AppendUint32(dst, maskedCRC(record))
}

// TFRecords returns a pipeline of the records of TFRecord files, gzipped or not, in the order of names. Each
// record is a string scalar; decode it (usually a tf.train.Example) with Map. The files are opened when they
// are read. Both checksums of every record are verified: a corrupt or truncated file gives a *[FormatError].
func TFRecords(names ...string) Pipeline {
	return Pipeline{&files{format: formatTFRecord, names: names, next: (*source).record}}
}

// recordLength returns the length of the record that follows head.
func recordLength(head [recordHeadBytes]byte) (int64, error) {
	if got, want := maskedCRC(head[:8]), binary.LittleEndian.Uint32(head[8:]); got != want {
		return 0, fmt.Errorf("the length of the record has checksum %08x, the file has %08x: corrupt, or not a TFRecord "+
			"file", got, want)
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n > recordBytesMax {
		return 0, fmt.Errorf("a record of %d bytes: at most %d expected", n, recordBytesMax)
	}
	return int64(n), nil
}

// record reads the next record, whatever its number. At the end of the file it returns io.EOF.
func (s *source) record(int) ([]byte, error) {
	start := s.offset
	if _, err := s.r.Peek(1); err == io.EOF {
		return nil, io.EOF
	}
	var head [recordHeadBytes]byte
	if err := s.full(head[:], "a record's length and its checksum"); err != nil {
		return nil, err
	}
	n, err := recordLength(head)
	if err != nil {
		return nil, s.wrong(start, err)
	}
	record, err := s.bytes(n, "a record")
	if err != nil {
		return nil, err
	}
	var foot [recordFootBytes]byte
	at := s.offset
	if err := s.full(foot[:], "a record's checksum"); err != nil {
		return nil, err
	}
	if got, want := maskedCRC(record), binary.LittleEndian.Uint32(foot[:]); got != want {
		return nil, s.wrong(at, fmt.Errorf("the record of %d bytes has checksum %08x, the file has %08x: corrupt", n, got,
			want))
	}
	return record, nil
}
