package gomlx_test

import (
	"context"
	"fmt"
	"log"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/layers/activation"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

// A model is a function of GoMLX with a loss, an optimizer and metrics. Package train compiles it; here it is compiled
// by hand, for one replica and batches of 32.
func ExampleModel() {
	m := &gomlx.Model{
		Forward: func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
			x := activation.Relu(layers.Dense(s.In("hidden"), inputs[0], true, 64))
			return []*graph.Node{layers.Dense(s.In("readout"), x, true, 10)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().Done(),
		Metrics:   []gomlx.Metric{gomlx.SparseCategoricalAccuracy()},
	}
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	program, err := m.Compile(context.Background(), e, engine.Spec{
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{784}}}, Labels: []engine.Feature{{DType: tensor.Int32}},
		Rows: 32, Devices: e.Devices(),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer program.Close()
	for _, v := range program.Parameters() {
		fmt.Println(v.Name, v.DType, v.Shape)
	}
	// Output:
	// /hidden/dense/biases float32 [64]
	// /hidden/dense/weights float32 [784 64]
	// /readout/dense/biases float32 [10]
	// /readout/dense/weights float32 [64 10]
}
