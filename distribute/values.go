package distribute

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Value is a nest of *tensor.Tensor, *tensor.IndexedSlices, [PerReplica], [*Mirrored], [*Variable], host numbers and
// any other argument or result of a step function.
type Value = any

// PerReplica has one value for each replica of this worker (TensorFlow's PerReplica, a DistributedValues): element i
// belongs to the replica whose [Replica.LocalID] is i. [Run] gives and returns such values; [Reduce] and [Gather]
// combine them.
type PerReplica[T any] []T

// String prints the components as TensorFlow does.
func (p PerReplica[T]) String() string { return formatComponents("PerReplica", p) }

// dynamic returns the value for code that does not know its type.
func (p PerReplica[T]) dynamic() *perReplica {
	values := make([]Value, len(p))
	for i, v := range p {
		values[i] = v
	}
	return &perReplica{values}
}

// untyped returns a PerReplica for code that does not know its type, and any other value unchanged. The value of a
// strategy of one device is not wrapped.
func untyped(v Value, oneDevice bool) Value {
	p, ok := v.(interface{ dynamic() *perReplica })
	if !ok {
		return v
	}
	d := p.dynamic()
	if oneDevice && len(d.values) == 1 {
		return d.values[0]
	}
	return d
}

// perReplica is a PerReplica whose type is not known, as part of a nest.
type perReplica struct{ values []Value }

// Mirrored is a value that is the same on every replica (TensorFlow's Mirrored, a DistributedValues). Several
// goroutines may read it.
type Mirrored struct {
	Values []Value // equal components, by replica
}

func perReplicaOf(values ...Value) *perReplica { return &perReplica{values} }

// String prints the components as TensorFlow does.
func (p *perReplica) String() string { return formatComponents("PerReplica", p.values) }

// String prints the components as TensorFlow does.
func (m *Mirrored) String() string { return formatComponents("Mirrored", m.Values) }

// Get returns the component on ctx's current device (see [device.With]) or, if that device has none, the first
// component. TensorFlow does the same if a mirrored value is used as a tensor in cross-replica context.
func (m *Mirrored) Get(ctx context.Context) Value {
	at := device.Host(ctx)
	for _, v := range m.Values {
		if d, ok := device.Of(v); ok && d == at {
			return v
		}
	}
	return m.Values[0]
}

func formatComponents[T any](name string, values []T) string {
	lines := make([]string, len(values))
	for i, v := range values {
		lines[i] = fmt.Sprintf("  %d: %v", i, v)
	}
	return name + ":{\n" + strings.Join(lines, ",\n") + "\n}"
}

// distributed is implemented by values that are replaced by a component in the arguments of a step function. A
// variable does not implement it: the step gets the whole variable.
type distributed interface{ byReplica() []Value }

func (p *perReplica) byReplica() []Value { return p.values }

func (m *Mirrored) byReplica() []Value { return m.Values }

// stored is implemented by *Variable: components that are kept between steps, one per replica or one for all.
type stored interface {
	first() *tensor.Tensor
	places() []device.Spec
	Values() []Value
	keptEqual() bool // its writes keep the components equal
}

// part is implemented by *Component: one of the parts of a whole. regroup replaces all parts by the whole.
type part interface {
	partOf() (whole Value, index, parts int)
}

// regroup is [Extended.Regroup] under the name of an operation.
func regroup(op string, replicas []Value) (Value, error) {
	if len(replicas) == 1 {
		return replicas[0], nil
	}
	if !slices.ContainsFunc(replicas, func(v Value) bool { return v != nil }) {
		return nil, nil // no value
	}
	return regroupAs(op, replicas, func(leaves []any) Value {
		if v := wholeOf(leaves); v != nil {
			return v
		}
		if sameLeaf(leaves) {
			return leaves[0]
		}
		return &perReplica{leaves}
	})
}

// regroupAs combines nests into one; wrap makes its leaves.
func regroupAs(op string, replicas []Value, wrap func(leaves []any) Value) (Value, error) {
	out, err := tensor.Zip(func(_ string, leaves []any) (any, error) { return wrap(leaves), nil }, isWhole, replicas...)
	return out, unlike(op, err)
}

// unlike returns the error of nests that cannot be walked together, and any error of this package unchanged.
func unlike(op string, err error) error {
	if se, ok := errors.AsType[*tensor.StructureError](err); ok {
		return errorf(op, ErrMismatch, "the structure of replica %d's nest differs from that of replica 0's: %w", se.Nest,
			err)
	}
	if _, ok := errors.AsType[*Error](err); ok || err == nil {
		return err
	}
	return errorf(op, ErrInvalid, "%w", err)
}

// selectReplica returns the nest with every distributed value replaced by its component of the replica, after a check
// of every distributed leaf by check; nil: none.
func selectReplica(replica int, v Value, check func(leaf Value) error) (Value, error) {
	if !hasDistributed(v) {
		return v, nil
	}
	return tensor.Map(v, func(leaf any) (any, error) {
		d, ok := leaf.(distributed)
		if !ok {
			return leaf, nil
		}
		if check != nil {
			if err := check(leaf); err != nil {
				return nil, err
			}
		}
		if values := d.byReplica(); replica >= 0 && replica < len(values) {
			return values[replica], nil
		}
		return nil, errorf("SelectReplica", ErrInvalid, "there is no replica %d: the value has %d components", replica,
			len(d.byReplica()))
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
