package backend

import (
	"slices"
	"unsafe"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/backend/internal/product"
	"github.com/lockstep-ml/lockstep/backend/internal/vector"
)

// depthwise lowers a convolution of each channel by itself, whose channels lie side by side: for each tap, vectors of
// channels, or of neighbouring pixels, are multiplied and added. ok is false for other ones.
func (p *planner) depthwise(x, w view, axes compute.ConvolveAxesConfig, windows []window, shape shapes.Shape) (
	_ view, ok bool,
) {
	dims, dtype := shape.Dimensions, shape.DType
	channels, result := dims[axes.OutputChannels], rowMajor(dims)
	if x.strides[axes.InputChannels] != 1 || result[axes.OutputChannels] != 1 ||
		slices.ContainsFunc(windows, func(v window) bool { return v.dilation > 1 }) || len(windows) > 8 {
		return view{}, false
	}
	w = w.transposed(slices.Concat(axes.KernelSpatial, []int{axes.KernelInputChannels, axes.KernelOutputChannels}))
	if !w.contiguous() {
		w = p.copied(w)
	}
	last := windows[len(windows)-1]
	outer := windows[:len(windows)-1]
	// Rows are those of the last spatial axis.
	rows := []product.Axis{{Size: dims[axes.OutputBatch], A: x.strides[axes.InputBatch], C: result[axes.OutputBatch]}}
	taps := last.taps
	for _, v := range outer {
		rows = append(rows, product.Axis{Size: v.out, C: v.c})
		taps *= v.taps
	}
	count := 1
	for _, r := range rows {
		count *= r.Size
	}
	bytes := int(dtype.Size())
	pixels := 1 // of a vector
	if last.stride == 1 && last.a == channels && last.c == channels {
		pixels = max(1, min(last.out, 512/channels, 1<<15/(taps*channels)))
	}
	t := types[dtype]
	multiply, add := vector.Lookup("Mul", t, t), vector.Lookup("Add", t, t)
	return p.withTasks(dims, dtype, func(n *node) *tasksInstruction {
		each := max(1, taskElements/(last.out*channels), (count+mostTasks-1)/mostTasks)
		width := pixels * channels * bytes
		return &tasksInstruction{
			tasks: (count + each - 1) / each, scratch: (taps + 1) * width,
			task: func(task int, memory []unsafe.Pointer, k *worker) {
				weights := func(tap int) unsafe.Pointer { return unsafe.Add(k.scratch, (tap+1)*width) }
				for tap := range taps { // the weights of a tap, for each pixel of a vector
					row := unsafe.Add(memory[w.of.slot], (w.offset+tap*channels)*bytes)
					repeat(weights(tap), row, pixels, channels*bytes)
				}
				for row := task * each; row < min((task+1)*each, count); row++ {
					rest, from, to := row, x.offset, 0
					var first [8]int // the element of the first tap, along the outer axes
					for i := len(rows) - 1; i >= 0; i-- {
						at := rest % rows[i].Size
						rest /= rows[i].Size
						from, to = from+at*rows[i].A, to+at*rows[i].C
						if i > 0 {
							first[i-1] = at*outer[i-1].stride - outer[i-1].before
						}
					}
					for at := 0; at < last.out; at += pixels {
						end := min(at+pixels, last.out)
						sum := unsafe.Add(memory[n.slot], (to+at*last.c)*bytes)
						clear(unsafe.Slice((*byte)(sum), (end-at)*channels*bytes))
						for tap := range taps {
							s, rest := tap%last.taps, tap/last.taps
							place, inside := from, true
							for i := len(outer) - 1; i >= 0; i-- {
								v := &outer[i]
								e := first[i] + rest%v.taps*v.step
								rest /= v.taps
								place, inside = place+e*v.a, inside && e >= 0 && e < v.in
							}
							// Pixels whose element of this tap is not padding.
							lo, hi := at, end
							for lo < hi && lo*last.stride+s*last.step < last.before {
								lo++
							}
							for hi > lo && (hi-1)*last.stride+s*last.step-last.before >= last.in {
								hi--
							}
							if !inside || lo >= hi {
								continue
							}
							place += (lo*last.stride + s*last.step - last.before) * last.a
							to := unsafe.Add(sum, (lo-at)*channels*bytes)
							k.in[0], k.in[1] = unsafe.Add(memory[x.of.slot], place*bytes), weights(tap)
							k.in[2] = k.in[0]
							multiply(k.scratch, &k.in, (hi-lo)*channels)
							k.in[0], k.in[1], k.in[2] = to, k.scratch, to
							add(to, &k.in, (hi-lo)*channels)
						}
					}
				}
			},
		}
	}, x, w), true
}
