package data

import (
	"context"
	"fmt"
	"math/rand/v2"

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

// RandomShift returns a function for [Pipeline.MapRandom] that augments data by shifting images. It shifts by
// up to pixels rows and columns, uniformly distributed, and fills with zeros. It shifts the first input of a
// [Batch], or a tensor: a float32 image [height, width, channels], or several images [n, height, width,
// channels], each by a separate distance. RandomShift panics if pixels is negative.
func RandomShift(pixels int) func(ctx context.Context, r *rand.Rand, e Element) (Element, error) {
	if pixels < 0 {
		panic(fmt.Sprintf("data: RandomShift by %d pixels", pixels))
	}
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
			return nil, fmt.Errorf("data: RandomShift of %s: want float32 [height, width, channels] or [n, height, width, "+
				"channels]", what)
		}
		ts[0] = shiftImages(ts[0], func() (down, right int) {
			return r.IntN(2*pixels+1) - pixels, r.IntN(2*pixels+1) - pixels
		})
		return rebuild(e, ts), nil
	}
}

// shiftImages returns a copy of the images, each shifted by the result of a call of by.
func shiftImages(t *tensor.Tensor, by func() (down, right int)) *tensor.Tensor {
	shape := t.Shape()
	n := 1
	if len(shape) == 4 {
		n, shape = shape[0], shape[1:]
	}
	height, width, channels := shape[0], shape[1], shape[2]
	out := tensor.New(tensor.Float32, t.Shape()...)
	size := height * width * channels
	from, to := tensor.Data[float32](t), tensor.Data[float32](out)
	for i := range n {
		down, right := by()
		shiftImage(to[i*size:(i+1)*size], from[i*size:(i+1)*size], height, width*channels, down, right*channels)
	}
	return out
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
