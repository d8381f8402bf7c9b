package deadlock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/distribute/internal/deadlock"
	"github.com/lockstep-ml/lockstep/tensor"
)

func send(to, n int) *collective.Call {
	return &collective.Call{
		Op: collective.Send, Peer: to, Type: tensor.Float32,
		Src: tensor.HostMemory(make([]float32, n)),
	}
}

func receive(from, n int) *collective.Call {
	return &collective.Call{
		Op: collective.Recv, Peer: from, Type: tensor.Float32,
		Dst: tensor.HostMemory(make([]float32, n)),
	}
}

// do makes calls one after the other.
func do(ctx context.Context, c collective.Communicator, calls ...*collective.Call) error {
	for _, call := range calls {
		if err := c.Do(ctx, call); err != nil {
			return err
		}
	}
	return nil
}

// TestPairs: calls of two ranks between collectives, in which the third rank takes no part, change no result.
func TestPairs(t *testing.T) {
	w := newWorld(t, 3, deadlock.Config{}, "x")
	defer w.close()
	each, _, err := w.run(context.Background(), func(ctx context.Context, r replica) error {
		c := r.comm("x")
		for range 20 {
			var err error
			switch r.id {
			case 0:
				err = do(ctx, c, send(1, 3), receive(1, 2))
			case 1:
				err = do(ctx, c, receive(0, 3), send(0, 2))
			}
			if err = errors.Join(err, do(ctx, c, vector("w", 3))); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err, each)
	}
}

// TestPairsThatNeverMeet: a cycle through calls of two ranks, and a peer that has ended, are detected without
// a timeout.
func TestPairsThatNeverMeet(t *testing.T) {
	for name, step := range map[string]func(ctx context.Context, r replica) error{
		"a ring of receives": func(ctx context.Context, r replica) error {
			return do(ctx, r.comm("x"), receive((r.id+1)%3, 4))
		},
		"a ring of sends": func(ctx context.Context, r replica) error { return do(ctx, r.comm("x"), send((r.id+1)%3, 4)) },
		"send against all_reduce": func(ctx context.Context, r replica) error {
			if r.id == 0 {
				return do(ctx, r.comm("x"), send(1, 4), vector("w", 3))
			}
			return do(ctx, r.comm("x"), vector("w", 3))
		},
		"the peer has returned": func(ctx context.Context, r replica) error {
			if r.id == 0 {
				return do(ctx, r.comm("x"), receive(1, 4))
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 3, deadlock.Config{}, "x")
				defer w.close()
				start := time.Now()
				_, _, err := w.run(context.Background(), step)
				var failure *deadlock.StepError
				if !errors.As(err, &failure) || !errors.Is(err, collective.ErrDesync) {
					t.Fatalf("got %v, want a StepError that is %q", err, collective.ErrDesync)
				}
				if took := time.Since(start); took != 0 {
					t.Errorf("it took %v, want no time at all", took)
				}
			})
		})
	}
}
