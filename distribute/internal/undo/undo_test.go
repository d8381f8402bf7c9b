package undo

import (
	"errors"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

func value(c *Cell) int32 { return tensor.Data[int32](c.Load())[0] }

// A failed Run restores its own writes; those of the Run around it stay until that one ends.
func TestNestedRuns(t *testing.T) {
	var l Log
	failure := errors.New("failed")
	for _, c := range []struct {
		name         string
		inner, outer error
		want         int32
	}{
		{"both succeed", nil, nil, 3},
		{"the inner Run fails", failure, nil, 2},
		{"the outer Run fails", nil, failure, 1},
		{"both fail", failure, failure, 1},
	} {
		cell := NewCell(tensor.Scalar(int32(0)))
		l.Store(cell, tensor.Scalar(int32(1))) // outside of all Runs
		outer := l.Begin()
		l.Store(cell, tensor.Scalar(int32(2)))
		inner := l.Begin()
		l.Store(cell, tensor.Scalar(int32(9)))
		l.Store(cell, tensor.Scalar(int32(3)))
		l.End(inner, c.inner)
		l.End(outer, c.outer)
		if got := value(cell); got != c.want {
			t.Errorf("%s: the value is %d, want %d", c.name, got, c.want)
		}
		if len(l.entries) != 0 {
			t.Errorf("%s: %d entries are left", c.name, len(l.entries))
		}
	}
}
