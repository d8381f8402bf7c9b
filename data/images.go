package data

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Set is a data set of labelled images with its standard division into training and test data. Each element
// is a [Batch] with one input, a float32 image with values from 0 to 1, and one int32 label.
type Set struct {
	Name    string   // "mnist"
	Shape   []int    // of an image: height, width, channels
	Classes int      // labels are 0…Classes-1
	Train   Pipeline // training data
	Test    Pipeline // test data
}

// FromImages returns a pipeline of images and labels. Each element is a [Batch] of one float32 image [height,
// width, channels], with values divided by white, and its int32 label. images is uint8, [n, height, width]
// (one channel) or [n, height, width, channels]. labels is of an integer dtype, [n]. The pipeline shares the
// memory of images, which must not be modified afterwards. FromImages returns an error for other dtypes or
// shapes.
func FromImages(images, labels *tensor.Tensor, white float32) (Pipeline, error) {
	shape := images.Shape()
	if images.DType() != tensor.Uint8 || len(shape) != 3 && len(shape) != 4 {
		return Pipeline{}, fmt.Errorf("data: images of %v%s: want uint8 [n, height, width] or [n, height, width, channels]",
			images.DType(), tensor.FormatShape(shape))
	}
	if !(white > 0) {
		return Pipeline{}, fmt.Errorf("data: images with white = %v: want the largest value, such as 255", white)
	}
	if len(shape) == 3 {
		images = images.Reshape(shape[0], shape[1], shape[2], 1)
	}
	if labels.Rank() != 1 || !labels.DType().IsInteger() || labels.Len() != shape[0] {
		return Pipeline{}, fmt.Errorf("data: labels of %v%s for %d images: want one integer for each",
			labels.DType(), tensor.FormatShape(labels.Shape()), shape[0])
	}
	classes := make([]int32, labels.Len())
	for i, x := range labels.Float64s() {
		classes[i] = int32(x)
		if float64(classes[i]) != x {
			return Pipeline{}, fmt.Errorf("data: label %d is %v, which is not an int32", i, x)
		}
	}
	t, err := newTable(Batch{Inputs: []*tensor.Tensor{images}, Labels: []*tensor.Tensor{tensor.Of(classes)}})
	if err != nil {
		return Pipeline{}, err
	}
	value := new([256]float32)
	for i := range value {
		value[i] = float32(i) / white
	}
	t.columns[0].dtype, t.columns[0].value = tensor.Float32, value
	return Of(t), nil
}

// imageFunc returns a function for [Pipeline.MapRandom] that replaces the first input of a [Batch], or a tensor.
// change gets a float32 image [height, width, channels] and returns a new one; it is called for each image of
// [n, height, width, channels].
func imageFunc(name string, change func(r *rand.Rand, pixels []float32, shape [3]int) ([]float32, [3]int, error)) func(
	ctx context.Context, r *rand.Rand, e Element) (Element, error) {
	return func(_ context.Context, r *rand.Rand, e Element) (Element, error) {
		ts, err := leaves(nil, e)
		if err != nil {
			return nil, err
		}
		if len(ts) == 0 || ts[0].DType() != tensor.Float32 || ts[0].Rank() != 3 && ts[0].Rank() != 4 {
			what := "an element without tensors"
			if len(ts) > 0 {
				what = ts[0].DType().String() + tensor.FormatShape(ts[0].Shape())
			}
			return nil, fmt.Errorf("data: %s of %s: want float32 [height, width, channels] or [n, height, width, channels]",
				name, what)
		}
		shape := ts[0].Shape()
		n, one := 1, [3]int(shape[len(shape)-3:])
		if len(shape) == 4 {
			n = shape[0]
		}
		size := one[0] * one[1] * one[2]
		from, out := tensor.Data[float32](ts[0]), []float32(nil)
		to := one
		for i := range n {
			var pixels []float32
			if pixels, to, err = change(r, from[i*size:(i+1)*size], one); err != nil {
				return nil, fmt.Errorf("data: %s: %w", name, err)
			}
			if n == 1 {
				out = pixels
			} else {
				out = append(out, pixels...)
			}
		}
		ts[0] = tensor.Of(out, append(slices.Clone(shape[:len(shape)-3]), to[:]...)...)
		return rebuild(e, ts), nil
	}
}

// RandomShift returns a function for [Pipeline.MapRandom] that augments data by shifting images. It shifts by
// up to pixels rows and columns, uniformly distributed, and fills with zeros. It shifts the first input of a
// [Batch], or a tensor: a float32 image [height, width, channels], or several images [n, height, width,
// channels], each by a separate distance. RandomShift panics if pixels is negative.
func RandomShift(pixels int) func(ctx context.Context, r *rand.Rand, e Element) (Element, error) {
	if pixels < 0 {
		panic(fmt.Sprintf("data: RandomShift by %d pixels", pixels))
	}
	return imageFunc("RandomShift", func(r *rand.Rand, src []float32, s [3]int) ([]float32, [3]int, error) {
		dst := make([]float32, len(src))
		down, right := r.IntN(2*pixels+1)-pixels, r.IntN(2*pixels+1)-pixels
		shiftImage(dst, src, s[0], s[1]*s[2], down, right*s[2])
		return dst, s, nil
	})
}

// RandomFlip returns a function for [Pipeline.MapRandom] that mirrors half of the images, left to right. It takes the
// same elements as [RandomShift].
func RandomFlip() func(ctx context.Context, r *rand.Rand, e Element) (Element, error) {
	return imageFunc("RandomFlip", func(r *rand.Rand, src []float32, s [3]int) ([]float32, [3]int, error) {
		dst := slices.Clone(src)
		if r.IntN(2) == 0 {
			return dst, s, nil
		}
		width, channels := s[1], s[2]
		for row := 0; row < len(src); row += width * channels {
			for x := range width {
				copy(dst[row+x*channels:][:channels], src[row+(width-1-x)*channels:])
			}
		}
		return dst, s, nil
	})
}

// RandomCrop returns a function for [Pipeline.MapRandom] that crops images to height by width pixels at a random
// place. Before it crops, it pads each side with padding pixels of zeros. It takes the same elements as
// [RandomShift]; an image that is too small is an error. RandomCrop panics if a size is not positive, or padding is
// negative.
func RandomCrop(height, width, padding int) func(ctx context.Context, r *rand.Rand, e Element) (Element, error) {
	if height < 1 || width < 1 || padding < 0 {
		panic(fmt.Sprintf("data: RandomCrop to %d by %d pixels with a padding of %d", width, height, padding))
	}
	return imageFunc("RandomCrop", func(r *rand.Rand, src []float32, s [3]int) ([]float32, [3]int, error) {
		down, right := s[0]+2*padding-height, s[1]+2*padding-width // places for the crop, less one
		if down < 0 || right < 0 {
			return nil, s, fmt.Errorf("an image of %d by %d pixels with a padding of %d is smaller than %d by %d", s[1], s[0],
				padding, width, height)
		}
		top, left := r.IntN(down+1)-padding, r.IntN(right+1)-padding
		to := [3]int{height, width, s[2]}
		dst := make([]float32, height*width*s[2])
		first, last := max(0, left), min(s[1], left+width) // columns of the image that lie in the crop
		for y := max(0, top); y < min(s[0], top+height) && first < last; y++ {
			copy(dst[((y-top)*width+first-left)*s[2]:], src[(y*s[1]+first)*s[2]:(y*s[1]+last)*s[2]])
		}
		return dst, to, nil
	})
}

// Normalize returns a function for [Pipeline.Map] that subtracts mean from each channel of the images and divides by
// deviation. Both have one number per channel, or one for all. It takes the same elements as [RandomShift]. Normalize
// panics if the lengths differ, or a deviation is not positive.
func Normalize(mean, deviation []float32) func(ctx context.Context, e Element) (Element, error) {
	for _, d := range deviation {
		if !(d > 0) {
			panic(fmt.Sprintf("data: Normalize by a deviation of %v: want a positive number", d))
		}
	}
	if len(mean) != len(deviation) || len(mean) == 0 {
		panic(fmt.Sprintf("data: Normalize by %d means and %d deviations: want one per channel", len(mean), len(deviation)))
	}
	f := imageFunc("Normalize", func(_ *rand.Rand, src []float32, s [3]int) ([]float32, [3]int, error) {
		if len(mean) != 1 && len(mean) != s[2] {
			return nil, s, fmt.Errorf("an image of %d channels: want %d, one per mean", s[2], len(mean))
		}
		dst := make([]float32, len(src))
		for i, x := range src {
			c := i % len(mean)
			dst[i] = (x - mean[c]) / deviation[c]
		}
		return dst, s, nil
	})
	return func(ctx context.Context, e Element) (Element, error) { return f(ctx, nil, e) }
}

// shiftImage shifts an image of height rows of width values into the zeroed dst: dst[y+down][x+right] =
// src[y][x] where both are inside.
func shiftImage(dst, src []float32, height, width, down, right int) {
	first, last := max(0, right), min(width, width+right) // columns of dst that are written
	if first >= last {
		return
	}
	for y := max(0, down); y < min(height, height+down); y++ {
		row := (y - down) * width
		copy(dst[y*width+first:y*width+last], src[row+first-right:row+last-right])
	}
}
