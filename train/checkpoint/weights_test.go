package checkpoint

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/tensor"
)

// shard writes a model in two files and their index, which places each tensor in the file of its key.
func shard(t *testing.T, dir string, index map[string]string) string {
	t.Helper()
	files := map[string][]Tensor{
		"model-00001-of-00002.safetensors": sample()[:4],
		"model-00002-of-00002.safetensors": sample()[4:],
	}
	if index == nil {
		index = map[string]string{}
		for file, list := range files {
			for _, x := range list {
				index[x.Name] = file
			}
		}
	}
	for file, list := range files {
		if err := Save(filepath.Join(dir, file), list, map[string]string{"format": "pt"}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": index})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model.safetensors.index.json")
	if err := os.WriteFile(path, text, 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSharded(t *testing.T) {
	dir := t.TempDir()
	path := shard(t, dir, nil)
	for _, p := range []string{path, dir} {
		got, metadata, err := LoadWeights(p)
		if err != nil || !maps.Equal(metadata, map[string]string{"format": "pt"}) {
			t.Fatalf("%s: %v, metadata %v", p, err, metadata)
		}
		if len(got) != len(sample()) || !slices.IsSorted(namesOf(got)) {
			t.Errorf("%s: got %v", p, namesOf(got))
		}
		for _, want := range sample() {
			if i := slices.IndexFunc(got, func(g Tensor) bool { return g.Name == want.Name }); !got[i].Value.Equal(want.Value) {
				t.Errorf("%s: %s is %v, want %v", p, want.Name, got[i].Value, want.Value)
			}
		}
	}
	first, second := "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
	for want, index := range map[string]map[string]string{
		"places in \"\"":       {"step": first, "half": second},
		"want a file in the":   {"step": "../" + first},
		"no such file":         {"step": "absent.safetensors"},
		"no weight_map":        {},
		"lack 1 of its tensor": nil,
	} {
		dir := t.TempDir()
		if index == nil {
			index = map[string]string{"more": first}
			for i, x := range sample() {
				index[x.Name] = []string{first, second}[min(1, i/4)]
			}
		}
		if _, _, err := LoadWeights(shard(t, dir, index)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

// TestWeightsIn checks what is found in a folder, and that formats that cannot be read are refused.
func TestWeightsIn(t *testing.T) {
	dir := t.TempDir()
	if _, _, err := LoadWeights(dir); err == nil || !strings.Contains(err.Error(), "has no weights") {
		t.Errorf("empty folder: %v", err)
	}
	if _, _, err := LoadWeights(filepath.Join(dir, "absent")); err == nil || !strings.Contains(err.Error(), "absent") {
		t.Errorf("absent: %v", err)
	}
	for _, name := range []string{"a.safetensors", "b.safetensors"} {
		if err := Save(filepath.Join(dir, name), sample(), nil); err != nil {
			t.Fatal(err)
		}
		got, _, err := LoadWeights(dir)
		switch {
		case name == "a.safetensors" && (err != nil || len(got) != len(sample())):
			t.Errorf("one file: %v", err)
		case name == "b.safetensors" && (err == nil || !strings.Contains(err.Error(), "a.safetensors, b.safetensors")):
			t.Errorf("two files: %v", err)
		}
	}
	for name, want := range map[string]string{
		"model.weights.h5": "model.weights", "pytorch_model.bin": "safetensors.torch", "model.keras": "safetensors.numpy",
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("x"), 0o666); err != nil {
			t.Fatal(err)
		}
		if _, _, err := LoadWeights(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q in it", name, err, want)
		}
	}
	snapshots := t.TempDir()
	m := open(t, Config{Dir: snapshots})
	save(t, m, 7)
	got, _, err := LoadWeights(filepath.Join(snapshots, "snapshot-000001-step-7"))
	if err != nil || len(got) != len(contents(7).Tensors) {
		t.Errorf("snapshot: %d tensors, %v", len(got), err)
	}
}

func TestNameMap(t *testing.T) {
	m, err := ParseNameMap(`
# a comment
layers.{i}.fc.weight   /layer_{i}/dense/weights  transpose
layers.{i}.{what}      /layer_{i}/{what}         reshape
{rest...}.count        -
norm$x                 /norm$1
`)
	if err != nil {
		t.Fatal(err)
	}
	x := tensor.Of([]int8{1, 2, 3, 4, 5, 6}, 2, 3)
	in := []Tensor{
		{"layers.0.fc.weight", x},
		{"layers.10.bias", tensor.Of([]int8{1, 2, 3, 4}, 4)},
		{"layers.1.count", x},
		{"a.b.c.count", x},
		{"norm$x", x},
		{"kept", x},
	}
	got, err := m.Apply(in, map[string][]int{"/layer_10/bias": {2, 2}})
	if err != nil {
		t.Fatal(err)
	}
	want := []Tensor{
		{"/layer_0/dense/weights", tensor.Of([]int8{1, 4, 2, 5, 3, 6}, 3, 2)},
		{"/layer_1/count", x},
		{"/layer_10/bias", tensor.Of([]int8{1, 2, 3, 4}, 2, 2)},
		{"/norm$1", x},
		{"kept", x},
	}
	slices.SortFunc(want, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	if !slices.Equal(namesOf(got), namesOf(want)) {
		t.Fatalf("got %q, want %q", namesOf(got), namesOf(want))
	}
	for i := range want {
		if !got[i].Value.Equal(want[i].Value) {
			t.Errorf("%s: got %v, want %v", want[i].Name, got[i].Value, want[i].Value)
		}
	}
	for text, want := range map[string]string{
		"a":                          "line 1",
		"a b turn":                   "neither transpose nor reshape",
		"a.{i} b.{j}":                "which a.{i} has not",
		"a.{i}.{i} b":                "twice",
		"nothing b":                  "no tensor of this name",
		"kept b transpose\nx y":      "no tensor of this name",
		"layers.10.bias b transpose": "want a matrix",
		"kept norm$x":                "two tensors get the name",
		"kept b reshape":             "cannot be reshaped",
	} {
		m, err := ParseNameMap(text)
		if err == nil {
			_, err = m.Apply(in, map[string][]int{"b": {5}})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q in it", text, err, want)
		}
	}
	var none *NameMap
	if got, err := none.Apply(in, nil); err != nil || len(got) != len(in) {
		t.Errorf("no map: %v", err)
	}
}
