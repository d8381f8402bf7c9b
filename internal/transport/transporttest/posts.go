package transporttest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

var postTests = []test{
	{"posts", []int{2, 3, 8}, posts, manyInProgress},
	{"posts do not wait", []int{2}, posts, postsDoNotWait},
	{"shared receives", []int{2, 3}, posts, sharedReceives},
	{"posts and exchanges", []int{2, 5}, posts, postsAndExchanges},
	{"one-sided posts", []int{2, 3}, posts, oneSidedPosts},
	{"cancelled posts", []int{2}, posts, cancelledPosts},
	{"posts to a peer that closes", []int{2}, posts, postsClose},
	{"posted frame refused", []int{2}, posts, postRefused},
	{"no allocation in posts", []int{2}, posts | frugal, postsNoAllocation},
}

// posted is an exchange in progress.
type posted struct {
	out, in, want []byte
}

// manyInProgress keeps as many exchanges in progress as possible, around the ring, of random sizes.
func manyInProgress(g *group) {
	g.acceptAll()
	_, seed := seeded(g.T)
	n := len(g.ends)
	g.each(func(p transport.Endpoint) {
		random := rand.New(rand.NewPCG(seed, 1)) // the same on all ranks
		me := p.Rank()
		to, from := (me+1)%n, (me+n-1)%n
		var pending []posted
		const rounds = 120
		for round := 0; round < rounds || len(pending) > 0; round++ {
			if round < rounds {
				size := random.IntN(1 << random.IntN(18))
				x := posted{
					pattern(make([]byte, size), me, to, round), make([]byte, size),
					pattern(make([]byte, size), from, me, round),
				}
				if err := p.Posts().Post(to, frame(uint64(round), x.out), from, x.in); err != nil {
					g.Errorf("rank %d: Post %d: %v", me, round, err)
					return
				}
				pending = append(pending, x)
			}
			if len(pending) < transport.PostsMax && round < rounds {
				continue
			}
			if err := p.Posts().Complete(ctx); err != nil || !bytes.Equal(pending[0].in, pending[0].want) {
				g.Errorf("rank %d, about round %d: other bytes than sent, or %v (seed %d)", me, round, err, seed)
				return
			}
			clear(pending[0].out)
			clear(pending[0].in)
			pending = pending[1:]
		}
	})
}

// postsDoNotWait: Post returns although no peer has called Exchange.
func postsDoNotWait(g *group) {
	g.acceptAll()
	p := g.ends[0]
	out := pattern(make([]byte, transport.PostsMax*g.Large), 0, 1, 0)
	in := make([]byte, len(out))
	for i := range transport.PostsMax {
		lo, hi := i*g.Large, (i+1)*g.Large
		if err := p.Posts().Post(1, frame(uint64(i), out[lo:hi]), 1, in[lo:hi]); err != nil {
			g.Fatalf("Post %d: %v", i, err)
		}
	}
	peer := async(func() error {
		back := make([]byte, g.Large)
		for i := range transport.PostsMax {
			want := out[i*g.Large : (i+1)*g.Large]
			if err := g.ends[1].Exchange(ctx, 0, frame(uint64(i), want), 0, back); err != nil {
				return err
			}
			if !bytes.Equal(back, want) {
				return errors.New("other bytes than posted")
			}
		}
		return nil
	})
	for range transport.PostsMax {
		if err := p.Posts().Complete(ctx); err != nil {
			g.Errorf("Complete: %v", err)
		}
	}
	if err := result(g, "rank 1", peer); err != nil || !bytes.Equal(in, out) {
		g.Errorf("other bytes than sent, or %v", err)
	}
}

// sharedReceives: if the endpoints declare it, all posted exchanges may receive into the same memory.
func sharedReceives(g *group) {
	if !g.ends[0].Capabilities().SharedReceives {
		g.Skip("every posted exchange needs separate memory")
	}
	g.acceptAll()
	n := len(g.ends)
	g.each(func(p transport.Endpoint) {
		me := p.Rank()
		to, from := (me+1)%n, (me+n-1)%n
		in := make([]byte, g.Large)
		for i := range transport.PostsMax {
			if err := p.Posts().Post(to, frame(uint64(i), pattern(make([]byte, g.Large), me, to, i)), from, in); err != nil {
				g.Errorf("rank %d: Post %d: %v", me, i, err)
				return
			}
		}
		for i := range transport.PostsMax {
			err := p.Posts().Complete(ctx)
			if err != nil || !bytes.Equal(in, pattern(make([]byte, g.Large), from, me, i)) {
				g.Errorf("rank %d: Complete %d: other bytes than sent, or %v", me, i, err)
				return
			}
			time.Sleep(time.Millisecond) // nothing is written meanwhile
			if !bytes.Equal(in, pattern(make([]byte, g.Large), from, me, i)) {
				g.Errorf("rank %d: the data of exchange %d changed after its Complete", me, i)
				return
			}
		}
	})
}

// postsAndExchanges: on some ranks an exchange is posted, on others not, round by round.
func postsAndExchanges(g *group) {
	g.acceptAll()
	random, seed := seeded(g.T)
	n := len(g.ends)
	const rounds = 100
	post := make([][]bool, n)
	for r := range post {
		for range rounds {
			post[r] = append(post[r], random.IntN(2) == 0)
		}
	}
	g.each(func(p transport.Endpoint) {
		me := p.Rank()
		to, from := (me+1)%n, (me+n-1)%n
		var pending []posted
		complete := func() error {
			err := p.Posts().Complete(ctx)
			if err == nil && !bytes.Equal(pending[0].in, pending[0].want) {
				err = errors.New("other bytes than sent")
			}
			pending = pending[1:]
			return err
		}
		for round := range rounds {
			size := (round * 977) % 5000
			x := posted{
				pattern(make([]byte, size), me, to, round), make([]byte, size),
				pattern(make([]byte, size), from, me, round),
			}
			var err error
			if post[me][round] {
				if len(pending) == transport.PostsMax {
					err = complete()
				}
				err = errors.Join(err, p.Posts().Post(to, frame(uint64(round), x.out), from, x.in))
				pending = append(pending, x)
			} else {
				for len(pending) > 0 && err == nil {
					err = complete()
				}
				if err == nil {
					err = p.Exchange(ctx, to, frame(uint64(round), x.out), from, x.in)
				}
				if err == nil && !bytes.Equal(x.in, x.want) {
					err = errors.New("other bytes than sent")
				}
			}
			if err != nil {
				g.Errorf("rank %d, round %d: %v (seed %d)", me, round, err, seed)
				return
			}
		}
		for len(pending) > 0 {
			if err := complete(); err != nil {
				g.Errorf("rank %d, at the end: %v (seed %d)", me, err, seed)
			}
		}
	})
}

// oneSidedPosts: halves alone, from rank 0 to all others.
func oneSidedPosts(g *group) {
	g.acceptAll()
	n := len(g.ends)
	const rounds = 50
	g.each(func(p transport.Endpoint) {
		buf := make([]byte, transport.PostsMax*1000)
		pending := 0
		for i := range rounds * (n - 1) {
			round, peer := i/(n-1), 1+i%(n-1)
			half := buf[1000*(i%transport.PostsMax):][:1000]
			if pending == transport.PostsMax && p.Rank() == 0 {
				if err := p.Posts().Complete(ctx); err != nil {
					g.Errorf("rank 0, round %d: %v", round, err)
					return
				}
				pending--
			}
			var err error
			switch {
			case p.Rank() == 0:
				err = p.Posts().Post(peer, frame(uint64(round), pattern(half, 0, peer, round)), -1, nil)
				pending++
			case p.Rank() == peer:
				if err = p.Posts().Post(-1, transport.Frame{}, 0, half); err == nil {
					err = p.Posts().Complete(ctx)
				}
				if !bytes.Equal(half, pattern(make([]byte, 1000), 0, peer, round)) {
					g.Errorf("rank %d got other bytes in round %d", peer, round)
				}
			}
			if err != nil {
				g.Errorf("rank %d, round %d: %v", p.Rank(), round, err)
				return
			}
		}
		for ; pending > 0; pending-- {
			if err := p.Posts().Complete(ctx); err != nil {
				g.Errorf("rank 0, at the end: %v", err)
			}
		}
	})
}

// cancelledPosts: after a failed Complete the next one fails too, and then the memory is the rank's again.
func cancelledPosts(g *group) {
	g.acceptAll()
	p := g.ends[0]
	out, in := make([]byte, 1000*transport.PostsMax), make([]byte, 1000*transport.PostsMax)
	for i := range transport.PostsMax {
		if err := p.Posts().Post(1, frame(uint64(i), out[1000*i:][:1000]), 1, in[1000*i:][:1000]); err != nil {
			g.Fatal(err)
		}
	}
	cause := errors.New("enough")
	waiting, cancel := context.WithCancelCause(ctx)
	time.AfterFunc(time.Millisecond, func() { cancel(cause) })
	if err := p.Posts().Complete(waiting); !errors.Is(err, cause) {
		g.Errorf("Complete: %v, want %v", err, cause)
	}
	second := async(func() error { return p.Posts().Complete(ctx) })
	if err := result(g, "the second Complete", second); err == nil {
		g.Error("the second Complete succeeded after the first had failed")
	}
	clear(out)
	clear(in)
}

func postsClose(g *group) {
	g.acceptAll()
	p := g.ends[0]
	buf := make([]byte, 2000*transport.PostsMax)
	for i := range transport.PostsMax {
		if err := p.Posts().Post(1, frame(uint64(i), buf[2000*i:][:1000]), 1, buf[2000*i+1000:][:1000]); err != nil {
			g.Fatal(err)
		}
	}
	time.AfterFunc(time.Millisecond, func() { g.ends[1].Close() })
	for i := range transport.PostsMax {
		done := async(func() error { return p.Posts().Complete(ctx) })
		g.isDown("Complete", result(g, "Complete", done), 1, closedReason)
		_ = i
	}
	clear(buf)
}

func postRefused(g *group) {
	refusal := errors.New("not this one")
	g.acceptAll()
	g.ends[1].Inspect(func(peer int, h transport.Header) error {
		if h.Seq == 1 {
			return refusal
		}
		return nil
	})
	sending, cancel := context.WithCancel(ctx)
	sent := async(func() error {
		return errors.Join(send(sending, g.ends[0], 1, frame(0, []byte("abc"))),
			send(sending, g.ends[0], 1, frame(1, []byte("def"))))
	})
	p := g.ends[1]
	in := bytes.Repeat([]byte("xyz"), transport.PostsMax)
	for i := range transport.PostsMax {
		if err := p.Posts().Post(-1, transport.Frame{}, 0, in[3*i:][:3]); err != nil {
			g.Fatal(err)
		}
	}
	if err := p.Posts().Complete(ctx); err != nil || string(in[:3]) != "abc" {
		g.Errorf("the first: %q, %v", in[:3], err)
	}
	if err := p.Posts().Complete(ctx); !errors.Is(err, refusal) || string(in[3:6]) != "xyz" {
		g.Errorf("the refused one: %q, %v, want %v", in[3:], err, refusal)
	}
	cancel()
	result(g, "the sends", sent)
}

func postsNoAllocation(g *group) {
	g.acceptAll()
	const runs = 200
	round := func(p transport.Endpoint, buf []byte) error {
		peer := 1 - p.Rank()
		x := p.Posts()
		return errors.Join(
			x.Post(peer, frame(0, buf[:64]), peer, buf[64:128]), x.Post(peer, frame(0, buf[128:192]), peer, buf[192:]),
			x.Complete(ctx), x.Complete(ctx))
	}
	peer := async(func() error {
		buf := make([]byte, 256)
		for range runs + 1 {
			if err := round(g.ends[1], buf); err != nil {
				return err
			}
		}
		return nil
	})
	buf := make([]byte, 256)
	if n := testing.AllocsPerRun(runs, func() { round(g.ends[0], buf) }); n >= 1 {
		g.Errorf("%v allocations per two posts, want 0", n)
	}
	if err := result(g, "rank 1", peer); err != nil {
		g.Error(err)
	}
}
