package data_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// maskedCRC follows the format's description word by word.
func maskedCRC(b []byte) uint32 {
	crc := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	return ((crc >> 15) | (crc << 17)) + 0xa282ead8
}

func strings1(t testing.TB, ds data.Dataset) []string {
	t.Helper()
	var out []string
	for _, e := range collect(t, ds, 0) {
		x := e.(*tensor.Tensor)
		if x.DType() != tensor.String || x.Rank() != 0 {
			t.Fatalf("got %v, want a string scalar", x)
		}
		out = append(out, x.StringData()[0])
	}
	return out
}

// TestTFRecordsOfTensorBoard reads what TensorBoard's writer wrote (testdata/make.py), and writes the same bytes.
func TestTFRecordsOfTensorBoard(t *testing.T) {
	file, err := os.ReadFile("testdata/records.tfrecord")
	if err != nil {
		t.Fatal(err)
	}
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	want := []string{"", "a", string(bytes.Repeat([]byte("lock"), 1000)), string(all)}
	if got := strings1(t, data.TFRecords("testdata/records.tfrecord")); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	twice := data.TFRecords(writeFile(t, "a.gz", zipped(file)), "testdata/records.tfrecord")
	if got := strings1(t, twice); !slices.Equal(got, slices.Concat(want, want)) || twice.Len() != -1 {
		t.Errorf("two files, one compressed: got %q", got)
	}
	var written []byte
	for _, r := range want {
		written = data.AppendTFRecord(written, []byte(r))
	}
	if !bytes.Equal(written, file) {
		t.Error("AppendTFRecord wrote other bytes than TensorBoard")
	}
}

func TestTFRecordErrors(t *testing.T) {
	file := data.AppendTFRecord(data.AppendTFRecord(nil, []byte("one")), []byte("three"))
	const second = 12 + 3 + 4
	flip := func(at int) []byte {
		b := bytes.Clone(file)
		b[at] ^= 0x10
		return b
	}
	huge := binary.LittleEndian.AppendUint64(nil, 1<<40)
	huge = binary.LittleEndian.AppendUint32(huge, maskedCRC(huge))
	tests := []struct {
		name     string
		file     []byte
		elements int
		offset   int64
		want     string
	}{
		{"length", flip(0), 0, 0, "the length of the record has checksum"},
		{"length's checksum", flip(second + 9), 1, second, "corrupt, or not a TFRecord file"},
		{"record", flip(second + 13), 1, second + 12 + 5, "the record of 5 bytes has checksum"},
		{"record's checksum", flip(second + 18), 1, second + 12 + 5, "the file has"},
		{
			"head truncated", file[:second+5], 1, second,
			"a record's length and its checksum expected, 12 bytes; the file ends " +
				"after 5",
		},
		{"record truncated", file[:second+14], 1, second + 12, "a record expected, 5 bytes; the file ends after 2"},
		{
			"checksum truncated", file[:second+18], 1, second + 17,
			"a record's checksum expected, 4 bytes; the file ends after 1",
		},
		{"too long", huge, 0, 0, "a record of 1099511627776 bytes: at most 2147483647 expected"},
		{"text", []byte("no records here"), 0, 0, "not a TFRecord file"},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			name := writeFile(t, "r.tfrecord", c.file)
			n, err := firstError(t.Context(), data.TFRecords(name))
			checkFormatError(t, err, c.offset, c.want, name)
			if n != c.elements {
				t.Errorf("%d records before it, want %d", n, c.elements)
			}
		})
	}
	checkTruncated(t, file, func(name string) error {
		_, err := firstError(t.Context(), data.TFRecords(name))
		return err
	}, map[int]bool{0: true, second: true})
}

func TestTFRecordRoundTrip(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		var file []byte
		want := rapid.SliceOf(rapid.String()).Draw(rt, "records")
		for _, r := range want {
			file = data.AppendTFRecord(file, []byte(r))
		}
		if err := os.WriteFile(dir+"/r", file, 0o666); err != nil {
			rt.Fatal(err)
		}
		if got := strings1(t, data.TFRecords(dir+"/r")); !slices.Equal(got, want) {
			rt.Fatalf("got %q, want %q", got, want)
		}
	})
}

// TestTFRecordLikeGzip reads records whose lengths begin with the bytes of a gzip stream, as the first of a file and
// later, plain and compressed.
func TestTFRecordLikeGzip(t *testing.T) {
	for _, n := range []int{0x8b1f, 0x8b1f + 8<<16} {
		want := []string{strings.Repeat("a", n), "short", strings.Repeat("b", n)}
		var file []byte
		for _, r := range want {
			file = data.AppendTFRecord(file, []byte(r))
		}
		plain, packed := writeFile(t, "plain", file), writeFile(t, "packed", zipped(file))
		for _, name := range []string{plain, packed} {
			if got := strings1(t, data.TFRecords(name)); !slices.Equal(got, want) {
				t.Errorf("%d bytes, %s: got %d records, want %d", n, name, len(got), len(want))
			}
		}
		p, err := data.OpenTFRecords(t.Context(), []string{plain}, data.IndexOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings1(t, p); !slices.Equal(got, want) {
			t.Errorf("%d bytes, by position: got %d records, want %d", n, len(got), len(want))
		}
		if _, err := data.OpenTFRecords(t.Context(), []string{packed}, data.IndexOptions{}); err == nil {
			t.Error("a compressed file, by position: no error")
		}
	}
}

func FuzzTFRecord(f *testing.F) {
	f.Add(data.AppendTFRecord(data.AppendTFRecord(nil, []byte("one")), nil))
	f.Add(zipped(data.AppendTFRecord(nil, []byte("one"))))
	f.Add([]byte("no records"))
	f.Fuzz(func(t *testing.T, file []byte) {
		name := writeFile(t, "r", file)
		var again []byte
		var err error
		for e, bad := range data.TFRecords(name).Iter(t.Context()) {
			if err = bad; err == nil {
				again = data.AppendTFRecord(again, []byte(e.(*tensor.Tensor).StringData()[0]))
			}
		}
		if decoded(t, err) && !bytes.HasPrefix(file, []byte{0x1f, 0x8b}) && !bytes.Equal(again, file) {
			t.Errorf("% x became % x", file, again)
		}
	})
}
