package models_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/models"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/train"
)

// A model of Hugging Face predicts the next token. Its folder is one that save_pretrained has written.
func ExampleLoadCausalLM() {
	const folder = "testdata/transformers/llama"
	m, err := models.LoadCausalLM(folder + "/config.json")
	if err != nil {
		log.Fatal(err)
	}
	weights, err := train.LoadWeights(folder)
	if err != nil {
		log.Fatal(err)
	}
	e, err := gomlx.OpenGo(gomlx.GoOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	p, err := train.NewPredictor(context.Background(), &gomlx.Model{Forward: m.Forward}, train.PredictorConfig{
		Engine: e, Inputs: []engine.Feature{{DType: tensor.Int32, Shape: []int{4}}}, Batch: 1, Weights: weights,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	logits, err := p.Predict(context.Background(), tensor.Of([]int32{7, 11, 13, 17}, 1, 4))
	if err != nil {
		log.Fatal(err)
	}
	last := tensor.Data[float32](logits[0])[3*m.Vocabulary:]
	best := 0
	for i, x := range last {
		if x > last[best] {
			best = i
		}
	}
	fmt.Println("logits:", logits[0].Shape(), "next token:", best)
	// Output:
	// logits: [1 4 53] next token: 30
}
