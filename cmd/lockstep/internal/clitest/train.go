package clitest

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// Train runs lockstep train and returns its summary and weights.
func Train(t *testing.T, args ...string) (summary map[string]any, weights []checkpoint.Tensor) {
	t.Helper()
	return TrainInto(t, t.TempDir(), args...)
}

// TrainInto runs lockstep train with --out, and returns its summary and weights.
func TrainInto(t *testing.T, dir string, args ...string) (summary map[string]any, weights []checkpoint.Tensor) {
	t.Helper()
	root := Commands()
	var out strings.Builder
	root.SetOut(&out)
	root.SetArgs(append([]string{"train", "--progress", "none", "--out", dir}, args...))
	if err := root.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &summary); err != nil {
		t.Fatal(err)
	}
	if weights, _, err = checkpoint.Load(filepath.Join(dir, "weights.safetensors")); err != nil {
		t.Fatal(err)
	}
	return summary, weights
}

// TinyTable returns flags that train a small perceptron on a table of 90 rows. With the digits, most of the time of a
// short training is the evaluation of their 1,797 test images.
func TinyTable(t *testing.T) []string {
	t.Helper()
	rows := []string{"a,b,c,d,label"}
	random := rand.New(rand.NewPCG(1, 2))
	for row := range 90 {
		class := row % 3
		rows = append(rows, fmt.Sprintf("%.2f,%.2f,%.2f,%.2f,%d", float64(class)+random.NormFloat64(),
			random.NormFloat64()-float64(class), random.NormFloat64(), random.NormFloat64(), class))
	}
	file := filepath.Join(t.TempDir(), "table.csv")
	if err := os.WriteFile(file, []byte(strings.Join(rows, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--data", "csv", "--data-file", file, "--label", "label", "--model", "mlp", "--hidden", "64,32"}
}
