// Command customloop is a custom training loop: linear regression on two replicas. GoMLX computes the gradients of a
// loss, and the replicas synchronize in an all-reduce and in a merge call.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/gomlx/gomlx/core/graph"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/engine/gomlx"
	"github.com/lockstep-ml/lockstep/tensor"
)

func main() {
	if err := run(context.Background(), os.Stdout); err != nil {
		log.Fatal(err)
	}
}

const (
	examples     = 4 // of the global batch
	learningRate = 0.25
)

// batch is a replica's half of the global batch.
type batch struct{ x, y *tensor.Tensor }

func run(ctx context.Context, out io.Writer) error {
	e, err := gomlx.OpenGo(gomlx.GoOptions{LogicalCPUs: 2})
	if err != nil {
		return err
	}
	defer e.Close()
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{Engine: e})
	if err != nil {
		return err
	}
	defer s.Close()
	gradient, err := gomlx.NewGradient(e, squaredError)
	if err != nil {
		return err
	}
	defer gradient.Close()
	devices := s.EngineDevices()
	w, err := s.NewVariable(ctx, distribute.VariableConfig{Name: "w", Initial: tensor.Of([]float32{0, 0})})
	if err != nil {
		return err
	}
	// Each replica's inputs, and labels y = x0 + 3 x1.
	data := []batch{
		{x: tensor.Of([]float32{1, 1, 1, -1}, 2, 2), y: tensor.Of([]float32{4, -2})},
		{x: tensor.Of([]float32{-1, 1, -1, -1}, 2, 2), y: tensor.Of([]float32{2, -4})},
	}

	step := func(ctx context.Context, r *distribute.Replica, b batch) (*tensor.Tensor, error) {
		now, err := w.Read(r)
		if err != nil {
			return nil, err
		}
		loss, gradients, err := gradient.Of(ctx, devices[r.LocalID()], []*tensor.Tensor{now}, []*tensor.Tensor{b.x, b.y})
		if err != nil {
			return nil, err
		}
		// In replica context: every replica contributes its loss, and gets the sum.
		total, err := distribute.AllReduce(ctx, r, distribute.Sum, loss)
		if err != nil {
			return nil, err
		}
		// In cross-replica context, once for all replicas: sum the gradients, and update every replica's component.
		_, err = distribute.MergeCall(ctx, r, func(ctx context.Context, c *distribute.CrossReplica,
			gradients distribute.PerReplica[*tensor.Tensor],
		) (struct{}, error) {
			sum, err := distribute.Reduce(ctx, s, distribute.Sum, gradients, distribute.ReduceOptions{})
			if err != nil {
				return struct{}{}, err
			}
			return struct{}{}, w.Update(c, func(_ context.Context, component *distribute.Component) error {
				return w.AssignSub(component, descent(sum))
			})
		}, gradients[0])
		return total, err
	}
	for range 3 {
		losses, err := distribute.Run(ctx, s, step, data)
		if err != nil {
			return err
		}
		// Both replicas return the same sum, in separate tensors.
		fmt.Fprintf(out, "loss: %v\n", losses)
	}
	_, err = fmt.Fprintln(out, w)
	return err
}

// squaredError is a replica's share of the mean squared error of x·w against y.
func squaredError(parameters, inputs []*graph.Node) *graph.Node {
	w, x, y := parameters[0], inputs[0], inputs[1]
	d := graph.Sub(graph.ReduceSum(graph.Mul(x, graph.InsertAxes(w, 0)), 1), y)
	return graph.DivScalar(graph.ReduceAllSum(graph.Square(d)), examples)
}

// descent is the optimizer: what it subtracts from the weights, learningRate * gradient.
func descent(gradient *tensor.Tensor) *tensor.Tensor {
	step := make([]float32, gradient.Len())
	for i, g := range tensor.Data[float32](gradient) {
		step[i] = learningRate * g
	}
	return tensor.Of(step)
}
