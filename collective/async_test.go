package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// TestStart checks that started calls are executed in the order of their start, a Do after them, and that handles may
// be awaited in any order.
func TestStart(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		g := m.opened(t, 3, collective.Config{})
		mustEach(t, g, func(c collective.Communicator) error {
			const calls = 20
			x := []float32{float32(c.Rank())} // each call sums what the one before left
			var handles []collective.Handle
			for range calls {
				h, err := c.Start(background, sum(x, x))
				if err != nil {
					return err
				}
				handles = append(handles, h)
			}
			if n := c.Pending(); n != calls {
				return fmt.Errorf("%d calls pending, want %d", n, calls)
			}
			y := make([]float32, 1)
			if err := c.Do(background, sum(x, y)); err != nil {
				return err
			}
			for i := range handles {
				if err := handles[(i+7)%calls].Wait(background); err != nil {
					return err
				}
			}
			want := float32(3)
			for range calls {
				want *= 3 // 0+1+2 = 3 after the first call, then three times as much each
			}
			if y[0] != want || c.Pending() != 0 {
				return fmt.Errorf("got %v with %d calls pending, want %v with none", y[0], c.Pending(), want)
			}
			if err := handles[0].Wait(background); !errors.Is(err, collective.ErrInvalid) {
				return fmt.Errorf("a second Wait: %v, want ErrInvalid", err)
			}
			return nil
		})
	})
}

// TestUnawaited checks that the error of Close reports handles that were not awaited.
func TestUnawaited(t *testing.T) {
	g := modes[0].open(t, 2, collective.Config{})
	mustEach(t, g, func(c collective.Communicator) error {
		for range 3 {
			if _, err := c.Start(background, barrier()); err != nil {
				return err
			}
		}
		return c.Do(background, barrier())
	})
	err := g.Close()
	if !errors.Is(err, collective.ErrInvalid) || strings.Count(err.Error(), "3 started calls were not awaited") != 2 {
		t.Errorf("Close: %v", err)
	}
}

// TestAsyncFailures checks that the end of the context of Wait or of a queued Do, Abort and Close end started calls
// too.
func TestAsyncFailures(t *testing.T) {
	cause := errors.New("enough")
	for _, test := range []struct {
		name string
		run  func(c collective.Communicator, h collective.Handle, ctx context.Context) error
		kind error
	}{
		{
			"wait", func(_ collective.Communicator, h collective.Handle, ctx context.Context) error { return h.Wait(ctx) },
			cause,
		},
		{"do behind it", func(c collective.Communicator, h collective.Handle, ctx context.Context) error {
			err := c.Do(ctx, barrier())
			if e := h.Wait(background); e != err {
				return fmt.Errorf("the started call returned %w, the Do behind it %w", e, err)
			}
			return err
		}, cause},
		{"abort", func(c collective.Communicator, h collective.Handle, _ context.Context) error {
			time.AfterFunc(time.Second, func() { c.Abort(cause) })
			return h.Wait(background)
		}, cause},
		{"close", func(c collective.Communicator, h collective.Handle, _ context.Context) error {
			time.AfterFunc(time.Second, func() { c.Close() })
			return h.Wait(background)
		}, collective.ErrClosed},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				synctest.Test(t, func(t *testing.T) {
					g := m.open(t, 2, collective.Config{})
					ctx, cancel := context.WithCancelCause(background)
					defer cancel(nil)
					time.AfterFunc(time.Second, func() { cancel(cause) })
					c := g.Local()[0]
					h, err := c.Start(background, barrier())
					if err != nil {
						t.Fatal(err)
					}
					same(t, []error{test.run(c, h, ctx)}, test.kind)
					if test.kind == cause {
						poisoned(t, g, []error{c.Err()})
					}
					g.Close()
				})
			})
		})
	}
}

func TestSplit(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		for n := 1; n <= 9; n++ {
			g := m.opened(t, n, collective.Config{Epoch: 7})
			mustEach(t, g, func(c collective.Communicator) error {
				for round := range 3 {
					color := c.Rank() % 3
					if color == 2 {
						color = -1
					}
					sub, err := c.Split(background, color, -c.Rank())
					if err != nil {
						return err
					}
					if color < 0 {
						if sub != nil {
							return fmt.Errorf("color %d got %v", color, sub)
						}
						continue
					}
					members := (n - color + 2) / 3
					if sub.Size() != members || sub.Rank() != members-1-c.Rank()/3 {
						return fmt.Errorf("rank %d became rank %d of %d, want reversed order of %d", c.Rank(), sub.Rank(), sub.Size(),
							members)
					}
					x, want := []float32{float32(c.Rank())}, float32(0)
					for r := color; r < n; r += 3 {
						want += float32(r)
					}
					if err := sub.Do(background, sum(x, x)); err != nil {
						return err
					}
					if x[0] != want {
						return fmt.Errorf("the sum over color %d is %v in round %d, want %v", color, x[0], round, want)
					}
					if p := sub.Properties(); p.Epoch != 7 || !p.Canonical || p.Transport != "mem" {
						return fmt.Errorf("properties %+v", p)
					}
					if err := sub.Close(); err != nil {
						return err
					}
				}
				return c.Do(background, barrier())
			})
		}
	})
}

// noSplit is an endpoint whose Split fails after a minute.
type noSplit struct {
	transport.Endpoint
	err error
}

func (e noSplit) Split(uint64, []int) (transport.Endpoint, error) {
	time.Sleep(time.Minute)
	return nil, e.err
}

// TestSplitHalfDone checks that a rank whose Split succeeded does not wait for one whose Split failed.
func TestSplitHalfDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		cause := errors.New("no memory left")
		ends := mem.NewPipes(3)
		ends[2] = noSplit{ends[2], cause}
		g, err := collective.Open(ends, collective.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer shut(t, g)
		errs := each(g, func(c collective.Communicator) error {
			sub, err := c.Split(background, 0, 0)
			if err != nil {
				return err
			}
			defer sub.Close()
			return sub.Do(background, barrier())
		})
		same(t, errs, cause)
		if waited := time.Since(start); waited != time.Minute {
			t.Errorf("it took %v, want the minute until rank 2 failed", waited)
		}
	})
}

// TestSplitFailsAlone checks that the failure of a part does not affect the whole group.
func TestSplitFailsAlone(t *testing.T) {
	g := modes[0].opened(t, 4, collective.Config{})
	mustEach(t, g, func(c collective.Communicator) error {
		sub, err := c.Split(background, c.Rank()%2, 0)
		if err != nil {
			return err
		}
		defer sub.Close()
		if c.Rank() == 0 {
			sub.Abort(nil)
		}
		if err := sub.Do(background, barrier()); (err != nil) != (c.Rank()%2 == 0) {
			return fmt.Errorf("in part %d: %v", c.Rank()%2, err)
		}
		return c.Do(background, barrier())
	})
}

func TestDoAll(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		for n := 1; n <= 5; n++ {
			g := m.opened(t, n, collective.Config{})
			xs := make([][]float32, n)
			calls := make([]collective.Call, n)
			for round := range 5 {
				for r := range xs {
					xs[r] = []float32{float32(r + round), 1}
					calls[r] = *sum(xs[r], xs[r])
				}
				if err := g.DoAll(background, calls); err != nil {
					t.Fatal(err)
				}
				for r := range xs {
					if want := float32(n*(n-1)/2 + n*round); xs[r][0] != want || xs[r][1] != float32(n) {
						t.Errorf("rank %d has %v, want [%v %v]", r, xs[r], want, n)
					}
				}
			}
			mustEach(t, g, func(c collective.Communicator) error { return c.Do(background, barrier()) })
		}
	})
}

func TestDoAllFails(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		for name, test := range map[string]struct {
			calls []collective.Call
			kind  error
		}{
			"mismatch":      {[]collective.Call{*barrier(), *sum(nil, nil)}, collective.ErrMismatch},
			"too few calls": {[]collective.Call{*barrier()}, collective.ErrInvalid},
		} {
			t.Run(name, func(t *testing.T) {
				g := m.opened(t, 2, collective.Config{})
				err := g.DoAll(background, test.calls)
				same(t, []error{err}, test.kind)
				poisoned(t, g, []error{err})
			})
		}
		t.Run("busy", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := m.open(t, 3, collective.Config{})
				defer shut(t, g)
				first := make(chan error)
				go func() { first <- g.Local()[1].Do(background, barrier()) }()
				synctest.Wait()
				err := g.DoAll(background, []collective.Call{*barrier(), *barrier(), *barrier()})
				same(t, []error{err, <-first}, collective.ErrBusy)
			})
		})
	})
}

// TestRebuild checks that after a failure the same ranks continue at the next epoch.
func TestRebuild(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		g := m.open(t, 3, collective.Config{Epoch: 4})
		for epoch := uint32(5); epoch < 8; epoch++ {
			g.Local()[1].Abort(errors.New("enough"))
			next, err := g.Rebuild(background)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range g.Local() {
				if err := c.Do(background, barrier()); !errors.Is(err, collective.ErrClosed) {
					t.Errorf("the old group: %v, want ErrClosed", err)
				}
			}
			g = next
			mustEach(t, g, func(c collective.Communicator) error {
				if p := c.Properties(); p.Epoch != epoch {
					return fmt.Errorf("epoch %d, want %d", p.Epoch, epoch)
				}
				return c.Do(background, barrier())
			})
		}
		shut(t, g)
	})
}
