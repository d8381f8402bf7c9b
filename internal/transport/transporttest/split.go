package transporttest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

var splitTests = []test{
	{"split", []int{1, 4, 5}, 0, split},
	{"split again", []int{4, 6}, 0, splitAgain},
	{"groups at once", []int{2, 4}, 0, groupsAtOnce},
	{"groups apart", []int{3, 4}, 0, groupsApart},
	{"late to a split", []int{2}, 0, lateSplit},
}

var askTests = []test{
	{"ask", []int{2, 3}, 0, ask},
	{"ask who is gone", []int{2}, 0, askGone},
}

// use exchanges around a group, and uses flags if it has memory.
func use(e transport.Endpoint, id int) error {
	e.Inspect(accept)
	if e.Memory() != nil {
		if err := errors.Join(start(e, 0, tensor.Memory{}), pass(e, 1)); err != nil {
			return err
		}
	}
	n := e.Size()
	if n == 1 {
		return nil
	}
	to, from := (e.Rank()+1)%n, (e.Rank()+n-1)%n
	for round := range 20 {
		in := make([]byte, 500)
		err := e.Exchange(ctx, to, frame(uint64(round), pattern(make([]byte, 500), e.Rank(), to, id+round)), from, in)
		if err != nil {
			return err
		}
		if !bytes.Equal(in, pattern(make([]byte, 500), from, e.Rank(), id+round)) {
			return fmt.Errorf("rank %d of group %d got other bytes than rank %d sent", e.Rank(), id, from)
		}
	}
	return nil
}

// parity returns the even or the odd ranks, the highest first.
func parity(n, odd int) []int {
	var ranks []int
	for r := range n {
		if r%2 == odd {
			ranks = append([]int{r}, ranks...)
		}
	}
	return ranks
}

// split makes groups by parity, reversed, and uses both at once with the parent.
func split(g *group) {
	n := len(g.ends)
	g.each(func(e transport.Endpoint) {
		odd := e.Rank() % 2
		ranks := parity(n, odd)
		sub, err := e.Split(uint64(1+odd), ranks)
		if err != nil {
			g.Errorf("rank %d: Split: %v", e.Rank(), err)
			return
		}
		defer sub.Close()
		if sub.Size() != len(ranks) || ranks[sub.Rank()] != e.Rank() {
			g.Errorf("rank %d became rank %d of %d in %v", e.Rank(), sub.Rank(), sub.Size(), ranks)
			return
		}
		for peer, r := range ranks {
			if before := shares(e, r); shares(sub, peer) != before {
				g.Errorf("rank %d shares memory with rank %d: %v, but in the split group: %v", e.Rank(), r, before, !before)
			}
		}
		if err := errors.Join(use(sub, 3*odd), use(e, 7)); err != nil {
			g.Errorf("rank %d: %v", e.Rank(), err)
		}
		if _, err := e.Split(99, nil); err == nil {
			g.Error("Split into a group that the rank is not in: no error")
		}
		if _, err := e.Split(98, []int{e.Rank(), n}); err == nil {
			g.Errorf("Split with rank %d of %d: no error", n, n)
		}
		if _, err := e.Split(97, []int{e.Rank(), e.Rank()}); err == nil {
			g.Error("Split with one rank twice: no error")
		}
	})
}

// splitAgain splits a part once more, and all of it at once.
func splitAgain(g *group) {
	n := len(g.ends)
	g.each(func(e transport.Endpoint) {
		half := []int{}
		for r := e.Rank() / (n / 2) * (n / 2); len(half) < n/2; r++ {
			half = append(half, r)
		}
		sub, err := e.Split(uint64(10+half[0]), half)
		if err != nil {
			g.Errorf("rank %d: %v", e.Rank(), err)
			return
		}
		defer sub.Close()
		pair := []int{0, 1}
		if sub.Rank() > 1 {
			pair = []int{sub.Rank()}
		}
		part, err := sub.Split(uint64(1000+10*half[0]+pair[0]), pair)
		if err != nil {
			g.Errorf("rank %d: %v", e.Rank(), err)
			return
		}
		defer part.Close()
		if err := errors.Join(use(part, 1), use(sub, 2), use(e, 3)); err != nil {
			g.Errorf("rank %d: %v", e.Rank(), err)
		}
	})
}

// groupsAtOnce uses several groups of the same ranks at the same time, each on its own goroutine.
func groupsAtOnce(g *group) {
	n := len(g.ends)
	all := make([]int, n)
	for r := range all {
		all[r] = r
	}
	const groups = 3
	g.each(func(e transport.Endpoint) {
		var wg sync.WaitGroup
		for id := range groups {
			sub, err := e.Split(uint64(5+id), all)
			if err != nil {
				g.Errorf("rank %d: %v", e.Rank(), err)
				return
			}
			wg.Go(func() {
				defer sub.Close()
				for range 10 {
					if err := use(sub, id); err != nil {
						g.Errorf("rank %d: %v", e.Rank(), err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// groupsApart: events in one group do not affect the others.
func groupsApart(g *group) {
	n := len(g.ends)
	all := make([]int, n)
	for r := range all {
		all[r] = r
	}
	for id, happen := range []func(e transport.Endpoint){
		func(e transport.Endpoint) { e.Close() },
		func(e transport.Endpoint) { e.Fail([]byte("oil")) },
		func(e transport.Endpoint) {
			if m := e.Memory(); m != nil {
				m.Interrupt()
			}
		},
	} {
		subs := make([]transport.Endpoint, n)
		g.each(func(e transport.Endpoint) {
			var err error
			if subs[e.Rank()], err = e.Split(uint64(20+id), all); err != nil {
				g.Errorf("rank %d: %v", e.Rank(), err)
			}
		})
		if g.Failed() {
			return
		}
		happen(subs[n-1])
		g.each(func(e transport.Endpoint) {
			if err := use(e, id); err != nil {
				g.Errorf("rank %d in the parent: %v", e.Rank(), err)
			}
		})
		for _, e := range g.ends {
			select {
			case d := <-e.Down():
				g.Errorf("rank %d of the parent was notified: %v", e.Rank(), &d)
			default:
			}
		}
		for _, e := range subs {
			e.Close()
		}
	}
}

// lateSplit: a rank may use its end of a part before a peer has taken its own.
func lateSplit(g *group) {
	done := async(func() error {
		sub, err := g.ends[0].Split(30, []int{0, 1})
		if err != nil {
			return err
		}
		defer sub.Close()
		return use(sub, 1)
	})
	time.Sleep(5 * time.Millisecond)
	sub, err := g.ends[1].Split(30, []int{0, 1})
	if err != nil {
		g.Fatal(err)
	}
	if err := use(sub, 1); err != nil {
		g.Errorf("rank 1: %v", err)
	}
	sub.Close()
	if err := result(g, "rank 0", done); err != nil {
		g.Errorf("rank 0: %v", err)
	}
}

// ask: every rank queries every other rank that it reaches by frames only, all at the same time, whatever those do.
func ask(g *group) {
	for _, e := range g.ends {
		e.Answer(func(seq uint64) []byte {
			if seq != 7 {
				return nil
			}
			return fmt.Appendf(nil, "the call of rank %d", e.Rank())
		})
	}
	g.acceptAll()
	g.each(func(e transport.Endpoint) {
		for peer := range g.ends {
			if shares(e, peer) {
				continue
			}
			if got := e.Ask(peer, 7); string(got) != fmt.Sprintf("the call of rank %d", peer) {
				g.Errorf("rank %d asked rank %d and got %q", e.Rank(), peer, got)
			}
			if got := e.Ask(peer, 8); got != nil {
				g.Errorf("rank %d asked rank %d for a call it does not know and got %q", e.Rank(), peer, got)
			}
		}
	})
	if g.Domain == nil { // asking disturbs no frame
		g.each(func(e transport.Endpoint) {
			if err := use(e, 1); err != nil {
				g.Errorf("rank %d: %v", e.Rank(), err)
			}
		})
	}
}

func askGone(g *group) {
	if shares(g.ends[0], 1) {
		return
	}
	g.ends[1].Answer(func(uint64) []byte { return []byte("here") })
	g.ends[1].Close()
	result(g, "Down", g.ends[0].Down())
	got := make(chan []byte, 1)
	go func() { got <- g.ends[0].Ask(1, 7) }()
	if text := result(g, "the answer", got); text != nil {
		g.Errorf("a rank that is gone answered %q", text)
	}
}
