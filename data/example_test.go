package data_test

import (
	"context"
	"fmt"
	"image"
	"image/png"
	"log"
	"os"
	"path/filepath"
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
	all, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{inputs}, Labels: []*tensor.Tensor{labels}})
	if err != nil {
		log.Fatal(err)
	}
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
	img := tensor.From([]float32{0, 0, 0, 0, 1, 0, 0, 0, 0}, 1, 3, 3, 1)
	images, err := data.FromTensors(img)
	if err != nil {
		log.Fatal(err)
	}
	moved := images.MapRandom(1, data.RandomShift(1))
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

func ExampleSequences() {
	tokens := tensor.Of([]byte("to be or not to be")) // LoadText returns such a vector
	sequences, err := data.Sequences(tokens, 8)
	if err != nil {
		log.Fatal(err)
	}
	for e, err := range sequences.Iter(context.Background()) {
		if err != nil {
			log.Fatal(err)
		}
		b := e.(data.Batch)
		input, label := tensor.Data[int32](b.Inputs[0]), tensor.Data[int32](b.Labels[0])
		fmt.Printf("%q is followed by %q\n", data.Bytes{}.Decode(input), data.Bytes{}.Decode(label))
	}
	// Output:
	// "to be or" is followed by "o be or "
	// " not to " is followed by "not to b"
}

func ExampleImageFolder() {
	dir, err := os.MkdirTemp("", "pets") // a folder with one black and one white image
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for class, level := range map[string]uint8{"cat": 0, "dog": 255} {
		if err := os.Mkdir(filepath.Join(dir, class), 0o777); err != nil {
			log.Fatal(err)
		}
		f, err := os.Create(filepath.Join(dir, class, "1.png"))
		if err != nil {
			log.Fatal(err)
		}
		if err := png.Encode(f, &image.Gray{Pix: []uint8{level}, Stride: 1, Rect: image.Rect(0, 0, 1, 1)}); err != nil {
			log.Fatal(err)
		}
		f.Close()
	}
	pets, err := data.ImageFolder(dir, data.ImageOptions{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(pets.Classes, pets.Shape)
	for e, err := range pets.Images.Batch(2).Iter(context.Background()) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.(data.Batch).Labels[0].Format(), tensor.Data[float32](e.(data.Batch).Inputs[0]))
	}
	// Output:
	// [cat dog] [1 1 3]
	// [0 1] [0 0 0 1 1 1]
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
