package data_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestFromImages(t *testing.T) {
	images := tensor.From([]uint8{0, 1, 2, 4, 8, 16, 3, 5}, 2, 2, 2)
	for _, labels := range []*tensor.Tensor{
		tensor.From([]uint8{7, 9}), tensor.From([]int64{7, 9}),
		tensor.From([]int32{7, 9}),
	} {
		p, err := data.FromImages(images, labels, 16)
		if err != nil {
			t.Fatal(err)
		}
		one := collect(t, p, 0)[1].(data.Batch)
		if want := tensor.From([]float32{0.5, 1, 0.1875, 0.3125}, 2, 2, 1); !one.Inputs[0].Equal(want) ||
			!one.Labels[0].Equal(tensor.Scalar(int32(9))) {
			t.Errorf("got %v, %v", one.Inputs[0], one.Labels[0])
		}
		both := collect(t, p.Batch(2), 0)[0].(data.Batch)
		want := tensor.From([]float32{0, 0.0625, 0.125, 0.25, 0.5, 1, 0.1875, 0.3125}, 2, 2, 2, 1)
		if both.Rows() != 2 || !both.Inputs[0].Equal(want) || !both.Labels[0].Equal(tensor.From([]int32{7, 9})) {
			t.Errorf("got %v, %v", both.Inputs[0], both.Labels[0])
		}
	}
	if p, err := data.FromImages(images.Reshape(2, 1, 2, 2), tensor.From([]uint8{7, 9}), 16); err != nil {
		t.Error(err)
	} else if got := collect(t, p, 0)[0].(data.Batch).Inputs[0].Shape(); !slices.Equal(got, []int{1, 2, 2}) {
		t.Errorf("channels: got shape %v", got)
	}
	for _, c := range []struct {
		name           string
		images, labels *tensor.Tensor
		white          float32
		want           string
	}{
		{
			"dtype", tensor.New(tensor.Float32, 2, 2, 2), tensor.New(tensor.Uint8, 2), 1,
			"images of float32(2, 2, 2): want uint8",
		},
		{
			"rank", tensor.New(tensor.Uint8, 2, 4), tensor.New(tensor.Uint8, 2), 1,
			"images of uint8(2, 4): want uint8 [n, height, width]",
		},
		{"white", images, tensor.New(tensor.Uint8, 2), 0, "white = 0"},
		{"count", images, tensor.New(tensor.Uint8, 3), 1, "labels of uint8(3,) for 2 images: want one integer for each"},
		{"labels' rank", images, tensor.New(tensor.Uint8, 2, 1), 1, "labels of uint8(2, 1)"},
		{"labels' dtype", images, tensor.New(tensor.Float32, 2), 1, "labels of float32(2,)"},
		{"label", images, tensor.From([]int64{1, 1 << 40}), 1, "label 1 is 1.099511627776e+12, which is not an int32"},
	} {
		if _, err := data.FromImages(c.images, c.labels, c.white); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v", c.name, err)
		}
	}
}

// TestRandomShift looks for the shift of each image that explains every pixel of the result, as an oracle that knows
// nothing of copying rows.
func TestRandomShift(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, height, width, channels := rapid.IntRange(1, 3).Draw(t, "n"), rapid.IntRange(1, 5).Draw(t, "height"),
			rapid.IntRange(1, 5).Draw(t, "width"), rapid.IntRange(1, 2).Draw(t, "channels")
		pixels := rapid.IntRange(0, 6).Draw(t, "pixels")
		values := make([]float32, n*height*width*channels)
		for i := range values {
			values[i] = float32(i + 1) // all different, none 0
		}
		images := tensor.From(values, n, height, width, channels)
		in := data.Batch{Inputs: []*tensor.Tensor{images}, Labels: []*tensor.Tensor{tensor.New(tensor.Int32, n)}}
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		e, err := data.RandomShift(pixels)(context.Background(), r, in)
		if err != nil {
			t.Fatal(err)
		}
		out := e.(data.Batch)
		if !images.Equal(tensor.From(values, n, height, width, channels)) || out.Labels[0] != in.Labels[0] ||
			!out.Inputs[0].SameShape(images) {
			t.Fatal("the input changed, or the labels")
		}
		at := func(x *tensor.Tensor, i, row, column, c int) float32 {
			if row < 0 || row >= height || column < 0 || column >= width {
				return 0
			}
			return tensor.Data[float32](x)[((i*height+row)*width+column)*channels+c]
		}
		for i := range n {
			explained := false
			for down := -pixels; down <= pixels; down++ {
				for right := -pixels; right <= pixels; right++ {
					same := true
					for row := range height {
						for column := range width {
							for c := range channels {
								same = same && at(out.Inputs[0], i, row, column, c) == at(images, i, row-down, column-right, c)
							}
						}
					}
					explained = explained || same
				}
			}
			if !explained {
				t.Fatalf("image %d is not a shift by up to %d: %v of %v", i, pixels, out.Inputs[0], images)
			}
		}
	})
}

func TestRandomShiftOfPipelines(t *testing.T) {
	images := tensor.New(tensor.Uint8, 200, 3, 3)
	for i := range 200 {
		tensor.Data[uint8](images)[9*i+4] = 1 // the middle
	}
	p, err := data.FromImages(images, tensor.New(tensor.Uint8, 200), 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, q := range map[string]data.Pipeline{
		"images":  p.MapRandom(1, data.RandomShift(1)).Batch(200),
		"batches": p.Batch(200).MapRandom(1, data.RandomShift(1)),
	} {
		t.Run(name, func(t *testing.T) {
			pixels := func(epoch int) *tensor.Tensor { return collect(t, q, epoch)[0].(data.Batch).Inputs[0] }
			first := pixels(0)
			if !first.Equal(pixels(0)) || first.Equal(pixels(1)) {
				t.Error("an epoch repeats its shifts, and another has others")
			}
			var count [9]int
			for i, x := range tensor.Data[float32](first) {
				count[i%9] += int(x)
			}
			if slices.Min(count[:]) < 8 || slices.Max(count[:]) > 45 { // 22 each are expected
				t.Errorf("where 200 middles went: %v", count)
			}
		})
	}
	for _, x := range []data.Element{tensor.New(tensor.Float32, 2, 2), tensor.New(tensor.Uint8, 2, 2, 1), []any{}, 3} {
		_, err := firstError(t.Context(), data.FromFunc(1,
			func(context.Context, int) (data.Element, error) { return x, nil }).
			MapRandom(1, data.RandomShift(1)))
		if err == nil || !strings.HasPrefix(err.Error(), "data: ") {
			t.Errorf("%v: got %v", x, err)
		}
	}
}

// mnistFolder writes a small data set of 2x2 images under the given names of images and labels, for both parts.
func mnistFolder(t *testing.T, images, labels string, pack func([]byte) []byte) string {
	t.Helper()
	dir := t.TempDir()
	for prefix, n := range map[string]uint32{"train": 3, "t10k": 2} {
		px := make([]byte, 4*n)
		digits := make([]byte, n)
		for i := range digits {
			px[4*i], digits[i] = 255, byte(9-i)
		}
		for name, file := range map[string][]byte{
			images: idx(8, []uint32{n, 2, 2}, px...),
			labels: idx(8, []uint32{n}, digits...),
		} {
			if err := os.WriteFile(filepath.Join(dir, prefix+"-"+name), pack(file), 0o666); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

func plain(b []byte) []byte { return b }

func TestMNIST(t *testing.T) {
	for _, c := range []struct {
		name, images, labels string
		pack                 func([]byte) []byte
	}{
		{"plain", "images-idx3-ubyte", "labels-idx1-ubyte", plain},
		{"dots", "images.idx3-ubyte", "labels.idx1-ubyte", plain},
		{"gzip", "images-idx3-ubyte.gz", "labels-idx1-ubyte.gz", zipped},
		{"unpacked, but still named so", "images-idx3-ubyte.gz", "labels.idx1-ubyte", plain},
	} {
		t.Run(c.name, func(t *testing.T) {
			set, err := data.MNIST(mnistFolder(t, c.images, c.labels, c.pack))
			if err != nil {
				t.Fatal(err)
			}
			if set.Name != "mnist" || set.Classes != 10 || !slices.Equal(set.Shape, []int{2, 2, 1}) || set.Train.Len() != 3 ||
				set.Test.Len() != 2 {
				t.Errorf("got %+v", set)
			}
			b := collect(t, set.Train.Batch(3), 0)[0].(data.Batch)
			if want := tensor.From([]float32{1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}, 3, 2, 2, 1); !b.Inputs[0].Equal(want) ||
				!b.Labels[0].Equal(tensor.From([]int32{9, 8, 7})) {
				t.Errorf("got %v, %v", b.Inputs[0], b.Labels[0])
			}
		})
	}
}

func TestMNISTErrors(t *testing.T) {
	const images, labels = "images-idx3-ubyte", "labels-idx1-ubyte"
	tests := []struct {
		name   string
		file   string // replaced by
		with   []byte // nil: removed
		want   []string
		offset int64 // -1: no *data.FormatError
	}{
		{"missing", "t10k-" + labels, nil, []string{
			"no t10k labels in DIR: looked for t10k-labels-idx1-ubyte, t10k-labels-idx1-ubyte.gz, t10k-labels.idx1-ubyte, " +
				"t10k-labels.idx1-ubyte.gz",
		}, -1},
		{
			"swapped", "train-" + images, idx(8, []uint32{3}, 1, 2, 3),
			[]string{"DIR/train-images-idx3-ubyte: IDX: offset 0: images expected, uint8 of 3 dimensions; the file holds " +
				"uint8(3,)"},
			0,
		},
		{
			"count", "train-" + labels, idx(8, []uint32{2}, 1, 2),
			[]string{"DIR/train-images-idx3-ubyte has 3 images, but DIR/train-labels-idx1-ubyte 2 labels"},
			-1,
		},
		{
			"label", "t10k-" + labels, idx(8, []uint32{2}, 1, 10),
			[]string{"DIR/t10k-labels-idx1-ubyte: IDX: offset 9: label 10 of example 1: want 0 to 9"},
			9,
		},
		{
			"truncated", "t10k-" + images, idx(8, []uint32{2, 2, 2}, 1, 10),
			[]string{"DIR/t10k-images-idx3-ubyte: IDX: offset 16: elements of a uint8 tensor of shape [2 2 2] expected, 8 " +
				"bytes; the file ends after 2 of them"},
			16,
		},
		{
			"other size", "t10k-" + images, idx(8, []uint32{2, 1, 2}, 1, 2, 3, 4),
			[]string{"DIR/t10k-images-idx3-ubyte: images of [1 2], where the training set's are [2 2]"},
			-1,
		},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			dir := mnistFolder(t, images, labels, plain)
			file := filepath.Join(dir, c.file)
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if c.with != nil {
				if err := os.WriteFile(file, c.with, 0o666); err != nil {
					t.Fatal(err)
				}
			}
			_, err := data.MNIST(dir)
			for _, want := range c.want {
				if want = strings.ReplaceAll(want, "DIR", dir); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got  %v\nwant %s", err, want)
				}
			}
			if c.offset >= 0 {
				checkFormatError(t, err, c.offset)
			}
			if missing := c.with == nil; errors.Is(err, fs.ErrNotExist) != missing {
				t.Errorf("errors.Is(err, fs.ErrNotExist) is %t for %v", !missing, err)
			}
		})
	}
	if _, err := data.MNIST(filepath.Join(t.TempDir(), "nowhere")); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "nowhere") {
		t.Errorf("no folder: got %v", err)
	}
}

// TestMNISTItself reads the real files, if they are present.
func TestMNISTItself(t *testing.T) {
	dir := os.Getenv("LOCKSTEP_MNIST")
	if dir == "" {
		t.Skip("set LOCKSTEP_MNIST to a folder with MNIST's four files")
	}
	set, err := data.MNIST(dir)
	if err != nil {
		t.Fatal(err)
	}
	if set.Train.Len() != 60000 || set.Test.Len() != 10000 || !slices.Equal(set.Shape, []int{28, 28, 1}) {
		t.Errorf("got %+v", set)
	}
	var first []int32
	for _, e := range collect(t, set.Train.Take(10), 0) {
		first = append(first, tensor.Data[int32](e.(data.Batch).Labels[0])...)
	}
	if want := []int32{5, 0, 4, 1, 9, 2, 1, 3, 1, 4}; !slices.Equal(first, want) {
		t.Errorf("the first labels are %v, want %v", first, want)
	}
}

func TestOptdigits(t *testing.T) {
	row := strings.Repeat("0,16,", 32)
	header := strings.Repeat("Block,", 64) + "Class\n"
	for name, file := range map[string]string{
		"header": header + row + "3\n" + row + "9\n", "none": row + "3\n" + row + "9",
	} {
		images, labels, err := data.LoadOptdigits(writeFile(t, "optdigits.tra", []byte(file)))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if want := bytes.Repeat([]byte{0, 16}, 64); !slices.Equal(images.Shape(), []int{2, 8, 8}) ||
			!bytes.Equal(tensor.Data[uint8](images), want) || !labels.Equal(tensor.From([]uint8{3, 9})) {
			t.Errorf("%s: got %v, %v", name, images, labels)
		}
	}
	for _, c := range []struct {
		name, file string
		offset     int64
		want       string
	}{
		{"empty", "", 0, "the file contains no examples"},
		{"names only", header, int64(len(header)), "the file contains no examples"},
		{"fields", row + "3\n1,2\n", 162, "line 2, offset 162: 2 fields: want 64 pixels and the digit"},
		{
			"pixel", row + "3\n" + strings.Replace(row, "16", "17", 1) + "3\n", 164,
			`line 2, offset 164: field 2 is "17": want a number from 0 to 16`,
		},
		{"digit", row + "10\n", 160, `line 1, offset 160: field 65 is "10": want a number from 0 to 9`},
		{"names later", row + "1\n" + header, 162, `line 2, offset 162: field 1 is "Block"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := writeFile(t, "optdigits.tra", []byte(c.file))
			_, _, err := data.LoadOptdigits(name)
			checkFormatError(t, err, c.offset, c.want, name)
		})
	}
}

func TestRandomFlip(t *testing.T) {
	img := tensor.From([]float32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 2, 3, 2)
	mirrored := tensor.From([]float32{5, 6, 3, 4, 1, 2, 11, 12, 9, 10, 7, 8}, 2, 3, 2)
	flip, r := data.RandomFlip(), rand.New(rand.NewPCG(1, 2))
	count := 0
	for range 1000 {
		e, err := flip(t.Context(), r, data.Batch{Inputs: []*tensor.Tensor{img}})
		if err != nil {
			t.Fatal(err)
		}
		switch got := e.(data.Batch).Inputs[0]; {
		case got.Equal(mirrored):
			count++
		case !got.Equal(img):
			t.Fatalf("got %v", got)
		}
	}
	if count < 400 || count > 600 {
		t.Errorf("%d of 1000 images are mirrored", count)
	}
}

// TestRandomCrop compares crops with the padded image, at every place where they can lie.
func TestRandomCrop(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		height, width := rapid.IntRange(1, 5).Draw(t, "height"), rapid.IntRange(1, 5).Draw(t, "width")
		channels, padding := rapid.IntRange(1, 3).Draw(t, "channels"), rapid.IntRange(0, 3).Draw(t, "padding")
		h, w := rapid.IntRange(1, height+2*padding).Draw(t, "h"), rapid.IntRange(1, width+2*padding).Draw(t, "w")
		pixels := make([]float32, height*width*channels)
		for i := range pixels {
			pixels[i] = float32(i + 1)
		}
		e, err := data.RandomCrop(h, w, padding)(t.Context(), rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)),
			tensor.Of(pixels, 1, height, width, channels))
		if err != nil {
			t.Fatal(err)
		}
		got := e.(*tensor.Tensor)
		if !slices.Equal(got.Shape(), []int{1, h, w, channels}) {
			t.Fatalf("shape %v", got.Shape())
		}
		for top := range height + 2*padding - h + 1 {
			for left := range width + 2*padding - w + 1 {
				var want []float32
				for y := top - padding; y < top-padding+h; y++ {
					for x := left - padding; x < left-padding+w; x++ {
						for c := range channels {
							v := float32(0)
							if y >= 0 && y < height && x >= 0 && x < width {
								v = pixels[(y*width+x)*channels+c]
							}
							want = append(want, v)
						}
					}
				}
				if slices.Equal(want, tensor.Data[float32](got)) {
					return
				}
			}
		}
		t.Errorf("the padded image contains no crop %v", got)
	})
	if _, err := data.RandomCrop(4, 4, 0)(t.Context(), rand.New(rand.NewPCG(1, 1)),
		tensor.New(tensor.Float32, 3, 8, 1)); err == nil || !strings.Contains(err.Error(), "an image of 8 by 3 pixels") {
		t.Errorf("a small image: %v", err)
	}
}

func TestNormalize(t *testing.T) {
	img := tensor.From([]float32{1, 2, 3, 4}, 1, 2, 2)
	got, err := data.Normalize([]float32{1, 0}, []float32{2, 4})(t.Context(), img)
	if err != nil || !got.(*tensor.Tensor).Equal(tensor.From([]float32{0, 0.5, 1, 1}, 1, 2, 2)) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err = data.Normalize([]float32{1}, []float32{2})(t.Context(), img); err != nil ||
		!got.(*tensor.Tensor).Equal(tensor.From([]float32{0, 0.5, 1, 1.5}, 1, 2, 2)) {
		t.Errorf("one number: got %v, %v", got, err)
	}
	if _, err = data.Normalize([]float32{1, 2, 3}, []float32{2, 2, 2})(t.Context(), img); err == nil {
		t.Error("3 means for 2 channels: no error")
	}
}
