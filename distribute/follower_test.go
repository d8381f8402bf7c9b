package distribute_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/distribute"
	"github.com/lockstep-ml/lockstep/tensor"
)

// rounds exchanges sums of one bucket in three rounds, each of which follows the one before: an all-to-all, an
// all-gather of what each replica adds up, and an all-reduce of the whole, which must be replicas times the sums.
type rounds struct {
	src, received, sums, whole *tensor.Tensor
	handles                    [3]distribute.Handle
	added, copied              chan struct{}
}

func newRounds(n, part int) *rounds {
	make := func() *tensor.Tensor { return tensor.New(tensor.Int32, n*part) }
	return &rounds{src: make(), received: make(), sums: make(), whole: make()}
}

func (x *rounds) start(ctx context.Context, r *distribute.Replica, step int) (err error) {
	n := r.NumReplicas()
	part := x.src.Len() / n
	x.added, x.copied = make(chan struct{}), make(chan struct{})
	for i := range tensor.Data[int32](x.src) {
		tensor.Data[int32](x.src)[i] = int32(1000*r.ID() + i + step)
	}
	own := tensor.Data[int32](x.sums)[r.ID()*part : (r.ID()+1)*part]
	if x.handles[0], err = r.StartAllToAll(ctx, x.received, x.src, "parts"); err != nil {
		return err
	}
	add := func() {
		clear(own)
		for i, v := range tensor.Data[int32](x.received) {
			own[i%part] += v
		}
		close(x.added)
	}
	if x.handles[1], err = x.handles[0].Then(add).StartAllGather(ctx, x.sums, tensor.Of(own), "sums"); err != nil {
		return err
	}
	copied := func() {
		copy(tensor.Data[int32](x.whole), tensor.Data[int32](x.sums))
		close(x.copied)
	}
	b := distribute.Bucket{Dst: []*tensor.Tensor{x.whole}, Src: []*tensor.Tensor{x.whole}, Names: []string{"whole"}}
	x.handles[2], err = x.handles[1].Then(copied).StartAllReduce(ctx, distribute.Sum, b)
	return err
}

func (x *rounds) check(n, step int) error {
	for i, got := range tensor.Data[int32](x.whole) {
		if want := int32(n * (1000*n*(n-1)/2 + n*(i+step))); got != want {
			return fmt.Errorf("step %d: element %d is %d, want %d", step, i, got, want)
		}
	}
	return nil
}

// TestFollower checks calls that follow others, several at a time over several steps. They proceed without the
// replica's goroutine.
func TestFollower(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		s := mirrored(t, n)
		buckets := make([][]*rounds, n)
		for replica := range buckets {
			for _, part := range []int{1, 7, 3000} {
				buckets[replica] = append(buckets[replica], newRounds(n, part))
			}
		}
		for step := range 4 {
			err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
				for _, x := range buckets[r.ID()] {
					if err := x.start(ctx, r, step); err != nil {
						return err
					}
				}
				for _, x := range buckets[r.ID()] {
					<-x.added
					<-x.copied
				}
				for k, x := range buckets[r.ID()] {
					if step == 3 && k == 1 {
						continue // the Run awaits them
					}
					for i := range x.handles {
						if step == 2 {
							i = len(x.handles) - 1 - i
						}
						if err := x.handles[i].Wait(ctx); err != nil {
							return err
						}
					}
					if err := x.check(n, step); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatalf("%d replicas: %v", n, err)
			}
		}
	}
}

// TestFollowerByOps: custom CrossDeviceOps make both calls when the second one is awaited.
func TestFollowerByOps(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) {
		cfg.Logger, cfg.CrossDeviceOps = quiet, distribute.NewReductionToOneDevice("", nil)
	})
	for _, first := range []bool{true, false} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			a, b := onesBucket(0, 3), onesBucket(0, 3)
			h, err := r.StartAllReduce(ctx, distribute.Sum, a)
			if err != nil {
				return err
			}
			double := func() {
				for i, v := range tensor.Data[float32](a.Dst[0]) {
					tensor.Data[float32](b.Src[0])[i] = 2 * v
				}
			}
			next, err := h.Then(double).StartAllReduce(ctx, distribute.Sum, b)
			if err == nil && first {
				err = h.Wait(ctx)
			}
			if err == nil {
				err = next.Wait(ctx)
			}
			if got := tensor.Data[float32](b.Dst[0])[0]; err == nil && got != 8 {
				err = fmt.Errorf("got %v, want 8", got)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestFollowerFails: a call that cannot begin ends with the failure of the Run, also if the first call never ends.
func TestFollowerFails(t *testing.T) {
	s := mirrored(t, 2, func(cfg *distribute.MirroredConfig) { cfg.Logger = quiet })
	for _, c := range []struct {
		name, want string
		step       func(ctx context.Context, r *distribute.Replica, h distribute.Handle) error
	}{
		{"the replica fails", errStep.Error(), func(_ context.Context, r *distribute.Replica, _ distribute.Handle) error {
			if r.ID() == 1 {
				return errStep
			}
			return nil
		}},
		{"a panic", "the function of Handle.Then panicked: no memory", func(
			ctx context.Context, r *distribute.Replica, h distribute.Handle,
		) error {
			next, err := h.Then(func() {
				if r.ID() == 1 {
					panic("no memory")
				}
			}).StartAllReduce(ctx, distribute.Sum, onesBucket(1, 2))
			return errors.Join(err, next.Wait(ctx))
		}},
		{"two of one call", "another call follows", func(
			ctx context.Context, r *distribute.Replica, h distribute.Handle,
		) error {
			_, err := h.Then(func() {}).StartAllReduce(ctx, distribute.Sum, onesBucket(1, 2))
			if err == nil {
				_, err = h.Then(func() {}).StartAllReduce(ctx, distribute.Sum, onesBucket(2, 2))
			}
			return err
		}},
		{"of no call", "refers to no call", func(ctx context.Context, _ *distribute.Replica, _ distribute.Handle) error {
			_, err := distribute.Handle{}.Then(func() {}).StartAllReduce(ctx, distribute.Sum, onesBucket(1, 2))
			return err
		}},
		{"one replica does not start the first", "", func(
			ctx context.Context, r *distribute.Replica, h distribute.Handle,
		) error {
			if r.ID() == 1 {
				return nil
			}
			more, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(1, 9))
			if err == nil {
				more, err = more.Then(func() {}).StartAllReduce(ctx, distribute.Sum, onesBucket(1, 2))
			}
			return errors.Join(err, more.Wait(ctx))
		}},
	} {
		err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
			h, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 5))
			if err != nil {
				return err
			}
			return c.step(ctx, r, h)
		})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error { // after an awaited call
		h, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 5))
		if err == nil {
			err = h.Wait(ctx)
		}
		if err != nil {
			return err
		}
		h, err = h.Then(func() {}).StartAllReduce(ctx, distribute.Sum, onesBucket(1, 5))
		return errors.Join(err, h.Wait(ctx))
	})
	if err != nil {
		t.Error(err)
	}
}

// TestFollowersInTurn: when a call that follows another one was awaited, a second one may follow the same call.
func TestFollowersInTurn(t *testing.T) {
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		computed := 0
		first, err := r.StartAllReduce(ctx, distribute.Sum, onesBucket(0, 5))
		for k := 1; err == nil && k <= 3; k++ {
			var next distribute.Handle
			next, err = first.Then(func() { computed++ }).StartAllReduce(ctx, distribute.Sum, onesBucket(k, 5))
			if err == nil {
				err = next.Wait(ctx)
			}
		}
		if err == nil && computed != 3 {
			err = fmt.Errorf("computed %d times, want 3", computed)
		}
		return errors.Join(err, first.Wait(ctx))
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFollowerDoesNotAllocate(t *testing.T) {
	skipRace(t)
	s := mirrored(t, 2)
	err := inStep(t, s, func(ctx context.Context, r *distribute.Replica) (err error) {
		a, b, compute := onesBucket(1, 50), onesBucket(0, 20), func() {}
		a.Names, b.Names = []string{"a"}, []string{"b"}
		doesNotAllocate(t, r, func() {
			first, e := r.StartAllReduce(ctx, distribute.Sum, a)
			second, f := first.Then(compute).StartAllReduce(ctx, distribute.Sum, b)
			err = errors.Join(err, e, f, first.Wait(ctx), second.Wait(ctx))
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
