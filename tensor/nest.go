package tensor

import (
	"fmt"
	"reflect"
	"sort"
	"strconv"
)

// Tuple is a sequence in a nest, distinct from a list. The regrouped results of several values are a Tuple.
type Tuple []any

// A nest is a value made of containers and leaves (TensorFlow's tf.nest). The containers are []any and any
// other slice whose elements are not plain numbers, strings or bools; Tuple; maps with string keys, in the
// order of their sorted keys; and struct values with at least one exported field, whose exported fields are
// visited in order. Everything else is a leaf: tensors and other pointers, nil, numbers, []float32, structs
// without exported fields.

// Flatten returns the leaves of a nest in order.
func Flatten(nest any) []any {
	var leaves []any
	_, _ = Map(nest, func(leaf any) (any, error) {
		leaves = append(leaves, leaf)
		return leaf, nil
	})
	return leaves
}

// Map returns a nest of the same structure in which every leaf is replaced by f's result. Typed slices and maps
// whose element type cannot hold the results become []any and map[string]any. A struct whose field cannot hold
// its result is an error, and so is any error of f; both errors have the path of the leaf.
func Map(nest any, f func(leaf any) (any, error)) (any, error) {
	return Zip(func(_ string, leaves []any) (any, error) { return f(leaves[0]) }, nil, nest)
}

// Pack returns a nest with the structure of like and the given leaves, in order. It is an error if their number
// differs.
func Pack(like any, leaves []any) (any, error) {
	if n := len(Flatten(like)); n != len(leaves) {
		return nil, fmt.Errorf("tensor: %d leaves given for a nest that has %d", len(leaves), n)
	}
	next := 0
	return Map(like, func(any) (any, error) {
		next++
		return leaves[next-1], nil
	})
}

// Zip walks several nests of the same structure together and returns a nest of f's results. f gets the path of
// the leaf, such as ".Loss[2]", and one leaf of each nest, in a slice that it may keep. If stop returns true
// for a container of the first nest, the containers are treated as leaves. A nil stop always returns false.
// Nests with different structures are a *[StructureError]. Results are stored as in [Map].
func Zip(f func(path string, leaves []any) (any, error), stop func(container any) bool, nests ...any) (any, error) {
	if len(nests) == 0 {
		return nil, nil
	}
	return (&zipper{f: f, stop: stop}).walk("", nests)
}

// StructureError reports nests whose structures differ but must be equal.
type StructureError struct {
	Path   string // position in the nest: "" is the top
	Nest   int    // index of the nest that differs from the first
	Detail string // the difference
}

// Error returns the difference and its path.
func (e *StructureError) Error() string {
	at := e.Path
	if at == "" {
		at = "the top"
	}
	return fmt.Sprintf("tensor: structures differ at %s: %s", at, e.Detail)
}

// IsNest reports whether v is a container rather than a leaf.
func IsNest(v any) bool {
	switch v.(type) {
	case nil, *Tensor, *IndexedSlices:
		return false
	case []any, Tuple, map[string]any:
		return true
	}
	return kindOf(reflect.TypeOf(v)) != leafKind
}

type nestKind uint8

const (
	leafKind nestKind = iota
	sliceKind
	mapKind
	structKind
)

func kindOf(t reflect.Type) nestKind {
	switch t.Kind() {
	case reflect.Slice:
		if k := t.Elem().Kind(); k <= reflect.Complex128 || k == reflect.String {
			return leafKind
		}
		return sliceKind
	case reflect.Map:
		if t.Key().Kind() == reflect.String {
			return mapKind
		}
	case reflect.Struct:
		for i := range t.NumField() {
			if t.Field(i).IsExported() {
				return structKind
			}
		}
	}
	return leafKind
}

type zipper struct {
	f    func(path string, leaves []any) (any, error)
	stop func(container any) bool
}

func (z *zipper) walk(path string, nests []any) (any, error) {
	if !IsNest(nests[0]) || z.stop != nil && z.stop(nests[0]) {
		for i, n := range nests[1:] {
			if IsNest(n) && (z.stop == nil || !z.stop(n)) {
				return nil, &StructureError{path, i + 1, fmt.Sprintf("%T, a container, against %T, a leaf", n, nests[0])}
			}
		}
		return z.f(path, append([]any(nil), nests...))
	}
	t := reflect.TypeOf(nests[0])
	values := make([]reflect.Value, len(nests))
	for i, n := range nests {
		if reflect.TypeOf(n) != t {
			return nil, &StructureError{path, i, fmt.Sprintf("%T against %T", n, nests[0])}
		}
		values[i] = reflect.ValueOf(n)
	}
	switch kindOf(t) {
	case sliceKind:
		return z.walkSlice(path, t, values)
	case mapKind:
		return z.walkMap(path, t, values)
	}
	return z.walkStruct(path, t, values)
}

func (z *zipper) walkSlice(path string, t reflect.Type, values []reflect.Value) (any, error) {
	n := values[0].Len()
	for i, v := range values {
		if v.Len() != n {
			return nil, &StructureError{path, i, fmt.Sprintf("%d items against %d", v.Len(), n)}
		}
	}
	items := make([]any, n)
	fits := true
	for j := range items {
		item, err := z.walk(path+"["+strconv.Itoa(j)+"]",
			each(values, func(v reflect.Value) any { return v.Index(j).Interface() }))
		if err != nil {
			return nil, err
		}
		items[j] = item
		fits = fits && assignable(item, t.Elem())
	}
	switch {
	case t == reflect.TypeFor[Tuple]():
		return Tuple(items), nil
	case t == reflect.TypeFor[[]any]() || !fits:
		return items, nil
	}
	out := reflect.MakeSlice(t, n, n)
	for j, item := range items {
		set(out.Index(j), item)
	}
	return out.Interface(), nil
}

func (z *zipper) walkMap(path string, t reflect.Type, values []reflect.Value) (any, error) {
	keys := sortedKeys(values[0])
	for i, v := range values[1:] {
		if other := sortedKeys(v); !reflect.DeepEqual(keys, other) {
			return nil, &StructureError{path, i + 1, fmt.Sprintf("keys %q against %q", other, keys)}
		}
	}
	items := make(map[string]any, len(keys))
	fits := true
	for _, k := range keys {
		key := reflect.ValueOf(k).Convert(t.Key())
		item, err := z.walk(path+"["+strconv.Quote(k)+"]",
			each(values, func(v reflect.Value) any { return v.MapIndex(key).Interface() }))
		if err != nil {
			return nil, err
		}
		items[k] = item
		fits = fits && assignable(item, t.Elem())
	}
	if t == reflect.TypeFor[map[string]any]() || !fits {
		return items, nil
	}
	out := reflect.MakeMapWithSize(t, len(items))
	for k, item := range items {
		v := reflect.New(t.Elem()).Elem()
		set(v, item)
		out.SetMapIndex(reflect.ValueOf(k).Convert(t.Key()), v)
	}
	return out.Interface(), nil
}

func (z *zipper) walkStruct(path string, t reflect.Type, values []reflect.Value) (any, error) {
	out := reflect.New(t).Elem()
	out.Set(values[0])
	for i := range t.NumField() {
		field := t.Field(i)
		if !field.IsExported() {
			continue
		}
		at := path + "." + field.Name
		item, err := z.walk(at, each(values, func(v reflect.Value) any { return v.Field(i).Interface() }))
		if err != nil {
			return nil, err
		}
		if !assignable(item, field.Type) {
			return nil, fmt.Errorf("tensor: field %s of type %v cannot hold a %T", at, field.Type, item)
		}
		set(out.Field(i), item)
	}
	return out.Interface(), nil
}

func each(values []reflect.Value, of func(reflect.Value) any) []any {
	out := make([]any, len(values))
	for i, v := range values {
		out[i] = of(v)
	}
	return out
}

func sortedKeys(m reflect.Value) []string {
	keys := make([]string, 0, m.Len())
	for _, k := range m.MapKeys() {
		keys = append(keys, k.String())
	}
	sort.Strings(keys)
	return keys
}

func assignable(v any, t reflect.Type) bool {
	if v == nil {
		switch t.Kind() {
		case reflect.Interface, reflect.Pointer, reflect.Slice, reflect.Map, reflect.Func, reflect.Chan:
			return true
		}
		return false
	}
	return reflect.TypeOf(v).AssignableTo(t)
}

func set(dst reflect.Value, v any) {
	if v == nil {
		dst.SetZero()
		return
	}
	dst.Set(reflect.ValueOf(v))
}
