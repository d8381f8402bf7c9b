package data_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"testing"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/tensor"
)

const flowers = `length,width,kind
5.1,3.5,0
7.0,3.2,1
6.3,3.3,2
4.9,3.0,0
6.4,3.2,1
5.8,2.7,2
`

func Example() {
	frame, err := data.ReadCSV(strings.NewReader(flowers), data.CSV{}) // or data.LoadCSV(file, …)
	if err != nil {
		log.Fatal(err)
	}
	inputs, _ := frame.Floats("length", "width") // float32 [6, 2]
	labels, _ := frame.Ints("kind")              // int32 [6]
	all := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{inputs}, Labels: []*tensor.Tensor{labels}})
	kept, held := all.Split(1.0/3, 1) // for training, for validation
	batches := kept.Shuffle(1).Batch(3).Prefetch(2)
	fmt.Println(batches.Len(), "batches,", held.Len(), "examples held back")
	for epoch := range 2 {
		for e, err := range batches.Iter(data.WithEpoch(context.Background(), epoch)) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println("epoch", epoch, "kinds", e.(data.Batch).Labels[0].Format())
		}
	}
	// Output:
	// 2 batches, 2 examples held back
	// epoch 0 kinds [1 1 2]
	// epoch 0 kinds [2]
	// epoch 1 kinds [2 2 1]
	// epoch 1 kinds [1]
}

func ExamplePipeline_MapRandom() {
	image := tensor.From([]float32{0, 0, 0, 0, 1, 0, 0, 0, 0}, 1, 3, 3, 1)
	moved := data.FromTensors(image).MapRandom(1, data.RandomShift(1))
	for epoch := range 3 {
		for e, err := range moved.Iter(data.WithEpoch(context.Background(), epoch)) {
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(e.(*tensor.Tensor).Reshape(9).Format())
		}
	}
	// Output:
	// [0. 0. 0. 0. 0. 0. 0. 1. 0.]
	// [0. 0. 0. 1. 0. 0. 0. 0. 0.]
	// [0. 0. 0. 1. 0. 0. 0. 0. 0.]
}

// TestPageShowsExample checks that docs/data.md shows the code of Example.
func TestPageShowsExample(t *testing.T) {
	source, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../docs/data.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(source), "func Example() {\n")
	code, _, found := strings.Cut(code, "\t// Output:")
	code = strings.ReplaceAll("\n"+code, "\n\t", "\n")
	if !found || !strings.Contains(string(page), "```go"+code+"```") {
		t.Errorf("docs/data.md lacks:\n%s", code)
	}
}
