package distribute_test

import (
	"context"
	"fmt"
	"log"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// The reduction of each bucket of gradients proceeds while the replica computes the next one.
func ExampleReplica_StartAllReduce() {
	s := twoReplicas()
	defer s.Close()
	ctx := context.Background()

	var weights []*distribute.Variable
	for _, name := range []string{"kernel", "bias"} {
		v, err := s.NewVariable(ctx, distribute.VariableConfig{Name: name, Initial: tensor.From([]float32{10, 10})})
		if err != nil {
			log.Fatal(err)
		}
		weights = append(weights, v)
	}
	_, err := distribute.Run(ctx, s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
			var buckets []distribute.Bucket
			var handles []distribute.Handle
			for i, name := range []string{"kernel", "bias"} {
				gradient := []*tensor.Tensor{tensor.From([]float32{float32(1 + i), float32(r.ID())})} // computes it
				b := distribute.Bucket{Dst: gradient, Src: gradient, Names: []string{name}}
				h, err := r.StartAllReduce(ctx, distribute.Sum, b)
				if err != nil {
					return struct{}{}, err
				}
				buckets, handles = append(buckets, b), append(handles, h)
			}
			for i, h := range handles {
				if err := h.Wait(ctx); err != nil {
					return struct{}{}, err
				}
				if err := weights[i].AssignSub(r, buckets[i].Dst[0]); err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		}, nil)
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
	//   0: <tf.Variable 'bias:0' shape=(2,) dtype=float32, numpy=array([6., 9.], dtype=float32)>,
	//   1: <tf.Variable 'bias/replica_1:0' shape=(2,) dtype=float32, numpy=array([6., 9.], dtype=float32)>
	// }
}

// Every replica gets the values of all replicas, even if their lengths differ.
func ExampleAllGather() {
	s := twoReplicas()
	defer s.Close()

	out, err := distribute.Run(context.Background(), s,
		func(ctx context.Context, r *distribute.Replica, mine []int32) (*tensor.Tensor, error) {
			return distribute.AllGather(ctx, r, tensor.From(mine), 0)
		}, [][]int32{{1, 2, 3}, {4}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(out[0])
	fmt.Println(out[1])
	// Output:
	// tf.Tensor([1 2 3 4], shape=(4,), dtype=int32)
	// tf.Tensor([1 2 3 4], shape=(4,), dtype=int32)
}

// The gradients of a look-up are rows of a table: all replicas' are kept, as in TensorFlow, or those of one index
// added.
func ExampleSparse() {
	s := twoReplicas()
	defer s.Close()

	for _, way := range []distribute.Sparse{distribute.SparseKeep, distribute.SparseAuto} {
		out, err := distribute.Run(context.Background(), s,
			func(ctx context.Context, r *distribute.Replica, _ int) (*tensor.IndexedSlices, error) {
				rows := &tensor.IndexedSlices{
					Values:     tensor.From([]float32{1, 2}, 2, 1),
					Indices:    tensor.From([]int64{7, int64(r.ID())}),
					DenseShape: tensor.From([]int64{1000, 1}),
				}
				return distribute.AllReduce(ctx, r, distribute.Sum, rows, distribute.Options{Sparse: way})
			}, nil)
		if err != nil {
			log.Fatal(err)
		}
		rows := out[0]
		fmt.Println(way, rows.Indices.Format(), rows.Values.Reshape(rows.Values.Len()).Format())
	}
	// Output:
	// keep [7 0 7 1] [1. 2. 1. 2.]
	// auto [0 1 7] [2. 2. 2.]
}
