package data_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/lockstep-ml/lockstep/data"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// collect reads one epoch of a dataset.
func collect(t testing.TB, ds data.Dataset, epoch int) []data.Element {
	t.Helper()
	var out []data.Element
	for e, err := range ds.Iter(data.WithEpoch(t.Context(), epoch)) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// firstError reads a dataset up to its error, which must be the last pair.
func firstError(ctx context.Context, ds data.Dataset) (elements int, err error) {
	for _, e := range ds.Iter(ctx) {
		if err != nil {
			return elements, errors.New("the dataset goes on after an error")
		}
		if err = e; err == nil {
			elements++
		}
	}
	return elements, err
}

// writeFile writes a file into a new folder and returns its name.
func writeFile(t testing.TB, name string, contents []byte) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(name, contents, 0o666); err != nil {
		t.Fatal(err)
	}
	return name
}

// zipped compresses b.
func zipped(b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = z.Write(b)
	_ = z.Close()
	return out.Bytes()
}

// zippedZeros compresses a head followed by a number of zeros.
func zippedZeros(t testing.TB, head []byte, zeros int) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err := z.Write(head)
	for chunk := make([]byte, 1<<20); zeros > 0 && err == nil; zeros -= len(chunk) {
		chunk = chunk[:min(len(chunk), zeros)]
		_, err = z.Write(chunk)
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// allocated returns the bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// checkFormatError requires a *data.FormatError at an offset whose text contains every part of want.
func checkFormatError(t *testing.T, err error, offset int64, want ...string) {
	t.Helper()
	var format *data.FormatError
	if !errors.As(err, &format) {
		t.Fatalf("got %v, want a *data.FormatError", err)
	}
	if format.Offset != offset {
		t.Errorf("offset %d, want %d: %v", format.Offset, offset, err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("got  %v\nwant %q in it", err, w)
		}
	}
}

// checkTruncated requires that every proper beginning of a file, compressed or not, is refused with the name
// of the file; whole reports which prefixes are complete files.
func checkTruncated(t *testing.T, contents []byte, load func(name string) error, whole map[int]bool) {
	t.Helper()
	dir := t.TempDir()
	for _, packed := range []bool{false, true} {
		all, name := contents, filepath.Join(dir, "file")
		if packed {
			all, name = zipped(contents), filepath.Join(dir, "file.gz")
		}
		for n := range len(all) + 1 {
			if err := os.WriteFile(name, all[:n], 0o666); err != nil {
				t.Fatal(err)
			}
			err := load(name)
			if n == len(all) || !packed && whole[n] || packed && n == 0 && whole[0] {
				if err != nil {
					t.Errorf("%d of %d bytes: %v", n, len(all), err)
				}
				continue
			}
			var format *data.FormatError
			if !errors.As(err, &format) || format.File != name || format.Offset > int64(len(contents)) ||
				packed && n > 1 && !format.Packed || !strings.Contains(err.Error(), name) {
				t.Errorf("%d of %d bytes, packed %t: got %v, want a *data.FormatError that names the file", n, len(all), packed,
					err)
			}
		}
	}
}
