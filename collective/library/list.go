package library

import (
	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// joined is a call whose lists of memories are copied to contiguous memory, because libraries take no lists.
type joined struct {
	call     collective.Call
	src, dst []byte
}

// join returns the contiguous form of a call. It copies SrcList; after the call, split copies the result to DstList.
func (j *joined) join(c *collective.Call) *collective.Call {
	j.call = *c
	j.call.SrcList, j.call.DstList = nil, nil
	if c.SrcList != nil {
		j.src = j.src[:0]
		for _, m := range c.SrcList {
			j.src = append(j.src, m.HostBytes()...)
		}
		j.call.Src = tensor.HostMemory(j.src)
	}
	if c.DstList != nil {
		n := 0
		for _, m := range c.DstList {
			n += m.Bytes
		}
		j.dst = append(j.dst[:0], make([]byte, n)...)
		j.call.Dst = tensor.HostMemory(j.dst)
	}
	return &j.call
}

// split copies the result of a joined call to the memories of its DstList.
func (j *joined) split(c *collective.Call) {
	from := j.dst
	for _, m := range c.DstList {
		from = from[copy(m.HostBytes(), from):]
	}
}
