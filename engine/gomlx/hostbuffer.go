package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/tensor"
)

// hostBuffer is an argument of a program whose bytes the host writes: one buffer, refilled for every step. If
// host and device do not share memory, load copies the bytes to the device.
type hostBuffer struct {
	b      *backend
	device compute.DeviceNum
	shape  shapes.Shape
	flat   any
	mem    tensor.Memory
	buffer compute.Buffer // the shared one, or the last copy
}

func newHostBuffer(b *backend, device compute.DeviceNum, shape shapes.Shape) (*hostBuffer, error) {
	c := &hostBuffer{b: b, device: device, shape: shape}
	if b.HasSharedBuffers() {
		buffer, flat, err := b.NewSharedBuffer(device, shape)
		if err != nil {
			return nil, fmt.Errorf("gomlx: input buffer of shape %s: %w", shape, err)
		}
		c.buffer, c.flat, c.mem = buffer, flat, memoryOf(flat, shape, int(device))
		clear(c.mem.HostBytes()) // a backend may return used memory
		return c, nil
	}
	d, err := fromGoMLX(shape.DType)
	if err != nil {
		return nil, err
	}
	c.mem = tensor.New(d, shape.Dimensions...).Memory()
	c.flat = flatOf(c.mem, shape.DType, shape.Size())
	return c, nil
}

// load returns the backend's buffer with the bytes that the host has written. The host must not write to it
// until the run has ended.
func (c *hostBuffer) load() (compute.Buffer, error) {
	if c.b.HasSharedBuffers() {
		return c.buffer, nil
	}
	c.close()
	var err error
	c.buffer, err = c.b.BufferFromFlatData(c.device, c.flat, c.shape)
	return c.buffer, err
}

func (c *hostBuffer) close() {
	if c != nil {
		release(c.buffer)
		c.buffer = nil
	}
}

// release frees a non-nil buffer. It ignores errors: such a buffer is freed with the backend.
func release(b compute.Buffer) {
	if b != nil {
		_ = b.Finalize()
	}
}
