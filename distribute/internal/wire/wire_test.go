package wire

import (
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// A value that is encoded and decoded is unchanged.
func TestWireValues(t *testing.T) {
	for _, v := range []any{
		nil, tensor.Scalar(float32(1.5)), tensor.New(tensor.Int8, 0, 3), tensor.Strings([]string{"a", ""}, 2,
			1), tensor.From([]bool{true, false}),
		[]any{tensor.From([]int64{1, 2}), nil},
		tensor.Tuple{tensor.Scalar(uint8(7))},
		map[string]any{"x": tensor.Scalar(1.0), "a": []any{}},
		&tensor.IndexedSlices{Values: tensor.From([]float64{1, 2}, 2, 1), Indices: tensor.From([]int32{3, 0})},
		&tensor.IndexedSlices{
			Values: tensor.New(tensor.BFloat16, 0, 2), Indices: tensor.New(tensor.Int64, 0),
			DenseShape: tensor.From([]int64{4, 2}),
		},
	} {
		text, err := Encode(v)
		if err != nil {
			t.Errorf("%v: %v", v, err)
			continue
		}
		got, err := Decode(text)
		if err != nil || fmt.Sprintf("%T %v", got, got) != fmt.Sprintf("%T %v", v, v) {
			t.Errorf("%v was decoded as %v, %v", v, got, err)
		}
	}
	if _, err := Encode(struct{ X int }{1}); err == nil {
		t.Error("a struct was encoded")
	}
}

// Any input decodes to a value that can be encoded again, or to an error.
func FuzzWireValue(f *testing.F) {
	for _, v := range []any{
		tensor.Scalar(float32(1)), tensor.Strings([]string{"a"}, 1),
		map[string]any{"k": tensor.Tuple{tensor.New(tensor.Int64, 2)}},
		&tensor.IndexedSlices{Values: tensor.New(tensor.Float32, 1, 2), Indices: tensor.From([]int64{1})},
	} {
		text, err := Encode(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		v, err := Decode(text)
		if err != nil {
			return
		}
		if _, err := Encode(v); err != nil {
			t.Errorf("%v cannot be encoded again: %v", v, err)
		}
	})
}
