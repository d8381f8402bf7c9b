package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// drawParts draws tensors of one dtype whose shapes differ along one axis only, filled with different numbers.
func drawParts(rt *rapid.T, n int) (parts []*tensor.Tensor, axis int) {
	dtype := rapid.SampledFrom([]tensor.DType{
		tensor.Float32, tensor.BFloat16, tensor.Int8, tensor.Int64, tensor.Bool,
		tensor.String,
	}).Draw(rt, "dtype")
	rank := rapid.IntRange(1, 4).Draw(rt, "rank")
	axis = rapid.IntRange(0, rank-1).Draw(rt, "axis")
	shape := make([]int, rank)
	for d := range shape {
		shape[d] = rapid.IntRange(1, 3).Draw(rt, "size")
	}
	next := 0.0
	for range n {
		shape[axis] = rapid.IntRange(0, 3).Draw(rt, "length")
		t := tensor.New(dtype, shape...)
		for j := range t.Len() {
			next++
			switch dtype {
			case tensor.String:
				t.StringData()[j] = fmt.Sprint(next)
			case tensor.Bool:
				tensor.Data[bool](t)[j] = int(next)%3 == 0
			default:
				setNumber(t, j, next)
			}
		}
		parts = append(parts, t)
	}
	return parts, axis
}

// element returns the element at an index, as text.
func element(t *tensor.Tensor, at []int) string {
	i := 0
	for d, x := range at {
		i = i*t.Shape()[d] + x
	}
	if t.DType() == tensor.String {
		return t.StringData()[i]
	}
	return fmt.Sprint(t.Float64s()[i])
}

// checkGathered compares a concatenation with its parts, element by element.
func checkGathered(parts []*tensor.Tensor, axis int, got *tensor.Tensor) error {
	offset := 0
	for _, p := range parts {
		at := make([]int, p.Rank())
		for range p.Len() {
			there := append([]int(nil), at...)
			there[axis] += offset
			if want, has := element(p, at), element(got, there); want != has {
				return fmt.Errorf("element %v of %v is %s, want %s", there, got, has, want)
			}
			for d := len(at) - 1; d >= 0; d-- {
				if at[d]++; at[d] < p.Shape()[d] {
					break
				}
				at[d] = 0
			}
		}
		offset += p.Shape()[axis]
	}
	if got.Shape()[axis] != offset {
		return fmt.Errorf("shape %v: want %d along axis %d", got.Shape(), offset, axis)
	}
	return nil
}

// TestGather: for every dtype, shape and axis, every replica gets all parts, in order, with every
// implementation.
func TestGather(t *testing.T) {
	strategies := map[int][]*distribute.Strategy{}
	for n := 1; n <= 4; n++ {
		strategies[n] = []*distribute.Strategy{
			mirrored(t, n),
			mirrored(t, n, onOneDevice),
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(rt, "replicas")
		parts, axis := drawParts(rt, n)
		given := axis
		if rapid.Bool().Draw(rt, "negative") {
			given -= parts[0].Rank()
		}
		components := make([]distribute.Value, n)
		for i, p := range parts {
			components[i] = p.OnDevice(i)
		}
		for _, s := range strategies[n] {
			v, err := s.Extended().Gather(context.Background(), distribute.NewComponents(components...), given)
			if err == nil {
				err = checkGathered(parts, axis, v.(*tensor.Tensor))
			}
			if err != nil {
				rt.Fatalf("Gather by %v: %v", s.CrossDeviceOps(), err)
			}
			all, err := distribute.Run(context.Background(), s,
				func(ctx context.Context, r *distribute.Replica, x distribute.Value) (distribute.Value, error) {
					return distribute.AllGather(ctx, r, map[string]any{"x": x}, given)
				}, components)
			if err != nil {
				rt.Fatal(err)
			}
			for i, v := range all {
				got := v.(map[string]any)["x"].(*tensor.Tensor)
				if d, _ := device.Of(got); d.Index != i {
					rt.Fatalf("replica %d got a tensor on %v", i, d)
				}
				if err := checkGathered(parts, axis, got); err != nil {
					rt.Fatalf("AllGather by %v, replica %d: %v", s.CrossDeviceOps(), i, err)
				}
			}
		}
	})
}

func TestGatherErrors(t *testing.T) {
	s := mirrored(t, 2)
	f32 := func(shape ...int) *tensor.Tensor { return tensor.New(tensor.Float32, shape...) }
	rows := &tensor.IndexedSlices{Values: f32(1, 2), Indices: tensor.From([]int64{0})}
	for _, c := range []struct {
		name    string
		v       distribute.Value
		axis    int
		kind    error
		message string
	}{
		{"scalars", distribute.NewComponents(f32(), f32()), 0, distribute.ErrInvalid, "can't concatenate scalars"},
		{"axis", distribute.NewComponents(f32(2), f32(2)), 1, distribute.ErrInvalid, "in the range [-1, 1), but got 1"},
		{"negative axis", distribute.NewComponents(f32(2), f32(2)), -2, distribute.ErrInvalid, "but got -2"},
		{
			"other dimension", distribute.NewComponents(f32(1, 1), f32(1, 2)), 0, distribute.ErrMismatch,
			"dimension 1 in both shapes must be equal: shape[0] = [1,1] vs. shape[1] = [1,2]",
		},
		{
			"ranks", distribute.NewComponents(f32(1), f32(1, 2)), 0, distribute.ErrMismatch,
			"ranks of all input tensors should match",
		},
		{
			"dtypes", distribute.NewComponents(f32(1), tensor.From([]int64{1})), 0, distribute.ErrMismatch,
			"expected to be a float32 tensor",
		},
		{"slices", rows, 0, distribute.ErrUnsupported, "gather does not support IndexedSlices"},
		{
			"slices of no known shape", distribute.NewComponents(rows, rows), 0, distribute.ErrInvalid,
			"dense shape of the IndexedSlices is not known",
		},
	} {
		_, err := s.Extended().Gather(t.Context(), c.v, c.axis)
		if !errors.Is(err, c.kind) || !containsAll(err.Error(), c.message) {
			t.Errorf("%s: got %v, want %v with %q", c.name, err, c.kind, c.message)
		}
	}
	_, err := tf.GatherWith(t.Context(), distribute.NewReductionToOneDevice("", nil), distribute.NewComponents(rows, rows),
		"CPU:0", 0)
	if !errors.Is(err, distribute.ErrUnsupported) || !containsAll(err.Error(), "gather/all_gather does not support "+
		"IndexedSlices") {
		t.Errorf("CrossDeviceOps: got %v", err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if _, err := distribute.AllGather(ctx, r, []any{f32(1), rows}, 0); !errors.Is(err, distribute.ErrUnsupported) ||
			!containsAll(err.Error(), "all_gather does not support IndexedSlices", "gather_test.go") {
			t.Errorf("in a step: got %v", err)
		}
		if _, err := s.Extended().Gather(ctx, f32(1), 0); !errors.Is(err, distribute.ErrContext) ||
			!containsAll(err.Error(), "AllGather") {
			t.Errorf("Gather in a step: got %v", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// collecting is a user's CrossDeviceOps that gathers in reverse order.
type collecting struct {
	distribute.CrossDeviceOps
}

func (collecting) BatchGather(
	ctx context.Context, batch []distribute.Reduction, axis int, o distribute.Options,
) ([]distribute.Value, error) {
	out := make([]distribute.Value, len(batch))
	for i, b := range batch {
		values := b.Values
		v, err := distribute.CurrentStrategy(ctx).Extended().GatherWith(ctx, distribute.NewReductionToOneDevice("", nil),
			distribute.NewComponents(values[1], values[0]), mirroredOf(values...), axis, o)
		if err != nil {
			return nil, err
		}
		out[i] = v
	}
	return out, nil
}

func TestUsersGather(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) {
		cfg.CrossDeviceOps = collecting{distribute.NewReductionToOneDevice("", nil)}
	})
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		v, err := distribute.AllGather(ctx, r, tensor.From([]float32{float32(r.ID())}), 0)
		if err == nil && fmt.Sprint(v.Float64s()) != "[1 0]" {
			err = fmt.Errorf("got %v, want the result of the user's operations", v)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestSlicesAmongTensors: replicas may mix tensors and IndexedSlices at one leaf of a nest. The result is a value or
// an error at once, never a wait, even if the nest had only tensors before.
func TestSlicesAmongTensors(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	dense := tensor.From([]float32{1, 2, 3, 4}, 2, 2)
	slices := &tensor.IndexedSlices{
		Values: tensor.From([]float32{5, 6}, 1, 2), Indices: tensor.From([]int64{1}),
		DenseShape: tensor.From([]int64{2, 2}),
	}
	reduce := func(values ...distribute.Value) error {
		return inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			v, err := distribute.AllReduce(ctx, r, distribute.Sum, values[r.ID()])
			if err != nil {
				return err
			}
			if got := fmt.Sprint(v.(*tensor.Tensor).Float64s()); got != "[1 2 8 10]" && got != "[2 4 6 8]" {
				return fmt.Errorf("got %s", got)
			}
			return nil
		})
	}
	if err := reduce(dense, slices); err != nil {
		t.Error(err)
	}
	if err := reduce(dense, dense); err != nil {
		t.Error(err)
	}
	if err := reduce(slices, dense); !errors.Is(err, distribute.ErrMismatch) ||
		!containsAll(err.Error(), "which are sparse") {
		t.Errorf("slices where all replicas had tensors: got %v", err)
	}
	if err := reduce(slices, dense); err != nil { // a failed step clears the cache of nests
		t.Error(err)
	}
}
