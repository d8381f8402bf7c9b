package simnet

import (
	"cmp"
	"slices"
	"time"

	"github.com/lockstep-ml/lockstep/internal/transport/faulty"
	"github.com/lockstep-ml/lockstep/transport"
)

// flight is a frame in transit. It has a copy of the data, since the sender may change its memory.
type flight struct {
	from, to *end
	number   uint64 // of the sender's frames
	header   transport.Header
	data     []byte
	done     bool // the sender may continue
}

// offer sends a frame.
func (n *Net) offer(f *flight) {
	n.counts.Frames++
	n.counts.Bytes += len(f.data)
	if n.fresh = append(n.fresh, f); len(n.fresh) == 1 {
		n.at(1, n.depart) // after all ranks have made their calls of this moment
	}
}

// depart computes when the frames offered in the last moment arrive.
func (n *Net) depart() {
	slices.SortFunc(n.fresh, func(a, b *flight) int {
		return cmp.Or(cmp.Compare(a.from.proc, b.from.proc), cmp.Compare(a.number, b.number))
	})
	for _, f := range n.fresh {
		left, arrives := n.route(f)
		if n.cfg.Buffers {
			n.at(time.Until(left), func() { f.done = true; f.from.notify() })
		}
		n.arrival(f.from.proc, f.to.proc, time.Until(arrives), func() { n.arrive(f) })
	}
	clear(n.fresh)
	n.fresh = n.fresh[:0]
}

// route occupies the links that a frame takes, and returns when it has left and when it arrives.
func (n *Net) route(f *flight) (left, arrives time.Time) {
	from, to := f.from.proc, f.to.proc
	bytes := float64(frameBytes + len(f.data))
	begin := time.Now()
	takes := func(bandwidth, slow float64) time.Duration { return time.Duration(bytes / bandwidth * slow * 1e9) }
	a, b := n.cfg.Places[from].Host, n.cfg.Places[to].Host
	if a == b {
		lane := &n.procs[from].lane
		begin = latest(begin, *lane)
		left = begin.Add(takes(n.cfg.Host.Bandwidth, n.slow(a)))
		*lane = left
		return left, left.Add(n.latency(from, to))
	}
	out, in := &n.cards[a].out, &n.cards[b].in
	begin = latest(begin, *out, *in)
	if n.cfg.Switch > 0 {
		begin = latest(begin, n.free)
		n.free = begin.Add(takes(n.cfg.Switch, 1))
	}
	*out = begin.Add(takes(n.cfg.Network.Bandwidth, n.slow(a)))
	*in = begin.Add(takes(n.cfg.Network.Bandwidth, n.slow(b)))
	left = latest(*out, *in)
	if n.cfg.Switch > 0 {
		left = latest(left, n.free)
	}
	arrives = left.Add(n.latency(from, to))
	if n.cfg.Jitter > 0 {
		arrives = arrives.Add(time.Duration(n.random.Int64N(int64(n.cfg.Jitter))))
	}
	return left, arrives
}

func latest(t time.Time, others ...time.Time) time.Time {
	for _, o := range others {
		if o.After(t) {
			t = o
		}
	}
	return t
}

// slow returns the factor by which a host is slower.
func (n *Net) slow(host int) float64 {
	if f, ok := n.cfg.Slow[host]; ok {
		return f
	}
	return 1
}

// latency returns how long the shortest frame takes from one process to another.
func (n *Net) latency(from, to int) time.Duration {
	a, b := n.cfg.Places[from].Host, n.cfg.Places[to].Host
	l := n.cfg.Host.Latency
	if a != b {
		l = n.cfg.Network.Latency
	}
	return time.Duration(float64(l)*max(n.slow(a), n.slow(b))) + n.procs[from].delay + n.procs[to].delay
}

// arrival schedules an action for when something sent after all previous frames arrives from one process at another,
// unless the connection is cut by then.
func (n *Net) arrival(from, to int, after time.Duration, do func()) {
	when := latest(time.Now().Add(after), n.last[[2]int{from, to}])
	n.last[[2]int{from, to}] = when
	n.at(time.Until(when), func() {
		if !n.dead[pair(from, to)] {
			do()
		}
	})
}

func pair(a, b int) [2]int { return [2]int{min(a, b), max(a, b)} }

// arrive delivers a frame to its receiver, after it applies damage.
func (n *Net) arrive(f *flight) {
	way := [2]int{f.from.proc, f.to.proc}
	switch n.next[way] {
	case Corrupt: // the checksum is wrong: the receiver closes the connection
		delete(n.next, way)
		n.sever(way[0], way[1], ErrReset, transport.ErrCorrupt)
		return
	case Forge:
		delete(n.next, way)
		f.header = faulty.FlipBit(f.header, n.random)
	}
	f.to.inbox.add(f)
	f.to.notify()
}

// receive takes the first frame that a peer has for e, whose data was copied.
func (n *Net) receive(e *end, from int) {
	f := e.inbox.take(from)
	if !n.cfg.Buffers {
		n.arrival(e.proc, f.from.proc, n.latency(e.proc, f.from.proc), func() { f.done = true; f.from.notify() })
	}
}
