// Command customloop is a custom training loop on plain tensors, without a model library: linear regression on two
// replicas, which synchronize in an all-reduce and in a merge call.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/lockstep-ml/lockstep/distribute"
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

func run(ctx context.Context, out io.Writer) error {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices:     []string{"CPU:0", "CPU:1"},
		LogicalCPUs: 2,
	})
	if err != nil {
		return err
	}
	defer s.Close()
	w, err := s.NewVariable(ctx, distribute.VariableConfig{Name: "w", Initial: tensor.Of([]float32{0, 0})})
	if err != nil {
		return err
	}
	// Each replica's half of the batch: inputs, and labels y = x0 + 3 x1.
	x := distribute.NewPerReplica(tensor.Of([]float32{1, 1, 1, -1}, 2, 2), tensor.Of([]float32{-1, 1, -1, -1}, 2, 2))
	y := distribute.NewPerReplica(tensor.Of([]float32{4, -2}), tensor.Of([]float32{2, -4}))

	step := func(ctx context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
		now, err := w.Read(r)
		if err != nil {
			return nil, err
		}
		loss, gradient := squaredError(now, args[0].(*tensor.Tensor), args[1].(*tensor.Tensor))
		// In replica context: every replica contributes its loss, and gets the sum.
		total, err := r.AllReduce(ctx, distribute.Sum, loss)
		if err != nil {
			return nil, err
		}
		// In cross-replica context, once for all replicas: sum the gradients, and update every replica's component.
		_, err = r.MergeCall(ctx, func(ctx context.Context, c *distribute.CrossReplica,
			args ...distribute.Value,
		) (distribute.Value, error) {
			sum, err := c.ReduceTo(ctx, distribute.Sum, args[0], w)
			if err != nil {
				return nil, err
			}
			return c.Update(ctx, w, descend, sum)
		}, gradient)
		return total, err
	}
	for range 3 {
		losses, err := distribute.Run(ctx, s, step, x, y)
		if err != nil {
			return err
		}
		// Both replicas return the same sum, in separate tensors.
		fmt.Fprintf(out, "loss: %v\n", losses)
	}
	_, err = fmt.Fprintln(out, w)
	return err
}

// squaredError returns a replica's share of the mean squared error of x·w against y, and its gradient.
func squaredError(w, x, y *tensor.Tensor) (loss, gradient *tensor.Tensor) {
	weights, inputs := tensor.Data[float32](w), tensor.Data[float32](x)
	var sum float32
	g := make([]float32, len(weights))
	for i, label := range tensor.Data[float32](y) {
		row := inputs[i*len(weights) : (i+1)*len(weights)]
		d := -label
		for j, v := range row {
			d += v * weights[j]
		}
		sum += d * d / examples
		for j, v := range row {
			g[j] += 2 * d * v / examples
		}
	}
	return tensor.Scalar(sum), tensor.Of(g)
}

// descend is the optimizer: component -= learningRate * gradient.
func descend(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
	gradient := tensor.Data[float32](args[0].(*tensor.Tensor))
	step := make([]float32, len(gradient))
	for i, g := range gradient {
		step[i] = learningRate * g
	}
	return nil, c.AssignSub(tensor.Of(step))
}
