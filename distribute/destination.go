package distribute

import "github.com/lockstep-ml/lockstep/tensor"

// Destination is the set of devices that receives the result of a reduction: the devices of a [*PerReplica],
// [*Mirrored] or [*Variable], a device string ([At]), or the devices of any value ([Like]).
type Destination interface {
	destination(op string) ([]Device, error)
}

func errNoDestination(op string) error {
	return errorf(op, ErrInvalid, "destinations can not be empty: the destination is nil; want a value (Like), a "+
		"variable or a device (At)")
}

// At is the destination named by a device string.
type At string

func (a At) destination(op string) ([]Device, error) {
	if a == "" {
		return nil, errorf(op, ErrInvalid, "destinations can not be empty: want a device string such as CPU:0")
	}
	d, err := CanonicalDevice(string(a))
	if err != nil {
		return nil, errorf(op, ErrInvalid, "destination: %w", err)
	}
	if !d.local() {
		return nil, errorf(op, ErrInvalid, "destination %v belongs to another worker: want a device of this process", d)
	}
	return []Device{d}, nil
}

// Like returns the devices of v as a destination: those of a distributed value's components, or that of a
// tensor. Other values have no device; using the destination is then an error.
func Like(v Value) Destination {
	if d, ok := v.(Destination); ok {
		return d
	}
	return likeValue{v}
}

type likeValue struct{ v Value }

func (l likeValue) destination(op string) ([]Device, error) {
	if name, ok := l.v.(string); ok {
		return At(name).destination(op)
	}
	if d, ok := DeviceOf(l.v); ok {
		return []Device{d}, nil
	}
	return nil, errorf(op, ErrInvalid, "destinations must be one of a distributed value, a variable, a tensor, or a "+
		"device string, not %v", l.v)
}

func (c *components) destination(op string) ([]Device, error) {
	if len(c.values) == 0 {
		return nil, errorf(op, ErrInvalid, "destinations can not be empty: the value has no components")
	}
	devices := make([]Device, len(c.values))
	for i, v := range c.values {
		leaf := v
		if tensor.IsNest(v) {
			if leaves := tensor.Flatten(v); len(leaves) > 0 {
				leaf = leaves[0]
			}
		}
		d, ok := DeviceOf(leaf)
		if !ok {
			d = localCPU
			d.Index = i
		}
		devices[i] = d
	}
	return devices, nil
}

// place puts a host leaf on devices: unwrapped on one, mirrored on several. Logical devices share the host's
// memory and tensors are immutable, so nothing is copied.
func place(v Value, to []Device) Value {
	if len(to) == 1 {
		return onDevice(v, to[0])
	}
	m := &Mirrored{components{make([]Value, len(to))}}
	for i, d := range to {
		m.values[i] = onDevice(v, d)
	}
	return m
}

func onDevice(v Value, d Device) Value {
	switch v := v.(type) {
	case *tensor.Tensor:
		return v.OnDevice(d.Index)
	case *tensor.IndexedSlices:
		out := *v
		out.Values, out.Indices = v.Values.OnDevice(d.Index), v.Indices.OnDevice(d.Index)
		return &out
	}
	return v
}

// A Device is a [Destination], because its name is one.
func (d Device) destination(op string) ([]Device, error) { return At(d.String()).destination(op) }
