package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/examples/internal/exampletest"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

func TestProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "flowers.safetensors")
	out := exampletest.Run(t, "-out", file)
	if !strings.HasSuffix(out, "flower 0 is of kind 0\nflower 1 is of kind 2\n") ||
		!strings.Contains(out, "val_accuracy") {
		t.Errorf("got\n%s", out)
	}
	weights, metadata, err := checkpoint.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if len(weights) != 4 || metadata["data"] != "flowers.csv" {
		t.Errorf("the file has %d tensors and the metadata %v, want weights and biases of 2 layers, from flowers.csv",
			len(weights), metadata)
	}
}
