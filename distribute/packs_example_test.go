package distribute_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The gradients of a model travel in packs of 50 MiB, and the user's own loop applies those of each pack while the next
// ones travel. (Gradients this small are one pack.)
func ExampleCollectiveHints() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()
	hints := distribute.CollectiveHints(50<<20, 0)

	var weights []*distribute.Variable
	for _, name := range []string{"kernel", "bias"} {
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Name: name, Initial: tensor.From([]float32{10, 10})})
		if err != nil {
			log.Fatal(err)
		}
		weights = append(weights, v)
	}
	_, err := distribute.Run(ctx, s, func(ctx context.Context, r *distribute.Replica, _ ...distribute.Value) (distribute.Value, error) {
		gradients := []*tensor.Tensor{tensor.From([]float32{1, float32(r.ID())}), tensor.From([]float32{3, 4})}
		sums := []*tensor.Tensor{tensor.New(tensor.Float32, 2), tensor.New(tensor.Float32, 2)}
		for done, err := range r.AllReducePacks(ctx, distribute.Sum, sums, gradients, []string{"kernel", "bias"}, hints) {
			if err != nil {
				return nil, err
			}
			for _, i := range done {
				if err := weights[i].AssignSub(r, sums[i]); err != nil {
					return nil, err
				}
			}
		}
		return nil, nil
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, v := range weights {
		fmt.Println(v)
	}
	// Output:
	// MirroredVariable:{
	//   0: <tf.Variable 'kernel:0' shape=(2,) dtype=float32, numpy=array([8., 9.], dtype=float32)>,
	//   1: <tf.Variable 'kernel/replica_1:0' shape=(2,) dtype=float32, numpy=array([8., 9.], dtype=float32)>
	// }
	// MirroredVariable:{
	//   0: <tf.Variable 'bias:0' shape=(2,) dtype=float32, numpy=array([4., 2.], dtype=float32)>,
	//   1: <tf.Variable 'bias/replica_1:0' shape=(2,) dtype=float32, numpy=array([4., 2.], dtype=float32)>
	// }
}
