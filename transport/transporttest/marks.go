package transporttest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// enter publishes a slot of call seq and raises mark 0.
func enter(m transport.Marker, seq int, mem tensor.Memory) error {
	m.Publish(transport.Slot{Header: transport.Header{Seq: uint64(seq)}, Src: mem, Shape: []int{seq}})
	return m.Signal(0)
}

// slotsAndMarks: what was written before a mark is seen by all that awaited it, call after call, also with calls that have
// mark 0 only, so that a rank runs ahead of the others.
func slotsAndMarks(g *group) {
	markers := g.markers()
	n := len(markers)
	g.each(func(e transport.Endpoint) {
		m := e.(transport.Marker)
		own := make([]int64, n) // slot r is written by rank r
		for seq := range 300 {
			if err := enter(m, seq, tensor.HostMemory(own)); err != nil {
				g.Errorf("rank %d: entering call %d: %v", m.Rank(), seq, err)
				return
			}
			if err := m.Await(ctx, -1, 0); err != nil {
				g.Errorf("rank %d: awaiting the start of call %d: %v", m.Rank(), seq, err)
				return
			}
			for r := range n {
				if slot := m.Peer(r); slot.Seq != uint64(seq) || slot.Shape[0] != seq {
					g.Errorf("rank %d in call %d sees rank %d in call %d", m.Rank(), seq, r, slot.Seq)
				}
			}
			if seq%3 == 0 {
				continue
			}
			for r := range n {
				*(*int64)(unsafe.Add(m.Peer(r).Src.Ptr, 8*m.Rank())) = int64(seq)
			}
			for mark := 1; mark < 8; mark++ {
				if err := errors.Join(m.Signal(mark), m.Await(ctx, -1, mark)); err != nil {
					g.Errorf("rank %d: mark %d: %v", m.Rank(), mark, err)
				}
			}
			for r := range n {
				if own[r] != int64(seq) {
					g.Errorf("rank %d does not see what rank %d wrote in call %d", m.Rank(), r, seq)
				}
			}
			if seq%7 == 0 {
				time.Sleep(time.Microsecond)
			}
		}
	})
}

func marksClose(g *group) {
	markers := g.markers()
	last := len(markers) - 1
	done := make(chan error, 1)
	go func() {
		if err := enter(markers[0], 0, tensor.Memory{}); err != nil {
			done <- err
			return
		}
		done <- markers[0].Await(ctx, -1, 0)
	}()
	time.Sleep(time.Millisecond)
	markers[last].Close()
	var down *transport.PeerDown
	if err := <-done; !errors.As(err, &down) || down.Rank != last {
		g.Errorf("waiting for a rank that closes: %v, want a PeerDown of rank %d", err, last)
	}
}

// withdrawBefore: a rank that leaves a call before its start ends it for all, those that wait and those that come.
func withdrawBefore(g *group) {
	markers := g.markers()
	n := len(markers)
	errs := make(chan error, n)
	for _, m := range markers[:n-1] {
		go func() {
			if err := enter(m, 0, tensor.Memory{}); err != nil {
				errs <- err
				return
			}
			waiting, cancel := context.WithTimeout(ctx, time.Duration(m.Rank()*50+1)*time.Millisecond)
			defer cancel()
			err := m.Await(waiting, -1, 0)
			if m.Rank() == 0 {
				if behind := m.Behind(0, nil); !slices.Contains(behind, n-1) || slices.Contains(behind, 0) {
					g.Errorf("rank 0 says that ranks %v are behind", behind)
				}
				if !m.Withdraw() {
					g.Error("Withdraw says that the call has started")
				}
				m.Interrupt()
			}
			errs <- err
		}()
	}
	for range n - 1 {
		if err := <-errs; !errors.Is(err, transport.ErrInterrupted) && !errors.Is(err, context.DeadlineExceeded) {
			g.Errorf("a waiting rank got %v", err)
		}
	}
	if err := enter(markers[n-1], 0, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
		g.Errorf("entering after a withdrawal: %v, want %v", err, transport.ErrInterrupted)
	}
}

// withdrawAfter: a call that has started cannot be left, and runs to its last mark even if the group is interrupted.
func withdrawAfter(g *group) {
	markers := g.markers()
	g.each(func(e transport.Endpoint) {
		m := e.(transport.Marker)
		if err := errors.Join(enter(m, 0, tensor.Memory{}), m.Await(ctx, -1, 0)); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
		}
	})
	for _, m := range markers {
		if m.Withdraw() {
			g.Errorf("rank %d withdrew from a call that has started", m.Rank())
		}
		m.Interrupt()
	}
	g.each(func(e transport.Endpoint) {
		m := e.(transport.Marker)
		if err := errors.Join(m.Signal(1), m.Await(ctx, -1, 1)); err != nil {
			g.Errorf("rank %d: mark 1 after Interrupt: %v", m.Rank(), err)
		}
		if err := enter(m, 1, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
			g.Errorf("rank %d: the next call after Interrupt: %v", m.Rank(), err)
		}
	})
}

// withdrawRace: whoever tries to leave while the last ones arrive, all ranks agree whether the call has started.
func withdrawRace(g *group) {
	g.markers()
	random, seed := seeded(g.T)
	for round := range 200 {
		ends := g.sub(uint64(round) | 1<<50)
		var startedBy atomic.Int32
		var wg sync.WaitGroup
		for _, e := range ends {
			m := e.(transport.Marker)
			pause := time.Duration(random.IntN(30)) * time.Microsecond
			patience := time.Duration(random.IntN(60)) * time.Microsecond
			wg.Go(func() {
				time.Sleep(pause)
				if enter(m, 0, tensor.Memory{}) != nil {
					return
				}
				waiting, cancel := context.WithTimeout(ctx, patience)
				defer cancel()
				err := m.Await(waiting, -1, 0)
				if err != nil && m.Withdraw() {
					m.Interrupt()
					return
				}
				startedBy.Add(1)
				if err := errors.Join(m.Signal(1), m.Await(ctx, -1, 1)); err != nil {
					g.Errorf("rank %d: the last mark: %v (seed %d)", m.Rank(), err, seed)
				}
			})
		}
		wg.Wait()
		if n := startedBy.Load(); n != 0 && int(n) != len(ends) {
			g.Fatalf("%d of %d ranks say that the call has started (seed %d)", n, len(ends), seed)
		}
		for _, e := range ends {
			e.Close()
		}
	}
}

// interrupt: it may come from anywhere, and wakes all.
func interrupt(g *group) {
	markers := g.markers()
	n := len(markers)
	errs := make(chan error, n)
	for _, m := range markers[1:] {
		go func() {
			if err := enter(m, 0, tensor.Memory{}); err != nil {
				errs <- err
				return
			}
			errs <- m.Await(ctx, -1, 0)
		}()
	}
	time.Sleep(time.Millisecond)
	markers[0].Interrupt()
	for range n - 1 {
		if err := <-errs; !errors.Is(err, transport.ErrInterrupted) {
			g.Errorf("a waiting rank got %v, want %v", err, transport.ErrInterrupted)
		}
	}
}

func marksNoAllocation(g *group) {
	markers := g.markers()
	const runs = 200
	call := func(m transport.Marker) {
		m.Publish(transport.Slot{})
		if err := errors.Join(m.Signal(0), m.Await(ctx, -1, 0), m.Signal(1), m.Await(ctx, -1, 1)); err != nil {
			g.Error(err)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for range runs + 1 {
			call(markers[1])
		}
	})
	if n := testing.AllocsPerRun(runs, func() { call(markers[0]) }); n >= 1 {
		g.Errorf("%v allocations per call, want 0", n)
	}
	wg.Wait()
}
