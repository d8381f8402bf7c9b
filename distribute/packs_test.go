package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/tensor"
)

// packSizes are sizes of packs that tests range over: chosen by the library, one tensor each, a few, many, all in one.
var packSizes = []int{0, 1, 3, 200, 10_000, distribute.OnePack}

// randomTensors returns tensors of random shapes and bits, NaNs of any payload among them.
func randomTensors(rng *rand.Rand, shapes [][]int, dtypes []tensor.DType) []*tensor.Tensor {
	out := make([]*tensor.Tensor, len(shapes))
	for i, shape := range shapes {
		out[i] = tensor.New(dtypes[i%len(dtypes)], shape...)
		bytes := out[i].Memory().HostBytes()
		for j := range bytes {
			bytes[j] = []byte{0, 0xff, 0x80, byte(rng.Uint32())}[rng.IntN(4)]
		}
	}
	return out
}

// TestPacksGiveTheSameBits: nests of several dtypes give the same result for every size of pack and every
// implementation.
func TestPacksGiveTheSameBits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var shapes [][]int
	for range 17 {
		shapes = append(shapes, []int{rng.IntN(40), 1 + rng.IntN(3)})
	}
	shapes = append(shapes, []int{}, []int{150, 200})
	dtypes := []tensor.DType{
		tensor.Float32, tensor.BFloat16, tensor.Float32, tensor.Int64, tensor.Float64, tensor.Uint8,
		tensor.Float16,
	}
	for _, n := range []int{2, 3} {
		s := mirrored(t, n)
		inputs := make([][]*tensor.Tensor, n)
		for i := range inputs {
			inputs[i] = randomTensors(rng, shapes, dtypes)
		}
		for _, op := range []distribute.ReduceOp{distribute.Sum, distribute.Mean} {
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				mine := inputs[r.ID()]
				nest := make([]any, len(mine))
				alone := make([]*tensor.Tensor, len(mine)) // each by a separate call
				for i, x := range mine {
					nest[i] = x
					v, err := distribute.AllReduce(ctx, r, op, x)
					if err != nil {
						return err
					}
					alone[i] = v
				}
				for _, size := range packSizes {
					o := distribute.Options{BytesPerPack: size}
					v, err := distribute.AllReduce(ctx, r, op, nest, o)
					if err != nil {
						return err
					}
					for i, x := range v {
						if !x.(*tensor.Tensor).Equal(alone[i]) {
							return fmt.Errorf("%v of tensor %d in packs of %d: %v, by itself %v", op, i, size, x, alone[i])
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

func ones(sizes ...int) []*tensor.Tensor {
	out := make([]*tensor.Tensor, len(sizes))
	for i, n := range sizes {
		out[i] = tensor.New(tensor.Float32, n)
		for j := range n {
			tensor.Data[float32](out[i])[j] = 1
		}
	}
	return out
}

// TestFailureBetweenBuckets: after a replica ends between two buckets, in any way, all variables have their old values,
// also those to which other replicas have written the results of the first one.
func TestFailureBetweenBuckets(t *testing.T) {
	for name, end := range map[string]func() error{
		"an error": func() error { return errStep },
		"a panic":  func() error { panic(errStep) },
	} {
		t.Run(name, func(t *testing.T) {
			s := mirrored(t, 3, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
			var variables []*distribute.Variable
			for range 3 {
				variables = append(variables, variable(t, s, distribute.OnWrite, distribute.AggregateNone))
			}
			before := fmt.Sprint(variables)
			written := make(chan struct{}, 2)
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				buckets := []distribute.Bucket{onesBucket(0, 2), onesBucket(0, 2), onesBucket(0, 2)}
				var handles []distribute.Handle
				for _, b := range buckets {
					h, err := r.StartAllReduce(ctx, distribute.Sum, b)
					if err != nil {
						return err
					}
					handles = append(handles, h)
				}
				for i, h := range handles {
					if err := h.Wait(ctx); err != nil {
						return err
					}
					if err := variables[i].Assign(r, buckets[i].Dst[0]); err != nil {
						return err
					}
					if r.ID() == 2 {
						<-written // the others have the first bucket, too
						<-written
						return end()
					}
					if i == 0 {
						written <- struct{}{}
					} else if err := merge(ctx, r); err != nil { // wait for a merge call that replica 2 never makes
						return err
					}
				}
				return nil
			})
			if !errors.Is(err, errStep) {
				t.Fatalf("got %v, want the step's own error", err)
			}
			if after := fmt.Sprint(variables); after != before {
				t.Errorf("after a failed step: %s, before it: %s", after, before)
			}
			checkRunsAgain(t, s)
		})
	}
}

// TestMismatchInPack: the error for replicas with different tensors names the tensor.
func TestMismatchInPack(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		x := ones(4, 4, 4+r.ID())
		return r.AllReduceInto(ctx, distribute.Sum, x, x, []string{"a", "b", "c"},
			distribute.Options{BytesPerPack: distribute.OnePack})
	})
	if !errors.Is(err, distribute.ErrMismatch) || !containsAll(err.Error(), "c [4]", "c [5]") {
		t.Errorf("got %v, want a mismatch that names the tensors with their shapes", err)
	}
}

// TestConcurrentBatches: goroutines that reduce batches on one strategy, and strategies over the same devices, never
// mix up their calls and never deadlock.
func TestConcurrentBatches(t *testing.T) {
	rounds := 1000
	if testing.Short() || race.Enabled {
		rounds = 100
	}
	one, other := mirrored(t, 2), mirrored(t, 2)
	var wait sync.WaitGroup
	for g := range 4 {
		s := one
		if g >= 2 {
			s = other
		}
		wait.Go(func() {
			for i := range rounds {
				if err := batchRound(t.Context(), s, float32(g), float32(i)); err != nil {
					t.Errorf("goroutine %d, round %d: %v", g, i, err)
					return
				}
			}
		})
	}
	for g := range 2 {
		s := []*distribute.Strategy{one, other}[g]
		wait.Go(func() { // and steps at the same time
			for i := range rounds {
				err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
					x := ones(3, i%7, 5)
					return r.AllReduceInto(ctx, distribute.Sum, x, x, nil, distribute.Options{BytesPerPack: 8})
				})
				if err != nil {
					t.Errorf("step %d of strategy %d: %v", i, g, err)
					return
				}
			}
		})
	}
	wait.Wait()
}

// batchRound reduces a batch of three values, which depend on the goroutine, and checks the sums.
func batchRound(ctx context.Context, s *distribute.Strategy, g, i float32) error {
	var batch reductions
	for k := range 3 {
		x := g*10_000 + i + float32(k)/4
		v := distribute.NewComponents(tensor.From([]float32{x, -x}).OnDevice(0), tensor.From([]float32{x, x}).OnDevice(1))
		batch.add(v, v)
	}
	out, err := s.Extended().BatchReduceTo(ctx, distribute.Sum, batch.values, batch.to,
		distribute.Options{BytesPerPack: 1 + int(i)%40})
	if err != nil {
		return err
	}
	for k, v := range out {
		x := g*10_000 + i + float32(k)/4
		for _, c := range v.(*distribute.Mirrored).Values {
			if got := tensor.Data[float32](c.(*tensor.Tensor)); got[0] != 2*x || got[1] != 0 {
				return fmt.Errorf("value %d is %v, want [%v 0]", k, got, 2*x)
			}
		}
	}
	return nil
}

func TestAllReduceInPacksDoesNotAllocate(t *testing.T) {
	skipRace(t)
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		a, b := ones(10, 20, 30, 20_000), ones(7, 7)
		var err error
		reduce := func() {
			err = errors.Join(err, r.AllReduceInto(ctx, distribute.Mean, a, a, nil),
				r.AllReduceInto(ctx, distribute.Mean, b, b, nil))
		}
		doesNotAllocate(t, r, reduce)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestManyLists: a replica that reduces more lists of tensors than its cache holds gets right results.
func TestManyLists(t *testing.T) {
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		for i := range 100 {
			x := ones(i%40, 3, i%33)
			if err := r.AllReduceInto(ctx, distribute.Sum, x, x, nil); err != nil {
				return err
			}
			for _, v := range x {
				for _, got := range tensor.Data[float32](v) {
					if got != 2 {
						return fmt.Errorf("round %d: got %v, want 2", i, got)
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func containsAll(s string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(s, p) })
}
