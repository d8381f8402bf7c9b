package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/distribute/internal/sparse"
	"github.com/lockstep-ml/lockstep/tensor"
)

// recorder is a user's CrossDeviceOps: it takes the maximum and counts.
type recorder struct{ batches int }

func (r *recorder) String() string { return "recorder" }

func (r *recorder) BatchReduce(
	_ context.Context, _ distribute.ReduceOp, batch []distribute.Reduction, _ distribute.Options,
) ([]distribute.Value, error) {
	r.batches++
	out := make([]distribute.Value, len(batch))
	for i, b := range batch {
		most := b.Values[0].(*tensor.Tensor).Clone()
		for _, v := range b.Values {
			for j, x := range tensor.Data[float32](v.(*tensor.Tensor)) {
				tensor.Data[float32](most)[j] = max(tensor.Data[float32](most)[j], x)
			}
		}
		values := make([]distribute.Value, len(b.To))
		for j, d := range b.To {
			values[j] = most.OnDevice(d.Index)
		}
		out[i] = mirroredOf(values...)
	}
	return out, nil
}

func TestUsersCrossDeviceOps(t *testing.T) {
	ops := &recorder{}
	s := mirrored(t, 3, func(cfg *distribute.MirroredConfig) { cfg.CrossDeviceOps = ops })
	got := make([][]float32, 3)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		x := tensor.From([]float32{float32(r.ID()), float32(1 - r.ID())})
		v, err := distribute.AllReduce(ctx, r, distribute.Sum, x)
		if err != nil {
			return err
		}
		into := tensor.New(tensor.Float32, 2)
		if err := r.AllReduceInto(ctx, distribute.Sum, []*tensor.Tensor{into}, []*tensor.Tensor{x}, nil); err != nil {
			return err
		}
		got[r.ID()] = append(tensor.Data[float32](v), tensor.Data[float32](into)...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range got {
		if fmt.Sprint(g) != "[2 1 2 1]" {
			t.Errorf("replica %d got %v, want the maxima twice", i, g)
		}
	}
	if ops.batches != 2 {
		t.Errorf("%d batches, want 2: one for each reduction", ops.batches)
	}
	// With a CPU as destination, a single reduction uses ReductionToOneDevice, not the user's operations.
	v := distribute.NewComponents(tensor.From([]float32{1}), tensor.From([]float32{2}), tensor.From([]float32{3}))
	out, err := s.Extended().ReduceTo(t.Context(), distribute.Sum, v, v)
	if err != nil || ops.batches != 2 {
		t.Errorf("got %v, %v after %d batches", out, err, ops.batches)
	}
}

func TestAccumulationFn(t *testing.T) {
	ops := distribute.NewReductionToOneDevice("", func(ts []*tensor.Tensor) (*tensor.Tensor, error) {
		return ts[len(ts)-1], nil
	})
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.CrossDeviceOps = ops })
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		v, err := distribute.AllReduce(ctx, r, distribute.Mean, tensor.Scalar(float32(r.ID()*8)))
		if err == nil && v.Float64s()[0] != 4 {
			t.Errorf("replica %d got %v, want the last one's 8, divided by 2", r.ID(), v)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestReductionsGiveTheSameBits(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 9).Draw(rt, "replicas")
		length := rapid.IntRange(0, 40).Draw(rt, "length")
		dtype := rapid.SampledFrom([]tensor.DType{
			tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64,
			tensor.Int8, tensor.Uint16, tensor.Int64,
		}).Draw(rt, "dtype")
		op := rapid.SampledFrom([]distribute.ReduceOp{distribute.Sum, distribute.Mean}).Draw(rt, "op")
		packs := rapid.IntRange(0, 5).Draw(rt, "packs")
		components := make([]distribute.Value, n)
		for i := range components {
			x := tensor.New(dtype, length)
			for j := range length {
				setNumber(x, j, rapid.Float64Range(-100, 100).Draw(rt, "x"))
			}
			components[i] = x.OnDevice(i)
		}
		hier, err := distribute.NewHierarchicalCopyAllReduce(packs, nil)
		if err != nil {
			rt.Fatal(err)
		}
		names := make([]string, n)
		for i := range names {
			names[i] = fmt.Sprintf("CPU:%d", i)
		}
		coll, err := distribute.NewCollectiveAllReduce(distribute.CollectiveConfig{Devices: names})
		if err != nil {
			rt.Fatal(err)
		}
		defer coll.Close()
		v := distribute.NewComponents(components...)
		var first *tensor.Tensor
		for _, ops := range []distribute.CrossDeviceOps{distribute.NewReductionToOneDevice("", nil), hier, coll} {
			out, err := reduceWith(context.Background(), ops, op, v, v)
			if err != nil {
				rt.Fatalf("%v: %v", ops, err)
			}
			for i, x := range out.(*distribute.Mirrored).Values {
				got := x.(*tensor.Tensor)
				if d, _ := device.Of(got); d.Index != i {
					rt.Errorf("%v: component %d is on %s", ops, i, d.Short())
				}
				if first == nil {
					first = got
				}
				if !got.Equal(first) {
					rt.Errorf("%v: component %d is %v, the first one's %v", ops, i, got, first)
				}
			}
		}
	})
}

// plainAxisMean is the slow twin of Reduce(Mean, axis): all elements at one position added, divided by their number.
func TestReduceOverAxes(t *testing.T) {
	s := mirrored(t, 3)
	rapid.Check(t, func(rt *rapid.T) {
		rank := rapid.IntRange(1, 3).Draw(rt, "rank")
		shape := make([]int, rank)
		var axes []int
		for i := range shape {
			shape[i] = rapid.IntRange(1, 3).Draw(rt, "size")
			if rapid.Bool().Draw(rt, "reduced") {
				axis := i
				if rapid.Bool().Draw(rt, "negative") {
					axis -= rank
				}
				axes = append(axes, axis)
			}
		}
		if axes == nil {
			axes = []int{}
		}
		components := make([]distribute.Value, 3)
		sums, counts := map[string]float64{}, map[string]float64{}
		for r := range components {
			mine := append([]int(nil), shape...)
			for _, a := range axes {
				mine[(a+rank)%rank] = rapid.IntRange(0, 3).Draw(rt, "rows")
			}
			x := tensor.New(tensor.Float64, mine...)
			for i := range x.Len() {
				value := float64(rapid.IntRange(-50, 50).Draw(rt, "x"))
				setNumber(x, i, value)
				key, rest := "", i
				for d := rank - 1; d >= 0; d-- {
					at := rest % mine[d]
					rest /= mine[d]
					kept := true
					for _, a := range axes {
						kept = kept && (a+rank)%rank != d
					}
					if kept {
						key = fmt.Sprintf("%d,", at) + key
					}
				}
				sums[key] += value
				counts[key]++
			}
			components[r] = x
		}
		out, err := s.Extended().Reduce(context.Background(), distribute.Mean, distribute.NewComponents(components...),
			distribute.ReduceOptions{Axis: axes})
		if err != nil {
			rt.Fatal(err)
		}
		got := out.(*tensor.Tensor)
		for i, x := range got.Float64s() {
			key, rest := "", i
			for d := got.Rank() - 1; d >= 0; d-- {
				key = fmt.Sprintf("%d,", rest%got.Shape()[d]) + key
				rest /= got.Shape()[d]
			}
			if want := sums[key] / counts[key]; x != want && !(x != x && want != want) {
				rt.Fatalf("element %s of %v over axes %v is %v, want %v", key, components, axes, x, want)
			}
		}
	})
}

func TestReduceListOverAxis(t *testing.T) {
	s := mirrored(t, 2)
	a := distribute.NewComponents(tensor.From([]float32{1, 2}), tensor.From([]float32{3, 4}))
	b := distribute.NewComponents(tensor.From([]float32{10, 20}), tensor.From([]float32{30, 40}))
	out, err := s.Extended().Reduce(t.Context(), distribute.Sum, []any{a, b}, distribute.ReduceOptions{Axis: []int{0}})
	if err != nil {
		t.Fatal(err)
	}
	if want := tensor.From([]float32{44, 66}); !out.(*tensor.Tensor).Equal(want) {
		t.Errorf("got %v, want %v", out, want)
	}
	short := distribute.NewComponents(tensor.From([]float32{1}), tensor.From([]float32{1}))
	_, err = s.Extended().Reduce(t.Context(), distribute.Sum, []any{a, short}, distribute.ReduceOptions{Axis: []int{0}})
	if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "item 1 of the list is float32(1,), "+
		"item 0 float32(2,)") {
		t.Errorf("got %v, want ErrInvalid that names the item that differs", err)
	}
}

func TestMeanOfOneComponent(t *testing.T) {
	v := distribute.NewComponents(tensor.From([]int32{3}))
	for _, c := range []struct {
		to   string
		want *tensor.Tensor
	}{
		{"CPU:0", tensor.From([]int32{3})}, // it is unchanged
		{"CPU:1", tensor.From([]float64{3})},
	} {
		out, err := reduceWith(t.Context(), distribute.NewReductionToOneDevice("", nil), distribute.Mean, v, c.to)
		if err != nil {
			t.Fatal(err)
		}
		if !out.(*tensor.Tensor).Equal(c.want) {
			t.Errorf("to %s: got %v, want %v", c.to, out, c.want)
		}
	}
	_, err := reduceWith(t.Context(), distribute.NewReductionToOneDevice("", nil), distribute.Mean,
		distribute.NewComponents(true), "CPU:1")
	if !errors.Is(err, distribute.ErrInvalid) || !strings.Contains(err.Error(), "bool is not in the list of allowed "+
		"values") {
		t.Errorf("a bool: got %v", err)
	}
}

func TestReduceErrors(t *testing.T) {
	s, other := mirrored(t, 2), mirrored(t, 2)
	ctx := t.Context()
	f32 := tensor.From([]float32{1, 2})
	pr := distribute.NewComponents(f32, f32)
	for _, c := range []struct {
		name    string
		ctx     context.Context
		op      distribute.ReduceOp
		v       distribute.Value
		axis    []int
		kind    error
		message string
	}{
		{"another reduction", ctx, collective.Max, pr, nil, distribute.ErrInvalid, "'MAX' is not a valid ReduceOp"},
		{
			"another strategy's scope", other.Scope(ctx), distribute.Sum, pr, nil, distribute.ErrContext,
			"mixing different strategies",
		},
		{
			"nested scopes of two", other.Scope(s.Scope(ctx)), distribute.Sum, pr, nil, distribute.ErrContext,
			"mixing different strategies",
		},
		{
			"a value of no replica", ctx, distribute.Sum, f32, nil, distribute.ErrInvalid,
			"cannot be reduced with the given reduce op SUM",
		},
		{
			"bool", ctx, distribute.Sum, distribute.NewComponents(true, false), nil, distribute.ErrInvalid,
			"bool is not in the list of allowed values",
		},
		{
			"string", ctx, distribute.Mean, distribute.NewComponents("a", "b"), nil, distribute.ErrInvalid,
			"string is not in the list",
		},
		{
			"dtypes", ctx, distribute.Sum, distribute.NewComponents(f32, tensor.From([]int32{1, 2})), nil,
			distribute.ErrMismatch, "expected to be a float32 tensor",
		},
		{
			"shapes", ctx, distribute.Sum, distribute.NewComponents(f32, tensor.From([]float32{1})), nil, distribute.ErrMismatch,
			"[2], component 1 [1]",
		},
		{
			"axis", ctx, distribute.Sum, pr,
			[]int{1},
			distribute.ErrInvalid,
			"invalid reduction dimension 1 for input with 1 dimensions",
		},
		{"negative axis", ctx, distribute.Mean, pr, []int{-2}, distribute.ErrInvalid, "invalid reduction dimension -2"},
		{"axis twice", ctx, distribute.Sum, pr, []int{0, -1}, distribute.ErrInvalid, "duplicate dimension"},
		{
			"sum of a mirrored value", ctx, distribute.Sum, mirroredOf(f32, f32), nil, distribute.ErrInvalid,
			"mirrored",
		},
		{"no component", ctx, distribute.Sum, distribute.NewComponents(), nil, distribute.ErrInvalid, "must be non-empty"},
	} {
		_, err := s.Extended().Reduce(c.ctx, c.op, c.v, distribute.ReduceOptions{Axis: c.axis})
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.message) {
			t.Errorf("%s: got %v, want %v with %q", c.name, err, c.kind, c.message)
		}
	}
	if _, err := s.Extended().ReduceTo(ctx, distribute.Sum, pr, ""); err == nil ||
		!strings.Contains(err.Error(), "destinations can not be empty") {
		t.Errorf("no destination: got %v", err)
	}
	if _, err := s.Extended().ReduceTo(ctx, distribute.Sum, pr, "/job:worker/task:1/cpu:0"); !errors.Is(err,
		distribute.ErrInvalid) || !strings.Contains(err.Error(), "belongs to another worker") {
		t.Errorf("another worker's destination: got %v", err)
	}
	if _, err := s.Extended().ReduceTo(ctx, distribute.Sum, pr, 3); err == nil ||
		!strings.Contains(err.Error(), "destinations must be one of a") {
		t.Errorf("a number as destination: got %v", err)
	}
	if _, err := s.Extended().ReduceTo(ctx, distribute.Sum, pr, pr, distribute.Options{BytesPerPack: -1}); err == nil ||
		!strings.Contains(err.Error(), "must be >=0, received -1") {
		t.Errorf("bad options: got %v", err)
	}
	err := inStep(t, s, func(ctx context.Context, _ *distribute.Replica) error {
		_, err := s.Extended().Reduce(ctx, distribute.Sum, pr, distribute.ReduceOptions{})
		if !errors.Is(err, distribute.ErrContext) || !strings.Contains(err.Error(), "MergeCall") {
			t.Errorf("inside a step: got %v, want ErrContext with the way to get there", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestBatchReduceToNothing(t *testing.T) {
	s := mirrored(t, 2)
	out, err := s.Extended().BatchReduceTo(t.Context(), distribute.Sum, nil, nil)
	if err != nil || len(out) != 0 {
		t.Errorf("got %v, %v, want nothing", out, err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		v, err := distribute.AllReduce(ctx, r, distribute.Sum, []any{})
		if v == nil || len(v) != 0 {
			t.Errorf("got %v, want an empty list", v)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestDeviceMixedSparseAndDense(t *testing.T) {
	rows := &tensor.IndexedSlices{
		Values: tensor.From([]float32{4, 5}, 1, 2), Indices: tensor.From([]int32{2}), DenseShape: tensor.From([]int64{3, 2}),
	}
	dense := tensor.From([]float32{1, 1, 2, 2, 3, 3}, 3, 2)
	v := distribute.NewComponents(rows, dense)
	out, err := reduceWith(t.Context(), distribute.NewReductionToOneDevice("", nil), distribute.Sum, v,
		"CPU:0")
	if err != nil {
		t.Fatal(err)
	}
	if want := tensor.From([]float32{1, 1, 2, 2, 7, 8}, 3, 2); !out.(*tensor.Tensor).Equal(want) {
		t.Errorf("got %v, want %v", out, want)
	}
	rows.Indices = tensor.From([]int32{3})
	if _, err := sparse.Densify(rows); !errors.Is(err, distribute.ErrInvalid) ||
		!strings.Contains(err.Error(), "index 3 of row 0 is outside of the 3 rows") {
		t.Errorf("got %v", err)
	}
}

func TestSparseSumIsTheDenseSum(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 5).Draw(rt, "replicas")
		components, dense := make([]distribute.Value, n), make([]distribute.Value, n)
		for i := range components {
			k := rapid.IntRange(0, 4).Draw(rt, "rows")
			s := &tensor.IndexedSlices{
				Values: tensor.New(tensor.Float32, k, 2), Indices: tensor.New(tensor.Int64, k),
				DenseShape: tensor.From([]int64{5, 2}),
			}
			for j := range 2 * k {
				tensor.Data[float32](s.Values)[j] = float32(rapid.IntRange(-9, 9).Draw(rt, "x"))
			}
			for j := range k {
				tensor.Data[int64](s.Indices)[j] = int64(rapid.IntRange(0, 4).Draw(rt, "index"))
			}
			components[i] = s
			d, err := sparse.Densify(s)
			if err != nil {
				rt.Fatal(err)
			}
			dense[i] = d
		}
		to := "CPU:0"
		rows, err := reduceWith(context.Background(), distribute.NewReductionToOneDevice("", nil), distribute.Sum,
			distribute.NewComponents(components...), to)
		if err != nil {
			rt.Fatal(err)
		}
		got, err := sparse.Densify(rows.(*tensor.IndexedSlices))
		if err != nil {
			rt.Fatal(err)
		}
		want, err := reduceWith(context.Background(), distribute.NewReductionToOneDevice("", nil), distribute.Sum,
			distribute.NewComponents(dense...), to)
		if err != nil {
			rt.Fatal(err)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			rt.Fatalf("got %v, want %v", got, want)
		}
	})
}
