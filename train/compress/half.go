package compress

import (
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
)

// half exchanges float32 as float16 or bfloat16. It keeps nothing from step to step.
type half struct {
	dtype     tensor.DType
	narrowed  []int            // the parameters of float32
	list      []*tensor.Tensor // of the call: the encoded gradients, then those of other types
	names     []string
	others    []int
	gradients []*tensor.Tensor
	calls     [1]Call
	rounds    [1][]Call
}

func newHalf(dtype tensor.DType, parameters []Parameter) *half {
	h := &half{dtype: dtype}
	count := 0
	for i, p := range parameters {
		if p.DType == tensor.Float32 {
			h.narrowed = append(h.narrowed, i)
			count += length(p.Shape)
		} else {
			h.others = append(h.others, i)
		}
	}
	if count > 0 {
		h.list = append(h.list, tensor.New(dtype, count))
		h.names = append(h.names, callName("gradients in "+dtype.String(), parameters))
	}
	for _, i := range h.others {
		h.list, h.names = append(h.list, nil), append(h.names, parameters[i].Name)
	}
	return h
}

func (h *half) Start(gradients []*tensor.Tensor, _ int64) [][]Call {
	h.gradients = gradients
	h.each(func(half, wide unsafe.Pointer, n int) { kernel.Convert(h.dtype, tensor.Float32, half, wide, n) })
	for k, i := range h.others {
		h.list[len(h.list)-len(h.others)+k] = gradients[i]
	}
	h.calls[0] = Call{Op: AllReduce, Dst: h.list, Src: h.list, Names: h.names}
	h.rounds[0] = h.calls[:]
	return h.rounds[:]
}

func (h *half) Next() {
	h.each(func(half, wide unsafe.Pointer, n int) { kernel.Convert(tensor.Float32, h.dtype, wide, half, n) })
	h.gradients = nil
}

// each calls f with each gradient of float32 and its place in the encoded ones.
func (h *half) each(f func(half, wide unsafe.Pointer, n int)) {
	at := 0
	for _, i := range h.narrowed {
		g := h.gradients[i].Memory()
		if g.Bytes > 0 {
			f(unsafe.Add(h.list[0].Memory().Ptr, at), g.Ptr, g.Bytes/4)
		}
		at += g.Bytes / 2
	}
}

func (h *half) Commit() {}

func (h *half) Discard() {}

func (h *half) State() []State { return nil }

// length returns the number of elements of a shape.
func length(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
