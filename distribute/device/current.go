package device

import (
	"context"

	"github.com/lockstep-ml/lockstep/tensor"
)

type deviceKey struct{}

// With returns a context in which d is the current device. Parts that d leaves open are taken from the
// current device of ctx (TensorFlow's tf.device). Results without a destination are placed on the current
// device, and mirrored variables are read there.
func With(ctx context.Context, d Spec) context.Context {
	if outer, ok := ctx.Value(deviceKey{}).(Spec); ok {
		d = d.fill(outer)
	}
	return context.WithValue(ctx, deviceKey{}, d)
}

// Current returns the device of the innermost [With].
func Current(ctx context.Context) (Spec, bool) {
	d, ok := ctx.Value(deviceKey{}).(Spec)
	return d, ok
}

// Resolve parses a device string. Missing parts are taken from the current device, then from the defaults
// of [Canonical] (TensorFlow's device_util.resolve).
func Resolve(ctx context.Context, name string) (Spec, error) {
	if d, ok := Current(ctx); ok {
		return Canonical(name, d.String())
	}
	return Canonical(name)
}

// Host returns the device of results without a destination: the current device, or CPU:0.
func Host(ctx context.Context) Spec {
	d, _ := Current(ctx)
	return Spec.fill(d, CPU(0))
}

// Of returns the device of a leaf value, or false for a host number.
func Of(v any) (Spec, bool) {
	switch v := v.(type) {
	case *tensor.Tensor:
		d := CPU(v.Memory().Device)
		if v.Memory().Kind == tensor.Device {
			d.Kind = "GPU"
		}
		return d, true
	case *tensor.IndexedSlices:
		return Of(v.Values)
	}
	return Spec{}, false
}
