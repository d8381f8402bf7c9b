package undo

import (
	"errors"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

func value(c *Cell) int32 {
	t, err := c.Load()
	if err != nil {
		panic(err)
	}
	return tensor.Data[int32](t)[0]
}

// A failed Run restores its own writes; those of the Run around it stay until that one ends.
func TestNestedRuns(t *testing.T) {
	var l Log[string]
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
		l.Store("", cell, tensor.Scalar(int32(1))) // outside of all Runs
		l.Begin("outer", "")
		l.Store("outer", cell, tensor.Scalar(int32(2)))
		l.Begin("inner", "outer")
		l.Store("inner", cell, tensor.Scalar(int32(9)))
		l.Store("inner", cell, tensor.Scalar(int32(3)))
		l.End("inner", c.inner)
		l.End("outer", c.outer)
		if got := value(cell); got != c.want {
			t.Errorf("%s: the value is %d, want %d", c.name, got, c.want)
		}
		if len(l.entries) != 0 {
			t.Errorf("%s: %d entries are left", c.name, len(l.entries))
		}
	}
}

// TestAbandonedRun checks that a Run inside of another one that has ended before it neither restores values that later
// Runs have written, nor writes, nor keeps the log from being cleared.
func TestAbandonedRun(t *testing.T) {
	var l Log[string]
	failure := errors.New("failed")
	cell := NewCell(tensor.Scalar(int32(1)))
	l.Begin("outer", "")
	l.Begin("inner", "outer")
	l.Store("inner", cell, tensor.Scalar(int32(3)))
	l.End("outer", failure)
	if got := value(cell); got != 1 {
		t.Errorf("after the outer Run has failed the value is %d, want 1", got)
	}
	if l.Begin("late", "outer") {
		t.Error("a Run began inside of one that has ended")
	}
	l.Begin("next", "")
	l.Store("next", cell, tensor.Scalar(int32(5)))
	l.End("inner", failure)
	for _, run := range []string{"outer", "inner"} {
		if err := l.Store(run, cell, tensor.Scalar(int32(7))); !errors.Is(err, ErrEnded) {
			t.Errorf("the %s Run wrote after its end", run)
		}
	}
	if got := value(cell); got != 5 {
		t.Errorf("the abandoned Run changed the next Run's value to %d, want 5", got)
	}
	l.End("next", nil)
	l.Store("", cell, tensor.Scalar(int32(6)))
	if got := value(cell); got != 6 || len(l.entries) != 0 {
		t.Errorf("the value is %d, want 6; %d entries are left, want none", got, len(l.entries))
	}
}
