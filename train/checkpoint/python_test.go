package checkpoint

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// readInPython prints what Python's safetensors finds in a file, by numpy: a list of name, type, shape and bytes.
const readInPython = `
import json, sys
from safetensors.numpy import load_file
tensors = load_file(sys.argv[1])
print(json.dumps([[name, str(t.dtype), list(t.shape), t.tobytes().hex()] for name, t in sorted(tensors.items())]))
`

// python returns a Python with safetensors, or skips the test. LOCKSTEP_PYTHON names one; .ci/run makes one.
func python(t *testing.T) string {
	t.Helper()
	name := os.Getenv("LOCKSTEP_PYTHON")
	if name == "" {
		name = "python3"
	}
	if out, err := exec.Command(name, "-c", "import safetensors.numpy").CombinedOutput(); err != nil {
		t.Skipf("no Python with safetensors and numpy here (LOCKSTEP_PYTHON may name one): %v %s", err, out)
	}
	return name
}

// TestPython checks that Python's safetensors reads our files, to the bit.
func TestPython(t *testing.T) {
	program := python(t)
	dtypes := map[string]string{
		"F32": "float32", "F64": "float64", "I64": "int64", "BOOL": "bool", "F16": "float16",
		"U8": "uint8",
	}
	var tensors []Tensor
	for _, v := range sample() { // numpy has no bfloat16
		if _, ok := dtypes[names[v.Value.DType()]]; ok {
			tensors = append(tensors, v)
		}
	}
	if len(tensors) < 8 {
		t.Fatalf("%d tensors", len(tensors))
	}
	dir := t.TempDir()
	export := filepath.Join(dir, "export.safetensors")
	if err := Save(export, tensors, map[string]string{"seed": "1"}); err != nil {
		t.Fatal(err)
	}
	m := open(t, Config{Dir: dir})
	save(t, m, 7)
	for path, want := range map[string][]Tensor{
		export: tensors,
		filepath.Join(dir, "snapshot-000001-step-7", tensorsFile): contents(7).Tensors,
	} {
		out, err := exec.Command(program, "-c", readInPython, path).Output()
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		var got [][4]any
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if len(got) != len(want) {
			t.Errorf("%s: it finds %d tensors, want %d", path, len(got), len(want))
		}
		for _, w := range want {
			shape := []any{}
			for _, d := range w.Value.Shape() {
				shape = append(shape, float64(d))
			}
			found := slices.ContainsFunc(got, func(g [4]any) bool {
				return g[0] == w.Name && g[1] == dtypes[names[w.Value.DType()]] && slices.Equal(g[2].([]any), shape) &&
					g[3] == hex.EncodeToString(w.Value.Memory().HostBytes())
			})
			if !found {
				t.Errorf("%s: it does not find %s %v", path, w.Name, w.Value)
			}
		}
	}
}
