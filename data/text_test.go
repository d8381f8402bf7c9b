package data_test

import (
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

// words is a tokenizer whose tokens are the words of a list.
type words []string

func (w words) Encode(text string) ([]int32, error) {
	var tokens []int32
	for _, word := range strings.Fields(text) {
		for i, known := range w {
			if word == known {
				tokens = append(tokens, int32(i))
			}
		}
	}
	return tokens, nil
}

func (w words) Decode(tokens []int32) string {
	var text []string
	for _, t := range tokens {
		text = append(text, w[t])
	}
	return strings.Join(text, " ")
}

func (w words) Size() int { return len(w) }

func TestLoadText(t *testing.T) {
	first, second := writeFile(t, "1.txt", []byte("to be or ")), writeFile(t, "2.txt.gz", zipped([]byte("not to be")))
	got, err := data.LoadText(data.Bytes{}, first, second)
	if err != nil || !got.Equal(tensor.Of([]byte("to be or not to be"))) {
		t.Errorf("bytes: got %v, %v", got, err)
	}
	list := words{"be", "not", "or", "to"}
	got, err = data.LoadText(list, first, second)
	if err != nil || !got.Equal(tensor.Of([]uint16{3, 0, 2, 1, 3, 0})) {
		t.Errorf("words: got %v, %v", got, err)
	}
	long := append(make(words, 70000), "be")
	if got, err = data.LoadText(long, first); err != nil || !got.Equal(tensor.Of([]int32{70000})) {
		t.Errorf("a large vocabulary: got %v, %v", got, err)
	}
	if _, err = data.LoadText(data.Bytes{}, filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a missing file: no error")
	}
	if _, err = data.LoadText(data.Bytes{}); err == nil {
		t.Error("no files: no error")
	}
	if text := (data.Bytes{}).Decode([]int32{'a', 300, -1, 'b'}); text != "ab" {
		t.Errorf("decoded %q", text)
	}
}

func vectorOf[T uint8 | uint16 | int32 | int64](numbers []int64) *tensor.Tensor {
	out := make([]T, len(numbers))
	for i, x := range numbers {
		out[i] = T(x)
	}
	return tensor.Of(out)
}

// TestSequences compares sequences of every dtype with the tokens, one by one.
func TestSequences(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 40).Draw(t, "tokens")
		length := rapid.IntRange(1, min(12, n-1)).Draw(t, "length")
		tokens := make([]int64, n)
		for i := range tokens {
			tokens[i] = rand.Int64N(256)
		}
		all := rapid.SampledFrom([]func([]int64) *tensor.Tensor{
			vectorOf[uint8], vectorOf[uint16], vectorOf[int32], vectorOf[int64],
		}).Draw(t, "dtype")(tokens)
		p, err := data.Sequences(all, length)
		if err != nil {
			t.Fatal(err)
		}
		if p.Len() != (n-1)/length {
			t.Fatalf("%d sequences of %d from %d tokens", p.Len(), length, n)
		}
		i := 0
		for e, err := range p.Iter(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			input, label := tensor.Data[int32](e.(data.Batch).Inputs[0]), tensor.Data[int32](e.(data.Batch).Labels[0])
			if len(input) != length || len(label) != length {
				t.Fatalf("sequence %d has %d tokens and %d labels", i, len(input), len(label))
			}
			for k := range length {
				if int64(input[k]) != tokens[i*length+k] || int64(label[k]) != tokens[i*length+k+1] {
					t.Fatalf("sequence %d, token %d: got %d and %d", i, k, input[k], label[k])
				}
			}
			i++
		}
	})
	tokens := tensor.Of([]byte("to be or not to be"))
	p, err := data.Sequences(tokens, 4)
	if err != nil {
		t.Fatal(err)
	}
	got := collect(t, p.Shuffle(1).Batch(3), 0)
	var rows []*tensor.Tensor
	for _, e := range collect(t, p.Shuffle(1), 0) {
		rows = append(rows, e.(data.Batch).Labels[0])
	}
	for i, row := range rows {
		if label := got[i/3].(data.Batch).Labels[0].Rows(i%3, i%3+1).Reshape(4); !label.Equal(row) {
			t.Errorf("row %d of the batches is %v, the element %v", i, label, row)
		}
	}
	other, err := data.Sequences(tensor.Of([]byte("to be or not to bE")), 4)
	if err != nil || data.Fingerprint(p) == 0 || data.Fingerprint(p) == data.Fingerprint(other) {
		t.Errorf("fingerprints %x and %x, %v", data.Fingerprint(p), data.Fingerprint(other), err)
	}
	for want, tokens := range map[string]*tensor.Tensor{
		"3 tokens are too few":     tensor.New(tensor.Uint8, 3),
		"want a vector":            tensor.New(tensor.Uint8, 3, 3),
		"want a vector of":         tensor.New(tensor.Float32, 9),
		"token 1 is 4.294967296e+": tensor.Of([]int64{1, 1 << 32, 3, 4, 5}),
	} {
		if _, err := data.Sequences(tokens, 3); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
	if _, err := data.Sequences(tensor.New(tensor.Uint8, 3), 0); err == nil {
		t.Error("length 0: no error")
	}
}
