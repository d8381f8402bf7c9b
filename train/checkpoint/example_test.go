package checkpoint_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train/checkpoint"
)

// A safetensors file is written, whole or not at all, and read again.
func ExampleSave() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "weights.safetensors")
	weights := []checkpoint.Tensor{{Name: "/dense/weights", Value: tensor.From([]float32{1, 2, 3, 4}, 2, 2)}}
	if err := checkpoint.Save(file, weights, map[string]string{"epoch": "7"}); err != nil {
		log.Fatal(err)
	}
	read, metadata, err := checkpoint.Load(file)
	if err != nil {
		log.Fatal(err)
	}
	for _, t := range read {
		fmt.Println(t.Name, t.Value.Shape(), tensor.Data[float32](t.Value))
	}
	fmt.Println(metadata)
	// Output:
	// /dense/weights [2 2] [1 2 3 4]
	// map[epoch:7]
}
