package transporttest

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

var endTests = []test{
	{"cancelled receiver", []int{2}, 0, cancelledReceiver},
	{"cancelled both ways", []int{2}, 0, cancelledBothWays},
	{"cancelled sender", []int{2}, unbuffered, cancelledSender},
	{"cancelled at any moment", []int{2, 4}, 0, cancelledAnyTime},
	{"peer closes", []int{2, 3, 5}, 0, peerCloses},
	{"peer closes after sending", []int{2}, 0, closesAfterSending},
	{"closing at any moment", []int{2, 4}, 0, closingAnyTime},
	{"own close", []int{2}, 0, ownClose},
	{"peer fails", []int{2, 3, 5}, 0, peerFails},
	{"peer fails after another and closes", []int{4}, 0, failsAndCloses},
	{"peer fails at any moment", []int{2, 4}, 0, failsAnyTime},
	{"failure is cut", []int{2}, 0, failureIsCut},
	{"only who needs it", []int{3}, 0, onlyWhoNeedsIt},
}

func cancelledReceiver(g *group) {
	cause := errors.New("enough")
	receiving, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	if err := receive(receiving, g.ends[0], 1, make([]byte, 4)); !errors.Is(err, cause) {
		g.Errorf("got %v, want %v", err, cause)
	}
}

func cancelledSender(g *group) {
	cause := errors.New("enough")
	sending, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	data := []byte("abcd")
	if err := send(sending, g.ends[0], 1, frame(0, data)); !errors.Is(err, cause) {
		g.Errorf("got %v, want %v", err, cause)
	}
	clear(data)
}

func cancelledBothWays(g *group) {
	cause := errors.New("enough")
	both, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	data := []byte("abcd")
	if err := g.ends[0].Exchange(both, 1, frame(0, data), 1, make([]byte, 4)); !errors.Is(err, cause) {
		g.Errorf("got %v, want %v", err, cause)
	}
	clear(data)
}

// around exchanges around the ring until an error, and then uses the memory, which is the rank's again: the race
// detector checks that.
func (g *group) around(c context.Context, e transport.Endpoint) error {
	n := e.Size()
	for round := 0; ; round++ {
		g.pass()
		out, in := make([]byte, 20_000), make([]byte, 20_000)
		err := e.Exchange(c, (e.Rank()+1)%n, frame(uint64(round), out), (e.Rank()+n-1)%n, in)
		clear(out)
		clear(in)
		if err != nil {
			return err
		}
	}
}

func cancelledAnyTime(g *group) {
	random, seed := seeded(g.T)
	for range attempts(15) {
		g := g.again()
		g.acceptAll()
		all, cancel := context.WithCancel(ctx)
		time.AfterFunc(time.Duration(random.IntN(300))*time.Microsecond, cancel)
		g.each(func(e transport.Endpoint) {
			if err := g.around(all, e); !errors.Is(err, context.Canceled) {
				g.Errorf("rank %d: %v (seed %d)", e.Rank(), err, seed)
			}
		})
		g.close()
	}
}

// isDown reports an error unless err is a PeerDown of the rank, for the reason.
func (g *group) isDown(when string, err error, rank int, reason func(error) bool) {
	g.Helper()
	var down *transport.PeerDown
	if !errors.As(err, &down) || down.Rank != rank || !reason(down.Err) {
		g.Errorf("%s: %v, want a PeerDown of rank %d with the reason", when, err, rank)
	}
}

func closedReason(err error) bool { return errors.Is(err, transport.ErrClosed) }

func failedReason(reason string) func(error) bool {
	return func(err error) bool {
		var f *transport.Failure
		return errors.As(err, &f) && string(f.Reason) == reason
	}
}

// delivered reports an error unless every rank but the last is notified once that the last is down.
func (g *group) delivered(reason func(error) bool) {
	g.Helper()
	last := len(g.ends) - 1
	for _, e := range g.ends[:last] {
		d := result(g, "Down", e.Down())
		if d.Rank != last || !reason(d.Err) {
			g.Errorf("rank %d was notified of %v, want rank %d", e.Rank(), &d, last)
		}
	}
}

func (g *group) deliveredNoMore() {
	g.Helper()
	for _, e := range g.ends[:len(g.ends)-1] {
		select {
		case d := <-e.Down():
			g.Errorf("rank %d was notified too: %v", e.Rank(), &d)
		default:
		}
	}
}

// peerCloses: a rank that needs a closed rank gets a PeerDown, whether it waits already or later, and Down delivers it
// once.
func peerCloses(g *group) {
	g.acceptAll()
	last := len(g.ends) - 1
	waiting := async(func() error { return receive(ctx, g.ends[0], last, make([]byte, 1)) })
	time.Sleep(time.Millisecond)
	g.ends[last].Close()
	g.isDown("waiting to receive", result(g, "waiting to receive", waiting), last, closedReason)
	if !g.Lazy {
		g.delivered(closedReason)
	}
	for _, e := range g.ends[:last] {
		g.isDown("sending later", send(ctx, e, last, frame(0, []byte("a"))), last, closedReason)
		g.isDown("receiving later", receive(ctx, e, last, make([]byte, 1)), last, closedReason)
		g.isDown("both later", e.Exchange(ctx, last, frame(0, []byte("a")), last, make([]byte, 1)), last, closedReason)
	}
	if g.Lazy {
		g.delivered(closedReason)
	}
	g.deliveredNoMore()
}

// closesAfterSending: data that a rank has sent before it closes still arrives.
func closesAfterSending(g *group) {
	g.acceptAll()
	data := pattern(make([]byte, 100_000), 0, 1, 0)
	done := async(func() error {
		if err := send(ctx, g.ends[0], 1, frame(0, data)); err != nil {
			return err
		}
		return g.ends[0].Close()
	})
	time.Sleep(time.Millisecond)
	in := make([]byte, len(data))
	if err := receive(ctx, g.ends[1], 0, in); err != nil || !bytes.Equal(in, data) {
		g.Errorf("what was sent before the Close: other bytes, or %v", err)
	}
	if err := result(g, "sending and closing", done); err != nil {
		g.Error(err)
	}
}

// closingAnyTime: a rank closes between two exchanges; then its neighbours, and the ranks that wait for them, get
// errors.
func closingAnyTime(g *group) {
	random, seed := seeded(g.T)
	for range attempts(10) {
		g := g.again()
		g.acceptAll()
		rounds := random.IntN(20)
		g.each(func(e transport.Endpoint) {
			defer e.Close()
			if e.Rank() != 0 {
				err := g.around(ctx, e)
				if down := (*transport.PeerDown)(nil); !errors.As(err, &down) || !errors.Is(err, transport.ErrClosed) {
					g.Errorf("rank %d: %v, want a PeerDown (seed %d)", e.Rank(), err, seed)
				}
				return
			}
			n := len(g.ends)
			for round := range rounds {
				if err := e.Exchange(ctx, 1, frame(uint64(round), make([]byte, 20_000)), n-1, make([]byte, 20_000)); err != nil {
					g.Errorf("rank 0: %v (seed %d)", err, seed)
				}
			}
		})
	}
}

func ownClose(g *group) {
	e := g.ends[0]
	for range 2 {
		if err := e.Close(); err != nil {
			g.Errorf("Close: %v", err)
		}
	}
	e.Fail([]byte("too late"))
	if err := send(ctx, e, 1, frame(0, nil)); !errors.Is(err, transport.ErrClosed) {
		g.Errorf("Exchange after Close: %v, want %v", err, transport.ErrClosed)
	}
	d := result(g, "Down", g.ends[1].Down())
	if !errors.Is(d.Err, transport.ErrClosed) {
		g.Errorf("a Fail after Close was notified as %v", &d)
	}
}

// peerFails: a rank that needs a failed rank gets its reason, whether it waits already or later, also after a Close.
func peerFails(g *group) {
	g.acceptAll()
	last := len(g.ends) - 1
	reason := failedReason("no more oil")
	waiting := async(func() error { return receive(ctx, g.ends[0], last, make([]byte, 1)) })
	time.Sleep(time.Millisecond)
	together([]transport.Endpoint{g.ends[last], g.ends[last]},
		func(e transport.Endpoint) { e.Fail([]byte("no more oil")) })
	g.ends[last].Fail([]byte("another"))
	g.isDown("waiting to receive", result(g, "waiting to receive", waiting), last, reason)
	g.delivered(reason)
	later := func(when string) {
		g.Helper()
		for _, e := range g.ends[:last] {
			g.isDown("sending "+when, send(ctx, e, last, frame(0, []byte("a"))), last, reason)
			g.isDown("receiving "+when, receive(ctx, e, last, make([]byte, 1)), last, reason)
		}
	}
	later("later")
	g.ends[last].Close()
	later("after its Close")
	g.deliveredNoMore()
}

// failsAndCloses: a rank that fails once it knows that another one has failed, and closes, is reported with its reason,
// not as one that has only closed, to those that need it later.
func failsAndCloses(g *group) {
	g.acceptAll()
	const first, second = 0, 2
	g.ends[first].Fail([]byte("no more oil"))
	if d := result(g, "Down", g.ends[second].Down()); d.Rank != first {
		g.Errorf("rank %d was notified of %v, want rank %d", second, &d, first)
	}
	g.ends[second].Fail([]byte("nor heat"))
	g.ends[second].Close()
	for _, rank := range []int{1, 3} {
		err := receive(ctx, g.ends[rank], second, make([]byte, 1))
		g.isDown("receiving later", err, second, failedReason("nor heat"))
	}
}

// failsAnyTime: at any moment, a failure ends the exchanges of all that need the rank, with its reason.
func failsAnyTime(g *group) {
	random, seed := seeded(g.T)
	for range attempts(10) {
		g := g.again()
		g.acceptAll()
		n := len(g.ends)
		victim := g.ends[random.IntN(n)]
		time.AfterFunc(time.Duration(random.IntN(300))*time.Microsecond, func() { victim.Fail([]byte("oil")) })
		var wg sync.WaitGroup
		for _, e := range g.ends {
			wg.Go(func() {
				err := g.around(ctx, e)
				down := (*transport.PeerDown)(nil)
				switch needs := (victim.Rank()-e.Rank()+n)%n == 1 || (e.Rank()-victim.Rank()+n)%n == 1; {
				case !errors.As(err, &down):
					g.Errorf("rank %d: %v, want a PeerDown (seed %d)", e.Rank(), err, seed)
				case needs && down.Rank == victim.Rank() && !failedReason("oil")(down.Err):
					g.Errorf("rank %d: %v, want the reason (seed %d)", e.Rank(), err, seed)
				}
				e.Fail([]byte("oil")) // and so around the ring
			})
		}
		wg.Wait()
		g.close()
	}
}

func failureIsCut(g *group) {
	long := string(bytes.Repeat([]byte("x"), transport.ReasonMax+1))
	g.ends[1].Fail([]byte(long))
	g.isDown("receiving", receive(ctx, g.ends[0], 1, make([]byte, 1)), 1, failedReason(long[:transport.ReasonMax]))
}

// onlyWhoNeedsIt: a rank that is down does not disturb the others' exchanges.
func onlyWhoNeedsIt(g *group) {
	for _, leave := range []func(e transport.Endpoint){
		func(e transport.Endpoint) { e.Close() },
		func(e transport.Endpoint) { e.Fail([]byte("oil")) },
	} {
		g := g.again()
		g.acceptAll()
		in := make([]byte, 3)
		waiting := async(func() error { return receive(ctx, g.ends[0], 1, in) })
		time.Sleep(time.Millisecond)
		leave(g.ends[2])
		result(g, "Down", g.ends[0].Down())
		time.Sleep(time.Millisecond)
		if err := send(ctx, g.ends[1], 0, frame(0, []byte("abc"))); err != nil {
			g.Errorf("sending: %v", err)
		}
		if err := result(g, "receiving", waiting); err != nil || string(in) != "abc" {
			g.Errorf("received %q, %v", in, err)
		}
		g.close()
	}
}
