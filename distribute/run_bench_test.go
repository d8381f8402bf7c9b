package distribute_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

func BenchmarkRunEmpty(b *testing.B) {
	for _, n := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("replicas=%d", n), func(b *testing.B) {
			s := mirrored(b, n)
			step := func(context.Context, *distribute.Replica, struct{}) (struct{}, error) { return struct{}{}, nil }
			b.ReportAllocs()
			for b.Loop() {
				if _, err := distribute.Run(b.Context(), s, step, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRunAllReduce is a Run of one small reduction.
func BenchmarkRunAllReduce(b *testing.B) {
	for _, n := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("replicas=%d/bytes=4", n), func(b *testing.B) {
			s := mirrored(b, n)
			tensors := make([][]*tensor.Tensor, n)
			for i := range tensors {
				tensors[i] = []*tensor.Tensor{tensor.New(tensor.Float32, 1)}
			}
			step := func(ctx context.Context, r *distribute.Replica, x []*tensor.Tensor) (struct{}, error) {
				return struct{}{}, r.AllReduceInto(ctx, distribute.Sum, x, x, nil)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := distribute.Run(b.Context(), s, step, tensors); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkAllReduceInto(b *testing.B) {
	for _, size := range []int{1, 1 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("replicas=2/bytes=%d", 4*size), func(b *testing.B) {
			s := mirrored(b, 2)
			b.SetBytes(int64(4 * size))
			b.ReportAllocs()
			_, err := distribute.Run(b.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
					src, dst := []*tensor.Tensor{tensor.New(tensor.Float32, size)}, []*tensor.Tensor{tensor.New(tensor.Float32, size)}
					for range b.N {
						if err := r.AllReduceInto(ctx, distribute.Mean, dst, src, nil); err != nil {
							return struct{}{}, err
						}
					}
					return struct{}{}, nil
				}, nil)
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkMergeCall(b *testing.B) {
	s := mirrored(b, 2)
	b.ReportAllocs()
	_, err := distribute.Run(b.Context(), s,
		func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
			for range b.N {
				_, err := distribute.MergeCall(ctx, r,
					func(context.Context, *distribute.CrossReplica, distribute.PerReplica[int]) (distribute.Value, error) {
						return nil, nil
					}, 0)
				if err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		}, nil)
	if err != nil {
		b.Fatal(err)
	}
}
