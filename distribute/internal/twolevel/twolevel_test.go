package twolevel

import (
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/dense"
	"github.com/lockstep-ml/lockstep/tensor"
)

// Every grouping and every number of packs gives the bits of the canonical tree.
func TestAdd(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		wide := rng.IntN(2) == 0
		accumulate := collective.AccumulateDType
		if wide {
			accumulate = collective.AccumulateFloat32
		}
		sums := make([]Sum, 1+rng.IntN(3))
		want := make([]*tensor.Tensor, len(sums))
		for i := range sums {
			n, d := rng.IntN(20), []tensor.DType{tensor.Float32, tensor.Float16, tensor.BFloat16}[rng.IntN(3)]
			s := Sum{To: tensor.New(d, n), Divide: 1}
			reduce := collective.Sum
			for range 2 + rng.IntN(8) {
				term := tensor.New(d, n)
				for k := range n {
					switch x := rng.Float32() * 100; d {
					case tensor.Float32:
						tensor.Data[float32](term)[k] = x
					case tensor.Float16:
						tensor.Data[tensor.F16](term)[k] = tensor.F16From(x)
					default:
						tensor.Data[tensor.BF16](term)[k] = tensor.BF16From(x)
					}
				}
				s.Of, s.Group = append(s.Of, term), append(s.Group, rng.IntN(3))
			}
			if rng.IntN(2) == 0 {
				s.Divide, reduce = len(s.Of), collective.Mean
			}
			sums[i], want[i] = s, dense.Reduce(reduce, s.Of, accumulate)
		}
		packs := rng.IntN(4)
		Add(sums, packs, wide)
		for i, s := range sums {
			if !s.To.Equal(want[i]) {
				t.Errorf("%d packs, groups %v, wide %v: got %v, want %v", packs, s.Group, wide, s.To, want[i])
			}
		}
	}
}
