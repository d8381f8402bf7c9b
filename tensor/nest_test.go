package tensor_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/lockstep-ml/lockstep/tensor"
)

type pair struct {
	Loss any
	Rest []any
	note string
}

type typed struct{ Loss *tensor.Tensor }

func TestFlatten(t *testing.T) {
	one, two := tensor.Scalar(float32(1)), tensor.Scalar(float32(2))
	now := time.Now()
	for _, c := range []struct {
		name string
		nest any
		want []any
	}{
		{"nil", nil, []any{nil}},
		{"leaf", one, []any{one}},
		{"list", []any{one, 3, "x"}, []any{one, 3, "x"}},
		{"empty list", []any{}, nil},
		{"tuple in list", []any{tensor.Tuple{one, two}, one}, []any{one, two, one}},
		{"typed slice", []*tensor.Tensor{two, one}, []any{two, one}},
		{"map by sorted keys", map[string]any{"b": two, "a": one}, []any{one, two}},
		{"typed map", map[string]*tensor.Tensor{"b": two, "a": one}, []any{one, two}},
		{"struct", pair{Loss: one, Rest: []any{two}, note: "kept"}, []any{one, two}},
		{"numbers are one leaf", []any{[]float32{1, 2}}, []any{[]float32{1, 2}}},
		{"struct without exported fields", now, []any{now}},
		{"pointer to a struct", &typed{one}, nil},
	} {
		got := tensor.Flatten(c.nest)
		if c.want == nil && c.name == "pointer to a struct" {
			c.want = []any{c.nest}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestMapKeepsTypes(t *testing.T) {
	in := pair{Loss: 1, Rest: []any{tensor.Tuple{2}, map[string]any{"k": 3}}, note: "kept"}
	got, err := tensor.Map(in, func(leaf any) (any, error) { return leaf.(int) * 10, nil })
	if err != nil {
		t.Fatal(err)
	}
	want := pair{Loss: 10, Rest: []any{tensor.Tuple{20}, map[string]any{"k": 30}}, note: "kept"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %#v, want %#v", got, want)
	}
	same, err := tensor.Map([]*tensor.Tensor{nil}, func(leaf any) (any, error) { return leaf, nil })
	if _, ok := same.([]*tensor.Tensor); err != nil || !ok {
		t.Errorf("a typed slice became %T, %v", same, err)
	}
	other, err := tensor.Map([]*tensor.Tensor{nil}, func(any) (any, error) { return "text", nil })
	if _, ok := other.([]any); err != nil || !ok {
		t.Errorf("a typed slice of other results became %T, %v", other, err)
	}
	_, err = tensor.Map([]any{typed{}}, func(any) (any, error) { return "text", nil })
	if err == nil || !strings.Contains(err.Error(), "[0].Loss") || !strings.Contains(err.Error(), "cannot hold a string") {
		t.Errorf("a struct that cannot hold the result: got %v", err)
	}
}

func TestZipNamesWhatDiffers(t *testing.T) {
	for _, c := range []struct {
		name string
		a, b any
		path string
		text string
	}{
		{"lengths", []any{1, []any{1}}, []any{1, []any{1, 2}}, "[1]", "2 items against 1"},
		{"keys", map[string]any{"a": 1}, map[string]any{"b": 1}, "", `["b"] against ["a"]`},
		{"list and tuple", []any{[]any{1}}, []any{tensor.Tuple{1}}, "[0]", "tensor.Tuple against []interface {}"},
		{
			"leaf and container",
			map[string]any{"x": 1},
			map[string]any{"x": []any{1}},
			`["x"]`,
			"a container, against int, a leaf",
		},
		{"container and leaf", pair{Loss: []any{1}}, pair{Loss: 1}, ".Loss", "int against []interface {}"},
	} {
		_, err := tensor.Zip(func(string, []any) (any, error) { return nil, nil }, nil, c.a, c.b)
		var e *tensor.StructureError
		if !errors.As(err, &e) || e.Path != c.path || e.Nest != 1 || !strings.Contains(e.Error(), c.text) {
			t.Errorf("%s: got %v, want path %q and %q", c.name, err, c.path, c.text)
		}
	}
}

func TestZipStops(t *testing.T) {
	var paths []string
	stop := func(c any) bool { _, whole := c.([]*tensor.Tensor); return whole }
	_, err := tensor.Zip(func(path string, leaves []any) (any, error) {
		paths = append(paths, fmt.Sprintf("%s %T", path, leaves[1]))
		return nil, nil
	}, stop, []any{[]*tensor.Tensor{nil}, 1}, []any{[]*tensor.Tensor{nil, nil}, 2})
	if want := []string{"[0] []*tensor.Tensor", "[1] int"}; err != nil || !reflect.DeepEqual(paths, want) {
		t.Errorf("got %q, %v, want %q", paths, err, want)
	}
}

func TestPackCounts(t *testing.T) {
	for _, leaves := range [][]any{{1}, {1, 2, 3}} {
		if _, err := tensor.Pack([]any{nil, nil}, leaves); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprint(len(leaves))) {
			t.Errorf("%d leaves for 2: got %v", len(leaves), err)
		}
	}
	if _, err := tensor.Pack(typed{}, nil); err == nil || !strings.Contains(err.Error(), "0 leaves given") {
		t.Errorf("no leaves for a struct: got %v", err)
	}
}

// nests draws random nests of ints.
func nests() *rapid.Generator[any] {
	return rapid.Custom(func(t *rapid.T) any { return drawNest(t, 3) })
}

func drawNest(t *rapid.T, depth int) any {
	kind := rapid.IntRange(0, 3).Draw(t, "kind")
	if depth == 0 {
		kind = 0
	}
	n := rapid.IntRange(0, 3).Draw(t, "n")
	items := make([]any, n)
	if kind != 0 {
		for i := range items {
			items[i] = drawNest(t, depth-1)
		}
	}
	switch kind {
	case 1:
		return items
	case 2:
		return tensor.Tuple(items)
	case 3:
		m := map[string]any{}
		for i, item := range items {
			m[string(rune('a'+i))] = item
		}
		return m
	}
	return rapid.Int().Draw(t, "leaf")
}

func TestPackIsTheInverseOfFlatten(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nest := nests().Draw(t, "nest")
		leaves := tensor.Flatten(nest)
		back, err := tensor.Pack(nest, leaves)
		if err != nil || !reflect.DeepEqual(back, nest) {
			t.Fatalf("got %#v, %v, want %#v", back, err, nest)
		}
		changed := make([]any, len(leaves))
		for i := range changed {
			changed[i] = fmt.Sprint("leaf ", i)
		}
		packed, err := tensor.Pack(nest, changed)
		if err != nil || len(changed) > 0 && !reflect.DeepEqual(tensor.Flatten(packed), changed) {
			t.Fatalf("got %#v, %v, want the leaves %v", packed, err, changed)
		}
	})
}
