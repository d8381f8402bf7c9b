package main

import (
	"context"
	"os"
)

func Example() {
	if err := run(context.Background(), os.Stdout); err != nil {
		panic(err)
	}
	// Output:
	// loss: PerReplica:{
	//   0: tf.Tensor(10.0, shape=(), dtype=float32),
	//   1: tf.Tensor(10.0, shape=(), dtype=float32)
	// }
	// loss: PerReplica:{
	//   0: tf.Tensor(2.5, shape=(), dtype=float32),
	//   1: tf.Tensor(2.5, shape=(), dtype=float32)
	// }
	// loss: PerReplica:{
	//   0: tf.Tensor(0.625, shape=(), dtype=float32),
	//   1: tf.Tensor(0.625, shape=(), dtype=float32)
	// }
	// MirroredVariable:{
	//   0: <tf.Variable 'w:0' shape=(2,) dtype=float32, numpy=array([0.875, 2.625], dtype=float32)>,
	//   1: <tf.Variable 'w/replica_1:0' shape=(2,) dtype=float32, numpy=array([0.875, 2.625], dtype=float32)>
	// }
}
