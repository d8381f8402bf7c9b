package distribute_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The examples of TensorFlow's documentation, with TensorFlow's output.

// A variable made by the strategy has a copy on each replica's device, kept equal.
func ExampleNewMirroredStrategy() {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices:     []string{"CPU:0", "CPU:1"},
		LogicalCPUs: 2,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	ctx := s.Scope(context.Background())

	x, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 1.0})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(x)
	// Output:
	// MirroredVariable:{
	//   0: <tf.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,
	//   1: <tf.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>
	// }
}

// Cross-device operations are chosen when the strategy is made.
func ExampleNewMirroredStrategy_crossDeviceOps() {
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices: []string{"CPU:0", "CPU:1"}, LogicalCPUs: 2, CrossDeviceOps: distribute.NewReductionToOneDevice("", nil),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (*tensor.Tensor, error) {
			return distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(1)))
		}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output:
	// PerReplica:{
	//   0: tf.Tensor(2.0, shape=(), dtype=float32),
	//   1: tf.Tensor(2.0, shape=(), dtype=float32)
	// }
}

// A list of numbers of any type, summed over two replicas: TensorFlow makes tensors of them.
func ExampleAllReduce_list() {
	s := twoReplicas()
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) ([]any, error) {
			return distribute.AllReduce(ctx, r, distribute.Sum, []any{1.0, int64(2)})
		}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out[0])
	// Output: [tf.Tensor(2.0, shape=(), dtype=float32) tf.Tensor(4, shape=(), dtype=int64)]
}

func ExampleNewHierarchicalCopyAllReduce() {
	ops, err := distribute.NewHierarchicalCopyAllReduce(1, nil)
	if err != nil {
		log.Fatal(err)
	}
	s, err := distribute.NewMirroredStrategy(distribute.MirroredConfig{
		Devices: []string{"CPU:0", "CPU:1"}, LogicalCPUs: 2, CrossDeviceOps: ops,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	sums, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ int) (*tensor.Tensor, error) {
			return distribute.AllReduce(ctx, r, distribute.Sum, tensor.From([]float32{1, float32(r.ID())}))
		}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sums[0])
	// Output: tf.Tensor([2. 1.], shape=(2,), dtype=float32)
}

// A value that is 1 on each replica is summed into a variable: 2 with two replicas, and 1 with one. The strategy
// decides the number of copies.
func ExampleVariable_AssignAdd() {
	ctx := context.Background()
	mirrored := twoReplicas()
	central, err := distribute.NewCentralStorageStrategy(distribute.CentralStorageConfig{ComputeDevices: []string{
		"CPU:0",
		"CPU:1",
	}, LogicalCPUs: 2})
	if err != nil {
		log.Fatal(err)
	}
	one, err := distribute.NewOneDeviceStrategy(distribute.OneDeviceConfig{})
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range []*distribute.Strategy{mirrored, central, one} {
		defer s.Close()
		v, err := s.NewVariable(ctx, distribute.VariableConfig{
			Initial: 0.0, Aggregation: distribute.AggregateSum,
		})
		if err != nil {
			log.Fatal(err)
		}
		_, err = distribute.Run(ctx, s, func(_ context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
			return struct{}{}, v.AssignAdd(r, tensor.Scalar(float32(1)))
		}, nil)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(v.Values()...)
	}
	// Output:
	// tf.Tensor(2.0, shape=(), dtype=float32) tf.Tensor(2.0, shape=(), dtype=float32)
	// tf.Tensor(2.0, shape=(), dtype=float32)
	// tf.Tensor(1.0, shape=(), dtype=float32)
}

// An update runs once on each copy of a variable.
func ExampleStrategy_Extended() {
	s := twoReplicas()
	defer s.Close()
	ctx := s.Scope(context.Background())

	v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 5.0})
	if err != nil {
		log.Fatal(err)
	}
	out, err := s.Extended().Update(ctx, v,
		func(_ context.Context, c *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
			if err := v.Assign(c, args[0]); err != nil {
				return nil, err
			}
			return v.Read(c)
		}, 1.0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output:
	// Mirrored:{
	//   0: tf.Tensor(1.0, shape=(), dtype=float32),
	//   1: tf.Tensor(1.0, shape=(), dtype=float32)
	// }
}

// Code that is written for a replica also runs outside of all strategies.
func ExampleCurrentReplica() {
	ctx := context.Background()
	r := distribute.CurrentReplica(ctx)
	sum, err := distribute.AllReduce(ctx, r, distribute.Sum, tensor.Scalar(float32(5)))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.ID(), r.NumReplicas(), sum)
	// Output: 0 1 tf.Tensor(5.0, shape=(), dtype=float32)
}
