package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/transport"
)

// apart opens a group of two ranks as two processes do. They block at once when they wait.
func apart(t testing.TB) (a, b *endpoint) {
	t.Helper()
	// All processes of the host share the names of groups.
	cfg := Config{Name: fmt.Sprint(t.Name(), os.Getpid()), Size: 2, Ranks: []int{1}, ArenaBytes: page}
	opened := make(chan *endpoint)
	go func() {
		ends, err := Open(context.Background(), cfg)
		if err != nil {
			t.Error(err)
			close(opened)
			return
		}
		opened <- ends[0].(*endpoint)
	}()
	listening := cfg
	listening.Ranks = []int{0}
	ends, err := Open(context.Background(), listening)
	if err != nil {
		t.Fatal(err)
	}
	a, b = ends[0].(*endpoint), <-opened
	t.Cleanup(func() { a.Close() })
	if b == nil {
		t.FailNow()
	}
	t.Cleanup(func() { b.Close() })
	parks(a, b)
	return a, b
}

// parks makes ranks block at once when they wait.
func parks(ends ...*endpoint) {
	for _, e := range ends {
		e.g.crowded = true
		e.waiter.Look(time.Now())
	}
}

// naps makes a rank share its CPU, and nap for so long.
func naps(e *endpoint, most time.Duration) {
	shared := func(time.Time) waiting.Room { return waiting.Shared }
	e.g.crowded, e.counts = false, waiting.Shared
	e.waiter = waiting.New(waiting.Config{Room: shared, Batch: 1, Nap: most})
}

// TestParkingAllocatesNothing checks that a rank that blocks at once, and the rank that wakes it, allocate nothing.
func TestParkingAllocatesNothing(t *testing.T) {
	for _, short := range []bool{false, true} {
		t.Run(fmt.Sprintf("short=%v", short), func(t *testing.T) {
			a, b := apart(t)
			if short {
				naps(a, waiting.NapMost)
				naps(b, waiting.NapMost)
			}
			call := func(e *endpoint) {
				e.Publish(&transport.Slot{})
				err := e.Signal(0)
				e.want = want{rank: -1, target: e.total}
				for short && !e.Poll() {
					e.Nap(time.Millisecond)
				}
				if err := errors.Join(err, e.Await(context.Background(), -1, 0),
					e.Exchange(context.Background(), 1-e.rank, transport.Frame{}, 1-e.rank, nil)); err != nil {
					t.Error(err)
				}
			}
			const runs = 300
			done := make(chan struct{})
			go func() {
				defer close(done)
				for range runs + 1 {
					call(b)
				}
			}()
			if n := testing.AllocsPerRun(runs, func() { call(a) }); n >= 1 {
				t.Errorf("%v allocations per call", n)
			}
			<-done
		})
	}
}

// TestNap checks that everything that ends a wait ends a nap before its time. A wait for frames goes on while they
// move.
func TestNap(t *testing.T) {
	await := func(e *endpoint) error {
		e.Publish(&transport.Slot{})
		return errors.Join(e.Signal(0), e.Await(context.Background(), -1, 0))
	}
	long := make([]byte, 3*ringMax)
	exchange := func(e *endpoint) error {
		return e.Exchange(context.Background(), 1-e.rank, transport.Frame{Data: long}, 1-e.rank, make([]byte, len(long)))
	}
	closed := func(err error) bool {
		var down *transport.PeerDown
		return errors.As(err, &down) && down.Rank == 1 && errors.Is(err, transport.ErrClosed)
	}
	fails := func(err error) bool {
		var failure *transport.Failure
		return errors.As(err, &failure) && string(failure.Reason) == "why"
	}
	interrupted := func(err error) bool { return errors.Is(err, transport.ErrInterrupted) }
	ends := func(err error) bool { return err == nil }
	for _, c := range []struct {
		name   string
		wait   func(e *endpoint) error
		cause  func(a, b *endpoint)
		wanted func(error) bool
	}{
		{"flag", await, func(_, b *endpoint) { await(b) }, ends},
		{"frames", exchange, func(_, b *endpoint) { exchange(b) }, ends},
		{"Interrupt", await, func(_, b *endpoint) { b.Interrupt() }, interrupted},
		{"Interrupt here", await, func(a, _ *endpoint) { a.Interrupt() }, interrupted},
		{"Fail", await, func(_, b *endpoint) { b.Fail([]byte("why")) }, fails},
		{"Fail while frames move", exchange, func(_, b *endpoint) { b.Fail([]byte("why")) }, fails},
		{"Close", await, func(_, b *endpoint) { b.Close() }, closed},
		{"end of the process", await, func(_, b *endpoint) {
			b.g.world.processes[0].conn.Close()
		}, func(err error) bool {
			var down *transport.PeerDown
			return errors.As(err, &down) && down.Rank == 1
		}},
	} {
		for _, oneProcess := range []bool{false, true} {
			if oneProcess && c.name == "end of the process" {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", c.name, oneProcess), func(t *testing.T) {
				open := apart
				if oneProcess {
					open = two
				}
				a, b := open(t)
				parks(b)
				naps(a, time.Hour)
				done := make(chan error, 1)
				go func() { done <- c.wait(a) }()
				for a.mine.parked.Load() == parkedNot {
					time.Sleep(time.Millisecond)
				}
				if a.mine.parked.Load() == parkedLong {
					t.Log("the wait is a long one, since this machine is too busy") // it ends in the same way
				}
				c.cause(a, b)
				select {
				case err := <-done:
					if !c.wanted(err) {
						t.Errorf("the wait ended with %v", err)
					}
				case <-time.After(20 * time.Second):
					t.Fatal("the wait did not end")
				}
			})
		}
	}
}

// TestNapsEnd checks that a rank that is not woken soon parks, so that its context ends the wait.
func TestNapsEnd(t *testing.T) {
	a, _ := two(t)
	naps(a, waiting.NapMost)
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	a.Publish(&transport.Slot{})
	if err := errors.Join(a.Signal(0), a.Await(ctx, -1, 0)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the wait ended with %v, want its deadline", err)
	}
}

// TestFutexWait checks that a wait for a word that has another value, and one that times out, count as waits, and that
// one that the system refuses does not: the rank would repeat it until its time is over.
func TestFutexWait(t *testing.T) {
	var words [2]atomic.Uint32
	words[0].Store(7)
	if !futexWait(&words[0], 8, time.Minute) {
		t.Error("a wait for another value is refused")
	}
	if !futexWait(&words[0], 7, time.Microsecond) {
		t.Error("a wait of a microsecond is refused")
	}
	if unaligned := unsafe.Add(unsafe.Pointer(&words[0]), 1); futexWait((*atomic.Uint32)(unaligned), 0, time.Minute) {
		t.Error("a wait that the system refuses counts as one")
	}
}
