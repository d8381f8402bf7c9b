package transporttest

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var flagTests = []test{
	{"slots and flags", []int{2, 4, 5}, memory, slotsAndFlags},
	{"alone in a domain", []int{1}, 0, alone},
	{"many flags", []int{2, 4, 6}, memory, manyFlags},
	{"flags of one rank", []int{2, 4, 8}, memory, flagsOfOne},
	{"a flag that is set", []int{2, 4}, memory, flagSet},
	{"flags between frames", []int{2, 4, 5}, memory, flagsBetweenFrames},
	{"flags end by closing", []int{2, 3, 4}, memory, flagsClose},
	{"flags end by failing", []int{2, 3, 4}, memory, flagsFail},
	{"flags cancelled", []int{2, 4}, memory, flagsCancelled},
	{"flags and a parker", []int{2, 4}, memory, flagsParked},
	{"withdraw before the start", []int{2, 3, 8}, memory, withdrawBefore},
	{"withdraw after the start", []int{2, 4}, memory, withdrawAfter},
	{"withdraw against the last arrival", []int{2, 4}, memory, withdrawRace},
	{"withdraw while a peer lags", []int{2, 4}, memory, withdrawLag},
	{"interrupt", []int{2, 3, 4}, memory, interrupt},
	{"interrupt against the last arrival", []int{2, 4}, memory, interruptRace},
	{"no allocation in memory", []int{2}, memory | frugal, flagsNoAllocation},
}

// enter publishes a slot of call seq and sets flag 0.
func enter(m transport.Endpoint, seq int, src tensor.Memory) error {
	m.Memory().Publish(&transport.Slot{Header: transport.Header{Seq: uint64(seq)}, Src: src, Shape: []int{seq}})
	return m.Memory().Signal(0)
}

// start enters a call and awaits all others.
func start(m transport.Endpoint, seq int, src tensor.Memory) error {
	if err := enter(m, seq, src); err != nil {
		return err
	}
	return m.Memory().Await(ctx, -1, 0)
}

// pass sets a flag and awaits it from all.
func pass(m transport.Endpoint, flag int) error {
	return errors.Join(m.Memory().Signal(flag), m.Memory().Await(ctx, -1, flag))
}

// slotsAndFlags: all ranks that awaited a flag see what was written before it, call after call, also in calls that have
// flag 0 only, so that a rank runs ahead of the others. All domains do so at the same time.
func slotsAndFlags(g *group) {
	n := len(g.ends)
	g.each(func(m transport.Endpoint) {
		src := g.buffer(m, 8*n)
		own := unsafe.Slice((*int64)(src.Ptr), n) // element r is written by rank r
		for seq := range 300 {
			if err := start(m, seq, src); err != nil {
				g.Errorf("rank %d: the start of call %d: %v", m.Rank(), seq, err)
				return
			}
			for _, r := range domainOf(m) {
				if slot := m.Memory().Peer(r); slot.Seq != uint64(seq) || len(slot.Shape) != 1 || slot.Shape[0] != seq {
					g.Errorf("rank %d in call %d sees rank %d in call %d, shape %v", m.Rank(), seq, r, slot.Seq, slot.Shape)
				}
			}
			if seq%3 == 0 {
				continue
			}
			for _, r := range domainOf(m) {
				*(*int64)(unsafe.Add(m.Memory().Peer(r).Src.Ptr, 8*m.Rank())) = int64(seq)
			}
			for flag := 1; flag < 4; flag++ {
				if err := pass(m, flag); err != nil {
					g.Errorf("rank %d: flag %d: %v", m.Rank(), flag, err)
					return
				}
			}
			for _, r := range domainOf(m) {
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

// alone: the only rank of a domain does not wait.
func alone(g *group) {
	m := g.ends[0]
	if m.Memory() == nil {
		return
	}
	for seq := range 3 {
		if err := errors.Join(start(m, seq, tensor.Memory{}), pass(m, 1)); err != nil {
			g.Errorf("call %d: %v", seq, err)
		}
	}
	if behind := m.Memory().Behind(1, nil); len(behind) != 0 {
		g.Errorf("ranks %v are behind", behind)
	}
	if m.Memory().Withdraw() {
		g.Error("withdrew from a call that has started")
	}
	m.Memory().Interrupt()
	if err := enter(m, 3, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
		g.Errorf("entering after Interrupt: %v, want %v", err, transport.ErrInterrupted)
	}
}

// manyFlags: the number of flags of a call is not limited, and differs between calls.
func manyFlags(g *group) {
	domain := g.shared()
	together(domain, func(m transport.Endpoint) {
		src := g.buffer(m, 8)
		own := (*int64)(src.Ptr)
		for seq, count := range []int{1, 1000, 3, 70, 1, 300} {
			err := start(m, seq, src)
			for flag := 1; flag < count && err == nil; flag += 2 {
				*own = int64(flag)
				if err = pass(m, flag); err != nil || flag+1 == count {
					break
				}
				for _, p := range domain {
					if got := *(*int64)(m.Memory().Peer(p.Rank()).Src.Ptr); got != int64(flag) {
						g.Errorf("rank %d sees %d of rank %d after flag %d", m.Rank(), got, p.Rank(), flag)
					}
				}
				err = pass(m, flag+1) // now all have read
			}
			if err != nil {
				g.Errorf("rank %d, call %d of %d flags: %v", m.Rank(), seq, count, err)
				return
			}
		}
	})
}

// flagsOfOne: ranks pass a number on in a random order, and each waits only for the one before it.
func flagsOfOne(g *group) {
	domain := g.shared()
	_, seed := seeded(g.T)
	n := len(domain)
	together(domain, func(m transport.Endpoint) {
		random := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
		src := g.buffer(m, 8)
		own := (*int64)(src.Ptr)
		me := slices.IndexFunc(domain, func(p transport.Endpoint) bool { return p.Rank() == m.Rank() })
		for seq := range 200 {
			order := random.Perm(n)
			at := slices.Index(order, me)
			err := start(m, seq, src)
			sum := int64(seq)
			if at > 0 && err == nil {
				before := domain[order[at-1]].Rank()
				if err = m.Memory().Await(ctx, before, 1); err == nil {
					sum = *(*int64)(m.Memory().Peer(before).Src.Ptr)
				}
			}
			*own = sum + 1
			err = errors.Join(err, m.Memory().Signal(1))
			if at == n-1 && *own != int64(seq+n) {
				g.Errorf("call %d ended with %d, want %d (seed %d)", seq, *own, seq+n, seed)
			}
			if err = errors.Join(err, pass(m, 2)); err != nil {
				g.Errorf("rank %d, call %d: %v (seed %d)", m.Rank(), seq, err, seed)
				return
			}
		}
	})
}

// flagSet: awaiting a flag that is set returns no error, whatever else has happened.
func flagSet(g *group) {
	domain := g.shared()
	together(domain, func(m transport.Endpoint) {
		if err := start(m, 0, tensor.Memory{}); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
		}
	})
	last := domain[len(domain)-1]
	if err := last.Memory().Signal(1); err != nil {
		g.Fatal(err)
	}
	last.Memory().Interrupt()
	last.Fail([]byte("oil"))
	last.Close()
	result(g, "Down", domain[0].Down())
	over, cancel := context.WithCancel(ctx)
	cancel()
	for _, m := range domain[:len(domain)-1] {
		if err := errors.Join(m.Memory().Await(over, -1, 0), m.Memory().Await(over, last.Rank(), 0),
			m.Memory().Await(over, last.Rank(), 1)); err != nil {
			g.Errorf("rank %d: %v for a flag that is set", m.Rank(), err)
		}
	}
}

// flagsBetweenFrames: in one call the ranks of a domain use flags, and exchange frames with each other and other
// domains.
func flagsBetweenFrames(g *group) {
	g.acceptAll()
	n := len(g.ends)
	g.each(func(m transport.Endpoint) {
		out, in := []byte{0}, []byte{0}
		for seq := range 100 {
			out[0] = byte(seq + m.Rank())
			from := (m.Rank() + n - 1) % n
			err := errors.Join(start(m, seq, tensor.Memory{}),
				m.Exchange(ctx, (m.Rank()+1)%n, frame(uint64(seq), out), from, in), pass(m, 1))
			if err != nil || in[0] != byte(seq+from) {
				g.Errorf("rank %d, call %d: got %d, %v", m.Rank(), seq, in[0], err)
				return
			}
		}
	})
}

// waits are the ways to wait for the flag of one rank.
func waits(domain []transport.Endpoint, m transport.Endpoint, rank, flag int) error {
	if m.Rank() == domain[0].Rank() {
		return m.Memory().Await(ctx, -1, flag)
	}
	return m.Memory().Await(ctx, rank, flag)
}

// flagsEnd lets all but the last rank of a domain wait for the last, before the start or at flag 1, until it leaves.
func flagsEnd(g *group, leave func(last transport.Endpoint), reason func(error) bool) {
	for flag := range 2 {
		g := g.again()
		domain := g.shared()
		last := domain[len(domain)-1]
		callers := domain[:len(domain)-1+flag] // without the last the call never starts
		errs := make(chan error, len(domain))
		for _, m := range callers {
			go func() {
				err := enter(m, 0, tensor.Memory{})
				if flag == 1 {
					err = errors.Join(err, m.Memory().Await(ctx, -1, 0))
				}
				if m != last && err == nil {
					err = waits(domain, m, last.Rank(), flag)
				}
				errs <- err
			}()
		}
		if flag == 1 {
			if err := result(g, "the last rank", errs); err != nil {
				g.Fatalf("flag 1: %v", err)
			}
		}
		time.Sleep(time.Millisecond)
		leave(last)
		for range domain[1:] {
			g.isDown("waiting for a flag", result(g, "waiting for a flag", errs), last.Rank(), reason)
		}
		g.isDown("waiting later", waits(domain, domain[0], last.Rank(), flag), last.Rank(), reason)
		g.close()
	}
}

func flagsClose(g *group) {
	flagsEnd(g, func(last transport.Endpoint) { last.Close() }, closedReason)
}

func flagsFail(g *group) {
	flagsEnd(g, func(last transport.Endpoint) { last.Fail([]byte("oil")); last.Close() }, failedReason("oil"))
}

func flagsCancelled(g *group) {
	domain := g.shared()
	cause := errors.New("enough")
	for _, rank := range []int{-1, domain[1].Rank()} {
		g := g.again()
		m := g.shared()[0]
		waiting, cancel := context.WithCancelCause(ctx)
		time.AfterFunc(time.Millisecond, func() { cancel(cause) })
		if err := enter(m, 0, tensor.Memory{}); err != nil {
			g.Fatal(err)
		}
		if err := m.Memory().Await(waiting, rank, 0); !errors.Is(err, cause) {
			g.Errorf("waiting for rank %d: %v, want %v", rank, err, cause)
		}
		g.close()
	}
}

// flagsParked: a wait blocks through the context, and the rank that it is for wakes it.
func flagsParked(g *group) {
	domain := g.shared()
	for _, rank := range []int{-1, domain[1].Rank()} {
		g := g.again()
		domain := g.shared()
		p := &parked{Context: ctx}
		waiting := async(func() error {
			if err := enter(domain[0], 0, tensor.Memory{}); err != nil {
				return err
			}
			return domain[0].Memory().Await(p, rank, 0)
		})
		time.Sleep(2 * time.Millisecond)
		for _, m := range slices.Backward(domain[1:]) {
			if err := enter(m, 0, tensor.Memory{}); err != nil {
				g.Fatal(err)
			}
		}
		if err := result(g, "the parked rank", waiting); err != nil {
			g.Errorf("the parked rank: %v", err)
		}
		g.close()
	}
}

// withdrawBefore: a rank that leaves a call before its start ends it for all ranks, waiting or later.
func withdrawBefore(g *group) {
	domain := g.shared()
	n := len(domain)
	first, last := domain[0], domain[n-1]
	errs := make(chan error, n)
	for i, m := range domain[:n-1] {
		go func() {
			if err := enter(m, 0, tensor.Memory{}); err != nil {
				errs <- err
				return
			}
			waiting, cancel := context.WithTimeout(ctx, time.Duration(i*50+1)*time.Millisecond)
			defer cancel()
			err := m.Memory().Await(waiting, -1, 0)
			if m == first {
				behind := m.Memory().Behind(0, nil)
				if !slices.Contains(behind, last.Rank()) || slices.Contains(behind, m.Rank()) {
					g.Errorf("rank %d says that ranks %v are behind", m.Rank(), behind)
				}
				for range 2 {
					if !m.Memory().Withdraw() {
						g.Error("Withdraw says that the call has started")
					}
				}
				m.Memory().Interrupt()
			}
			errs <- err
		}()
	}
	for range n - 1 {
		err := result(g, "a waiting rank", errs)
		if !errors.Is(err, transport.ErrInterrupted) && !errors.Is(err, context.DeadlineExceeded) {
			g.Errorf("a waiting rank got %v", err)
		}
	}
	if err := enter(last, 0, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
		g.Errorf("entering after a withdrawal: %v, want %v", err, transport.ErrInterrupted)
	}
}

// withdrawAfter: a call that has started cannot be left, and runs to its last flag even if the group is interrupted.
func withdrawAfter(g *group) {
	domain := g.shared()
	together(domain, func(m transport.Endpoint) {
		if err := start(m, 0, tensor.Memory{}); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
		}
	})
	for _, m := range domain {
		if m.Memory().Withdraw() {
			g.Errorf("rank %d withdrew from a call that has started", m.Rank())
		}
		m.Memory().Interrupt()
	}
	together(domain, func(m transport.Endpoint) {
		for flag := 1; flag < 5; flag++ {
			if err := pass(m, flag); err != nil {
				g.Errorf("rank %d: flag %d after Interrupt: %v", m.Rank(), flag, err)
			}
		}
		if m.Memory().Withdraw() {
			g.Errorf("rank %d withdrew from a call that is over", m.Rank())
		}
		if err := enter(m, 1, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
			g.Errorf("rank %d: the next call after Interrupt: %v", m.Rank(), err)
		}
	})
}

// agreement makes ranks start calls one after the other until something ends it, and checks that all of them have
// started the same calls. leave is called on a rank whose wait for a start has ended.
func agreement(g *group, domain []transport.Endpoint, patience func(rank int) time.Duration,
	leave func(m transport.Endpoint) bool,
) {
	g.Helper()
	started := make([]int, len(domain))
	var wg sync.WaitGroup
	for i, m := range domain {
		wg.Go(func() {
			waiting, cancel := context.WithTimeout(ctx, patience(m.Rank()))
			defer cancel()
			for seq := 0; ; seq++ {
				g.pass()
				if enter(m, seq, tensor.Memory{}) != nil {
					return
				}
				err := waiting.Err() // a wait that need not block does not see it
				if err == nil {
					err = m.Memory().Await(waiting, -1, 0)
				}
				if err != nil && leave(m) {
					return
				}
				started[i]++
				if err := pass(m, 1); err != nil {
					g.Errorf("rank %d: the last flag of call %d: %v", m.Rank(), seq, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if slices.Min(started) != slices.Max(started) {
		g.Errorf("the ranks say that %v calls have started", started)
	}
}

// withdrawRace: if a rank tries to leave while the last ones arrive, all ranks agree which calls have started.
func withdrawRace(g *group) {
	random, seed := seeded(g.T)
	for range attempts(40) {
		g := g.again()
		domain := g.shared()
		patience := map[int]time.Duration{}
		for _, m := range domain {
			patience[m.Rank()] = time.Duration(random.IntN(300)) * time.Microsecond
		}
		agreement(g, domain, func(r int) time.Duration { return patience[r] }, func(m transport.Endpoint) bool {
			left := m.Memory().Withdraw()
			if left {
				m.Memory().Interrupt()
			}
			return left
		})
		g.close()
		if g.Failed() {
			g.Fatalf("patience %v (seed %d)", patience, seed)
		}
	}
}

// withdrawLag: the rank that a withdrawal waits for is still in the previous call. It ends that call; the next one
// never starts.
func withdrawLag(g *group) {
	domain := g.shared()
	n := len(domain)
	laggard := domain[n-1]
	together(domain, func(m transport.Endpoint) {
		if err := start(m, 0, tensor.Memory{}); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
		}
	})
	together(domain[:n-1], func(m transport.Endpoint) { // of flag 1 they need each other's only
		err := m.Memory().Signal(1)
		for _, p := range domain[:n-1] {
			err = errors.Join(err, m.Memory().Await(ctx, p.Rank(), 1))
		}
		if err = errors.Join(err, enter(m, 1, tensor.Memory{})); err != nil {
			g.Errorf("rank %d: %v", m.Rank(), err)
		}
	})
	if !domain[0].Memory().Withdraw() {
		g.Error("a call has started without its last rank")
	}
	if err := errors.Join(laggard.Memory().Signal(1), laggard.Memory().Await(ctx, -1, 1)); err != nil {
		g.Errorf("the call before: %v", err)
	}
	if err := enter(laggard, 1, tensor.Memory{}); !errors.Is(err, transport.ErrInterrupted) {
		g.Errorf("entering after a withdrawal: %v, want %v", err, transport.ErrInterrupted)
	}
	for _, m := range domain[:n-1] {
		if !m.Memory().Withdraw() {
			g.Errorf("rank %d could not withdraw from a call that never starts", m.Rank())
		}
		if err := m.Memory().Await(ctx, -1, 0); !errors.Is(err, transport.ErrInterrupted) {
			g.Errorf("rank %d: the start after a withdrawal: %v, want %v", m.Rank(), err, transport.ErrInterrupted)
		}
	}
}

// interrupt: any goroutine may interrupt a domain, and it wakes all its ranks.
func interrupt(g *group) {
	domain := g.shared()
	n := len(domain)
	errs := make(chan error, n)
	for i, m := range domain[1:] {
		go func() {
			if err := enter(m, 0, tensor.Memory{}); err != nil {
				errs <- err
				return
			}
			rank := -1
			if i%2 == 1 {
				rank = domain[0].Rank()
			}
			errs <- m.Memory().Await(ctx, rank, 0)
		}()
	}
	time.Sleep(time.Millisecond)
	domain[0].Memory().Interrupt()
	for range n - 1 {
		if err := result(g, "a waiting rank", errs); !errors.Is(err, transport.ErrInterrupted) {
			g.Errorf("a waiting rank got %v, want %v", err, transport.ErrInterrupted)
		}
	}
}

// interruptRace: an interrupt at any moment; all ranks agree which calls have started.
func interruptRace(g *group) {
	random, seed := seeded(g.T)
	for range attempts(40) {
		g := g.again()
		domain := g.shared()
		var interrupted atomic.Int32
		time.AfterFunc(time.Duration(random.IntN(300))*time.Microsecond, func() {
			defer interrupted.Add(1)
			domain[0].Memory().Interrupt()
		})
		agreement(g, domain, func(int) time.Duration { return time.Hour }, func(m transport.Endpoint) bool { return true })
		for interrupted.Load() == 0 {
			time.Sleep(time.Microsecond)
		}
		g.close()
		if g.Failed() {
			g.Fatalf("seed %d", seed)
		}
	}
}

func flagsNoAllocation(g *group) {
	domain := g.shared()
	const runs = 200
	slot := transport.Slot{Header: transport.Header{Seq: 1}}
	call := func(m, peer transport.Endpoint) error {
		s := m.Memory()
		s.Publish(&slot)
		return errors.Join(s.Signal(0), s.Await(ctx, -1, 0), s.Signal(1), s.Await(ctx, peer.Rank(), 1), s.Signal(2),
			s.Await(ctx, -1, 2))
	}
	peer := async(func() error {
		for range runs + 1 {
			if err := call(domain[1], domain[0]); err != nil {
				return err
			}
		}
		return nil
	})
	if n := testing.AllocsPerRun(runs, func() { call(domain[0], domain[1]) }); n >= 1 {
		g.Errorf("%v allocations per call, want 0", n)
	}
	if err := result(g, "the peer", peer); err != nil {
		g.Error(err)
	}
}
