package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// scalarValues returns numbers for a replica's scalars, special ones among them.
func scalarValues(rng *rand.Rand, n int) []float64 {
	special := []float64{
		0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.SmallestNonzeroFloat64, math.MaxFloat64,
		math.Float64frombits(0x7ff0_0000_dead_beef), math.Float64frombits(0xfff8_1234_5678_9abc),
	}
	out := make([]float64, n)
	for i := range out {
		if out[i] = math.Float64frombits(rng.Uint64()); rng.IntN(3) == 0 {
			out[i] = special[rng.IntN(len(special))]
		}
	}
	return out
}

// TestBucketsGiveTheSameBits: buckets of any dtypes and numbers of scalars, several in flight at once, give the bits of
// AllReduceInto of each tensor, and of a float64 tensor of the scalars.
func TestBucketsGiveTheSameBits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	all := []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Float16}
	for _, n := range []int{1, 2, 3, 5} {
		s := mirrored(t, n)
		for round := range 12 {
			rng := rand.New(rand.NewPCG(seed, uint64(round)))
			op := []distribute.ReduceOp{distribute.Sum, distribute.Mean}[rng.IntN(2)]
			dtypes := all[:1+rng.IntN(len(all))]
			counts := []int{0, 1, 7, 40, 200}
			var shapes [][][]int // by bucket
			var scalars []int
			for range 1 + rng.IntN(4) {
				var of [][]int
				for range rng.IntN(12) {
					of = append(of, []int{rng.IntN(40), 1 + rng.IntN(3)})
				}
				if rng.IntN(2) == 0 {
					of = append(of, []int{70, 1000})
				}
				shapes, scalars = append(shapes, of), append(scalars, counts[rng.IntN(len(counts))])
			}
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				rng := rand.New(rand.NewPCG(seed, uint64(1000*round+r.ID())))
				var handles []distribute.Handle
				var buckets []distribute.Bucket
				var want [][]*tensor.Tensor
				for k, of := range shapes {
					b := distribute.Bucket{Src: randomTensors(rng, of, dtypes), Scalars: scalarValues(rng, scalars[k])}
					expected := append([]*tensor.Tensor{tensor.From(b.Scalars)}, b.Src...)
					for i := range expected {
						expected[i] = expected[i].Clone()
						x := expected[i : i+1]
						if err := r.AllReduceInto(ctx, op, x, x, nil); err != nil {
							return err
						}
					}
					if b.Dst = b.Src; rng.IntN(2) == 0 {
						b.Dst = nil
						for _, x := range b.Src {
							b.Dst = append(b.Dst, tensor.New(x.DType(), x.Shape()...))
						}
					}
					buckets, want = append(buckets, b), append(want, expected)
				}
				for _, b := range buckets {
					h, err := r.StartAllReduce(ctx, op, b)
					if err != nil {
						return err
					}
					handles = append(handles, h)
				}
				for k, h := range handles {
					if err := h.Wait(ctx); err != nil {
						return err
					}
					got := append([]*tensor.Tensor{tensor.From(buckets[k].Scalars)}, buckets[k].Dst...)
					for i, x := range got {
						if !x.Equal(want[k][i]) {
							return fmt.Errorf("%v of bucket %d, tensor %d (0: scalars): %v, by itself %v", op, k, i, x, want[k][i])
						}
					}
				}
				return nil
			})
			if err != nil {
				t.Fatalf("%d replicas, round %d: %v", n, round, err)
			}
		}
	}
}

func onesBucket(scalars int, sizes ...int) distribute.Bucket {
	x := ones(sizes...)
	return distribute.Bucket{Dst: x, Src: x, Scalars: make([]float64, scalars)}
}

// TestStartedCallsAmongOthers: other calls of a replica wait for the started ones; handles may be awaited in any order.
func TestStartedCallsAmongOthers(t *testing.T) {
	s := mirrored(t, 3)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		var handles []distribute.Handle
		var buckets []distribute.Bucket
		for i := range 20 { // more than a report can describe
			b := onesBucket(1, i, 5)
			h, err := r.StartAllReduce(ctx, distribute.Sum, b)
			if err != nil {
				return err
			}
			handles, buckets = append(handles, h), append(buckets, b)
		}
		if err := errors.Join(merge(ctx, r), sum(ctx, r, "x", 2)); err != nil {
			return err
		}
		for i := len(handles) - 1; i >= 0; i-- {
			if err := handles[i].Wait(ctx); err != nil {
				return err
			}
			if got := tensor.Data[float32](buckets[i].Dst[1])[4]; got != 3 {
				return fmt.Errorf("bucket %d: got %v, want 3", i, got)
			}
		}
		if err := handles[0].Wait(ctx); !errors.Is(err, distribute.ErrInvalid) {
			return fmt.Errorf("a second Wait: %v, want ErrInvalid", err)
		}
		next, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 5))
		if err != nil {
			return err
		}
		for _, h := range append(handles, distribute.Handle{}) {
			if err := h.Wait(ctx); !errors.Is(err, distribute.ErrInvalid) {
				return fmt.Errorf("a second Wait, while another call is in progress: %v, want ErrInvalid", err)
			}
		}
		return next.Wait(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestRunAwaitsStartedCalls: the results are there when the Run has returned, although no step awaited them.
func TestRunAwaitsStartedCalls(t *testing.T) {
	s := mirrored(t, 3)
	buckets := []distribute.Bucket{onesBucket(0, 4, 50_000), onesBucket(2, 4, 50_000), onesBucket(2)}
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		_, err := r.StartAllReduce(ctx, distribute.Sum, buckets[r.ID()/2])
		if r.ID() == 1 {
			buckets[2] = onesBucket(2, 4, 50_000)
			return nil
		}
		return err
	})
	if !errors.Is(err, distribute.ErrMismatch) && !errors.Is(err, distribute.ErrDesync) {
		t.Fatalf("replicas with other buckets: got %v, want ErrMismatch or ErrDesync", err)
	}
	for i := range buckets {
		buckets[i] = onesBucket(2, 4, 50_000)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		_, err := r.StartAllReduce(ctx, distribute.Sum, buckets[r.ID()])
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range buckets {
		if got := tensor.Data[float32](b.Dst[1])[49_999]; got != 3 {
			t.Errorf("replica %d: got %v, want 3", i, got)
		}
	}
}

// TestFailureWithStartedCalls: a replica ends in any way while buckets are in flight. All replicas get its error at
// once, nothing writes to their memory afterwards, and the strategy can run again.
func TestFailureWithStartedCalls(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(ctx context.Context, r *distribute.Replica) error
		want error
	}{
		"an error": {func(context.Context, *distribute.Replica) error { return errStep }, errStep},
		"a panic":  {func(context.Context, *distribute.Replica) error { panic(errStep) }, errStep},
		"Goexit": {
			func(context.Context, *distribute.Replica) error { runtime.Goexit(); return nil }, distribute.ErrPeerLost,
		},
		"an early return": {
			func(context.Context, *distribute.Replica) error { return nil }, distribute.ErrDesync,
		},
		"another bucket": {
			func(ctx context.Context, r *distribute.Replica) error {
				_, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(1, 30_000, 9))
				return err
			}, distribute.ErrMismatch,
		},
		"a merge call": {merge, distribute.ErrDesync},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := mirrored(t, 3, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
				memory := make([][]distribute.Bucket, 3)
				err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
					var last distribute.Handle
					for k := range 4 {
						if k == 2 && r.ID() == 2 {
							return c.end(ctx, r)
						}
						b := onesBucket(1, 30_000, 5)
						memory[r.ID()] = append(memory[r.ID()], b)
						h, err := r.StartAllReduce(ctx, distribute.Sum, b)
						if err != nil {
							return err
						}
						last = h
					}
					return last.Wait(ctx)
				})
				if !errors.Is(err, c.want) {
					t.Fatalf("got %v, want %v", err, c.want)
				}
				var before [][]*tensor.Tensor
				for _, buckets := range memory {
					for _, b := range buckets {
						before = append(before, []*tensor.Tensor{b.Dst[0].Clone(), b.Dst[1].Clone()})
					}
				}
				checkRunsAgain(t, s)
				for _, buckets := range memory {
					for _, b := range buckets {
						for i, x := range b.Dst {
							if !x.Equal(before[0][i]) {
								t.Errorf("the memory of a failed call changed after the Run")
							}
						}
						before = before[1:]
					}
				}
			})
		})
	}
}

// TestBucketErrors: invalid buckets are rejected; the error for buckets that differ names the tensor.
func TestBucketErrors(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(0, 4, 4)
		b.Dst = b.Dst[:1]
		_, err := r.StartAllReduce(ctx, distribute.Sum, b)
		return err
	})
	if !errors.Is(err, distribute.ErrInvalid) {
		t.Errorf("a bucket without a destination: %v, want ErrInvalid", err)
	}
	err = inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(0, 4, 4, 4+r.ID())
		b.Names = []string{"a", "b", "c"}
		h, err := r.StartAllReduce(ctx, distribute.Sum, b)
		if err != nil {
			return err
		}
		return h.Wait(ctx)
	})
	if !errors.Is(err, distribute.ErrMismatch) || !containsAll(err.Error(), "c [4]", "c [5]") {
		t.Errorf("got %v, want a mismatch that names the tensors with their shapes", err)
	}
}

// TestBucketByOps: custom CrossDeviceOps reduce a bucket when it is awaited.
func TestBucketByOps(t *testing.T) {
	s := mirrored(t, 2, onOneDevice)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		b := onesBucket(1, 4, 9)
		b.Scalars[0] = float64(r.ID() + 1)
		h, err := r.StartAllReduce(ctx, distribute.Sum, b)
		if err != nil {
			return err
		}
		if err := h.Wait(ctx); err != nil {
			return err
		}
		if got := tensor.Data[float32](b.Dst[1])[8]; got != 2 || b.Scalars[0] != 3 {
			return fmt.Errorf("got %v and %v, want 2 and 3", got, b.Scalars)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestForgottenCallsByOps: custom CrossDeviceOps make forgotten calls in the order in which they were started, although
// the replicas awaited earlier ones at other points.
func TestForgottenCallsByOps(t *testing.T) {
	s := mirrored(t, 2, onOneDevice)
	var buckets [2][3]distribute.Bucket
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		var first distribute.Handle
		for i := range buckets[r.ID()] {
			b := onesBucket(0, i+1)
			buckets[r.ID()][i] = b
			h, err := r.StartAllReduce(ctx, distribute.Sum, b)
			if i == 0 {
				first = h
			}
			if i == r.ID() { // replica 1 starts its second call before it awaits the first
				err = errors.Join(err, first.Wait(ctx))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for id, list := range buckets {
		for i, b := range list {
			if got := tensor.Data[float32](b.Dst[0])[i]; got != 2 {
				t.Errorf("replica %d, bucket %d: got %v, want 2", id, i, got)
			}
		}
	}
}

func TestBucketsDoNotAllocate(t *testing.T) {
	skipRace(t)
	for _, n := range []int{1, 2} {
		s := mirrored(t, n)
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			buckets := make([]distribute.Bucket, 20)
			for i := range buckets {
				buckets[i] = onesBucket(3, 10, 20, i, 30_000)
			}
			handles := make([]distribute.Handle, len(buckets))
			var err error
			reduce := func() {
				for i, b := range buckets {
					var e error
					handles[i], e = r.StartAllReduce(ctx, distribute.Sum, b)
					err = errors.Join(err, e)
				}
				for _, h := range handles {
					err = errors.Join(err, h.Wait(ctx))
				}
			}
			doesNotAllocate(t, r, reduce)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

var concurrent = distribute.Options{Concurrent: true}

func sumConcurrently(ctx context.Context, r *distribute.Replica) error {
	x := ones(3)
	if err := r.AllReduceInto(ctx, distribute.Sum, x, x, []string{"statistics"}, concurrent); err != nil {
		return err
	}
	if got := tensor.Data[float32](x[0])[2]; int(got) != r.NumReplicas() {
		return fmt.Errorf("a concurrent sum of ones is %v on %d replicas", got, r.NumReplicas())
	}
	return nil
}

// TestConcurrentCalls: a call on the second communicator completes although a peer has not started the bucket that this
// replica started before.
func TestConcurrentCalls(t *testing.T) {
	s := mirrored(t, 3)
	for range 2 {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			if err := sumConcurrently(ctx, r); err != nil {
				return err
			}
			for round := range 20 {
				b := onesBucket(2, 10, 40_000)
				var h distribute.Handle
				var err error
				if (round+r.ID())%3 != 0 {
					if h, err = r.StartAllReduce(ctx, distribute.Sum, b); err != nil {
						return err
					}
				}
				if err := sumConcurrently(ctx, r); err != nil {
					return err
				}
				if h == (distribute.Handle{}) {
					if h, err = r.StartAllReduce(ctx, distribute.Sum, b); err != nil {
						return err
					}
				}
				if err := h.Wait(ctx); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestConcurrentCallsInACycle: replicas that wait for each other in calls of both communicators fail at once.
func TestConcurrentCallsInACycle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
		start := time.Now()
		for _, opened := range []bool{true, false} {
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				if opened {
					if err := sumConcurrently(ctx, r); err != nil {
						return err
					}
				}
				if r.ID() == 1 {
					return errors.Join(sumConcurrently(ctx, r), sum(ctx, r, "gradient", 2))
				}
				h, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 2))
				if err != nil {
					return err
				}
				return errors.Join(h.Wait(ctx), sumConcurrently(ctx, r))
			})
			want := distribute.ErrDesync
			if !opened {
				want = distribute.ErrMismatch // opening the second communicator is a call on the first one
			}
			if !errors.Is(err, want) {
				t.Errorf("opened before: %v: got %v, want %v", opened, err, want)
			}
			if opened && !containsAll(err.Error(), "wait for each other", "statistics") {
				t.Errorf("got %v, want a cycle that names the calls", err)
			}
			checkRunsAgain(t, s)
		}
		if err := inStep(t, s, sumConcurrently); err != nil {
			t.Errorf("after failures: %v", err)
		}
		if passed := time.Since(start); passed != 0 {
			t.Errorf("it took %v: a call waited for its deadline", passed)
		}
	})
}

// TestFailureOfConcurrentCall: calls that differ on the second communicator fail the step on all replicas, which are in
// calls of the first one.
func TestFailureOfConcurrentCall(t *testing.T) {
	s := mirrored(t, 3, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		if err := sumConcurrently(ctx, r); err != nil {
			return err
		}
		if _, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 2)); err != nil {
			return err
		}
		x := ones(1 + r.ID())
		return r.AllReduceInto(ctx, distribute.Sum, x, x, nil, concurrent)
	})
	if !errors.Is(err, distribute.ErrMismatch) {
		t.Errorf("got %v, want ErrMismatch", err)
	}
	checkRunsAgain(t, s)
	if err := inStep(t, s, sumConcurrently); err != nil {
		t.Errorf("after the failure: %v", err)
	}
}
