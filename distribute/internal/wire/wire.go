// Package wire encodes the values that workers exchange: tensors, IndexedSlices and nests of them.
package wire

import (
	"bytes"
	"encoding/gob"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/lockstep-ml/lockstep/distribute/internal/kinds"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// wireValue is the encoding of a value; gob sends its name. Kind says which fields are used.
type wireValue struct {
	Kind    kind
	Type    tensor.DType // of a tensor
	Shape   []int
	Bytes   []byte
	Strings []string
	Keys    []string    // of a dictionary
	Items   []wireValue // of a nest; of IndexedSlices: values, indices, dense shape
}

type kind uint8

const (
	nilKind kind = iota
	tensorKind
	slicesKind
	listKind
	tupleKind
	dictKind
)

// Encode returns a value's bytes. Any other type than those of the package is an error, and so is device memory.
func Encode(v any) ([]byte, error) {
	w, err := toWire(v)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = gob.NewEncoder(&b).Encode(w)
	return b.Bytes(), err
}

func toWire(v any) (w wireValue, err error) {
	items := func(kind kind, list []any) (wireValue, error) {
		w := wireValue{Kind: kind}
		for _, x := range list {
			item, err := toWire(x)
			if err != nil {
				return w, err
			}
			w.Items = append(w.Items, item)
		}
		return w, nil
	}
	switch v := v.(type) {
	case nil:
		return w, nil
	case *tensor.Tensor:
		switch {
		case v == nil:
			return w, nil
		case v.DType() == tensor.String:
			return wireValue{Kind: tensorKind, Type: tensor.String, Shape: v.Shape(), Strings: v.StringData()}, nil
		case v.Memory().Kind == tensor.Device:
			return w, kinds.Errorf(kinds.Unsupported, "the tensor is in device memory: copy it to the host first")
		}
		return wireValue{Kind: tensorKind, Type: v.DType(), Shape: v.Shape(), Bytes: v.Memory().HostBytes()}, nil
	case *tensor.IndexedSlices:
		return items(slicesKind, []any{v.Values, v.Indices, v.DenseShape})
	case tensor.Tuple:
		return items(tupleKind, v)
	case []any:
		return items(listKind, v)
	case map[string]any:
		keys := slices.Sorted(maps.Keys(v))
		var list []any
		for _, k := range keys {
			list = append(list, v[k])
		}
		w, err = items(dictKind, list)
		w.Keys = keys
		return w, err
	}
	return w, fmt.Errorf("cannot send a %T to other workers: want tensors, IndexedSlices, or []any, tensor.Tuple or "+
		"map[string]any of them",
		v)
}

// Decode returns the value that [Encode] encoded. It trusts no byte of text.
func Decode(text []byte) (any, error) {
	var w wireValue
	if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&w); err != nil {
		return nil, err
	}
	return w.decode(depthMax)
}

// Bounds of decoded values: the depth of nests, and the dimensions of tensors.
const (
	depthMax = 64
	dimsMax  = 64
)

func (w *wireValue) decode(depth int) (any, error) {
	if depth == 0 {
		return nil, fmt.Errorf("nests of more than %d levels", depthMax)
	}
	items := make([]any, len(w.Items))
	for i := range w.Items {
		var err error
		if items[i], err = w.Items[i].decode(depth - 1); err != nil {
			return nil, err
		}
	}
	switch w.Kind {
	case nilKind:
		return nil, nil
	case tensorKind:
		return w.tensor()
	case slicesKind:
		return slicesOf(items)
	case listKind:
		return items, nil
	case tupleKind:
		return tensor.Tuple(items), nil
	case dictKind:
		if len(w.Keys) != len(items) {
			return nil, fmt.Errorf("a dictionary of %d keys and %d values", len(w.Keys), len(items))
		}
		out := map[string]any{}
		for i, k := range w.Keys {
			out[k] = items[i]
		}
		return out, nil
	}
	return nil, fmt.Errorf("a value of kind %d", w.Kind)
}

func (w *wireValue) tensor() (any, error) {
	n := 1
	for _, d := range w.Shape {
		if d < 0 || d > 0 && n > math.MaxInt/16/d || len(w.Shape) > dimsMax {
			return nil, fmt.Errorf("a tensor of shape %v", w.Shape)
		}
		n *= d
	}
	switch {
	case w.Type == tensor.String && len(w.Strings) == n:
		return tensor.Strings(w.Strings, slices.Clone(w.Shape)...), nil
	case w.Type == tensor.String || w.Type == tensor.Invalid || w.Type > tensor.String || len(w.Bytes) != n*w.Type.Bytes():
		return nil, fmt.Errorf("a tensor of dtype %v and shape %v in %d bytes and %d strings", w.Type, w.Shape, len(w.Bytes),
			len(w.Strings))
	}
	t := tensor.New(w.Type, w.Shape...)
	if n > 0 {
		copy(t.Memory().HostBytes(), w.Bytes)
	}
	return t, nil
}

// slicesOf puts IndexedSlices together.
func slicesOf(parts []any) (any, error) {
	s := &tensor.IndexedSlices{}
	if len(parts) != 3 {
		return nil, fmt.Errorf("IndexedSlices of %d parts", len(parts))
	}
	for i, to := range []**tensor.Tensor{&s.Values, &s.Indices, &s.DenseShape} {
		if t, ok := parts[i].(*tensor.Tensor); ok {
			*to = t
		}
	}
	return s, sparse.Check(s)
}
