package data_test

import (
	"context"
	"iter"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestHash checks that equal datasets have one hash, and that each different one has another.
func TestHash(t *testing.T) {
	batch := func(weights *tensor.Tensor, x ...float32) data.Batch {
		return data.Batch{
			Inputs: []*tensor.Tensor{tensor.Of(x, len(x))},
			Labels: []*tensor.Tensor{tensor.New(tensor.Int32, len(x))}, Weights: weights,
		}
	}
	of := func(elements ...data.Element) func() data.Dataset {
		return func() data.Dataset { return given(elements...) }
	}
	seen := map[string]string{}
	for name, make := range map[string]func() data.Dataset{
		"empty":       of(),
		"one":         of(batch(nil, 1, 2)),
		"other value": of(batch(nil, 1, 3)),
		"other shape": of(data.Batch{
			Inputs: []*tensor.Tensor{tensor.Of([]float32{1, 2}, 2, 1)},
			Labels: []*tensor.Tensor{tensor.New(tensor.Int32, 2)},
		}),
		"other dtype": of(data.Batch{
			Inputs: []*tensor.Tensor{tensor.Of([]float32{1, 2}, 2)},
			Labels: []*tensor.Tensor{tensor.New(tensor.Uint32, 2)},
		}),
		"weights":  of(batch(tensor.Of([]float32{1, 1}, 2), 1, 2)),
		"two":      of(batch(nil, 1, 2), batch(nil, 1, 2)),
		"in order": of(batch(nil, 1), batch(nil, 2)),
		"turned":   of(batch(nil, 2), batch(nil, 1)),
		"strings":  of(tensor.Strings([]string{"ab", "c"}, 2)),
		"shorter":  of(tensor.Strings([]string{"a", "bc"}, 2)),
	} {
		hash := hashOf(t, make())
		if again := hashOf(t, make()); again != hash || len(hash) != 64 {
			t.Errorf("%s: %s, then %s", name, hash, again)
		}
		if other, ok := seen[hash]; ok {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[hash] = name
	}
	if _, err := data.Hash(t.Context(), given(3)); err == nil {
		t.Error("a number was hashed")
	}
	if _, err := data.Hash(t.Context(), data.Lines("absent")); err == nil {
		t.Error("a file that is not there was hashed")
	}
}

func given(elements ...data.Element) data.Dataset {
	return data.FromSeq(len(elements), func(context.Context) iter.Seq2[data.Element, error] {
		return func(yield func(data.Element, error) bool) {
			for _, e := range elements {
				if !yield(e, nil) {
					return
				}
			}
		}
	})
}

func hashOf(t *testing.T, ds data.Dataset) string {
	t.Helper()
	hash, err := data.Hash(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	return hash
}
