package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/ml/model"
	"github.com/gomlx/gomlx/ml/train/optimizer"

	"github.com/lockstep-ml/lockstep/engine"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/engine/gomlx/layer"
	"github.com/lockstep-ml/lockstep/tensor"
)

// A training loop without package train: two replicas of one process, whose gradients are added up by a plain loop.
// The loss is the mean over the examples of both replicas, so the gradients are not divided by the number of replicas.
func ExampleProgram() {
	ctx := context.Background()
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		log.Fatal(err)
	}
	defer e.Close()
	m := &gomlx.Model{
		Forward: func(s *model.Scope, inputs []*graph.Node) []*graph.Node {
			return []*graph.Node{layer.Dense(s.In("readout"), inputs[0], 2)}
		},
		Loss:      gomlx.SparseCategoricalCrossEntropyLogits,
		Optimizer: optimizer.Adam().LearningRate(0.1).Done(),
	}
	const rows, replicas = 4, 2
	p, err := m.Compile(ctx, e, engine.Spec{
		Rows: rows, Devices: e.Devices(), Seed: 1,
		Inputs: []engine.Feature{{DType: tensor.Float32, Shape: []int{1}}},
		Labels: []engine.Feature{{DType: tensor.Int32}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()

	examples := []engine.Batch{ // of each replica: numbers, and whether they are positive
		{
			Inputs:  []*tensor.Tensor{tensor.From([]float32{-1, 2, -3, 4}, rows, 1)},
			Labels:  []*tensor.Tensor{tensor.From([]int32{0, 1, 0, 1}, rows)},
			Weights: []float32{1, 1, 1, 1},
		},
		{
			Inputs:  []*tensor.Tensor{tensor.From([]float32{3, -2, 1, -4}, rows, 1)},
			Labels:  []*tensor.Tensor{tensor.From([]int32{1, 0, 1, 0}, rows)},
			Weights: []float32{1, 1, 1, 1},
		},
	}
	step := func(number uint64) (loss float64, err error) {
		scalars, errs := make([]engine.Scalars, replicas), make([]error, replicas)
		var computing sync.WaitGroup
		for r, b := range examples {
			computing.Go(func() {
				micro := engine.Micro{Batch: b, WeightSum: rows * replicas, RNG: [3]uint64{number, uint64(r), 1}, Last: true}
				scalars[r], errs[r] = p.Gradients(ctx, r, micro, nil) // ready is not needed without overlap
			})
		}
		computing.Wait()
		if err := errors.Join(errs...); err != nil {
			return 0, err
		}
		for _, bucket := range p.Buckets() {
			for _, i := range bucket.Parameters {
				first, err := p.Gradient(0, i)
				if err != nil {
					return 0, err
				}
				second, err := p.Gradient(1, i)
				if err != nil {
					return 0, err
				}
				a, b := tensor.Data[float32](first), tensor.Data[float32](second)
				for j := range a {
					a[j] += b[j]
					b[j] = a[j]
				}
			}
		}
		for device := range replicas {
			for part := range p.Parts(device) {
				if err := p.Update(ctx, device, device, part, 1); err != nil {
					return 0, err
				}
			}
		}
		return scalars[0].Loss + scalars[1].Loss, nil
	}
	for i := range uint64(50) {
		loss, err := step(i)
		if err != nil {
			p.Discard()
			log.Fatal(err)
		}
		p.Commit()
		if i == 49 {
			fmt.Println("loss below 0.1 after 50 steps:", loss < 0.1)
		}
	}
	// Output: loss below 0.1 after 50 steps: true
}
