package data

import (
	"fmt"
	"maps"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// leaves appends the tensors of e to dst: maps by key, a Batch as inputs, labels, weights.
func leaves(dst []*tensor.Tensor, e Element) ([]*tensor.Tensor, error) {
	var err error
	switch e := e.(type) {
	case *tensor.Tensor:
		if e == nil {
			return dst, fmt.Errorf("data: a nil *tensor.Tensor in an element")
		}
		return append(dst, e), nil
	case Batch:
		dst = append(append(dst, e.Inputs...), e.Labels...)
		if e.Weights != nil {
			dst = append(dst, e.Weights)
		}
		if slices.Contains(dst, nil) {
			return dst, fmt.Errorf("data: a nil *tensor.Tensor in a data.Batch")
		}
		return dst, nil
	case []*tensor.Tensor:
		if slices.Contains(e, nil) {
			return dst, fmt.Errorf("data: a nil *tensor.Tensor in an element")
		}
		return append(dst, e...), nil
	case []any:
		for _, x := range e {
			if dst, err = leaves(dst, x); err != nil {
				return dst, err
			}
		}
		return dst, nil
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(e)) {
			if dst, err = leaves(dst, e[k]); err != nil {
				return dst, err
			}
		}
		return dst, nil
	}
	return dst, fmt.Errorf("data: an element of type %T: want *tensor.Tensor, data.Batch, or a []any, []*tensor.Tensor or map[string]any of them", e)
}

// rebuild returns an element of the structure of like whose tensors are ts, by the order of leaves. ts has exactly as
// many as like.
func rebuild(like Element, ts []*tensor.Tensor) Element {
	e, _ := rebuildPart(like, ts)
	return e
}

func rebuildPart(like Element, ts []*tensor.Tensor) (Element, []*tensor.Tensor) {
	switch like := like.(type) {
	case Batch:
		var b Batch
		b.Inputs, ts = slices.Clone(ts[:len(like.Inputs)]), ts[len(like.Inputs):]
		b.Labels, ts = slices.Clone(ts[:len(like.Labels)]), ts[len(like.Labels):]
		if like.Weights != nil {
			b.Weights, ts = ts[0], ts[1:]
		}
		return b, ts
	case []*tensor.Tensor:
		return slices.Clone(ts[:len(like)]), ts[len(like):]
	case []any:
		out := make([]any, len(like))
		for i := range like {
			out[i], ts = rebuildPart(like[i], ts)
		}
		return out, ts
	case map[string]any:
		out := make(map[string]any, len(like))
		for _, k := range slices.Sorted(maps.Keys(like)) {
			out[k], ts = rebuildPart(like[k], ts)
		}
		return out, ts
	}
	return ts[0], ts[1:]
}

// sameStructure reports whether a and b nest their tensors alike.
func sameStructure(a, b Element) bool {
	switch a := a.(type) {
	case *tensor.Tensor:
		_, ok := b.(*tensor.Tensor)
		return ok
	case Batch:
		b, ok := b.(Batch)
		return ok && len(a.Inputs) == len(b.Inputs) && len(a.Labels) == len(b.Labels) && (a.Weights == nil) == (b.Weights == nil)
	case []*tensor.Tensor:
		b, ok := b.([]*tensor.Tensor)
		return ok && len(a) == len(b)
	case []any:
		b, ok := b.([]any)
		return ok && slices.EqualFunc(a, b, sameStructure)
	case map[string]any:
		b, ok := b.(map[string]any)
		return ok && maps.EqualFunc(a, b, sameStructure)
	}
	return false
}
