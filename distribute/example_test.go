package distribute_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/distribute/device"
	"github.com/lockstep-ml/lockstep/tensor"
)

// twoReplicas returns a strategy over two logical CPU devices.
func twoReplicas() *distribute.Strategy {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices:     []string{"CPU:0", "CPU:1"},
		LogicalCPUs: 2,
	})
	if err != nil {
		log.Fatal(err)
	}
	return s
}

// Each replica gets its part of the input, a value of the user's type, and returns one.
func ExampleRun() {
	s := twoReplicas()
	defer s.Close()

	type loss struct{ Mean float64 }
	losses, err := distribute.Run(context.Background(), s,
		func(_ context.Context, _ *distribute.Replica, batch []float64) (loss, error) {
			sum := 0.0
			for _, x := range batch {
				sum += x
			}
			return loss{sum / float64(len(batch))}, nil
		}, [][]float64{{1, 2, 3}, {4, 5}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(losses[0], losses[1])
	// Output: {2} {4.5}
}

// Every replica gets the sum of all replicas' values: of numbers, tensors, and structs of tensors.
func ExampleAllReduce() {
	s := twoReplicas()
	defer s.Close()

	type gradients struct{ Kernel, Bias *tensor.Tensor }
	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, mine float32) (gradients, error) {
			total, err := distribute.AllReduce(ctx, r, distribute.Sum, mine)
			if err != nil {
				return gradients{}, err
			}
			return distribute.AllReduce(ctx, r, distribute.Mean,
				gradients{tensor.From([]float32{mine, total}), tensor.Scalar(mine)})
		}, []float32{1, 2})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out[0].Kernel, out[1].Bias)
	// Output: tf.Tensor([1.5 3. ], shape=(2,), dtype=float32) tf.Tensor(1.5, shape=(), dtype=float32)
}

// A merge function runs once for all replicas.
func ExampleMergeCall() {
	s := twoReplicas()
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, mine string) (string, error) {
			return distribute.MergeCall(ctx, r,
				func(_ context.Context, _ *distribute.CrossReplica, all distribute.PerReplica[string]) (string, error) {
					fmt.Println("once:", all[0], all[1])
					return all[0] + all[1], nil
				}, mine)
		}, []string{"left", "right"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out[0], out[1])
	// Output:
	// once: left right
	// leftright leftright
}

// The gradients of all replicas are added and applied to every copy of a variable.
func ExampleVariable_Update() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 1.0})
	if err != nil {
		log.Fatal(err)
	}
	_, err = distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, gradient float32) (struct{}, error) {
			sum, err := distribute.AllReduce(ctx, r, distribute.Sum, gradient)
			if err != nil {
				return struct{}{}, err
			}
			return struct{}{}, v.Update(r, func(_ context.Context, c *distribute.Component) error {
				return v.AssignSub(c, sum)
			})
		}, []float32{1, 2})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(v)
	// Output:
	// MirroredVariable:{
	//   0: <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=-2.0>,
	//   1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=-2.0>
	// }
}

// The result of a reduction is placed on the current device.
func ExampleReduce() {
	s := twoReplicas()
	defer s.Close()

	ctx := device.With(context.Background(), device.CPU(1))
	v := distribute.PerReplica[*tensor.Tensor]{tensor.From([]float32{1, 2}), tensor.From([]float32{3, 5})}
	mean, err := distribute.Reduce(ctx, s, distribute.Mean, v, distribute.ReduceOptions{})
	if err != nil {
		log.Fatal(err)
	}
	at, _ := device.Of(mean)
	fmt.Println(at.Short(), mean)
	// Output: CPU:1 tf.Tensor([2.  3.5], shape=(2,), dtype=float32)
}

// The mean over the examples of shares of different lengths counts every example once.
func ExampleReduce_axis() {
	s := twoReplicas()
	defer s.Close()

	v := distribute.PerReplica[*tensor.Tensor]{tensor.From([]float32{1, 2, 3}), tensor.From([]float32{6})}
	mean, err := distribute.Reduce(context.Background(), s, distribute.Mean, v,
		distribute.ReduceOptions{Axis: []int{0}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(tensor.Data[float32](mean)[0])
	// Output: 3
}

// A global batch of 5 examples is split into 3 and 2; the last one, of a single example, into 1 and 0.
func ExampleStrategy_DistributeDataset() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	all, err := data.FromTensors(data.Batch{Inputs: []*tensor.Tensor{tensor.From([]int32{1, 2, 3, 4, 5, 6})}})
	if err != nil {
		log.Fatal(err)
	}
	set, err := s.DistributeDataset(all.Batch(5))
	if err != nil {
		log.Fatal(err)
	}
	for batch, err := range set.Iter(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		rows, err := distribute.Run(ctx, s,
			func(_ context.Context, _ *distribute.Replica, v data.Element) (string, error) {
				return v.(data.Batch).Inputs[0].Format(), nil
			}, batch)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(rows[0], rows[1])
	}
	// Output:
	// [1 2 3] [4 5]
	// [6] []
}
