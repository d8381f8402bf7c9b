package data_test

import (
	"bytes"
	"image"
	"image/color"
	"image/gif"
	"image/jpeg"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// encoded returns an image of each kind that the decoders produce, 4 wide and 2 high, as a file.
func encodedImages(t testing.TB) map[string][]byte {
	t.Helper()
	r := image.Rect(0, 0, 4, 2)
	files := map[string][]byte{}
	add := func(name string, img image.Image) {
		var b bytes.Buffer
		if err := png.Encode(&b, img); err != nil {
			t.Fatal(err)
		}
		files[name+".png"] = b.Bytes()
	}
	grey, deep, rgba, nrgba := image.NewGray(r), image.NewGray16(r), image.NewRGBA(r), image.NewNRGBA(r)
	plain, paletted := image.NewNRGBA64(r), image.NewPaletted(r, []color.Color{color.Black, color.RGBA{9, 99, 199, 255}})
	for y := range 2 {
		for x := range 4 {
			v := uint8(30*x + 100*y)
			grey.SetGray(x, y, color.Gray{v})
			deep.SetGray16(x, y, color.Gray16{uint16(v) * 257})
			rgba.SetRGBA(x, y, color.RGBA{v, 255 - v, 7, 255})
			nrgba.SetNRGBA(x, y, color.NRGBA{v, 255 - v, 7, 50 + v/2})
			plain.Set(x, y, color.NRGBA{v, 255 - v, 7, 255})
			paletted.SetColorIndex(x, y, uint8(x+y)%2)
		}
	}
	add("grey", grey)
	add("grey of 16 bits", deep)
	add("colour", rgba)
	add("colour with alpha", nrgba)
	add("colour of 16 bits", plain)
	add("palette", paletted)
	var b bytes.Buffer
	if err := jpeg.Encode(&b, rgba, &jpeg.Options{Quality: 100}); err != nil {
		t.Fatal(err)
	}
	files["colour.jpg"] = bytes.Clone(b.Bytes())
	b.Reset()
	if err := jpeg.Encode(&b, grey, &jpeg.Options{Quality: 100}); err != nil {
		t.Fatal(err)
	}
	files["grey.jpeg"] = bytes.Clone(b.Bytes())
	b.Reset()
	if err := gif.Encode(&b, paletted, nil); err != nil {
		t.Fatal(err)
	}
	files["palette.gif"] = b.Bytes()
	return files
}

// TestDecodeImage compares every kind of image with the standard library's conversion of each pixel.
func TestDecodeImage(t *testing.T) {
	for name, contents := range encodedImages(t) {
		img, _, err := image.Decode(bytes.NewReader(contents))
		if err != nil {
			t.Fatal(err)
		}
		for _, channels := range []int{1, 3, 4} {
			got, err := data.DecodeImage(contents, data.ImageOptions{Channels: channels})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !slices.Equal(got.Shape(), []int{2, 4, channels}) {
				t.Fatalf("%s: shape %v", name, got.Shape())
			}
			pixels := tensor.Data[float32](got)
			for y := range 2 {
				for x := range 4 {
					p := color.NRGBAModel.Convert(img.At(x, y)).(color.NRGBA)
					want := []uint8{p.R, p.G, p.B, p.A}[:channels]
					if channels == 1 {
						want = []uint8{color.GrayModel.Convert(img.At(x, y)).(color.Gray).Y}
					}
					for c, v := range want {
						if got, want := pixels[(y*4+x)*channels+c], float32(v)/255; got != want {
							t.Errorf("%s of %d channels, pixel (%d, %d), channel %d: got %v, want %v", name, channels, x, y, c,
								got, want)
						}
					}
				}
			}
		}
	}
}

func TestResizeImage(t *testing.T) {
	img := image.NewGray(image.Rect(0, 0, 6, 2)) // columns of 0, 0, 60, 60, 240, 240
	for y := range 2 {
		for x := range 6 {
			img.SetGray(x, y, color.Gray{[]uint8{0, 60, 240}[x/2]})
		}
	}
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o    data.ImageOptions
		want []float64 // of 255
	}{
		{data.ImageOptions{Height: 2, Width: 2, Channels: 1, Crop: true}, []float64{60, 60, 60, 60}},
		{data.ImageOptions{Height: 1, Width: 6, Channels: 1}, []float64{0, 0, 60, 60, 240, 240}},
		{data.ImageOptions{Height: 2, Width: 6, Channels: 1}, []float64{0, 0, 60, 60, 240, 240, 0, 0, 60, 60, 240, 240}},
	} {
		got, err := data.DecodeImage(b.Bytes(), c.o)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range tensor.Data[float32](got) {
			if math.Abs(float64(v)*255-c.want[i]) > 1 {
				t.Errorf("%+v: value %d is %v, want %v", c.o, i, v*255, c.want[i])
			}
		}
	}
}

// imageFolder writes files into a new folder.
func imageFolder(t testing.TB, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, contents := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, contents, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestImageFolder(t *testing.T) {
	kinds := encodedImages(t)
	dir := imageFolder(t, map[string][]byte{
		"dog/b.png": kinds["grey.png"], "dog/a/1.JPG": kinds["colour.jpg"], "cat/1.png": kinds["colour.png"],
		"cat/.hidden.png": nil, "cat/notes.txt": nil, ".git/x.png": nil, "LICENSE": nil, "dog/.thumbs/1.png": nil,
	})
	set, err := data.ImageFolder(dir, data.ImageOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range set.Files {
		name, _ := filepath.Rel(dir, file)
		names = append(names, filepath.ToSlash(name))
	}
	if want := []string{"cat/1.png", "dog/a/1.JPG", "dog/b.png"}; !slices.Equal(names, want) {
		t.Errorf("files: got %v, want %v", names, want)
	}
	if !slices.Equal(set.Classes, []string{"cat", "dog"}) || !slices.Equal(set.Shape, []int{2, 4, 3}) ||
		set.Images.Len() != 3 {
		t.Errorf("got classes %v, shape %v, %d images", set.Classes, set.Shape, set.Images.Len())
	}
	b := collect(t, set.Images.Batch(3), 0)[0].(data.Batch)
	if !b.Labels[0].Equal(tensor.From([]int32{0, 1, 1})) || !slices.Equal(b.Inputs[0].Shape(), []int{3, 2, 4, 3}) {
		t.Errorf("got labels %v, images %v", b.Labels[0], b.Inputs[0].Shape())
	}
	reversed := []string{"dog", "cat"}
	other, err := data.ImageFolder(dir, data.ImageOptions{Classes: reversed, Height: 5, Width: 3, Channels: 1})
	if err != nil {
		t.Fatal(err)
	}
	b = collect(t, other.Images.Batch(3), 0)[0].(data.Batch)
	if !b.Labels[0].Equal(tensor.From([]int32{0, 0, 1})) || !slices.Equal(b.Inputs[0].Shape(), []int{3, 5, 3, 1}) {
		t.Errorf("other order: got labels %v, images %v", b.Labels[0], b.Inputs[0].Shape())
	}
}

// TestImageFolderFingerprint checks that equal folders have equal fingerprints, wherever they lie.
func TestImageFolderFingerprint(t *testing.T) {
	kinds := encodedImages(t)
	fingerprint := func(dir string) uint64 {
		set, err := data.ImageFolder(dir, data.ImageOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return data.Fingerprint(set.Images)
	}
	files := map[string][]byte{"cat/1.png": kinds["grey.png"], "dog/1.png": kinds["colour.png"]}
	dir := imageFolder(t, files)
	first, link := fingerprint(dir), filepath.Join(t.TempDir(), "link")
	if err := os.Mkdir(link, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, class := range []string{"cat", "dog"} {
		if err := os.Symlink(filepath.Join(dir, class), filepath.Join(link, class)); err != nil {
			t.Skipf("symbolic links: %v", err)
		}
	}
	files["dog/1.png"] = kinds["colour with alpha.png"]
	if same, linked := fingerprint(imageFolder(t, map[string][]byte{
		"cat/1.png": kinds["grey.png"], "dog/1.png": kinds["colour.png"],
	})), fingerprint(link); first == 0 || same != first || linked != first {
		t.Errorf("equal folders: %x, %x, %x", first, same, linked)
	}
	if other := fingerprint(imageFolder(t, files)); other == first {
		t.Errorf("another image: the same fingerprint %x", other)
	}
}

func TestImageFolderErrors(t *testing.T) {
	kinds := encodedImages(t)
	var large bytes.Buffer
	if err := png.Encode(&large, image.NewGray(image.Rect(0, 0, 5, 2))); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		files map[string][]byte
		o     data.ImageOptions
		want  []string
	}{
		{
			"no folders",
			map[string][]byte{"1.png": kinds["grey.png"]},
			data.ImageOptions{},
			[]string{"no subfolders: want a folder per class"},
		},
		{"no images", map[string][]byte{"a/1.txt": nil}, data.ImageOptions{}, []string{"no images (.png,", `["a"]`}},
		{
			"unknown class",
			map[string][]byte{"a/1.png": kinds["grey.png"]},
			data.ImageOptions{Classes: []string{"b"}},
			[]string{`no folder for the class "b"`, `["a"]`},
		},
		{
			"another size",
			map[string][]byte{"a/1.png": kinds["grey.png"], "a/2.png": large.Bytes()},
			data.ImageOptions{},
			[]string{"2.png: the images differ in size", "an image of 5 by 2 pixels, where the first has 4 by 2"},
		},
		{
			"truncated",
			map[string][]byte{"a/1.png": kinds["grey.png"][:60]},
			data.ImageOptions{},
			[]string{"1.png: the image is truncated or corrupt"},
		},
		{
			"not an image",
			map[string][]byte{"a/1.png": []byte("hello")},
			data.ImageOptions{},
			[]string{"1.png: not a PNG, JPEG or GIF"},
		},
		{"channels", nil, data.ImageOptions{Channels: 2}, []string{"2 channels: want 1, 3 or 4"}},
		{"size", nil, data.ImageOptions{Height: 2}, []string{"0 by 2 pixels: want both or none"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			set, err := data.ImageFolder(imageFolder(t, c.files), c.o)
			if err == nil {
				_, err = firstError(t.Context(), set.Images)
			}
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %q, want %q in it", err, want)
				}
			}
		})
	}
	if _, err := data.ImageFolder(filepath.Join(t.TempDir(), "none"), data.ImageOptions{}); err == nil {
		t.Error("a missing folder: no error")
	}
}

// FuzzDecodeImage checks that no contents make DecodeImage panic, or give other shapes than stated.
func FuzzDecodeImage(f *testing.F) {
	for _, contents := range encodedImages(f) {
		f.Add(contents, uint8(3), uint8(0))
		f.Add(contents, uint8(1), uint8(3))
	}
	f.Fuzz(func(t *testing.T, contents []byte, channels, side uint8) {
		if c, _, err := image.DecodeConfig(bytes.NewReader(contents)); err == nil && (c.Width > 512 || c.Height > 512) {
			return // slow, not wrong
		}
		o := data.ImageOptions{Channels: []int{1, 3, 4}[channels%3], Height: int(side % 9), Width: int(side % 9)}
		img, err := data.DecodeImage(contents, o)
		if err != nil {
			return
		}
		if s := img.Shape(); len(s) != 3 || s[2] != o.Channels || o.Height > 0 && (s[0] != o.Height || s[1] != o.Width) {
			t.Errorf("%+v gives an image of shape %v", o, s)
		}
	})
}
