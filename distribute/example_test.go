package distribute_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/data"
	"github.com/lockstep-ml/lockstep/distribute"
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

// Each replica gets its component of a distributed value. The results are regrouped into one value.
func ExampleRun() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	input, err := s.DistributeValuesFromFunction(ctx, func(c distribute.ValueContext) (distribute.Value, error) {
		return tensor.From([]float32{1, float32(c.ReplicaID)}), nil
	})
	if err != nil {
		log.Fatal(err)
	}
	out, err := distribute.Run(ctx, s,
		func(_ context.Context, r *distribute.Replica, args ...distribute.Value) (distribute.Value, error) {
			x := tensor.Data[float32](args[0].(*tensor.Tensor))
			return tensor.From([]float32{x[0] * 10, x[1] * 10}), nil
		}, input)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output:
	// PerReplica:{
	//   0: tf.Tensor([10.  0.], shape=(2,), dtype=float32),
	//   1: tf.Tensor([10. 10.], shape=(2,), dtype=float32)
	// }
}

// A step whose inputs and results have the user's types.
func ExampleRunTyped() {
	s := twoReplicas()
	defer s.Close()

	type loss struct{ Mean float64 }
	losses, err := distribute.RunTyped(context.Background(), s,
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
	fmt.Println(losses)
	// Output: [{2} {4.5}]
}

// Every replica gets the sum of all replicas' values; a value may be a nest.
func ExampleReplica_AllReduce() {
	s := twoReplicas()
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return r.AllReduce(ctx, distribute.Sum, []any{tensor.Scalar(float32(1.5)), tensor.From([]float32{1, 2})})
		})
	if err != nil {
		log.Fatal(err)
	}
	for _, v := range s.LocalResults(out) {
		fmt.Println(tensor.Flatten(v)[1])
	}
	// Output:
	// tf.Tensor([2. 4.], shape=(2,), dtype=float32)
	// tf.Tensor([2. 4.], shape=(2,), dtype=float32)
}

// A merge function runs once for all replicas.
func ExampleReplica_MergeCall() {
	s := twoReplicas()
	defer s.Close()

	_, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			mine := tensor.From([]int64{int64(r.ID()), 7})
			return r.MergeCall(ctx,
				func(_ context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
					fmt.Println("once:", args[0])
					return nil, nil
				}, mine)
		})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// once: PerReplica:{
	//   0: tf.Tensor([0 7], shape=(2,), dtype=int64),
	//   1: tf.Tensor([1 7], shape=(2,), dtype=int64)
	// }
}

// The gradients of all replicas are added and applied to every copy of a variable.
func ExampleStrategy_Update() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 1.0})
	if err != nil {
		log.Fatal(err)
	}
	_, err = distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return r.MergeCall(ctx,
				func(ctx context.Context, c *distribute.CrossReplica, args ...distribute.Value) (distribute.Value, error) {
					sum, err := c.ReduceTo(ctx, distribute.Sum, args[0], v)
					if err != nil {
						return nil, err
					}
					return c.Update(ctx, v,
						func(_ context.Context, v *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
							return nil, v.Assign(args[0])
						}, sum)
				}, tensor.Scalar(float32(1)))
		})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(v)
	// Output:
	// MirroredVariable:{
	//   0: <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=2.0>,
	//   1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=2.0>
	// }
}

// The result of a reduction is placed on its destination.
func ExampleStrategy_ReduceTo() {
	s := twoReplicas()
	defer s.Close()

	v := distribute.NewPerReplica(tensor.From([]float32{1, 2}), tensor.From([]float32{3, 5}))
	sum, err := s.ReduceTo(context.Background(), distribute.Mean, v, distribute.At("CPU:1"))
	if err != nil {
		log.Fatal(err)
	}
	device, _ := distribute.DeviceOf(sum)
	fmt.Println(device.Short(), sum)
	// Output: CPU:1 tf.Tensor([2.  3.5], shape=(2,), dtype=float32)
}

// The mean over the examples of shares of different lengths counts every example once.
func ExampleStrategy_Reduce() {
	s := twoReplicas()
	defer s.Close()

	v := distribute.NewPerReplica(tensor.From([]float32{1, 2, 3}), tensor.From([]float32{6}))
	mean, err := s.Reduce(context.Background(), distribute.Mean, v, distribute.ReduceOptions{Axis: []int{0}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(tensor.Data[float32](mean.(*tensor.Tensor))[0])
	// Output: 3
}

// A global batch of 5 examples is split into 3 and 2; the last one, of a single example, into 1 and 0.
func ExampleStrategy_DistributeDataset() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	all := data.Batch{Inputs: []*tensor.Tensor{tensor.From([]int32{1, 2, 3, 4, 5, 6})}}
	set, err := s.DistributeDataset(data.FromTensors(all).Batch(5))
	if err != nil {
		log.Fatal(err)
	}
	for batch, err := range set.Iter(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		rows, err := distribute.RunTyped(ctx, s,
			func(_ context.Context, _ *distribute.Replica, v distribute.Value) (string, error) {
				return v.(data.Batch).Inputs[0].Format(), nil
			}, s.LocalResults(batch))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(rows)
	}
	// Output:
	// [[1 2 3] [4 5]]
	// [[6] []]
}
