package distribute_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// BenchmarkPacks reduces tensors like a small network's gradients, many small and a few large, by size of packs.
func BenchmarkPacks(b *testing.B) {
	var sizes []int
	for range 30 {
		sizes = append(sizes, 64, 64, 3000, 64)
	}
	sizes = append(sizes, 200_000, 10)
	for _, bytes := range []int{1, 0, 64 << 10, distribute.OnePack} {
		b.Run(fmt.Sprintf("replicas=2/bytes_per_pack=%d", bytes), func(b *testing.B) {
			s := mirrored(b, 2)
			total := 0
			for _, n := range sizes {
				total += 4 * n
			}
			b.SetBytes(int64(total))
			b.ReportAllocs()
			_, err := distribute.Run(b.Context(), s,
				func(ctx context.Context, r *distribute.Replica, _ struct{}) (struct{}, error) {
					src, dst := make([]*tensor.Tensor, len(sizes)), make([]*tensor.Tensor, len(sizes))
					for i, n := range sizes {
						src[i], dst[i] = tensor.New(tensor.Float32, n), tensor.New(tensor.Float32, n)
					}
					for range b.N {
						if err := r.AllReduceInto(ctx, distribute.Sum, dst, src, nil,
							distribute.Options{BytesPerPack: bytes}); err != nil {
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
