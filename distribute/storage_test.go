package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// fakeStorage holds a variable's components; a component can be broken.
type fakeStorage struct {
	mu     sync.Mutex
	values []*tensor.Tensor
	broken int // the component that fails; -1: none
}

func (s *fakeStorage) Load(component int) (*tensor.Tensor, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if component == s.broken {
		return nil, errors.New("no such memory")
	}
	return s.values[component].Clone(), nil
}

func (s *fakeStorage) Store(component int, value *tensor.Tensor) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if component == s.broken {
		return errors.New("no such memory")
	}
	s.values[component] = value.Clone()
	return nil
}

func (s *fakeStorage) String() string {
	var all []any
	for _, v := range s.values {
		all = append(all, v.Float64s())
	}
	return fmt.Sprint(all...)
}

// TestVariableIn checks that a variable in a storage behaves as any other: in both contexts, in Update, after a failed
// Run, and that a failure of the storage is the error of the operation.
func TestVariableIn(t *testing.T) {
	ctx := t.Context()
	s := mirrored(t, 2)
	storage := &fakeStorage{
		broken: -1, values: []*tensor.Tensor{tensor.From([]float32{1, 2}), tensor.From([]float32{1, 2})},
	}
	v, err := s.VariableIn(storage, tensor.Float32, []int{2}, distribute.VariableConfig{
		Name: "v", Aggregation: distribute.AggregateSum,
	})
	if err != nil {
		t.Fatal(err)
	}
	own, err := s.NewVariable(ctx, distribute.VariableConfig{
		Name: "v", Aggregation: distribute.AggregateSum, Initial: tensor.From([]float32{1, 2}),
	})
	if err != nil {
		t.Fatal(err)
	}
	if v.Kind() != own.Kind() || v.DType() != own.DType() || v.String() != own.String() {
		t.Errorf("%v of %v, another variable is %v of %v", v, v.DType(), own, own.DType())
	}
	in, err := s.Cross(ctx)
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("failed")
	add := func(failure error) error {
		return inStep(t, s, func(_ context.Context, r *distribute.Replica) error {
			if err := v.AssignAdd(r, tensor.From([]float32{10, float32(r.ID())})); err != nil {
				return err
			}
			return failure
		})
	}
	for _, step := range []struct {
		name string
		do   func() error
		want string
	}{
		{"AssignSub", func() error { return v.AssignSub(in, tensor.From([]float32{1, 1})) }, "[0 1] [0 1]"},
		{"in a Run", func() error { return add(nil) }, "[20 2] [20 2]"},
		{"in a failed Run", func() error {
			if err := add(cause); !errors.Is(err, cause) {
				return fmt.Errorf("got %w", err)
			}
			return nil
		}, "[20 2] [20 2]"},
		{"a failed Update", func() error {
			in, err := s.Cross(ctx)
			if err != nil {
				return err
			}
			err = v.Update(in, func(_ context.Context, c *distribute.Component) error {
				if err := c.Variable().Assign(c, tensor.From([]float32{7, 7})); err != nil || c.Replica() == 0 {
					return err
				}
				return cause
			})
			if !errors.Is(err, cause) {
				return fmt.Errorf("got %w", err)
			}
			return nil
		}, "[20 2] [20 2]"},
	} {
		if err := step.do(); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
		if got := storage.String(); got != step.want {
			t.Errorf("%s: the storage has %s, want %s", step.name, got, step.want)
		}
	}
	storage.broken = 0
	for name, err := range map[string]error{
		"Read": func() error { _, err := v.Read(in); return err }(), "Assign": v.Assign(in, tensor.From([]float32{1, 1})),
		"AssignAdd in a Run": add(nil),
	} {
		if err == nil || !strings.Contains(err.Error(), "v:0: no such memory") {
			t.Errorf("%s of a broken storage: %v", name, err)
		}
	}
	if _, err := s.VariableIn(storage, tensor.Int32, nil, distribute.VariableConfig{
		Name: "n", Aggregation: distribute.AggregateMean,
	}); !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("the mean of integers: %v", err)
	}
}
