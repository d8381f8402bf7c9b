package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// TestOwnersGetTheSameBits: a bucket that is reduced to owners and gathered from them has the bits of an all-reduce,
// whoever owns which tensors, in place or not.
func TestOwnersGetTheSameBits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	all := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float32, tensor.Float64}
	for _, n := range []int{1, 2, 3, 5} {
		s := mirrored(t, n)
		for round := range 12 {
			rng := rand.New(rand.NewPCG(seed, uint64(round)))
			op := []distribute.ReduceOp{distribute.Sum, distribute.Mean}[rng.IntN(2)]
			dtypes := all[:1+rng.IntN(len(all))]
			var shapes [][]int
			var owners []int
			for range rng.IntN(14) {
				shapes = append(shapes, []int{rng.IntN(50), 1 + rng.IntN(3)})
				owners = append(owners, rng.IntN(1+rng.IntN(n))) // often one owns most
			}
			if rng.IntN(2) == 0 {
				shapes, owners = append(shapes, []int{70, 1000}), append(owners, rng.IntN(n))
			}
			inPlace, scalars := rng.IntN(2) == 0, rng.IntN(3)
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				rng := rand.New(rand.NewPCG(seed, uint64(1000*round+r.ID())))
				gradients := randomTensors(rng, shapes, dtypes)
				want := make([]*tensor.Tensor, len(shapes))
				for i, x := range gradients {
					want[i] = x.Clone()
				}
				numbers := scalarValues(rng, scalars)
				sums := tensor.From(numbers, scalars)
				if err := errors.Join(r.AllReduceInto(ctx, op, want, want, nil),
					r.AllReduceInto(ctx, op, []*tensor.Tensor{sums}, []*tensor.Tensor{sums}, nil)); err != nil {
					return err
				}
				owned := make([]*tensor.Tensor, len(shapes)) // where this replica's results are
				for i, x := range gradients {
					if owners[i] != r.ID() {
						continue
					}
					if owned[i] = x; !inPlace {
						owned[i] = tensor.New(x.DType(), x.Shape()...)
					}
				}
				before := make([]*tensor.Tensor, len(shapes))
				for i, x := range gradients {
					before[i] = x.Clone()
				}
				h, err := r.StartReduceToOwners(ctx, op,
					distribute.Bucket{Src: gradients, Dst: owned, Owners: owners, Scalars: numbers})
				if err != nil {
					return err
				}
				if err := h.Wait(ctx); err != nil {
					return err
				}
				if got := tensor.From(numbers, scalars); !got.Equal(sums) {
					return fmt.Errorf("the sums of the scalars are %v, want %v", got, sums)
				}
				for i := range shapes {
					if owners[i] == r.ID() && !owned[i].Equal(want[i]) {
						return fmt.Errorf("tensor %d is %v at its owner, want %v", i, owned[i], want[i])
					}
					if (owners[i] != r.ID() || !inPlace) && !gradients[i].Equal(before[i]) {
						return fmt.Errorf("the gradient %d was changed", i)
					}
				}
				values := make([]*tensor.Tensor, len(shapes))
				for i, x := range gradients {
					if values[i] = tensor.New(x.DType(), x.Shape()...); owners[i] == r.ID() && inPlace {
						values[i] = owned[i]
					}
				}
				if h, err = r.StartGatherFromOwners(ctx, distribute.Bucket{Src: owned, Dst: values, Owners: owners}); err != nil {
					return err
				}
				if err := h.Wait(ctx); err != nil {
					return err
				}
				for i, got := range values {
					if !got.Equal(want[i]) {
						return fmt.Errorf("tensor %d is %v after gathering, want %v", i, got, want[i])
					}
				}
				return nil
			})
			if err != nil {
				t.Fatalf("%d replicas, round %d, owners %v of %v: %v", n, round, owners, shapes, err)
			}
		}
	}
}

// TestOwnerErrors: what has no valid owners is rejected; replicas that disagree on an owner get an error that names the
// tensors.
func TestOwnerErrors(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	for name, owners := range map[string][]int{
		"none": nil, "too many": {0, 1, 0}, "unknown": {0, 2}, "negative": {0, -1},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			b := onesBucket(0, 2, 3)
			b.Owners = owners
			_, err := r.StartReduceToOwners(ctx, distribute.Sum, b)
			return err
		})
		if !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
		}
	}
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(0, 2, 3)
		b.Dst, b.Owners = []*tensor.Tensor{nil, nil}, []int{0, 1}
		_, err := r.StartReduceToOwners(ctx, distribute.Sum, b)
		return err
	})
	if !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("an owner without a destination: got %v, want ErrInvalid", err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(0, 4, 4)
		b.Owners, b.Names = []int{r.ID(), 1 - r.ID()}, []string{"kernel", "bias"}
		h, err := r.StartGatherFromOwners(ctx, b)
		if err != nil {
			return err
		}
		return h.Wait(ctx)
	})
	if !errors.Is(err, distribute.ErrMismatch) ||
		!containsAll(err.Error(), "kernel [4] of rank 0", "kernel [4] of rank 1") {
		t.Errorf("other owners: got %v, want a mismatch that names the tensors and the owners", err)
	}
	s = mirrored(t, 2, func(cfg *distribute.MirroredConfig) {
		cfg.Logger, cfg.CrossDeviceOps = quiet, distribute.NewReductionToOneDevice("", nil)
	})
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		_, err := r.StartGatherFromOwners(ctx, distribute.Bucket{})
		return err
	})
	if !errors.Is(err, distribute.ErrUnsupported) {
		t.Errorf("with CrossDeviceOps: got %v, want ErrUnsupported", err)
	}
}

func TestOwnersDoNotAllocate(t *testing.T) {
	skipRace(t)
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(3, 10, 20, 30_000)
		b.Owners = []int{1, 0, 1}
		var err error
		reduce := func() {
			h, e := r.StartReduceToOwners(ctx, distribute.Sum, b)
			if err = errors.Join(err, e); err != nil {
				return
			}
			if err = h.Wait(ctx); err != nil {
				return
			}
			if h, err = r.StartGatherFromOwners(ctx, b); err == nil {
				err = h.Wait(ctx)
			}
		}
		doesNotAllocate(t, r, reduce)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
