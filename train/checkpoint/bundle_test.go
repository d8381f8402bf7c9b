package checkpoint

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// expectBundle compares tensors with what TensorFlow has read from testdata/tensorflow.
func expectBundle(t *testing.T, tensors []Tensor) {
	t.Helper()
	text, err := os.ReadFile("testdata/tensorflow/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string][3]any
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	if len(tensors) != len(want) || len(want) < 300 {
		t.Fatalf("got %d tensors, want %d", len(tensors), len(want))
	}
	for _, got := range tensors {
		w := want[got.Name]
		shape := []any{}
		for _, d := range got.Value.Shape() {
			shape = append(shape, float64(d))
		}
		if w[0] != got.Value.DType().String() || !slices.Equal(w[1].([]any), shape) ||
			w[2] != hex.EncodeToString(got.Value.Memory().HostBytes()) {
			t.Errorf("%s: got %v, want %v", got.Name, got.Value, w)
		}
	}
}

// TestTensorFlow reads a checkpoint that testdata/make_tensorflow.py has written, by its prefix, its index and
// its folder.
func TestTensorFlow(t *testing.T) {
	for _, name := range []string{"/ckpt-1", "/ckpt-1.index", ""} {
		path := "testdata/tensorflow" + name
		tensors, metadata, err := LoadWeights(path)
		if err != nil || len(metadata) > 0 {
			t.Fatalf("%s: %v, metadata %v", path, err, metadata)
		}
		expectBundle(t, tensors)
	}
}

// TestTensorFlowDamaged changes and removes bytes: the checksums must find it, or the values stay the same.
func TestTensorFlowDamaged(t *testing.T) {
	dir := t.TempDir()
	prefix := filepath.Join(dir, "ckpt")
	index, err := os.ReadFile("testdata/tensorflow/ckpt-1.index")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("testdata/tensorflow/ckpt-1.data-00000-of-00001")
	if err != nil {
		t.Fatal(err)
	}
	write := func(index, data []byte) {
		for name, content := range map[string][]byte{".index": index, ".data-00000-of-00001": data} {
			if err := os.WriteFile(prefix+name, content, 0o666); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(index, data)
	want, err := loadBundle(prefix)
	if err != nil {
		t.Fatal(err)
	}
	accepted := 0
	for at := 0; at < len(index); at += 7 {
		changed := slices.Clone(index)
		changed[at] ^= 4
		if _, _, err := parseBundle(changed); err != nil {
			continue
		}
		write(changed, data)
		got, err := loadBundle(prefix)
		if err != nil {
			continue
		}
		accepted++ // bytes that say nothing: the block of filters, and padding
		expectBundle(t, got)
	}
	if accepted > 20 {
		t.Errorf("%d changed bytes of the index were accepted", accepted)
	}
	for length := 0; length < len(index); length += 1001 {
		write(index[:length], data)
		if _, err := loadBundle(prefix); err == nil {
			t.Errorf("an index of %d bytes of %d was accepted", length, len(index))
		}
	}
	write(index, data[:500])
	if _, err := loadBundle(prefix); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("truncated data: %v", err)
	}
	entries, _, err := parseBundle(index)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.size == 0 || strings.HasPrefix(e.name, "many/") {
			continue
		}
		changed := slices.Clone(data)
		changed[e.offset] ^= 1
		write(index, changed)
		if _, err := loadBundle(prefix); err == nil || !strings.Contains(err.Error(), e.name) {
			t.Errorf("%s changed: %v", e.name, err)
		}
	}
	if len(want) != len(entries) {
		t.Errorf("%d tensors of %d entries", len(want), len(entries))
	}
}

// table builds an index of one block, with right checksums.
func table(block []byte) []byte {
	trailed := func(b []byte) []byte {
		return binary.LittleEndian.AppendUint32(append(slices.Clone(b), 0), maskedCRC(b, []byte{0}))
	}
	out := trailed(block)
	handle := binary.AppendUvarint([]byte{0}, uint64(len(block)))
	index := append([]byte{0, 1, byte(len(handle)), 'z'}, handle...)
	index = append(index, 0, 0, 0, 0, 1, 0, 0, 0)
	at := len(out)
	out = append(out, trailed(index)...)
	footer := binary.AppendUvarint(binary.AppendUvarint([]byte{0, 0}, uint64(at)), uint64(len(index)))
	footer = append(footer, make([]byte, tableFooter-8-len(footer))...)
	return binary.LittleEndian.AppendUint64(append(out, footer...), tableMagic)
}

func FuzzBundle(f *testing.F) {
	header := "\x00\x00\x06\x08\x01\x1a\x02\x08\x01"
	f.Add([]byte(header + "\x00\x01\x0ba\x08\x01\x12\x04\x12\x02\x08\x01\x28\x04" + "\x00\x00\x00\x00\x01\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, block []byte) {
		entries, shards, err := parseBundle(table(block))
		if err != nil {
			return
		}
		for _, e := range entries {
			size, err := sizeOf(e.shape, e.dtype)
			if err != nil || size != e.size || e.shard >= shards {
				t.Errorf("accepted %+v of %d files", e, shards)
			}
		}
	})
}

// TestBundleRefuses has blocks with right checksums that are wrong otherwise.
func TestBundleRefuses(t *testing.T) {
	const header, end = "\x00\x00\x06\x08\x01\x1a\x02\x08\x01", "\x00\x00\x00\x00\x01\x00\x00\x00"
	entry := func(key, value string) string {
		return string([]byte{0, byte(len(key)), byte(len(value))}) + key + value
	}
	for _, test := range []struct{ name, block, want string }{
		{"good", header + entry("a", "\x08\x01\x12\x04\x12\x02\x08\x01\x28\x04") + end, ""},
		{"strings are left out", header + entry("a", "\x08\x07\x12\x00\x28\x04") + end, ""},
		{"no header", entry("a", "\x08\x01") + end, "want that of the header"},
		{"empty", end, "no header"},
		{"big-endian", entry("", "\x08\x01\x10\x01") + end, "big-endian"},
		{"no files", entry("", "\x08\x00") + end, "names 0 data files"},
		{"key order", header + entry("b", "\x08\x07") + entry("a", "\x08\x07") + end, "want ascending"},
		{"dtype", header + entry("a", "\x08\x08") + end, "dtype 8"},
		{"size", header + entry("a", "\x08\x01\x12\x04\x12\x02\x08\x02\x28\x04") + end, "float32[2] has 8"},
		{"shard", header + entry("a", "\x08\x01\x12\x00\x18\x01\x28\x04") + end, "data file 1 of 1"},
		{
			"negative",
			header + entry("a", "\x08\x01\x12\x0d\x12\x0b\x08"+strings.Repeat("\xff", 9)+"\x01\x28\x04") + end, "negative",
		},
		{"unknown shape", header + entry("a", "\x08\x01\x12\x02\x18\x01\x28\x04") + end, "its shape is unknown"},
		{"partitioned", header + entry("a", "\x08\x01\x3a\x00\x28\x04") + end, "partitioned"},
		{"shared key", header + "\x05\x01\x00a" + end, "shares 5 bytes"},
		{"truncated", header + "\x00\x01\x09a" + end, "truncated inside an entry"},
		{"restarts", "\xff\x00\x00\x00", "255 restart points"},
	} {
		_, _, err := parseBundle(table([]byte(test.block)))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q in it", test.name, err, test.want)
		}
	}
}
