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
		Devices: []string{"CPU:0", "CPU:1"}, LogicalCPUs: 2, CrossDeviceOps: distribute.ReductionToOneDevice{},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
			return r.AllReduce(ctx, distribute.Sum, 1.0)
		})
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

// A number, and a list of numbers, summed over two replicas.
func ExampleReplica_AllReduce_lists() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	for _, value := range []distribute.Value{1.0, []any{1.0, 2.0}} {
		out, err := distribute.Run(ctx, s,
			func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
				return r.AllReduce(ctx, distribute.Sum, value)
			})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(out)
	}
	// Output:
	// PerReplica:{
	//   0: tf.Tensor(2.0, shape=(), dtype=float32),
	//   1: tf.Tensor(2.0, shape=(), dtype=float32)
	// }
	// [PerReplica:{
	//   0: tf.Tensor(2.0, shape=(), dtype=float32),
	//   1: tf.Tensor(2.0, shape=(), dtype=float32)
	// } PerReplica:{
	//   0: tf.Tensor(4.0, shape=(), dtype=float32),
	//   1: tf.Tensor(4.0, shape=(), dtype=float32)
	// }]
}

func ExampleNewHierarchicalCopyAllReduce() {
	ops, err := distribute.NewHierarchicalCopyAllReduce(1)
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

	sums, err := distribute.RunTyped(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, _ int) (distribute.Value, error) {
			return r.AllReduce(ctx, distribute.Sum, tensor.From([]float32{1, float32(r.ID())}))
		}, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sums[0])
	// Output: tf.Tensor([2. 1.], shape=(2,), dtype=float32)
}

// A value that is 1 on each replica is summed into a variable: 2 with two replicas, and 1 with one. The strategy
// decides the number of copies.
func ExampleStrategy_ReduceTo_variable() {
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
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 0.0})
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
		fmt.Println(v.Values()...)
	}
	// Output:
	// tf.Tensor(2.0, shape=(), dtype=float32) tf.Tensor(2.0, shape=(), dtype=float32)
	// tf.Tensor(2.0, shape=(), dtype=float32)
	// tf.Tensor(1.0, shape=(), dtype=float32)
}

// An update runs once on each copy of a variable.
func ExampleStrategy_Update_assign() {
	s := twoReplicas()
	defer s.Close()
	ctx := s.Scope(context.Background())

	v, err := s.NewVariable(ctx, distribute.VariableConfig{Initial: 5.0})
	if err != nil {
		log.Fatal(err)
	}
	out, err := s.Update(ctx, v,
		func(_ context.Context, v *distribute.Component, args ...distribute.Value) (distribute.Value, error) {
			err := v.Assign(args[0])
			return v.Read(), err
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
	sum, err := r.AllReduce(ctx, distribute.Sum, tensor.Scalar(float32(5)))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.ID(), r.NumReplicas(), sum)
	// Output: 0 1 tf.Tensor(5.0, shape=(), dtype=float32)
}
