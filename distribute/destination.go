package distribute

import (
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// destination returns the devices that receive the result of a reduction: those of a distributed value or a variable,
// that of a tensor, or the one that a name or a [device.Spec] gives.
func destination(op string, to Value) ([]device.Spec, error) {
	switch to := untyped(to, false).(type) {
	case nil:
		return nil, errorf(op, ErrInvalid, "destinations can not be empty: the destination is nil; want a value, a variable "+
			"or the name of a device")
	case stored:
		return to.places(), nil
	case distributed:
		return devicesOf(op, to.byReplica())
	case device.Spec:
		return destination(op, to.String())
	case string:
		if to == "" {
			return nil, errorf(op, ErrInvalid, "destinations can not be empty: want a device string such as CPU:0")
		}
		d, err := device.Canonical(to)
		if err != nil {
			return nil, errorf(op, ErrInvalid, "destination: %w", err)
		}
		if !d.Local() {
			return nil, errorf(op, ErrInvalid, "destination %v belongs to another worker: want a device of this process", d)
		}
		return []device.Spec{d}, nil
	}
	if d, ok := device.Of(to); ok {
		return []device.Spec{d}, nil
	}
	return nil, errorf(op, ErrInvalid, "destinations must be one of a distributed value, a variable, a tensor, or a "+
		"device string, not %v", to)
}

func errDestinations(op string, values, to []Value) error {
	return errorf(op, ErrInvalid, "%d values and %d destinations given: want one for each", len(values), len(to))
}

// devicesOf returns the devices of components.
func devicesOf(op string, values []Value) ([]device.Spec, error) {
	if len(values) == 0 {
		return nil, errorf(op, ErrInvalid, "destinations can not be empty: the value has no components")
	}
	devices := make([]device.Spec, len(values))
	for i, v := range values {
		leaf := v
		if tensor.IsNest(v) {
			if leaves := tensor.Flatten(v); len(leaves) > 0 {
				leaf = leaves[0]
			}
		}
		d, ok := device.Of(leaf)
		if !ok {
			d = device.CPU(i)
		}
		devices[i] = d
	}
	return devices, nil
}

// place puts a host leaf on devices: unwrapped on one, mirrored on several. Logical devices share the host's
// memory and tensors are immutable, so nothing is copied.
func place(v Value, to []device.Spec) Value {
	if len(to) == 1 {
		return onDevice(v, to[0])
	}
	m := &Mirrored{make([]Value, len(to))}
	for i, d := range to {
		m.Values[i] = onDevice(v, d)
	}
	return m
}

func onDevice(v Value, d device.Spec) Value {
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
