package digits_test

import (
	"crypto/sha256"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/data/digits"
	"github.com/lockstep-ml/lockstep/tensor"
)

func TestLoad(t *testing.T) {
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	if set.Name != "digits" || set.Classes != 10 || !slices.Equal(set.Shape, []int{8, 8, 1}) {
		t.Errorf("got %+v", set)
	}
	tests := []struct {
		name    string
		p       data.Pipeline
		n       int
		sum     string // SHA-256 over pixels and digit of each example in turn, as bytes, as the CSV files have them
		classes [10]int
	}{
		{
			"train", set.Train, 3823, "028f5e244ee9135dbe3d8c684583e6518709a7b05293a4c5ecd652eafb9f4689",
			[10]int{376, 389, 380, 389, 387, 376, 377, 387, 380, 382},
		},
		{
			"test", set.Test, 1797, "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2",
			[10]int{178, 182, 177, 183, 181, 182, 181, 179, 174, 180},
		},
	}
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			if c.p.Len() != c.n {
				t.Errorf("%d examples, want %d", c.p.Len(), c.n)
			}
			hash := sha256.New()
			var classes [10]int
			for e, err := range c.p.Iter(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				b := e.(data.Batch)
				var row []byte
				for _, x := range tensor.Data[float32](b.Inputs[0]) {
					if v := x * 16; v < 0 || v > 16 || v != float32(math.Trunc(float64(v))) {
						t.Fatalf("a pixel of %v", x)
					}
					row = append(row, byte(x*16))
				}
				label := tensor.Data[int32](b.Labels[0])[0]
				classes[label]++
				hash.Write(append(row, byte(label)))
			}
			if got := fmt.Sprintf("%x", hash.Sum(nil)); got != c.sum {
				t.Errorf("checksum %s, want %s", got, c.sum)
			}
			if classes != c.classes { // optdigits.names lists them
				t.Errorf("examples of each digit: %v, want %v", classes, c.classes)
			}
		})
	}
}

// TestRows compares examples with lines of the original files.
func TestRows(t *testing.T) {
	set, err := digits.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		p     data.Pipeline
		row   int
		want  []byte
		label int32
	}{
		{
			"train", set.Train, 0,
			[]byte{
				0, 1, 6, 15, 12, 1, 0, 0, 0, 7, 16, 6, 6, 10, 0, 0, 0, 8, 16, 2, 0, 11, 2, 0, 0, 5, 16,
				3, 0, 5, 7, 0, 0, 7, 13, 3, 0, 8, 7, 0, 0, 4, 12, 0, 1, 13, 5, 0, 0, 0, 14, 9, 15, 9, 0, 0, 0, 0, 6, 14, 7, 1, 0, 0,
			},
			0,
		},
		{"train", set.Train, 1234, []byte{
			0, 0, 9, 14, 10, 1, 0, 0, 0, 3, 13, 2, 8, 9, 0, 0, 0, 4, 12, 0, 4, 16, 1, 0, 0, 1,
			14, 8, 11, 16, 6, 0, 0, 0, 1, 6, 3, 10, 7, 0, 0, 0, 0, 0, 0, 8, 8, 0, 0, 3, 8, 3, 1, 10, 8, 0, 0, 1, 9, 11, 16, 12,
			1, 0,
		}, 9},
		{"train", set.Train, 3822, []byte{
			0, 0, 2, 15, 16, 13, 1, 0, 0, 0, 3, 7, 10, 16, 10, 0, 0, 0, 0, 0, 0, 11, 11, 0, 0,
			0, 0, 2, 8, 15, 5, 0, 0, 0, 0, 9, 16, 16, 8, 0, 0, 0, 0, 2, 16, 5, 0, 0, 0, 0, 0, 12, 7, 0, 0, 0, 0, 0, 4, 14, 1, 0,
			0, 0,
		}, 7},
		{"test", set.Test, 0, []byte{
			0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0, 0, 3, 15, 2, 0, 11, 8, 0, 0, 4, 12,
			0, 0, 8, 8, 0, 0, 5, 8, 0, 0, 9, 8, 0, 0, 4, 11, 0, 1, 12, 7, 0, 0, 2, 14, 5, 10, 12, 0, 0, 0, 0, 6, 13, 10, 0, 0,
			0,
		}, 0},
		{"test", set.Test, 1234, []byte{
			0, 1, 12, 16, 14, 8, 0, 0, 0, 4, 16, 8, 10, 15, 3, 0, 0, 0, 0, 0, 5, 16, 3, 0, 0, 0,
			0, 1, 12, 15, 0, 0, 0, 0, 0, 10, 16, 5, 0, 0, 0, 0, 5, 16, 10, 0, 0, 0, 0, 1, 14, 15, 6, 10, 11, 0, 0, 0, 13, 16, 16,
			14, 8, 1,
		}, 2},
		{"test", set.Test, 1796, []byte{
			0, 0, 10, 14, 8, 1, 0, 0, 0, 2, 16, 14, 6, 1, 0, 0, 0, 0, 15, 15, 8, 15, 0, 0, 0, 0,
			5, 16, 16, 10, 0, 0, 0, 0, 12, 15, 15, 12, 0, 0, 0, 4, 16, 6, 4, 16, 6, 0, 0, 8, 16, 10, 8, 16, 8, 0, 0, 1, 8, 12,
			14, 12, 1, 0,
		}, 8},
	} {
		t.Run(fmt.Sprint(c.name, " ", c.row), func(t *testing.T) {
			for e, err := range c.p.Skip(c.row).Take(1).Iter(t.Context()) {
				if err != nil {
					t.Fatal(err)
				}
				b := e.(data.Batch)
				want := tensor.New(tensor.Float32, 8, 8, 1)
				for i, x := range c.want {
					tensor.Data[float32](want)[i] = float32(x) / 16
				}
				if !b.Inputs[0].Equal(want) || !b.Labels[0].Equal(tensor.Scalar(c.label)) {
					t.Errorf("got %v, %v", b.Inputs[0], b.Labels[0])
				}
			}
		})
	}
}
