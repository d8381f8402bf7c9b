package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// labelled returns n int32 elements that name the replica and the position.
func labelled(replica, n int) *tensor.Tensor {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(1000*replica + i)
	}
	return tensor.Of(x)
}

// TestStartAllToAllAndAllGather starts both among reductions, and awaits them in another order.
func TestStartAllToAllAndAllGather(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		for _, part := range []int{0, 1, 7, 300} {
			s := mirrored(t, n)
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				src, dst := labelled(r.ID(), n*part), tensor.New(tensor.Int32, n*part)
				all := tensor.New(tensor.Int32, n*part)
				own := tensor.Of(tensor.Data[int32](all)[r.ID()*part : (r.ID()+1)*part])
				copy(tensor.Data[int32](own), tensor.Data[int32](labelled(r.ID(), part)))
				var handles [4]distribute.Handle
				var errs [4]error
				handles[0], errs[0] = r.StartAllReduce(ctx, distribute.Sum, onesBucket(1, 5))
				handles[1], errs[1] = r.StartAllToAll(ctx, dst, src, "parts")
				handles[2], errs[2] = r.StartAllGather(ctx, all, own, "all")
				handles[3], errs[3] = r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 5))
				if err := errors.Join(errs[:]...); err != nil {
					return err
				}
				for i := range handles {
					if err := handles[len(handles)-1-i].Wait(ctx); err != nil {
						return err
					}
				}
				for i := range n * part {
					sender, k := i/part, i%part
					if got, want := tensor.Data[int32](dst)[i], int32(1000*sender+r.ID()*part+k); got != want {
						return fmt.Errorf("AllToAll: element %d is %d, want %d", i, got, want)
					}
					if got, want := tensor.Data[int32](all)[i], int32(1000*sender+k); got != want {
						return fmt.Errorf("AllGather: element %d is %d, want %d", i, got, want)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatalf("%d replicas, parts of %d: %v", n, part, err)
			}
		}
	}
}

// TestStartAllToAllErrors: what cannot be exchanged is rejected, and custom CrossDeviceOps have no such operation.
func TestStartAllToAllErrors(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	for name, c := range map[string]struct{ dst, src *tensor.Tensor }{
		"uneven parts":   {tensor.New(tensor.Int8, 3), tensor.New(tensor.Int8, 3)},
		"other length":   {tensor.New(tensor.Int8, 4), tensor.New(tensor.Int8, 2)},
		"another dtype":  {tensor.New(tensor.Uint8, 4), tensor.New(tensor.Int8, 4)},
		"not fixed size": {tensor.New(tensor.String, 4), tensor.New(tensor.String, 4)},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			_, err := r.StartAllToAll(ctx, c.dst, c.src, "x")
			return err
		})
		if !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	s = mirrored(t, 2, func(cfg *distribute.MirroredConfig) {
		cfg.Logger, cfg.CrossDeviceOps = quiet, distribute.NewReductionToOneDevice("", nil)
	})
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		_, err := r.StartAllGather(ctx, tensor.New(tensor.Int8, 4), tensor.New(tensor.Int8, 2), "x")
		return err
	})
	if !errors.Is(err, distribute.ErrUnsupported) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
}

// TestRunEndsAllToAll: a Run awaits a started exchange, and one that fails ends it.
func TestRunEndsAllToAll(t *testing.T) {
	s := mirrored(t, 3, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	for _, fails := range []bool{false, true} {
		results := make([]*tensor.Tensor, 3)
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			if fails && r.ID() == 2 {
				return errStep
			}
			results[r.ID()] = tensor.New(tensor.Int32, 3*5)
			_, err := r.StartAllToAll(ctx, results[r.ID()], labelled(r.ID(), 3*5), "parts")
			return err
		})
		if fails {
			if !errors.Is(err, errStep) {
				t.Errorf("got %v, want %v", err, errStep)
			}
			checkRunsAgain(t, s)
			continue
		}
		if err != nil || tensor.Data[int32](results[1])[14] != 2009 {
			t.Errorf("got %v, %v", results[1], err)
		}
	}
}

func TestAllToAllDoesNotAllocate(t *testing.T) {
	skipRace(t)
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) (err error) {
		src, dst := labelled(r.ID(), 6), tensor.New(tensor.Int32, 6)
		exchange := func() {
			h, e := r.StartAllToAll(ctx, dst, src, "parts")
			if err = errors.Join(err, e); err == nil {
				err = h.Wait(ctx)
			}
		}
		doesNotAllocate(t, r, exchange)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestStartGather: only the root gets the parts, which may differ in size or be empty; the replicas agree on the sizes.
func TestStartGather(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		s := mirrored(t, n, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		root := n - 1
		for _, even := range []bool{true, false} {
			counts, total := make([]int, n), 0
			for i := range counts {
				if counts[i] = 3; !even {
					counts[i] = (i + 1) % 3
				}
				total += counts[i]
			}
			given := counts
			if even {
				given = nil
			}
			var got *tensor.Tensor
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				var dst *tensor.Tensor
				if r.ID() == root {
					got = tensor.New(tensor.Int32, total)
					dst = got
				}
				h, err := r.StartGather(ctx, dst, labelled(r.ID(), counts[r.ID()]), given, root, "parts")
				if err == nil {
					err = h.Wait(ctx)
				}
				return err
			})
			if err != nil {
				t.Fatalf("%d replicas, even %v: %v", n, even, err)
			}
			var want []int32
			for i, count := range counts {
				want = append(want, tensor.Data[int32](labelled(i, count))...)
			}
			if !slices.Equal(tensor.Data[int32](got), want) {
				t.Errorf("%d replicas, even %v: got %v, want %v", n, even, tensor.Data[int32](got), want)
			}
		}
	}
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	for name, gather := range map[string]func(ctx context.Context, r *distribute.Replica) (distribute.Handle, error){
		"no such root": func(ctx context.Context, r *distribute.Replica) (distribute.Handle, error) {
			return r.StartGather(ctx, nil, tensor.New(tensor.Int8, 1), nil, 2, "x")
		},
		"too few counts": func(ctx context.Context, r *distribute.Replica) (distribute.Handle, error) {
			return r.StartGather(ctx, nil, tensor.New(tensor.Int8, 1), []int{1}, 0, "x")
		},
		"another count": func(ctx context.Context, r *distribute.Replica) (distribute.Handle, error) {
			return r.StartGather(ctx, tensor.New(tensor.Int8, 3), tensor.New(tensor.Int8, 1), []int{1, 2}, 0, "x")
		},
		"no destination": func(ctx context.Context, r *distribute.Replica) (distribute.Handle, error) {
			return r.StartGather(ctx, nil, tensor.New(tensor.Int8, 1), nil, r.ID(), "x")
		},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			_, err := gather(ctx, r)
			return err
		})
		if !errors.Is(err, distribute.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}
