package gomlx_test

import (
	"errors"
	"iter"
	"strings"
	"testing"

	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/train"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// theirs is a dataset of GoMLX.
type theirs struct {
	spec any
	fail error
}

func (theirs) Name() string { return "squares" }

func (d theirs) Iter() iter.Seq2[train.Batch, error] {
	return func(yield func(train.Batch, error) bool) {
		for i := range 3 {
			x := tensors.FromValue([][]float32{{float32(i), 1}, {2, 3}})
			y := tensors.FromValue([]int32{int32(i * i), 4})
			if !yield(train.Batch{Inputs: []*tensors.Tensor{x}, Labels: []*tensors.Tensor{y}, Spec: d.spec}, nil) {
				return
			}
		}
		if d.fail != nil {
			yield(train.Batch{}, d.fail)
		}
	}
}

// TestDataset reads a dataset of GoMLX twice.
func TestDataset(t *testing.T) {
	p := gomlx.Dataset(theirs{}).Prefetch(1)
	for epoch := range 2 {
		n := 0
		for e, err := range p.Iter(data.WithEpoch(t.Context(), epoch)) {
			if err != nil {
				t.Fatal(err)
			}
			b := e.(data.Batch)
			if !b.Inputs[0].Equal(tensor.From([]float32{float32(n), 1, 2, 3}, 2, 2)) ||
				!b.Labels[0].Equal(tensor.From([]int32{int32(n * n), 4})) {
				t.Errorf("batch %d is %v, %v", n, b.Inputs[0].Format(), b.Labels[0].Format())
			}
			n++
		}
		if n != 3 {
			t.Errorf("%d batches", n)
		}
	}
	cause := errors.New("cause")
	for want, d := range map[string]theirs{
		`batch 1 of dataset "squares": it has the Spec task: want none`: {spec: "task"},
		`batch 3 of dataset "squares": cause`:                           {fail: cause},
	} {
		var last error
		for _, err := range gomlx.Dataset(d).Iter(t.Context()) {
			last = err
		}
		if last == nil || !strings.Contains(last.Error(), want) {
			t.Errorf("got %v, want %q", last, want)
		}
	}
}
