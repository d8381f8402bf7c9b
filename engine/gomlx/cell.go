package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"

	"github.com/lockstep-ml/lockstep/tensor"
)

// cell is an argument of a program whose bytes the host writes: one buffer, filled anew for every step. Where host and
// device share memory that is all; elsewhere load copies the bytes to the device.
type cell struct {
	b      *backend
	device compute.DeviceNum
	shape  shapes.Shape
	flat   any
	mem    tensor.Memory
	buffer compute.Buffer // the shared one, or the last copy
}

func newCell(b *backend, device compute.DeviceNum, shape shapes.Shape) (*cell, error) {
	c := &cell{b: b, device: device, shape: shape}
	if b.HasSharedBuffers() {
		buffer, flat, err := b.NewSharedBuffer(device, shape)
		if err != nil {
			return nil, fmt.Errorf("gomlx: input buffer of shape %s: %w", shape, err)
		}
		c.buffer, c.flat, c.mem = buffer, flat, memoryOf(flat, shape, int(device))
		clear(c.mem.HostBytes()) // a backend may hand out used memory
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

// load returns the buffer to run with, which holds what the host has written. It must not be written to until the run
// is over.
func (c *cell) load() (compute.Buffer, error) {
	if c.b.HasSharedBuffers() {
		return c.buffer, nil
	}
	c.close()
	var err error
	c.buffer, err = c.b.BufferFromFlatData(c.device, c.flat, c.shape)
	return c.buffer, err
}

func (c *cell) close() {
	if c != nil {
		release(c.buffer)
		c.buffer = nil
	}
}

// release frees a buffer, if there is one. What cannot be freed is lost with the backend; there is nothing to do about
// it.
func release(b compute.Buffer) {
	if b != nil {
		_ = b.Finalize()
	}
}
