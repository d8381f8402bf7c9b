package data

import (
	"fmt"
	"slices"

	"github.com/lockstep-ml/lockstep/tensor"
)

// leaves appends the tensors of e to dst, in the order of tensor.Flatten. It skips nil tensors, which are
// unused optional fields.
func leaves(dst []*tensor.Tensor, e Element) ([]*tensor.Tensor, error) {
	switch e := e.(type) { // the common types, without reflection
	case *tensor.Tensor:
		if e == nil {
			return dst, nil
		}
		return append(dst, e), nil
	case Batch:
		for _, ts := range [...][]*tensor.Tensor{e.Inputs, e.Labels, {e.Weights}} {
			for _, t := range ts {
				if t != nil {
					dst = append(dst, t)
				}
			}
		}
		return dst, nil
	}
	for _, leaf := range tensor.Flatten(e) {
		t, ok := leaf.(*tensor.Tensor)
		if !ok {
			return dst, fmt.Errorf("data: an element of type %T contains a %T: want *tensor.Tensor, data.Batch, or a nest of "+
				"tensors", e, leaf)
		}
		if t != nil {
			dst = append(dst, t)
		}
	}
	return dst, nil
}

// rebuild returns an element with the structure of like and the tensors ts as its leaves.
func rebuild(like Element, ts []*tensor.Tensor) Element {
	next := func(old *tensor.Tensor) *tensor.Tensor {
		if old == nil {
			return nil
		}
		t := ts[0]
		ts = ts[1:]
		return t
	}
	switch like := like.(type) {
	case *tensor.Tensor:
		return next(like)
	case Batch:
		out := Batch{Inputs: slices.Clone(like.Inputs), Labels: slices.Clone(like.Labels)}
		for i, t := range like.Inputs {
			out.Inputs[i] = next(t)
		}
		for i, t := range like.Labels {
			out.Labels[i] = next(t)
		}
		out.Weights = next(like.Weights)
		return out
	}
	out, err := tensor.Map(like, func(leaf any) (any, error) { return next(leaf.(*tensor.Tensor)), nil })
	if err != nil { // a tensor fits where a tensor was
		panic(fmt.Sprintf("data: %T: %v", like, err))
	}
	return out
}

// checkStructure returns an error if the structures of a and b differ.
func checkStructure(a, b Element) error {
	if _, ok := a.(*tensor.Tensor); ok {
		if _, ok = b.(*tensor.Tensor); ok {
			return nil
		}
	}
	_, err := tensor.Zip(func(path string, pair []any) (any, error) {
		t, _ := pair[0].(*tensor.Tensor)
		u, _ := pair[1].(*tensor.Tensor)
		if (t == nil) != (u == nil) {
			return nil, fmt.Errorf("%s is a tensor in only one of them", path)
		}
		return nil, nil
	}, nil, a, b)
	return err
}
