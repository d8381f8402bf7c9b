package collective_test

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

func send(to int, x []float32) *collective.Call {
	return &collective.Call{Op: collective.Send, Peer: to, Type: tensor.Float32, Src: tensor.HostMemory(x)}
}

func receive(from int, x []float32) *collective.Call {
	return &collective.Call{Op: collective.Recv, Peer: from, Type: tensor.Float32, Dst: tensor.HostMemory(x)}
}

// TestPairs passes tokens around a ring between collectives. Ranks that take no part in a send need no notice of it:
// the numbers of the collectives still agree.
func TestPairs(t *testing.T) {
	t.Parallel()
	eachPlacement(t, 5, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			r := c.Rank()
			for round := range 20 {
				count := []int{1, 1000, 0, 70_001}[round%4]
				x := filled(count, float32(round))
				// Rank round sends through rank round+1 to rank round+2; the other two do nothing.
				var err error
				switch first := round % 5; (r - first + 5) % 5 {
				case 0:
					err = c.Do(background, send((r+1)%5, x))
				case 1:
					got := make([]float32, count)
					if err = c.Do(background, receive((r+4)%5, got)); err == nil {
						err = c.Do(background, send((r+1)%5, got))
					}
				case 2:
					got := make([]float32, count)
					err = c.Do(background, receive((r+4)%5, got))
					s := startedSum{dst: got, want: float32(round)}
					err = errors.Join(err, s.check(err, 0))
				}
				if err == nil && round%3 == 0 {
					s := startedSum{dst: filled(3, 1), want: 5}
					err = s.check(c.Do(background, sum(s.dst, s.dst)), 0)
				}
				if err != nil {
					return fmt.Errorf("round %d: %w", round, err)
				}
			}
			return nil
		})
		for rank, err := range errs {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	})
}

// TestPairsThatDiffer checks that a send must match its receive, and that two ranks that wait for each other are
// detected.
func TestPairsThatDiffer(t *testing.T) {
	t.Parallel()
	big := func() []float32 { return make([]float32, 4<<20) } // more than any transport buffers
	for _, test := range []struct {
		name string
		one  func() *collective.Call
		two  func() *collective.Call
		kind error
		says string
	}{
		{
			"count", func() *collective.Call { return send(1, make([]float32, 3)) },
			func() *collective.Call { return receive(0, make([]float32, 4)) },
			collective.ErrMismatch, "recv float32 [4] from rank 0",
		},
		{
			"name", func() *collective.Call { return named(send(1, make([]float32, 3)), "w", 3) },
			func() *collective.Call { return named(receive(0, make([]float32, 3)), "b", 3) }, collective.ErrMismatch, "differ",
		},
		{
			"both receive", func() *collective.Call { return receive(1, make([]float32, 3)) },
			func() *collective.Call { return receive(0, make([]float32, 3)) }, collective.ErrDesync, "they wait for each other",
		},
		{
			"both send", func() *collective.Call { return send(1, big()) }, func() *collective.Call { return send(0, big()) },
			collective.ErrDesync, "",
		},
		{
			"send or all_reduce", func() *collective.Call { return send(1, big()) },
			func() *collective.Call { return sum(make([]float32, 3), make([]float32, 3)) }, nil, "send",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachPlacement(t, 2, func(t *testing.T, w *world) {
				// Processes that share memory see only the frames of each other's calls of two ranks: only the deadline detects
				// the rest.
				blind := strings.HasSuffix(t.Name(), "/shm_alone") || strings.HasSuffix(t.Name(), "/shm_and_tcp")
				errs := w.each(func(c collective.Communicator) error {
					call := test.one()
					if c.Rank() == 1 {
						call = test.two()
					}
					if blind {
						call.Options = &collective.Options{Timeout: 300 * time.Millisecond}
					}
					return thenBarriers(c, call)
				})
				switch {
				case blind && errors.Is(errors.Join(errs...), collective.ErrTimeout):
					// on one rank or on both; the other rank may have detected the mismatch
					for rank, err := range errs {
						if e := (*collective.Error)(nil); !errors.As(err, &e) {
							t.Errorf("rank %d: got %v", rank, err)
						}
					}
				case test.kind != nil:
					allFail(t, errs, test.kind, test.says)
				default:
					if !errors.Is(errs[0], collective.ErrMismatch) && !errors.Is(errs[0], collective.ErrDesync) {
						t.Errorf("got %v, want a mismatch or a deadlock", errs[0])
					}
					allFail(t, errs, kindOf(errs[0]), test.says)
				}
			})
		})
	}
}

// kindOf returns the kind of an error.
func kindOf(err error) error {
	if errors.Is(err, collective.ErrDesync) {
		return collective.ErrDesync
	}
	return collective.ErrMismatch
}

// TestPairsEnd checks that a receive without a send ends at its deadline, on both ranks.
func TestPairsEnd(t *testing.T) {
	eachMode(t, func(t *testing.T, m mode) {
		synctest.Test(t, func(t *testing.T) {
			g := m.open(t, 3, collective.Config{})
			defer shut(t, g)
			errs := each(g, func(c collective.Communicator) error {
				if c.Rank() == 1 {
					call := receive(2, make([]float32, 3))
					call.Options = &collective.Options{Timeout: time.Minute}
					return c.Do(background, call)
				}
				time.Sleep(time.Hour)
				return c.Do(background, barrier())
			})
			same(t, errs, collective.ErrTimeout, "rank 1 waited 1m0s for rank 2 in recv float32 [3] from rank 2")
		})
	})
}

// TestInvalidPairs checks that a rank cannot send to itself, or to a rank that does not exist, and that a wrong peer
// costs no memory.
func TestInvalidPairs(t *testing.T) {
	for says, call := range map[string]*collective.Call{
		"send of rank 0 with itself":                   send(0, nil),
		"peer 2 of 2 ranks":                            receive(2, nil),
		"peer -1 of 2 ranks":                           send(-1, nil),
		"peer 16777216 of 2 ranks":                     receive(1<<24, nil),
		"peer 16777217 of 2 ranks":                     send(1<<24+1, nil),
		fmt.Sprintf("peer %d of 2 ranks", math.MinInt): send(math.MinInt, nil),
	} {
		g := modes[0].open(t, 2, collective.Config{})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		same(t, []error{g.Local()[0].Do(background, call)}, collective.ErrInvalid, says)
		runtime.ReadMemStats(&after)
		if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 1<<20 {
			t.Errorf("%s: the call allocated %d bytes, want at most 1 MiB", says, bytes)
		}
		shut(t, g)
	}
}

// TestNewBuffer checks that every transport allocates memory that collectives can use, aligned and zeroed.
func TestNewBuffer(t *testing.T) {
	eachPlacement(t, 4, func(t *testing.T, w *world) {
		errs := w.each(func(c collective.Communicator) error {
			for _, bytes := range []int{4, 4000, 800_000} {
				src, err := c.NewBuffer(bytes)
				if err != nil {
					return err
				}
				dst, err := c.NewBuffer(bytes)
				if err != nil {
					return err
				}
				if uintptr(src.Ptr)%64 != 0 || src.Bytes != bytes {
					return fmt.Errorf("%d bytes at %p, want %d at a multiple of 64", src.Bytes, src.Ptr, bytes)
				}
				x, y := unsafe.Slice((*float32)(src.Ptr), bytes/4), unsafe.Slice((*float32)(dst.Ptr), bytes/4)
				for i := range x {
					if x[i] != 0 {
						return fmt.Errorf("element %d is %v, want 0", i, x[i])
					}
					x[i] = float32(c.Rank() + i%7)
				}
				call := &collective.Call{Op: collective.AllReduce, Type: tensor.Float32, Src: src, Dst: dst}
				if err := c.Do(background, call); err != nil {
					return err
				}
				for i := range y {
					if want := float32(6 + i%7*4); y[i] != want {
						return fmt.Errorf("element %d of %d is %v, want %v", i, len(y), y[i], want)
					}
				}
				for _, m := range []tensor.Memory{src, dst} {
					if m.Owner != nil {
						m.Owner.Release()
					}
				}
			}
			if _, err := c.NewBuffer(-1); !errors.Is(err, collective.ErrInvalid) {
				return fmt.Errorf("a buffer of -1 bytes: %v", err)
			}
			return c.Err()
		})
		for rank, err := range errs {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	})
}
