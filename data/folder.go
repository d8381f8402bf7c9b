package data

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/color"
	_ "image/gif" // decoders of ImageFolder
	_ "image/jpeg"
	_ "image/png"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/image/draw"

	"github.com/lockstep-ml/lockstep/tensor"
)

// ImageOptions specifies how image files become tensors.
type ImageOptions struct {
	// Height and Width are the size of the results, in pixels. Images of another size are resized by bilinear
	// interpolation, which averages pixels when it shrinks. 0 for both means that all images must have one size.
	Height, Width int
	// Channels is 1 for grey, 3 for red, green and blue, or 4 for these with alpha, not premultiplied; 0 means 3.
	// Images of another kind are converted; without a channel for it, alpha is dropped.
	Channels int
	// Crop preserves the aspect ratio: it crops the centre of the image before it resizes it. Otherwise images are
	// stretched.
	Crop bool
	// Classes are the names of subfolders in the order of their labels; nil means all subfolders, sorted. Give it to
	// read the validation data with the labels of the training data.
	Classes []string
}

// complete fills in defaults, and returns an error for invalid options.
func (o *ImageOptions) complete() error {
	if o.Channels == 0 {
		o.Channels = 3
	}
	switch {
	case o.Channels != 1 && o.Channels != 3 && o.Channels != 4:
		return fmt.Errorf("images of %d channels: want 1, 3 or 4", o.Channels)
	case o.Height < 0 || o.Width < 0 || (o.Height == 0) != (o.Width == 0) || o.Height > 0 && o.Width > pixelsMax/o.Height:
		return fmt.Errorf("images of %d by %d pixels: want both or none, of at most %d pixels in all", o.Width, o.Height,
			pixelsMax)
	}
	return nil
}

// LabelledImages is the data set that [ImageFolder] returns.
type LabelledImages struct {
	// Images has random access. Each element is a [Batch] with one input, a float32 image [height, width, channels]
	// with values from 0 to 1, and one int32 label.
	Images  Pipeline
	Classes []string // names of the classes: label i is Classes[i]
	Shape   []int    // of an image: height, width, channels
	Files   []string // the file of each element, in order
}

// imageSuffixes are the names of image files that ImageFolder reads.
var imageSuffixes = []string{".png", ".jpg", ".jpeg", ".gif"}

// ImageFolder lists the images in dir, which has one subfolder per class: dir/cat/1.png, dir/dog/a/2.jpg. It reads
// PNG, JPEG and GIF files (of an animation, the first image), in subfolders at any depth, in the order of their
// names, and ignores other files and names that start with a dot. A file is read when its element is. Orientation
// tags of cameras are ignored.
//
// Errors name the folder or file: no subfolders, no images, a class without a folder, a file that cannot be decoded,
// an image of another size when no size is given. It is torchvision's ImageFolder, and Keras'
// image_dataset_from_directory.
func ImageFolder(dir string, o ImageOptions) (*LabelledImages, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	set := &LabelledImages{Classes: slices.Clone(o.Classes)}
	found, err := subfolders(dir)
	if err != nil {
		return nil, err
	}
	if set.Classes == nil {
		set.Classes = found
	}
	var labels []int32
	same := false // all images must have the size of the first
	for label, class := range set.Classes {
		if !slices.Contains(found, class) {
			return nil, fmt.Errorf("data: %s: no folder for the class %q: there are %s", dir, class, quoteSome(found))
		}
		files, err := imagesIn(filepath.Join(dir, class))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			set.Files, labels = append(set.Files, file), append(labels, int32(label))
		}
	}
	if len(set.Files) == 0 {
		return nil, fmt.Errorf("data: %s: no images (%s) in the folders of its classes, %s: want a folder per class, "+
			"such as %s", dir, strings.Join(imageSuffixes, ", "), quoteSome(set.Classes),
			filepath.Join(dir, "cat", "1.png"))
	}
	if o.Height == 0 {
		c, err := imageConfig(set.Files[0])
		if err != nil {
			return nil, err
		}
		o.Height, o.Width = c.Height, c.Width
		same = true
	}
	set.Shape = []int{o.Height, o.Width, o.Channels}
	set.Images = Of(&imageFiles{dir: dir, files: set.Files, labels: labels, options: o, same: same})
	return set, nil
}

// imageFiles is the dataset of ImageFolder.
type imageFiles struct {
	dir      string
	files    []string
	labels   []int32
	options  ImageOptions
	same     bool // all images must have the size in options
	hash     uint64
	hashOnce sync.Once
}

// Len implements [Dataset].
func (f *imageFiles) Len() int { return len(f.files) }

// Iter implements [Dataset].
func (f *imageFiles) Iter(ctx context.Context) iter.Seq2[Element, error] { return newView(f).Iter(ctx) }

// At implements [Indexed].
func (f *imageFiles) At(_ context.Context, i int) (Element, error) {
	contents, err := os.ReadFile(f.files[i])
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	pixels, err := decodeImage(contents, f.options, f.same)
	if err != nil {
		return nil, fmt.Errorf("data: %s: %w", f.files[i], err)
	}
	return Batch{Inputs: []*tensor.Tensor{pixels}, Labels: []*tensor.Tensor{tensor.Scalar(f.labels[i])}}, nil
}

// Fingerprint implements [Fingerprinted]. It covers the options and the names, labels and sizes of the files.
func (f *imageFiles) Fingerprint() uint64 {
	f.hashOnce.Do(func() {
		f.hash = describe(0, fmt.Sprint(f.options, f.same))
		for i, file := range f.files {
			name, _ := filepath.Rel(f.dir, file)
			size := int64(-1) // reading it will fail
			if info, err := os.Stat(file); err == nil {
				size = info.Size()
			}
			f.hash = describe(f.hash, fmt.Sprint(filepath.ToSlash(name), f.labels[i], size))
		}
	})
	return f.hash
}

// version returns a hash that changes when a file is written again with the same size. Copies of a folder may have
// different ones.
func (f *imageFiles) version() uint64 {
	h := f.Fingerprint()
	for _, file := range f.files {
		if info, err := os.Stat(file); err == nil {
			h = describe(h, fmt.Sprint(info.ModTime().UnixNano()))
		}
	}
	return h
}

// subfolders returns the names of the folders in dir, sorted, without those that start with a dot.
func subfolders(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if info, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && info.IsDir() { // also through a link
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("data: %s: no subfolders: want a folder per class, with its images", dir)
	}
	return names, nil
}

// imagesIn returns the image files in dir and its subfolders, sorted by name.
func imagesIn(dir string) ([]string, error) {
	var files []string
	// WalkDir follows a link only if its name ends in a separator.
	err := filepath.WalkDir(dir+string(filepath.Separator), func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case strings.HasPrefix(e.Name(), ".") && e.IsDir():
			return fs.SkipDir
		case !e.IsDir() && !strings.HasPrefix(e.Name(), ".") &&
			slices.Contains(imageSuffixes, strings.ToLower(filepath.Ext(path))):
			files = append(files, path)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	return files, nil
}

// imageConfig returns the size of an image file.
func imageConfig(name string) (image.Config, error) {
	f, err := os.Open(name)
	if err != nil {
		return image.Config{}, fmt.Errorf("data: %w", err)
	}
	defer f.Close()
	c, _, err := image.DecodeConfig(f)
	if err != nil {
		return c, fmt.Errorf("data: %s: %w", name, explainImage(err))
	}
	return c, nil
}

// DecodeImage decodes a PNG, JPEG or GIF image from the contents of a file, as [ImageFolder] does, to a new float32
// tensor [height, width, channels] with values from 0 to 1. Classes is not used.
func DecodeImage(contents []byte, o ImageOptions) (*tensor.Tensor, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	pixels, err := decodeImage(contents, o, false)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	return pixels, nil
}

// ErrImageSize is the kind of the error of [ImageFolder] for images of different sizes when the options have no Height
// and Width.
var ErrImageSize = errors.New("the images differ in size, and no size to resize them to is given")

// pixelsMax is the largest image that is decoded. A small file can state any size.
const pixelsMax = 1 << 28

// decodeImage is DecodeImage, without the prefix of its errors. same: the image must have the size of the options.
func decodeImage(contents []byte, o ImageOptions, same bool) (*tensor.Tensor, error) {
	c, _, err := image.DecodeConfig(bytes.NewReader(contents))
	if err != nil {
		return nil, explainImage(err)
	}
	if c.Width < 1 || c.Height < 1 || c.Width > pixelsMax/c.Height {
		return nil, fmt.Errorf("an image of %d by %d pixels: want 1 to %d pixels in all", c.Width, c.Height, pixelsMax)
	}
	if same && (c.Height != o.Height || c.Width != o.Width) {
		return nil, fmt.Errorf("%w: an image of %d by %d pixels, where the first has %d by %d", ErrImageSize, c.Width,
			c.Height, o.Width, o.Height)
	}
	img, _, err := image.Decode(bytes.NewReader(contents))
	if err != nil {
		return nil, explainImage(err)
	}
	from := img.Bounds()
	if o.Height != 0 && (from.Dx() != o.Width || from.Dy() != o.Height) {
		if o.Crop {
			from = centre(from, o.Width, o.Height)
		}
		size := image.Rect(0, 0, o.Width, o.Height)
		var to draw.Image = image.NewNRGBA(size)
		if o.Channels == 1 {
			to = image.NewGray(size)
		}
		draw.BiLinear.Scale(to, size, img, from, draw.Src, nil)
		img = to
	}
	b := img.Bounds()
	out := tensor.New(tensor.Float32, b.Dy(), b.Dx(), o.Channels)
	pixelsOf(tensor.Data[float32](out), img, o.Channels)
	return out, nil
}

// explainImage adds the meaning of a decoder's error.
func explainImage(err error) error {
	if errors.Is(err, image.ErrFormat) {
		return errors.New("not a PNG, JPEG or GIF image: convert it, or remove it from the folder")
	}
	return fmt.Errorf("the image is truncated or corrupt: %w", err)
}

// centre returns the largest rectangle with the aspect ratio of width to height in the middle of r.
func centre(r image.Rectangle, width, height int) image.Rectangle {
	w, h := r.Dx(), r.Dy()
	if w*height > h*width {
		w = max(1, h*width/height)
	} else {
		h = max(1, w*height/width)
	}
	at := image.Pt(r.Min.X+(r.Dx()-w)/2, r.Min.Y+(r.Dy()-h)/2)
	return image.Rectangle{Min: at, Max: at.Add(image.Pt(w, h))}
}

// byteValues are the values of bytes between 0 and 1.
var byteValues = func() (v [256]float32) {
	for i := range v {
		v[i] = float32(i) / 255
	}
	return v
}()

// pixelsOf writes the pixels of img, row by row.
func pixelsOf(dst []float32, img image.Image, channels int) {
	b := img.Bounds()
	switch img := img.(type) { // without an interface call per pixel
	case *image.Gray:
		for y := range b.Dy() {
			for _, v := range img.Pix[y*img.Stride:][:b.Dx()] {
				for range min(channels, 3) {
					dst[0], dst = byteValues[v], dst[1:]
				}
				if channels == 4 {
					dst[0], dst = 1, dst[1:]
				}
			}
		}
		return
	case *image.NRGBA:
		if channels >= 3 {
			for y := range b.Dy() {
				row := img.Pix[y*img.Stride:][:4*b.Dx()]
				for ; len(row) > 0; row, dst = row[4:], dst[channels:] {
					for c := range channels {
						dst[c] = byteValues[row[c]]
					}
				}
			}
			return
		}
	case *image.RGBA:
		if channels == 3 && img.Opaque() {
			for y := range b.Dy() {
				row := img.Pix[y*img.Stride:][:4*b.Dx()]
				for ; len(row) > 0; row, dst = row[4:], dst[3:] {
					dst[0], dst[1], dst[2] = byteValues[row[0]], byteValues[row[1]], byteValues[row[2]]
				}
			}
			return
		}
	case *image.YCbCr:
		if channels == 3 {
			for y := b.Min.Y; y < b.Max.Y; y++ {
				for x := b.Min.X; x < b.Max.X; x++ {
					i, j := img.YOffset(x, y), img.COffset(x, y)
					r, g, b := color.YCbCrToRGB(img.Y[i], img.Cb[j], img.Cr[j])
					dst[0], dst[1], dst[2] = byteValues[r], byteValues[g], byteValues[b]
					dst = dst[3:]
				}
			}
			return
		}
	}
	for y := b.Min.Y; y < b.Max.Y; y++ {
		for x := b.Min.X; x < b.Max.X; x++ {
			if channels == 1 {
				dst[0] = byteValues[color.GrayModel.Convert(img.At(x, y)).(color.Gray).Y]
			} else {
				p := color.NRGBAModel.Convert(img.At(x, y)).(color.NRGBA)
				for c, v := range []uint8{p.R, p.G, p.B, p.A}[:channels] {
					dst[c] = byteValues[v]
				}
			}
			dst = dst[channels:]
		}
	}
}
