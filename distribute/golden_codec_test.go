package distribute_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// decodeValue returns the Go value that a case describes. Components of distributed values are put on the devices.
func decodeValue(v any, devices []int) (distribute.Value, error) {
	switch v := v.(type) {
	case nil, bool, string:
		return v, nil
	case json.Number:
		return decodeNumber(v)
	case map[string]any:
		return decodeKind(v, devices)
	}
	return nil, fmt.Errorf("a %T is not a value", v)
}

func decodeKind(v map[string]any, devices []int) (distribute.Value, error) {
	switch kind := v["kind"]; kind {
	case "tensor":
		return decodeTensor(v)
	case "indexed_slices":
		return decodeSlices(v)
	case "scalar":
		n, ok := v["value"].(json.Number)
		if !ok {
			return nil, fmt.Errorf("scalar of %v", v["value"])
		}
		if v["type"] == "float" {
			return n.Float64()
		}
		return decodeNumber(n)
	case "per_replica", "mirrored":
		values, err := decodeList(v["values"], devices, true)
		if err != nil {
			return nil, err
		}
		if kind == "mirrored" {
			return mirroredOf(values...), nil
		}
		return distribute.NewComponents(values...), nil
	case "list":
		return wrapErr(decodeList(v["items"], devices, false))
	case "tuple":
		items, err := decodeList(v["items"], devices, false)
		return tensor.Tuple(items), err
	case "dict":
		items, ok := v["items"].(map[string]any)
		if !ok {
			return nil, errors.New("dict without items")
		}
		out := map[string]any{}
		for k, item := range items {
			value, err := decodeValue(item, devices)
			if err != nil {
				return nil, err
			}
			out[k] = value
		}
		return out, nil
	default:
		return nil, fmt.Errorf("unknown kind %v", kind)
	}
}

func wrapErr(items []any, err error) (distribute.Value, error) { return items, err }

func decodeList(v any, devices []int, spread bool) ([]any, error) {
	items, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("a %T is not a list", v)
	}
	out := make([]any, len(items))
	for i, item := range items {
		value, err := decodeValue(item, devices)
		if err != nil {
			return nil, err
		}
		if spread && i < len(devices) {
			value = moved(value, devices[i])
		}
		out[i] = value
	}
	return out, nil
}

// moved puts the tensors of a nest on a logical CPU device.
func moved(v distribute.Value, device int) distribute.Value {
	out, err := tensor.Map(v, func(leaf any) (any, error) {
		switch leaf := leaf.(type) {
		case *tensor.Tensor:
			return leaf.OnDevice(device), nil
		case *tensor.IndexedSlices:
			s := *leaf
			s.Values, s.Indices = s.Values.OnDevice(device), s.Indices.OnDevice(device)
			return &s, nil
		}
		return leaf, nil
	})
	if err != nil {
		panic(err)
	}
	return out
}

func decodeNumber(n json.Number) (distribute.Value, error) {
	if i, err := strconv.Atoi(n.String()); err == nil {
		return i, nil
	}
	return n.Float64()
}

func decodeSlices(v map[string]any) (distribute.Value, error) {
	out := &tensor.IndexedSlices{}
	for name, place := range map[string]**tensor.Tensor{
		"values": &out.Values, "indices": &out.Indices,
		"dense_shape": &out.DenseShape,
	} {
		part, ok := v[name].(map[string]any)
		if !ok {
			if name == "dense_shape" && v[name] == nil {
				continue
			}
			return nil, fmt.Errorf("indexed slices without %s", name)
		}
		t, err := decodeTensor(part)
		if err != nil {
			return nil, err
		}
		*place = t
	}
	return out, nil
}

func decodeTensor(v map[string]any) (*tensor.Tensor, error) {
	name, _ := v["dtype"].(string)
	dtype, err := tensor.ParseDType(name)
	if err != nil {
		return nil, err
	}
	dims, ok := v["shape"].([]any)
	data, ok2 := v["data"].([]any)
	if !ok || !ok2 {
		return nil, errors.New("tensor without shape or data")
	}
	shape, n := make([]int, len(dims)), 1
	for i, d := range dims {
		number, _ := d.(json.Number)
		if shape[i], err = strconv.Atoi(number.String()); err != nil || shape[i] < 0 || shape[i] > 1<<20 {
			return nil, fmt.Errorf("dimension %v", d)
		}
		if n *= shape[i]; n > 1<<20 {
			return nil, fmt.Errorf("shape %v is too large", dims)
		}
	}
	if n != len(data) {
		return nil, fmt.Errorf("%d elements for shape %v", len(data), shape)
	}
	t := tensor.New(dtype, shape...)
	for i, x := range data {
		if err := setElement(t, i, x); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func setElement(t *tensor.Tensor, i int, x any) error {
	switch t.DType() {
	case tensor.Bool:
		b, ok := x.(bool)
		if !ok {
			return fmt.Errorf("%v is not a bool", x)
		}
		tensor.Data[bool](t)[i] = b
		return nil
	case tensor.String:
		s, ok := x.(string)
		if !ok {
			return fmt.Errorf("%v is not a string", x)
		}
		t.StringData()[i] = s
		return nil
	}
	text, ok := x.(string)
	if n, isNumber := x.(json.Number); isNumber {
		text, ok = n.String(), true
	}
	if !ok {
		return fmt.Errorf("%v is not a number", x)
	}
	var err error
	switch t.DType() {
	case tensor.Uint64:
		tensor.Data[uint64](t)[i], err = strconv.ParseUint(text, 10, 64)
		return err
	case tensor.Int64:
		tensor.Data[int64](t)[i], err = strconv.ParseInt(text, 10, 64)
		return err
	}
	f, err := strconv.ParseFloat(text, 64)
	setNumber(t, i, f)
	return err
}

// setNumber sets an element of a numeric tensor to a number, rounded if need be.
func setNumber(t *tensor.Tensor, i int, f float64) {
	switch t.DType() {
	case tensor.Int8:
		tensor.Data[int8](t)[i] = int8(int64(f))
	case tensor.Int16:
		tensor.Data[int16](t)[i] = int16(int64(f))
	case tensor.Int32:
		tensor.Data[int32](t)[i] = int32(int64(f))
	case tensor.Int64:
		tensor.Data[int64](t)[i] = int64(f)
	case tensor.Uint8:
		tensor.Data[uint8](t)[i] = uint8(int64(f))
	case tensor.Uint16:
		tensor.Data[uint16](t)[i] = uint16(int64(f))
	case tensor.Uint32:
		tensor.Data[uint32](t)[i] = uint32(int64(f))
	case tensor.Uint64:
		tensor.Data[uint64](t)[i] = uint64(f)
	case tensor.Float16:
		tensor.Data[tensor.F16](t)[i] = tensor.F16From(float32(f))
	case tensor.BFloat16:
		tensor.Data[tensor.BF16](t)[i] = tensor.BF16From(float32(f))
	case tensor.Float32:
		tensor.Data[float32](t)[i] = float32(f)
	default:
		tensor.Data[float64](t)[i] = f
	}
}

// match compares a Go value with a value of a case; path is its position in the answer.
func match(path string, want any, got distribute.Value, tol tolerance) error {
	switch w := want.(type) {
	case nil:
		if got != nil {
			return fmt.Errorf("%s: got %v, want nothing", path, got)
		}
		return nil
	case bool:
		if got != w {
			return fmt.Errorf("%s: got %v, want %v", path, got, w)
		}
		return nil
	case string:
		return matchText(path, w, got)
	case json.Number:
		f, err := w.Float64()
		if err != nil {
			return err
		}
		g, ok := hostNumber(got)
		if !ok || !near(f, g, 1e-6, tol) {
			return fmt.Errorf("%s: got %v (%T), want the number %v", path, got, got, w)
		}
		return nil
	case []any:
		items, ok := got.([]any)
		if !ok {
			return fmt.Errorf("%s: got a %T, want a list of %d", path, got, len(w))
		}
		return matchAll(path, w, items, tol)
	case map[string]any:
		if err, failed := got.(error); failed {
			kind, _ := w["error_type"].(string)
			message, _ := w["error_message"].(string)
			return matchError(kind, message, nil, err)
		}
		return matchKind(path, w, got, tol)
	}
	return fmt.Errorf("%s: cannot compare with a %T", path, want)
}

func matchText(path, want string, got distribute.Value) error {
	if f, ok := hostNumber(got); ok {
		if w, err := strconv.ParseFloat(want, 64); err == nil && near(w, f, 0, exact) {
			return nil
		}
	}
	if got != want {
		return fmt.Errorf("%s: got %v, want %q", path, got, want)
	}
	return nil
}

func matchKind(path string, want map[string]any, got distribute.Value, tol tolerance) error {
	bad := func() error { return fmt.Errorf("%s: got %v (%T), want %v", path, got, got, want) }
	switch want["kind"] {
	case "tensor":
		t, ok := got.(*tensor.Tensor)
		if !ok {
			return bad()
		}
		return matchTensor(path, want, t, tol)
	case "indexed_slices":
		s, ok := got.(*tensor.IndexedSlices)
		if !ok {
			return bad()
		}
		var dense distribute.Value
		if s.DenseShape != nil {
			dense = s.DenseShape
		}
		return errors.Join(match(path+".values", want["values"], s.Values, tol),
			match(path+".indices", want["indices"], s.Indices, tol),
			match(path+".dense_shape", want["dense_shape"], dense, tol))
	case "per_replica":
		p, ok := got.(*distribute.Components)
		if !ok {
			return bad()
		}
		return matchAll(path, want["values"], p.Values(), tol)
	case "mirrored":
		m, ok := got.(*distribute.Mirrored)
		if !ok {
			return bad()
		}
		return matchAll(path, want["values"], m.Values, tol)
	case "list":
		items, ok := got.([]any)
		if !ok {
			return bad()
		}
		return matchAll(path, want["items"], items, tol)
	case "tuple":
		items, ok := got.(tensor.Tuple)
		if !ok {
			return bad()
		}
		return matchAll(path, want["items"], items, tol)
	case "variable_ref": // TensorFlow returned a variable or a component of one, here it is a value
		v, ok := got.(*distribute.Variable)
		if want["class"] == "component" {
			if ok && len(v.Values()) == 1 {
				got = v.Values()[0]
			}
			return match(path, want["value"], got, tol)
		}
		if !ok {
			return bad()
		}
		return matchAll(path, want["components"], v.Values(), tol)
	case "dict":
		items, _ := want["items"].(map[string]any)
		return matchFields(path, items, got, tol)
	case nil:
		return matchFields(path, want, got, tol)
	}
	return fmt.Errorf("%s: cannot compare with kind %v", path, want["kind"])
}

func matchFields(path string, want map[string]any, got distribute.Value, tol tolerance) error {
	items, ok := got.(map[string]any)
	if !ok || len(items) != len(want) {
		return fmt.Errorf("%s: got %v, want %v", path, got, want)
	}
	for k, w := range want {
		g, ok := items[k]
		if !ok {
			return fmt.Errorf("%s: got %v without %q", path, got, k)
		}
		if err := match(path+"."+k, w, g, tol); err != nil {
			return err
		}
	}
	return nil
}

func matchAll(path string, want any, got []any, tol tolerance) error {
	items, ok := want.([]any)
	if !ok || len(items) != len(got) {
		return fmt.Errorf("%s: got %d values %v, want %d", path, len(got), got, len(items))
	}
	for i, w := range items {
		if err := match(fmt.Sprintf("%s[%d]", path, i), w, got[i], tol); err != nil {
			return err
		}
	}
	return nil
}

func matchTensor(path string, want map[string]any, got *tensor.Tensor, tol tolerance) error {
	w, err := decodeTensor(want)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if tol.pieces && w.Rank() > 0 && got.Rank() == w.Rank() && w.Shape()[0] == 0 && got.Shape()[0] == 0 &&
		got.DType() == w.DType() {
		return nil
	}
	if got.DType() != w.DType() || !got.SameShape(w) {
		return fmt.Errorf("%s: got %v, want %v", path, got, w)
	}
	if !w.DType().IsFloat() {
		if !got.Equal(w) {
			return fmt.Errorf("%s: got %v, want %v", path, got, w)
		}
		return nil
	}
	rtol := map[tensor.DType]float64{
		tensor.Float16: 1e-2, tensor.BFloat16: 1e-2, tensor.Float32: 1e-6,
		tensor.Float64: 1e-12,
	}[w.DType()]
	if w.DType() == tensor.Float32 && tol.float != 0 {
		rtol = tol.float
	}
	gs := got.Float64s()
	normal := map[tensor.DType]float64{tensor.Float32: 0x1p-126, tensor.Float64: 0x1p-1022}[w.DType()]
	for i, x := range w.Float64s() {
		if x == 0 && math.Abs(gs[i]) < normal {
			continue // TensorFlow's kernels flush subnormal numbers to zero
		}
		if !near(x, gs[i], rtol, tol) {
			return fmt.Errorf("%s: element %d is %v, want %v, in %v, want %v", path, i, gs[i], x, got, w)
		}
	}
	return nil
}

func near(want, got, rtol float64, tol tolerance) bool {
	switch {
	case math.IsNaN(want):
		return math.IsNaN(got)
	case tol.exact || math.IsInf(want, 0):
		return want == got
	}
	return math.Abs(got-want) <= rtol*math.Abs(want)
}

func hostNumber(v any) (float64, bool) {
	switch v := v.(type) {
	case int:
		return float64(v), true
	case float64:
		return v, true
	}
	return 0, false
}

func FuzzGoldenDecoder(f *testing.F) {
	f.Add([]byte(`[{"id":"a","op":"reduce","strategy":{"type":"Default"},"replicas":1,"inputs":{"value":{"kind":"tensor","dtype":"float32","shape":[2],"data":[1,"NaN"]}},"expect":{}}]`))
	f.Add([]byte(`[{"id":"a","op":"x","inputs":{"value":{"kind":"dict","items":{"k":{"kind":"per_replica","values":[{"kind":"scalar","type":"int","value":1}]}}}}}]`))
	f.Fuzz(func(t *testing.T, text []byte) {
		cases, err := parseGolden(text)
		if err != nil {
			return
		}
		for _, c := range cases {
			for _, in := range c.Inputs {
				v, err := decodeValue(in, []int{0, 1})
				if err != nil {
					continue
				}
				if err := match("value", in, v, exact); err != nil && !hasScalar(in) {
					t.Errorf("a decoded value differs from its text: %v", err)
				}
			}
		}
	})
}

// hasScalar reports whether a host number is in the value: a case writes them in another form than an answer does.
func hasScalar(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		if v["kind"] == "scalar" || v["kind"] == nil {
			return true
		}
		for _, x := range v {
			if hasScalar(x) {
				return true
			}
		}
	case []any:
		for _, x := range v {
			if hasScalar(x) {
				return true
			}
		}
	}
	return false
}
