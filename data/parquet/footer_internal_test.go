package parquet

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
)

// fileOf returns a file with a footer.
func fileOf(footer []byte) *bytes.Reader {
	b := append([]byte("PAR1"), footer...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(footer)))
	return bytes.NewReader(append(b, "PAR1"...))
}

// hostile are footers that state more than they have.
var hostile = map[string][]byte{
	"a list of 2147483647 elements": {0x29, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x07},
	"a map of 1000 elements":        {0x2b, 0xe8, 0x07, 0x88, 0},
	"a value goes beyond its end":   {0x28, 0xff, 0xff, 0xff, 0xff, 0x07, 0},
	"out of range: 34359738367":     {0x28, 0xff, 0xff, 0xff, 0xff, 0x7f, 0},
	"nested too deeply":             bytes.Repeat([]byte{0x1c}, 1000),
	"unknown type 13":               {0x1d, 0},
}

func TestHostileFooter(t *testing.T) {
	for want, footer := range hostile {
		f := fileOf(footer)
		if err := checkFooter(f, f.Size()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	f := bytes.NewReader([]byte("PAR1\xff\xff\xff\xffPAR1"))
	if err := checkFooter(f, f.Size()); err == nil || !strings.Contains(err.Error(), "its footer has 4294967295 bytes") {
		t.Errorf("a footer that is larger than the file: %v", err)
	}
}

func FuzzFooter(f *testing.F) {
	for _, footer := range hostile {
		f.Add(footer)
	}
	f.Add([]byte{0x15, 2, 0x19, 0x2c, 0x48, 1, 'a', 0, 0x15, 4, 0, 0x16, 8, 0x11, 0x12, 0})
	f.Fuzz(func(t *testing.T, footer []byte) {
		if n, err := structBytes(footer); err == nil && (n <= 0 || n > len(footer)) {
			t.Errorf("it reads %d bytes of %d", n, len(footer))
		}
	})
}
