package data_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// kinds are elements of every kind that a cache holds, of a source that counts its reads.
func kinds(n int, reads *atomic.Int64) data.Pipeline {
	numbers := fromTensors(tensor.New(tensor.Int32, n)) // has a fingerprint
	return data.Zip([]data.Pipeline{numbers}, nil).MapRandom(1, func(_ context.Context, r *rand.Rand, _ data.Element) (
		data.Element, error,
	) {
		reads.Add(1)
		x := tensor.New(tensor.Float32, 1+r.IntN(3), 2)
		for k := range tensor.Data[float32](x) {
			tensor.Data[float32](x)[k] = r.Float32()
		}
		return data.Batch{Inputs: []*tensor.Tensor{x, tensor.Strings([]string{"", strings.Repeat("é", r.IntN(9))}, 2)}}, nil
	})
}

func digest(t *testing.T, p data.Pipeline) string {
	t.Helper()
	h, err := data.Hash(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestCacheDir checks that elements are read once by all processes, up to the limit, and that damaged files cost reads
// and never give other elements.
func TestCacheDir(t *testing.T) {
	const n = 30
	var reads atomic.Int64
	count := func() int64 { return reads.Swap(0) }
	want := digest(t, kinds(n, &reads))
	wantShuffled := digest(t, kinds(n, &reads).Shuffle(3))
	count()
	dir := filepath.Join(t.TempDir(), "new", "folder")
	one, two := kinds(n, &reads).CacheDir(dir, 1<<20), kinds(n, &reads).CacheDir(dir, 1<<20)
	checkPositions(t, one, 0)
	if got := count(); got != n {
		t.Errorf("%d reads in two passes, want %d", got, n)
	}
	if digest(t, one.Shuffle(3).Workers(3)) != wantShuffled || digest(t, two) != want || count() != 0 {
		t.Errorf("another pass, or another process, has read again, or other elements")
	}
	if data.Fingerprint(one) == 0 || data.Fingerprint(one) != data.Fingerprint(two) || one.Len() != n {
		t.Errorf("the cache has the fingerprint %x and %d elements", data.Fingerprint(one), one.Len())
	}
	names, err := filepath.Glob(filepath.Join(dir, "*", "*.cache"))
	if err != nil || len(names) != 1 {
		t.Fatalf("files %q, %v", names, err)
	}
	good, err := os.ReadFile(names[0])
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 60 {
		bad := bytes.Clone(good)
		if i%2 == 0 { // as after a crash
			bad = bad[:r.IntN(len(bad))]
		} else {
			bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
		}
		if err := os.WriteFile(names[0], bad, 0o666); err != nil {
			t.Fatal(err)
		}
		if got := digest(t, kinds(n, &reads).CacheDir(dir, 0)); got != want || count() == 0 { // which writes nothing
			t.Fatalf("a damaged cache gives other elements, or is not noticed")
		}
	}
	if err := os.WriteFile(names[0], good, 0o666); err != nil {
		t.Fatal(err)
	}
	if digest(t, kinds(n, &reads).CacheDir(dir, 0)) != want || count() != 0 {
		t.Error("the repaired cache is not used")
	}
	small := kinds(n, &reads).CacheDir(filepath.Join(dir, "small"), 500)
	for range 2 {
		if digest(t, small) != want {
			t.Error("a small cache gives other elements")
		}
	}
	if got := count(); got <= n || got >= 2*n {
		t.Errorf("%d reads in two passes with a small cache", got)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := data.Hash(t.Context(), kinds(n, &reads).CacheDir(file, 1)); err == nil {
		t.Error("a file was accepted as the folder")
	}
}

// TestCacheDirOfOtherData checks that data that differ where their fingerprints do not have other elements in a cache,
// and that a source without a fingerprint is refused, below any stage.
func TestCacheDirOfOtherData(t *testing.T) {
	dir := t.TempDir()
	same := func(e data.Element) data.Pipeline {
		return fromTensors(e).Map(func(_ context.Context, e data.Element) (data.Element, error) { return e, nil })
	}
	weighted := func(w float32) data.Pipeline {
		return same(data.Batch{Inputs: []*tensor.Tensor{tensor.Of([]int32{1})}, Weights: tensor.Of([]float32{w})})
	}
	one, two := weighted(1), weighted(2)
	if data.Fingerprint(one) != data.Fingerprint(two) {
		t.Fatal("weights have got into the fingerprint")
	}
	for _, p := range []data.Pipeline{one, two} {
		if got, want := digest(t, p.CacheDir(dir, 1<<20)), digest(t, p); got != want {
			t.Error("the cache has the weights of other data")
		}
	}
	images, name := t.TempDir(), filepath.Join("class", "1.png")
	for i, colour := range []uint8{10, 20} {
		file := filepath.Join(images, name)
		writeImage(t, file, colour)
		if err := os.Chtimes(file, time.Time{}, time.Unix(int64(i), 0)); err != nil {
			t.Fatal(err)
		}
		p, err := data.ImageFolder(images, data.ImageOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := digest(t, p.Images.CacheDir(dir, 1<<20)), digest(t, p.Images); got != want {
			t.Error("the cache has an image that was written again")
		}
	}
	unknown := data.FromFunc(1, func(context.Context, int) (data.Element, error) { return tensor.Scalar[int32](1), nil })
	for _, p := range []data.Pipeline{
		unknown, unknown.Shuffle(1), unknown.Batch(1), data.Concat(one, unknown), data.Zip([]data.Pipeline{unknown}, nil),
		unknown.Cache(1).Map(func(_ context.Context, e data.Element) (data.Element, error) { return e, nil }),
	} {
		if _, err := data.Hash(t.Context(), p.CacheDir(dir, 1<<20)); err == nil ||
			!strings.Contains(err.Error(), "contents of the source are unknown") {
			t.Errorf("a source without a fingerprint: %v", err)
		}
	}
}

// writeImage writes an image of one pixel, of the same size for every colour.
func writeImage(t *testing.T, file string, colour uint8) {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, &image.Gray{Pix: []uint8{colour}, Stride: 1, Rect: image.Rect(0, 0, 1, 1)}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o777), os.WriteFile(file, b.Bytes(), 0o666)); err != nil {
		t.Fatal(err)
	}
}

// TestCacheDirTogether lets several processes, which share nothing but the folder, read at the same time.
func TestCacheDirTogether(t *testing.T) {
	var reads atomic.Int64
	want := digest(t, kinds(50, &reads))
	dir := t.TempDir()
	hashes := make(chan string)
	for i := range 4 {
		p := kinds(50, &reads).CacheDir(dir, 1<<20)
		go func() {
			for range 3 {
				_, err := data.Hash(context.Background(), p.Shuffle(int64(i)).Workers(2))
				if err != nil {
					hashes <- err.Error()
				}
			}
			h, err := data.Hash(context.Background(), p)
			hashes <- fmt.Sprint(h, err)
		}()
	}
	for range 4 {
		if h := <-hashes; h != want+"<nil>" {
			t.Errorf("got %s, want %s", h, want)
		}
	}
}

// TestInterleave compares with TensorFlow's order: Dataset.range(1, 6).interleave(lambda x: [x] * 6, cycle_length=2,
// block_length=4) is the example of its documentation.
func TestInterleave(t *testing.T) {
	part := func(k, n int) data.Pipeline {
		return fromTensors(tensor.Of(slices.Repeat([]int32{int32(k)}, n)))
	}
	var six []data.Pipeline
	for k := range 5 {
		six = append(six, part(k+1, 6))
	}
	documented := []int32{
		1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5,
	}
	for _, c := range []struct {
		cycle, block int
		parts        []data.Pipeline
		want         []int32
	}{
		{2, 4, six, documented},
		{3, 1, []data.Pipeline{part(1, 3), part(2, 0), part(3, 1), part(4, 2)}, []int32{1, 3, 1, 4, 1, 4}},
		{9, 2, []data.Pipeline{part(1, 3), part(2, 2)}, []int32{1, 1, 2, 2, 1}},
		{1, 1, nil, nil},
	} {
		p := data.Interleave(c.cycle, c.block, c.parts...)
		if got := values(t, p, 0); !slices.Equal(got, c.want) {
			t.Errorf("cycle %d, block %d: got %v, want %v", c.cycle, c.block, got, c.want)
		}
		if len(c.want) > 0 {
			checkPositions(t, p.Shuffle(1), 0)
		}
		var streams []data.Pipeline
		for _, x := range c.parts {
			streams = append(streams, asStream(x))
		}
		stream := data.Interleave(c.cycle, c.block, streams...)
		if got := values(t, stream, 0); !slices.Equal(got, c.want) {
			t.Errorf("streams, cycle %d, block %d: got %v, want %v", c.cycle, c.block, got, c.want)
		}
		if len(c.want) > 2 { // an iteration that ends early leaves nothing behind, see TestMain
			if got := values(t, stream.Take(2), 0); !slices.Equal(got, c.want[:2]) {
				t.Errorf("the first two are %v", got)
			}
			if r, err := data.Open(t.Context(), stream); r != nil || err != nil {
				t.Errorf("a stream has a reader, %v", err)
			}
		}
	}
	failing := data.FromFunc(2, func(context.Context, int) (data.Element, error) { return nil, fmt.Errorf("broken") })
	for _, other := range []data.Pipeline{failing, asStream(failing)} {
		p := data.Interleave(2, 1, six[0], other)
		if _, err := data.Hash(t.Context(), p); err == nil || err.Error() != "broken" {
			t.Errorf("got %v", err)
		}
	}
	if _, _, ok := data.Sharded(data.Interleave(1, 1, asStream(six[0]), six[1].Shard(0, 2))); !ok {
		t.Error("a shard in a part is not found")
	}
}

// FuzzCachedElement checks that decoding gives an element or an error.
func FuzzCachedElement(f *testing.F) {
	var reads atomic.Int64
	for e, err := range kinds(3, &reads).Iter(context.Background()) {
		if err != nil {
			f.Fatal(err)
		}
		b, err := data.EncodeElement(e)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("\x010\f\x0e\x000000000000000")) // an empty tensor with dimensions whose product overflows
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := data.DecodeElement(b)
		if err != nil {
			return
		}
		again, err := data.EncodeElement(e)
		if err != nil {
			t.Fatal(err)
		}
		if other, err := data.DecodeElement(again); err != nil || text(other) != text(e) {
			t.Errorf("encoded and decoded again: %v, %v, want %v", text(other), err, text(e))
		}
	})
}

// TestCacheDirUnwritable checks that a folder that cannot be written is an error, and one that is filled is none.
func TestCacheDirUnwritable(t *testing.T) {
	p := numbers(0, 4)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := data.Hash(t.Context(), p.CacheDir(file, 1<<20)); err == nil ||
		!strings.Contains(err.Error(), "the folder "+file+" cannot be written") {
		t.Errorf("a file instead of a folder: %v", err)
	}
	if os.Getuid() == 0 {
		return // may write any folder
	}
	dir := t.TempDir()
	folder := filepath.Join(dir, "cache")
	if err := os.Mkdir(folder, 0o555); err != nil {
		t.Fatal(err)
	}
	if _, err := data.Hash(t.Context(), p.CacheDir(folder, 1<<20)); err == nil || !strings.Contains(err.Error(), folder) {
		t.Errorf("a read-only folder: %v", err)
	}
}
