package distribute

import "context"

type deviceKey struct{}

// WithDevice returns a context in which d is the current device. Parts that d leaves open are taken from the
// current device of ctx (TensorFlow's tf.device). Results without a destination are placed on the current
// device, and mirrored variables are read there.
func WithDevice(ctx context.Context, d Device) context.Context {
	if outer, ok := ctx.Value(deviceKey{}).(Device); ok {
		d = d.fill(outer)
	}
	return context.WithValue(ctx, deviceKey{}, d)
}

// CurrentDevice returns the device of the innermost [WithDevice].
func CurrentDevice(ctx context.Context) (Device, bool) {
	d, ok := ctx.Value(deviceKey{}).(Device)
	return d, ok
}

// ResolveDevice parses a device string. Missing parts are taken from the current device, then from the defaults
// of [CanonicalDevice] (TensorFlow's device_util.resolve).
func ResolveDevice(ctx context.Context, name string) (Device, error) {
	if d, ok := CurrentDevice(ctx); ok {
		return CanonicalDevice(name, d.String())
	}
	return CanonicalDevice(name)
}

// hostDevice returns the device of results without a destination: the current device, or CPU:0.
func hostDevice(ctx context.Context) Device {
	d, _ := CurrentDevice(ctx)
	return Device.fill(d, localCPU)
}
