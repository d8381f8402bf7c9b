package collective_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/mem"
)

// same fails the test unless all errors have that kind and are the same value.
func same(t *testing.T, errs []error, kind error, texts ...string) {
	t.Helper()
	for rank, err := range errs {
		var e *collective.Error
		if !errors.Is(err, kind) || !errors.As(err, &e) {
			t.Errorf("rank %d: got %v, want a *collective.Error that is %q", rank, err, kind)
			continue
		}
		if err != errs[0] {
			t.Errorf("rank %d has another error than rank 0:\n%v\n%v", rank, err, errs[0])
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("rank %d: %q\ndoes not contain %q", rank, err, text)
			}
		}
	}
}

// poisoned fails the test unless every later call returns the first cause.
func poisoned(t *testing.T, g collective.Group, errs []error) {
	t.Helper()
	for rank, err := range each(g, func(c collective.Communicator) error { return c.Do(background, barrier()) }) {
		if err != errs[0] {
			t.Errorf("rank %d: the next call returned %v, want the first cause %v", rank, err, errs[0])
		}
	}
	for _, c := range g.Local() {
		if err := c.Err(); err != errs[0] {
			t.Errorf("rank %d: Err is %v, want the first cause %v", c.Rank(), err, errs[0])
		}
	}
}

func TestMismatch(t *testing.T) {
	vector := func(t tensor.DType, n int) tensor.Memory {
		return tensor.New(t, n).Memory()
	}
	all := func(op collective.ReduceOp, t tensor.DType, name string, shape ...int) *collective.Call {
		n := 1
		for _, d := range shape {
			n *= d
		}
		return named(&collective.Call{Op: collective.AllReduce, Reduce: op, Type: t, Src: vector(t, n), Dst: vector(t, n)},
			name, shape...)
	}
	f32 := func(name string, shape ...int) *collective.Call {
		return all(collective.Sum, tensor.Float32, name, shape...)
	}
	unnamed := func(n int) *collective.Call {
		return sum(make([]float32, n), make([]float32, n))
	}
	cast := func(root int) *collective.Call {
		return &collective.Call{
			Op: collective.Broadcast, Type: tensor.Float32, Root: root,
			Src: vector(tensor.Float32, 3), Dst: vector(tensor.Float32, 3),
		}
	}
	with := func(c *collective.Call, o collective.Options) *collective.Call { c.Options = &o; return c }
	for _, test := range []struct {
		name      string
		odd, rest func() *collective.Call
		says      []string
	}{
		{
			"operation", func() *collective.Call { return cast(0) }, func() *collective.Call { return f32("w", 3) },
			[]string{`calls broadcast float32 [3] from rank 0`, `all_reduce SUM float32 [3] of "w"`, "the operations differ"},
		},
		{
			"barrier", barrier, func() *collective.Call { return f32("w", 3) },
			[]string{`calls barrier`, `all_reduce SUM float32 [3] of "w"`, "the operations differ"},
		},
		{
			"reduction", func() *collective.Call { return all(collective.Max, tensor.Float32, "w", 3) },
			func() *collective.Call { return f32("w", 3) },
			[]string{`all_reduce MAX float32 [3] of "w"`, "the reductions differ"},
		},
		{
			"dtype", func() *collective.Call { return all(collective.Sum, tensor.Int32, "w", 3) },
			func() *collective.Call { return f32("w", 3) },
			[]string{`all_reduce SUM int32 [3] of "w"`, `all_reduce SUM float32 [3] of "w"`, "the dtypes differ"},
		},
		{
			"count", func() *collective.Call { return f32("w", 3) }, func() *collective.Call { return f32("w", 2) },
			[]string{`all_reduce SUM float32 [3] of "w"`, `all_reduce SUM float32 [2] of "w"`, "the shapes differ"},
		},
		{
			"shape of equal count", func() *collective.Call { return f32("w", 2, 3) },
			func() *collective.Call { return f32("w", 3, 2) },
			[]string{`[2 3] of "w"`, `[3 2] of "w"`, "the shapes differ"},
		},
		{
			"name", func() *collective.Call { return f32("w", 3) }, func() *collective.Call { return f32("b", 3) },
			[]string{`of "w"`, `of "b"`, "the names differ"},
		},
		{
			"name against none", func() *collective.Call { return unnamed(3) }, func() *collective.Call { return f32("b", 3) },
			[]string{`of "b"`, "the names differ"},
		},
		{
			"count without names", func() *collective.Call { return unnamed(3) }, func() *collective.Call { return unnamed(4) },
			[]string{"all_reduce SUM float32 [3]", "all_reduce SUM float32 [4]", "the counts differ"},
		},
		{
			"root", func() *collective.Call { return cast(1) }, func() *collective.Call { return cast(0) },
			[]string{"from rank 1", "from rank 0", "the roots differ"},
		},
		{
			"accumulation", func() *collective.Call {
				return with(all(collective.Sum, tensor.BFloat16, "w", 3),
					collective.Options{Accumulate: collective.AccumulateFloat32})
			}, func() *collective.Call { return all(collective.Sum, tensor.BFloat16, "w", 3) },
			[]string{"the accumulation types differ"},
		},
		{
			"order", func() *collective.Call { return with(f32("w", 3), collective.Options{Order: collective.Any}) },
			func() *collective.Call { return f32("w", 3) },
			[]string{"the orders of reduction differ"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				for _, n := range []int{2, 3, 5} {
					g := m.opened(t, n, collective.Config{})
					odd := n - 1
					errs := each(g, func(c collective.Communicator) error {
						if err := c.Do(background, barrier()); err != nil {
							return err
						}
						if c.Rank() == odd {
							return c.Do(background, test.odd())
						}
						return c.Do(background, test.rest())
					})
					says := append(slices.Clone(test.says), "call 1")
					if m.algorithm == "direct" {
						// with messages, other ranks may get it from a rank that was notified
						says = append(says, fmt.Sprintf("rank %d calls", odd))
					}
					same(t, errs, collective.ErrMismatch, says[:len(says)-1]...)
					poisoned(t, g, errs)
				}
			})
		})
	}
}

// TestMismatchText checks that the text names the ranks and the field.
func TestMismatchText(t *testing.T) {
	g := modes[0].opened(t, 2, collective.Config{Name: "gradients"})
	errs := each(g, func(c collective.Communicator) error {
		n := 2 + c.Rank()
		return c.Do(background, named(sum(make([]float32, n), make([]float32, n)), "w", n))
	})
	const want = `all_reduce of "w": mismatch: rank 1 calls all_reduce SUM float32 [3] of "w", ` +
		`rank 0 calls all_reduce SUM float32 [2] of "w": the shapes differ`
	same(t, errs, collective.ErrMismatch, `collective: communicator "gradients", rank `, want)
}

// TestMismatchWithoutTheOthers checks that two ranks with different calls are detected although a third makes no call.
func TestMismatchWithoutTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		g := modes[0].open(t, 3, collective.Config{})
		defer shut(t, g)
		errs := each(g, func(c collective.Communicator) error {
			switch c.Rank() {
			case 0:
				return c.Do(background, barrier())
			case 1:
				return c.Do(background, sum(nil, nil))
			}
			time.Sleep(time.Second)
			return c.Do(background, barrier())
		})
		same(t, errs, collective.ErrMismatch, "rank 1 calls all_reduce SUM float32 [0], rank 0 calls barrier")
		if waited := time.Since(start); waited != time.Second {
			t.Errorf("it took %v, want the second that rank 2 slept", waited)
		}
	})
}

// TestTimeout checks that every wait ends at its deadline, on all ranks, in virtual time, and that a stall is logged
// once before.
func TestTimeout(t *testing.T) {
	for _, test := range []struct {
		name  string
		cfg   collective.Config
		opts  *collective.Options
		ends  time.Duration
		stall bool
	}{
		{"default", collective.Config{}, nil, 10 * time.Minute, true},
		{"configured", collective.Config{Timeout: time.Second}, nil, time.Second, false},
		{"of the call", collective.Config{Timeout: time.Hour}, &collective.Options{Timeout: time.Minute}, time.Minute, true},
		{"stall first", collective.Config{Timeout: time.Hour, Stall: 20 * time.Minute}, nil, time.Hour, true},
		{"no stall report", collective.Config{Stall: -1}, nil, 10 * time.Minute, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				for _, n := range []int{2, 8} {
					synctest.Test(t, func(t *testing.T) {
						var log bytes.Buffer
						cfg := test.cfg
						cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
						g := m.open(t, n, cfg)
						defer shut(t, g)
						start := time.Now()
						errs := each(g, func(c collective.Communicator) error {
							if c.Rank() == 0 {
								time.Sleep(24 * time.Hour)
							}
							call := named(sum(make([]float32, 4), make([]float32, 4)), "w", 2, 2)
							call.Options = test.opts
							err := c.Do(background, call)
							if waited := time.Since(start); c.Rank() != 0 && waited != test.ends {
								t.Errorf("rank %d waited %v, want %v", c.Rank(), waited, test.ends)
							}
							return err
						})
						says := []string{fmt.Sprint("waited ", test.ends), `all_reduce SUM float32 [2 2] of "w"`}
						if m.algorithm == "direct" || n == 2 {
							says = append(says, "for rank 0")
						}
						same(t, errs, collective.ErrTimeout, says...)
						same(t, errs, context.DeadlineExceeded)
						if e := (*collective.Error)(nil); errors.As(errs[0], &e) && (!e.Timeout() || len(e.Peers) == 0) {
							t.Errorf("the error has Timeout %v and peers %v", e.Timeout(), e.Peers)
						}
						want := 0
						if test.stall {
							want = n - 1
						}
						if got := strings.Count(log.String(), "stalled"); got != want {
							t.Errorf("%d ranks logged a stall, want %d:\n%s", got, want, log.String())
						}
						if test.stall &&
							(!strings.Contains(log.String(), "waits_for=") || !strings.Contains(log.String(), "all_reduce SUM")) {
							t.Errorf("the stall report does not state which rank waits for which ranks, and in which call:\n%s",
								log.String())
						}
					})
				}
			})
		})
	}
}

func TestNoTimeoutIsLogged(t *testing.T) {
	var log bytes.Buffer
	g := modes[0].open(t, 2, collective.Config{Timeout: -1, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	shut(t, g)
	if got := strings.Count(log.String(), "no deadline"); got != 1 {
		t.Errorf("reported %d times that no deadline is set, want once: %s", got, log.String())
	}
}

// TestNoTimeout checks that with a negative timeout a rank waits for days.
func TestNoTimeout(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			g := m.open(t, 3, collective.Config{Timeout: -1, Logger: slog.New(slog.DiscardHandler)})
			defer shut(t, g)
			mustEach(t, g, func(c collective.Communicator) error {
				time.Sleep(time.Duration(c.Rank()) * 72 * time.Hour)
				return c.Do(background, barrier())
			})
		})
	})
}

func TestContextEnds(t *testing.T) {
	cause := errors.New("the user went home")
	for _, test := range []struct {
		name string
		ctx  func() (context.Context, context.CancelFunc)
		is   []error
	}{
		{"cancelled with a cause", func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(background)
			stop := time.AfterFunc(time.Second, func() { cancel(cause) })
			return ctx, func() { stop.Stop(); cancel(nil) }
		}, []error{collective.ErrAborted, context.Canceled, cause}},
		{"deadline", func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(background, time.Second)
		}, []error{collective.ErrTimeout, context.DeadlineExceeded}},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				for _, n := range []int{2, 8} {
					synctest.Test(t, func(t *testing.T) {
						g := m.open(t, n, collective.Config{})
						defer shut(t, g)
						ctx, cancel := test.ctx()
						defer cancel()
						errs := each(g, func(c collective.Communicator) error {
							if c.Rank() == n-1 {
								time.Sleep(time.Hour)
							}
							if c.Rank() == 0 {
								return c.Do(ctx, barrier())
							}
							return c.Do(background, barrier())
						})
						for _, is := range test.is {
							same(t, errs, is)
						}
						poisoned(t, g, errs)
					})
				}
			})
		})
	}
}

// TestContextOverBefore checks that a call with an ended context does not begin.
func TestContextOverBefore(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			g := m.open(t, 2, collective.Config{})
			defer shut(t, g)
			ctx, cancel := context.WithCancel(background)
			cancel()
			errs := each(g, func(c collective.Communicator) error {
				if c.Rank() == 0 {
					return c.Do(ctx, barrier())
				}
				return c.Do(background, barrier())
			})
			same(t, errs, context.Canceled)
		})
	})
}

func TestAbort(t *testing.T) {
	cause := errors.New("enough")
	eachMode(t, func(t *testing.T, m mode) {
		for _, given := range []error{cause, nil} {
			synctest.Test(t, func(t *testing.T) {
				g := m.open(t, 3, collective.Config{})
				defer shut(t, g)
				time.AfterFunc(time.Second, func() {
					g.Local()[0].Abort(given)
					g.Local()[1].Abort(errors.New("too late"))
				})
				errs := each(g, func(c collective.Communicator) error {
					if c.Rank() == 0 {
						time.Sleep(2 * time.Second)
					}
					return c.Do(background, barrier())
				})
				same(t, errs, collective.ErrAborted)
				if given != nil {
					same(t, errs, cause)
				}
				poisoned(t, g, errs)
			})
		}
	})
}

func TestInvalidCalls(t *testing.T) {
	x := make([]float32, 8)
	mem := tensor.HostMemory(x)
	ok := collective.Call{Op: collective.AllReduce, Type: tensor.Float32, Src: mem, Dst: mem}
	for _, test := range []struct {
		name   string
		change func(*collective.Call)
		says   string
	}{
		{"no operation", func(c *collective.Call) { c.Op = 0 }, "Op(0) is not an operation"},
		{"no reduction", func(c *collective.Call) { c.Reduce = 99 }, "ReduceOp(99) is not a reduction"},
		{"bool", func(c *collective.Call) { c.Type = tensor.Bool }, "a reduction of bool: want a numeric dtype"},
		{"string", func(c *collective.Call) { c.Op, c.Type = collective.Broadcast, tensor.String }, "a broadcast of string"},
		{"sizes", func(c *collective.Call) { c.Src = mem.Slice(0, 16) }, "16 bytes in Src and 32 in Dst"},
		{
			"part of an element", func(c *collective.Call) { c.Src, c.Dst = mem.Slice(0, 15), mem.Slice(0, 15) },
			"not a whole number of float32",
		},
		{"overlap", func(c *collective.Call) { c.Src, c.Dst = mem.Slice(0, 16), mem.Slice(8, 24) }, "Src and Dst overlap"},
		{"device", func(c *collective.Call) { c.Src.Kind = tensor.Device }, "memory of a device"},
		{"nowhere", func(c *collective.Call) { c.Src = tensor.Memory{Bytes: 32} }, "without a pointer"},
		{"root", func(c *collective.Call) { c.Op, c.Root = collective.Broadcast, 2 }, "root 2 of 2 ranks"},
		{"counts", func(c *collective.Call) { c.Counts = []int{4, 4} }, "field Counts is set for all_reduce"},
		{
			"shape", func(c *collective.Call) { c.Manifest = &collective.Manifest{Name: "w", Shape: []int{3, 3}} },
			`shape [3 3] of "w" holds 9 elements, Src 8`,
		},
		{
			"algorithm", func(c *collective.Call) { c.Options = &collective.Options{Algorithm: "magic"} },
			`no algorithm "magic": want one of direct,`,
		},
		{"order", func(c *collective.Call) { c.Options = &collective.Options{Order: 9} }, "unknown order 9"},
		{
			"accumulate", func(c *collective.Call) { c.Options = &collective.Options{Accumulate: 9} },
			"unknown accumulation type 9",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				synctest.Test(t, func(t *testing.T) {
					g := m.open(t, 2, collective.Config{})
					defer shut(t, g)
					errs := each(g, func(c collective.Communicator) error {
						call := ok
						if c.Rank() == 1 {
							test.change(&call)
						} else {
							y := make([]float32, 8)
							call.Src, call.Dst = tensor.HostMemory(y), tensor.HostMemory(y)
						}
						return c.Do(background, &call)
					})
					same(t, errs, collective.ErrInvalid, test.says)
				})
			})
		})
	}
}

func TestDirectNeedsMemory(t *testing.T) {
	g := modes[2].opened(t, 2, collective.Config{Algorithm: "barrier:direct"})
	errs := each(g, func(c collective.Communicator) error { return c.Do(background, barrier()) })
	same(t, errs, collective.ErrInvalid, "algorithm direct: ")
}

// TestNothing checks that nil arguments are errors on every rank, and that Close does not wait afterwards.
func TestNothing(t *testing.T) {
	var none context.Context
	for name, call := range map[string]func(collective.Group, collective.Communicator) error{
		"Do, no context": func(_ collective.Group, c collective.Communicator) error { return c.Do(none, barrier()) },
		"Do, no call":    func(_ collective.Group, c collective.Communicator) error { return c.Do(background, nil) },
		"Start, no context": func(_ collective.Group, c collective.Communicator) error {
			_, err := c.Start(none, barrier())
			return err
		},
		"Start, no call": func(_ collective.Group, c collective.Communicator) error {
			_, err := c.Start(background, nil)
			return err
		},
		"Split": func(_ collective.Group, c collective.Communicator) error {
			_, err := c.Split(none, 0, 0)
			return err
		},
		"DoAll": func(g collective.Group, _ collective.Communicator) error {
			return g.DoAll(none, []collective.Call{*barrier(), *barrier()})
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachMode(t, func(t *testing.T, m mode) {
				synctest.Test(t, func(t *testing.T) {
					g := m.open(t, 2, collective.Config{})
					defer shut(t, g)
					first := call(g, g.Local()[0])
					same(t, []error{first, g.Local()[1].Do(background, barrier())}, collective.ErrInvalid, "a call ")
				})
			})
		})
	}
}

// TestBusy makes calls from two goroutines on one communicator.
func TestBusy(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			g := m.open(t, 2, collective.Config{})
			defer shut(t, g)
			c := g.Local()[0]
			first := make(chan error, 1)
			go func() { first <- c.Do(background, barrier()) }()
			synctest.Wait()
			second := c.Do(background, barrier())
			same(t, []error{second, <-first, g.Local()[1].Do(background, barrier())}, collective.ErrBusy,
				"call 0 on another goroutine")
		})
	})
}

func TestClose(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		t.Run("while a rank waits", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := m.open(t, 2, collective.Config{})
				c := g.Local()[0]
				waiting := make(chan error, 1)
				go func() { waiting <- c.Do(background, barrier()) }()
				synctest.Wait()
				if err := c.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
				same(t, []error{<-waiting}, collective.ErrClosed)
				same(t, []error{c.Do(background, barrier())}, collective.ErrClosed)
				if _, err := c.Start(background, barrier()); !errors.Is(err, collective.ErrClosed) {
					t.Errorf("Start after Close: %v", err)
				}
				shut(t, g)
				shut(t, g)
			})
		})
		t.Run("while its peer waits", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := m.open(t, 2, collective.Config{})
				defer shut(t, g)
				waiting := make(chan error, 1)
				go func() { waiting <- g.Local()[0].Do(background, barrier()) }()
				synctest.Wait()
				g.Local()[1].Close()
				same(t, []error{<-waiting}, collective.ErrPeerLost, "rank 1 has closed its end")
			})
		})
		t.Run("before its peer calls", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := m.open(t, 2, collective.Config{})
				defer shut(t, g)
				g.Local()[1].Close()
				same(t, []error{g.Local()[0].Do(background, barrier())}, collective.ErrPeerLost, "rank 1 has closed its end")
			})
		})
		t.Run("right after the last call", func(t *testing.T) {
			for range 200 {
				g := m.open(t, 3, collective.Config{})
				mustEach(t, g, func(c collective.Communicator) error {
					x := []float32{1, 2, 3}
					err := c.Do(background, sum(x, x))
					return errors.Join(err, c.Close())
				})
			}
		})
	})
}

// seam is an endpoint with a hook that runs when a call has just started on its rank.
type seam struct {
	transport.Endpoint
	transport.SharedMemory
	started func()
}

func (s seam) Memory() transport.SharedMemory { return s }

func (s seam) Await(ctx context.Context, rank, mark int) error {
	err := s.SharedMemory.Await(ctx, rank, mark)
	if mark == 0 && err == nil {
		s.started()
	}
	return err
}

// TestAbortAfterTheStart checks that an abort stops a call that all ranks have entered, between segments, on the ranks
// that see the abort in time, and that the call fails on all ranks, including those that had done their part before.
func TestAbortAfterTheStart(t *testing.T) {
	for _, op := range []collective.Op{collective.AllReduce, collective.Broadcast} {
		t.Run(op.String(), func(t *testing.T) {
			ends := mem.New(3)
			var g collective.Group
			cause := errors.New("enough")
			ends[2] = seam{ends[2], ends[2].Memory(), func() { g.Local()[2].Abort(cause) }}
			g, err := collective.Open(ends, collective.Config{})
			if err != nil {
				t.Fatal(err)
			}
			defer shut(t, g)
			errs := each(g, func(c collective.Communicator) error {
				src, dst := make([]float32, 1000), make([]float32, 1000)
				call := sum(src, dst)
				call.Op, call.Options = op, &collective.Options{Algorithm: "direct"}
				return c.Do(background, call)
			})
			same(t, errs, cause)
			poisoned(t, g, errs)
		})
	}
}

// garbled is an endpoint that cannot accept a frame.
type garbled struct{ transport.Endpoint }

func (garbled) Exchange(context.Context, int, transport.Frame, int, []byte) error {
	return transport.ErrCorrupt
}

// TestFrameLostAfterTheStart checks that if a frame of a call that all have entered cannot be accepted, the ranks that
// need it do not hang.
func TestFrameLostAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ends := mem.New(3)
		ends[1] = garbled{ends[1]}
		g, err := collective.Open(ends, collective.Config{Algorithm: "recursive_doubling"})
		if err != nil {
			t.Fatal(err)
		}
		defer shut(t, g)
		same(t, each(g, func(c collective.Communicator) error {
			x := []float32{1}
			return c.Do(background, sum(x, x))
		}), transport.ErrCorrupt)
	})
}

// TestAbortAfterTheLastFlag checks that a call that needs no more flags once all ranks have entered it succeeds on all
// ranks, including the one that aborts, and that the next call fails.
func TestAbortAfterTheLastFlag(t *testing.T) {
	for range 20 {
		ends := mem.New(3)
		var g collective.Group
		cause := errors.New("enough")
		ends[2] = seam{ends[2], ends[2].Memory(), func() { g.Local()[2].Abort(cause) }}
		g, err := collective.Open(ends, collective.Config{})
		if err != nil {
			t.Fatal(err)
		}
		errs := each(g, func(c collective.Communicator) error {
			src, dst := []float32{1, 2}, make([]float32, 2)
			call := sum(src, dst)
			call.Options = &collective.Options{Algorithm: "eager"}
			if err := c.Do(background, call); err != nil {
				return fmt.Errorf("the call that had begun: %w", err)
			}
			if dst[0] != 3 || dst[1] != 6 {
				return fmt.Errorf("got %v, want the sums 3 and 6", dst)
			}
			return c.Do(background, sum(src, dst))
		})
		for rank, err := range errs {
			if !errors.Is(err, cause) || strings.Contains(err.Error(), "had begun") {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		shut(t, g)
	}
}

// TestCancelAfterTheStart checks that the end of a context does not stop a call that all ranks have entered.
func TestCancelAfterTheStart(t *testing.T) {
	for _, algorithm := range []string{"direct", "recursive_doubling"} {
		ctx, cancel := context.WithCancel(background)
		defer cancel()
		ends := mem.New(2)
		for i := range ends {
			ends[i] = seam{ends[i], ends[i].Memory(), cancel}
		}
		g, err := collective.Open(ends, collective.Config{Algorithm: algorithm})
		if err != nil {
			t.Fatal(err)
		}
		defer shut(t, g)
		mustEach(t, g, func(c collective.Communicator) error {
			x := []float32{1}
			if err := c.Do(ctx, sum(x, x)); err != nil {
				return err
			}
			if x[0] != 2 || ctx.Err() == nil {
				return fmt.Errorf("the sum is %v, want 2; the context's error %v", x[0], ctx.Err())
			}
			return nil
		})
	}
}

// TestFailuresAtAnyMoment makes ranks sum, with pauses, and injects a failure at a random moment. No rank hangs, all
// fail with one cause, no source changes, a call in memory fails on all ranks or on none, and no rank accesses memory
// that was returned to its owner (the race detector checks this). Time is virtual, so the result does not depend on the
// machine.
func TestFailuresAtAnyMoment(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, m mode) {
		random := seeded(t)
		for range 60 {
			n := 2 + random.IntN(7)
			count := []int{1, 1, 100, 100, 70_000}[random.IntN(5)]
			moment := time.Duration(random.IntN(1000)) * time.Microsecond
			victim, how := random.IntN(n), random.IntN(4)
			pauses := make([]time.Duration, n)
			for r := range pauses {
				pauses[r] = time.Duration(1+random.IntN(100)) * time.Microsecond // not zero, or the clock would not advance
			}
			synctest.Test(t, func(t *testing.T) {
				fail(t, m, n, count, moment, victim, how, pauses)
			})
		}
	})
}

func fail(t *testing.T, m mode, n, count int, moment time.Duration, victim, how int, pauses []time.Duration) {
	cfg := collective.Config{}
	if how == 3 {
		cfg.Timeout = moment + 1 // the failing rank makes no more calls
	}
	g := m.open(t, n, cfg)
	defer shut(t, g)
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var stopped atomic.Bool
	time.AfterFunc(moment, func() {
		switch how {
		case 0:
			cancel()
		case 1:
			g.Local()[victim].Abort(errors.New("enough"))
		case 2:
			g.Local()[victim].Close()
		case 3:
			stopped.Store(true)
		}
	})
	completed := make([]int, n)
	errs := each(g, func(c collective.Communicator) error {
		r := c.Rank()
		for i := 0; ; i++ {
			if how == 3 && r == victim && stopped.Load() {
				time.Sleep(time.Hour)
			}
			own := background
			if r == victim {
				own = ctx
			}
			src, dst := make([]float32, count), make([]float32, count)
			for k := range src {
				src[k] = float32(r + i)
			}
			err := c.Do(own, sum(src, dst))
			for k := range src {
				if src[k] != float32(r+i) {
					t.Errorf("rank %d: element %d of the source of call %d became %v", r, k, i, src[k])
					break
				}
			}
			want := float32(n*(n-1)/2 + n*i)
			for k := range dst {
				if err == nil && dst[k] != want {
					t.Errorf("rank %d: element %d of the sum of call %d is %v, want %v", r, k, i, dst[k], want)
					break
				}
			}
			clear(src)
			clear(dst)
			if err != nil {
				return err
			}
			completed[r]++
			time.Sleep(pauses[r])
		}
	})
	for r, err := range errs {
		if err == nil {
			t.Errorf("rank %d has no error", r)
		}
		if how != 2 && err != errs[0] {
			t.Errorf("rank %d failed with\n%v, rank 0 with\n%v", r, err, errs[0])
		}
		if strings.HasPrefix(m.name, "memory") && completed[r] != completed[0] {
			t.Errorf("rank %d completed %d calls, rank 0 %d", r, completed[r], completed[0])
		}
	}
}

// TestGroupsOfOneRankEach checks that a separate group may be opened for each rank: the failure of one reaches the
// others with the text of its cause, and a call that all have entered is completed.
func TestGroupsOfOneRankEach(t *testing.T) {
	cause := errors.New("enough")
	for name, leave := range map[string]func(c collective.Communicator) error{
		"abort": func(c collective.Communicator) error {
			c.Abort(cause)
			return c.Err()
		},
		"cancel": func(c collective.Communicator) error {
			ctx, cancel := context.WithCancelCause(background)
			time.AfterFunc(time.Second, func() { cancel(cause) })
			return c.Do(ctx, barrier())
		},
		"close": func(c collective.Communicator) error { return errors.Join(c.Close(), cause) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				groups := alone(t, mem.New(4))
				errs := eachAlone(groups, func(c collective.Communicator) error {
					x := []float32{1}
					if err := c.Do(background, sum(x, x)); err != nil || x[0] != 4 {
						return fmt.Errorf("the sum is %v, %w", x[0], err)
					}
					switch c.Rank() {
					case 0:
						time.Sleep(2 * time.Second)
					case 1:
						return leave(c)
					}
					return c.Do(background, barrier())
				})
				for rank, err := range errs {
					switch want := collective.ErrAborted; {
					case rank == 1:
						if !errors.Is(err, cause) {
							t.Errorf("rank %d: %v, want %v", rank, err, cause)
						}
					case name == "close":
						if !errors.Is(err, collective.ErrPeerLost) {
							t.Errorf("rank %d: %v, want %v", rank, err, collective.ErrPeerLost)
						}
					case !errors.Is(err, want) || !strings.HasPrefix(err.Error(), `collective: communicator "world", rank 1`) ||
						!strings.HasSuffix(err.Error(), "enough"):
						t.Errorf("rank %d: %v, want the %v of rank 1, with its cause", rank, err, want)
					}
				}
				if waited := time.Since(start); waited != 2*time.Second {
					t.Errorf("it took %v, want the two seconds that rank 0 slept", waited)
				}
			})
		})
	}
	t.Run("abort after the start", func(t *testing.T) {
		ends := mem.New(2)
		var groups []collective.Group
		ends[1] = seam{ends[1], ends[1].Memory(), func() { groups[1].Local()[0].Abort(cause) }}
		groups = alone(t, ends)
		for rank, err := range eachAlone(groups, func(c collective.Communicator) error {
			x := []float32{1}
			if err := c.Do(background, sum(x, x)); err != nil || x[0] != 2 {
				return fmt.Errorf("the sum is %v, %w", x[0], err)
			}
			return nil
		}) {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	})
}

// alone opens a group for each endpoint.
func alone(t *testing.T, ends []transport.Endpoint) []collective.Group {
	t.Helper()
	groups := make([]collective.Group, len(ends))
	for i := range ends {
		g, err := collective.Open(ends[i:i+1], collective.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { shut(t, g) })
		groups[i] = g
	}
	return groups
}

func eachAlone(groups []collective.Group, f func(c collective.Communicator) error) []error {
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() { errs[i] = f(g.Local()[0]) })
	}
	wg.Wait()
	return errs
}
