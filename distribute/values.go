package distribute

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/tensor"
)

// Value is a nest of *tensor.Tensor, *tensor.IndexedSlices, [*PerReplica], [*Mirrored], [*Variable], host
// numbers and any other argument or result of a step function.
type Value = any

// PerReplica is a value with one component per replica, by replica id (TensorFlow's PerReplica, a
// DistributedValues). Step functions return and distributed datasets yield such values. As an argument of a step
// function it is replaced by the replica's component. Several goroutines may read it.
type PerReplica struct{ components }

// Mirrored is a value that is the same on every replica (TensorFlow's Mirrored, a DistributedValues). Several
// goroutines may read it.
type Mirrored struct{ components }

// NewPerReplica returns a value with one component per replica, by replica id.
func NewPerReplica(values ...Value) *PerReplica { return &PerReplica{components{values}} }

// NewMirrored returns a mirrored value with these components, by replica id. The caller guarantees that they
// are equal.
func NewMirrored(values ...Value) *Mirrored { return &Mirrored{components{values}} }

// String prints the components as TensorFlow does.
func (p *PerReplica) String() string { return p.format("PerReplica") }

// String prints the components as TensorFlow does.
func (m *Mirrored) String() string { return m.format("Mirrored") }

// Get returns the component on ctx's current device (see [WithDevice]) or, if that device has none, the first
// component. TensorFlow does the same if a mirrored value is used as a tensor in cross-replica context.
func (m *Mirrored) Get(ctx context.Context) Value {
	at := hostDevice(ctx)
	for _, v := range m.values {
		if d, ok := DeviceOf(v); ok && d == at {
			return v
		}
	}
	return m.values[0]
}

type components struct{ values []Value }

// Values returns the components by replica; the caller must not change them.
func (c *components) Values() []Value { return c.values }

// Len returns the number of components.
func (c *components) Len() int { return len(c.values) }

// At returns the component of a replica. It panics if there is none.
func (c *components) At(replica int) Value { return c.values[replica] }

func (c *components) format(name string) string {
	lines := make([]string, len(c.values))
	for i, v := range c.values {
		lines[i] = fmt.Sprintf("  %d: %v", i, v)
	}
	return name + ":{\n" + strings.Join(lines, ",\n") + "\n}"
}

// distributed is implemented by values that are replaced by a component in the arguments of a step function. A
// variable does not implement it: the step gets the whole variable.
type distributed interface {
	Values() []Value
	isDistributed()
}

func (*components) isDistributed() {}

// stored is implemented by *Variable: components that are kept between steps, one per replica or one for all.
type stored interface {
	first() *tensor.Tensor
	perReplica() *PerReplica
	keptEqual() bool // its writes keep the components equal
}

// part is implemented by *Component: one of the parts of a whole. [Regroup] replaces all parts by the whole.
type part interface {
	partOf() (whole Value, index, parts int)
}

// Regroup combines the replicas' nests, by replica, into one nest (TensorFlow's distribute_utils.regroup). Each leaf
// becomes a [*PerReplica], with two exceptions: a leaf that is identical on all replicas (the same pointer, or equal
// host values) is kept, and the components of one variable become the variable. A typed container that cannot hold
// distributed values, such as a []*tensor.Tensor or a struct with a *tensor.Tensor field, becomes a PerReplica as a
// whole. Nests with different structures are an error.
func Regroup(perReplica []Value) (Value, error) { return regroup("Regroup", perReplica, false) }

func regroup(op string, perReplica []Value, alwaysWrap bool) (Value, error) {
	if len(perReplica) == 1 && !alwaysWrap {
		return perReplica[0], nil
	}
	if !alwaysWrap && !slices.ContainsFunc(perReplica, func(v Value) bool { return v != nil }) {
		return nil, nil // the result of a step function without one
	}
	return regroupAs(op, perReplica, func(leaves []any) Value {
		if v := wholeOf(leaves); v != nil {
			return v
		}
		if !alwaysWrap && sameLeaf(leaves) {
			return leaves[0]
		}
		return &PerReplica{components{leaves}}
	})
}

// regroupAs combines nests into one; wrap makes its leaves.
func regroupAs(op string, perReplica []Value, wrap func(leaves []any) Value) (Value, error) {
	out, err := tensor.Zip(func(_ string, leaves []any) (any, error) { return wrap(leaves), nil }, isWhole, perReplica...)
	if err != nil {
		if se, ok := errors.AsType[*tensor.StructureError](err); ok {
			return nil, errorf(op, ErrMismatch, "the structure of replica %d's nest differs from that of replica 0's: %w",
				se.Nest, err)
		}
		return nil, errorf(op, ErrInvalid, "%w", err)
	}
	return out, nil
}

// SelectReplica returns the nest with every distributed value replaced by its component of the replica (TensorFlow's
// distribute_utils.select_replica).
func SelectReplica(replica int, v Value) (Value, error) {
	return selectReplica(replica, v, func(Value) error { return nil })
}

// selectReplica is SelectReplica after a check of every distributed leaf by check.
func selectReplica(replica int, v Value, check func(leaf Value) error) (Value, error) {
	if !hasDistributed(v) {
		return v, nil
	}
	return tensor.Map(v, func(leaf any) (any, error) {
		d, ok := leaf.(distributed)
		if !ok {
			return leaf, nil
		}
		if err := check(leaf); err != nil {
			return nil, err
		}
		if values := d.Values(); replica >= 0 && replica < len(values) {
			return values[replica], nil
		}
		return nil, errorf("SelectReplica", ErrInvalid, "there is no replica %d: the value has %d components", replica,
			len(d.Values()))
	})
}

// hasDistributed reports whether a nest has a distributed leaf. Nests without one need not be copied.
func hasDistributed(v Value) bool {
	switch v := v.(type) {
	case nil, *tensor.Tensor, *tensor.IndexedSlices:
		return false
	case distributed:
		return true
	case []any:
		for _, x := range v {
			if hasDistributed(x) {
				return true
			}
		}
		return false
	}
	if !tensor.IsNest(v) || isWhole(v) {
		return false
	}
	for _, leaf := range tensor.Flatten(v) {
		if _, ok := leaf.(distributed); ok {
			return true
		}
	}
	return false
}

// sameLeaf reports whether a leaf is identical on all replicas.
func sameLeaf(leaves []any) bool {
	first := leaves[0]
	if first != nil && !reflect.TypeOf(first).Comparable() {
		return false
	}
	for _, l := range leaves[1:] {
		if l != nil && !reflect.TypeOf(l).Comparable() || l != first {
			return false
		}
	}
	return true
}

// wholeOf returns the value whose parts the leaves are, in their order, or nil.
func wholeOf(leaves []any) Value {
	var first Value
	for i, leaf := range leaves {
		p, ok := leaf.(part)
		if !ok {
			return nil
		}
		whole, index, parts := p.partOf()
		if i == 0 {
			first = whole
		}
		if whole != first || index != i || parts != len(leaves) {
			return nil
		}
	}
	return first
}

// isWhole reports whether a container cannot hold distributed values in place of its leaves.
func isWhole(container any) bool {
	switch container.(type) {
	case []any, tensor.Tuple, map[string]any:
		return false
	}
	return !holdsAny(reflect.TypeOf(container))
}

func holdsAny(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Interface:
		return t.NumMethod() == 0
	case reflect.Slice, reflect.Map:
		return holdsAny(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() && !holdsAny(f.Type) {
				return false
			}
		}
		return true
	}
	return false
}

// DeviceOf returns the device of a leaf value, or false for a host number.
func DeviceOf(v Value) (Device, bool) {
	switch v := v.(type) {
	case *tensor.Tensor:
		d := localCPU
		if v.Memory().Kind == tensor.Device {
			d.Kind = "GPU"
		}
		d.Index = v.Memory().Device
		return d, true
	case *tensor.IndexedSlices:
		return DeviceOf(v.Values)
	}
	return Device{}, false
}
