package simulate

import (
	"container/heap"
	"context"
	"fmt"
	"iter"
	"math"
	"runtime/metrics"
	"time"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/memlimit"
)

// Result is what a collective took.
type Result struct {
	Time    time.Duration // of the slowest rank
	Fastest time.Duration // of the rank that ended first
	Steps   int           // of all ranks
	Frames  int           // of all ranks
	Sent    int           // bytes that the busiest host's card sent
}

// Event is one step of one rank, as it took place.
type Event struct {
	Rank, Host int
	Step       plan.Step
	Start, End time.Duration
}

// Run carries out a problem's plans, made complete by [Cluster.Problem], on the cluster. watch, if not nil, is told every
// step when it ends. The end of ctx ends it.
func Run(ctx context.Context, c Cluster, a plan.Algorithm, p plan.Problem, elementBytes int, watch func(Event)) (Result, error) {
	if err := c.check(); err != nil {
		return Result{}, err
	}
	if err := a.Fits(p); err != nil {
		return Result{}, fmt.Errorf("simulate: %s: %w", a.Name, err)
	}
	if p.Size != c.Ranks || len(p.Places) != c.Ranks {
		return Result{}, fmt.Errorf("simulate: a problem of %d ranks at %d places on a cluster of %d", p.Size, len(p.Places), c.Ranks)
	}
	r := newRun(&c, a, p, elementBytes, watch)
	defer r.stop()
	return r.run(ctx)
}

// run is one simulation. Ranks are taken in the order of their clocks, so whatever happens at a time happens after all that
// came before it.
type run struct {
	c       *Cluster
	p       plan.Problem
	element int
	watch   func(Event)
	ranks   []rank
	hosts   []host
	domains map[int]*domain
	core    time.Duration // the switch is free from then on
	ready   queue         // ranks that can take their next step
	left    int           // ranks whose plans have not ended
	memory  uint64        // bytes that the program may use
	tooLong bool          // a rank has come to [timeMax]
	result  Result
}

// timeMax bounds the time that is simulated, about 18 years: sums of a few such times do not overflow.
const timeMax = time.Duration(1 << 59)

// rank is the state of one rank.
type rank struct {
	next  func() (plan.Step, bool)
	stop  func()
	step  plan.Step
	begun time.Duration // of the step
	now   time.Duration
	slow  float64 // how many times longer its computing takes
	marks []time.Duration

	// Of the exchange that it is in.
	meets          bool
	sent, received bool
	until          time.Duration
}

// host is a network card.
type host struct {
	out, in time.Duration // free from then on
	sent    int
}

// domain knows who waits for whose marks.
type domain struct {
	ranks  []int
	raised []int // by mark: how many ranks have raised it
	last   []time.Duration
	wait   map[int][]int // by mark: the ranks that wait for it
}

func newRun(c *Cluster, a plan.Algorithm, p plan.Problem, elementBytes int, watch func(Event)) *run {
	r := &run{c: c, p: p, element: elementBytes, watch: watch, ranks: make([]rank, p.Size), hosts: make([]host, c.Hosts), domains: map[int]*domain{}, memory: math.MaxUint64}
	if left, ok := memlimit.Available(); ok {
		r.memory = usedMemory() + uint64(left)/4*3 // the garbage collector and other programs take the rest
	}
	onHost := make([]int, c.Hosts)
	for _, place := range p.Places {
		onHost[place.Host]++
	}
	for i := range r.ranks {
		k := &r.ranks[i]
		k.next, k.stop = iter.Pull(a.Steps(p, i))
		k.slow, k.now = 1, c.Late[i]
		if c.Cores > 0 {
			k.slow = max(1, float64(onHost[p.Places[i].Host])/float64(c.Cores))
		}
		if f, ok := c.Stragglers[i]; ok {
			k.slow *= f
		}
		d := r.domains[p.Places[i].Domain]
		if d == nil {
			d = &domain{wait: map[int][]int{}}
			r.domains[p.Places[i].Domain] = d
		}
		d.ranks = append(d.ranks, i)
	}
	return r
}

func (r *run) stop() {
	for i := range r.ranks {
		r.ranks[i].stop()
	}
}

// usedMemory returns the bytes of the program's heap.
func usedMemory() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}

// goOn returns why the simulation must end now, or nil.
func (r *run) goOn(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case r.tooLong:
		return fmt.Errorf("simulate: the collective takes more than %.0f years: are sizes, rates and factors right?", timeMax.Hours()/24/365)
	case usedMemory() > r.memory:
		return fmt.Errorf("simulate: plans of %d ranks take more memory than is left here, %d bytes: simulate fewer ranks", len(r.ranks), r.memory)
	}
	return nil
}

// run takes steps until all plans have ended.
func (r *run) run(ctx context.Context) (Result, error) {
	r.left = len(r.ranks)
	r.result.Fastest = 1<<63 - 1
	for i := range r.ranks {
		if i&63 == 0 {
			if err := r.goOn(ctx); err != nil {
				return Result{}, err
			}
		}
		r.load(i)
	}
	for turn := 0; len(r.ready.items) > 0; turn++ {
		if turn&1023 == 0 || r.tooLong {
			if err := r.goOn(ctx); err != nil {
				return Result{}, err
			}
		}
		r.take(heap.Pop(&r.ready).(item).rank)
	}
	if r.tooLong {
		return Result{}, r.goOn(ctx)
	}
	if r.left > 0 {
		for i := range r.ranks {
			if k := &r.ranks[i]; k.step.Kind != 0 {
				return Result{}, fmt.Errorf("simulate: %d ranks wait for ever: rank %d at %v", r.left, i, k.step)
			}
		}
	}
	for _, h := range r.hosts {
		r.result.Sent = max(r.result.Sent, h.sent)
	}
	return r.result, nil
}

// load gets a rank's next step, and queues the rank, or notes that its plan has ended.
func (r *run) load(i int) {
	k := &r.ranks[i]
	s, ok := k.next()
	if !ok {
		k.step = plan.Step{}
		r.left--
		r.result.Time = max(r.result.Time, k.now)
		r.result.Fastest = min(r.result.Fastest, k.now)
		return
	}
	k.step, k.begun = s, k.now
	r.result.Steps++
	heap.Push(&r.ready, item{k.now, i})
}

// done ends a rank's step at a time.
func (r *run) done(i int, at time.Duration) {
	k := &r.ranks[i]
	k.now = at
	r.tooLong = r.tooLong || at >= timeMax
	if r.watch != nil {
		r.watch(Event{Rank: i, Host: r.p.Places[i].Host, Step: k.step, Start: k.begun, End: at})
	}
	r.load(i)
}

// take takes a rank's current step, as far as it can.
func (r *run) take(i int) {
	k := &r.ranks[i]
	s := k.step
	switch s.Kind {
	case plan.Exchange:
		r.meet(i)
	case plan.Signal:
		r.signal(i)
	case plan.Await:
		r.await(i)
	case plan.Combine:
		n := s.Ranks.Hi - s.Ranks.Lo
		r.done(i, k.now+r.reading(k, float64(s.In.Hi-s.In.Lo)*float64(n), r.c.Combine))
	case plan.Pull, plan.Push:
		r.done(i, k.now+r.reading(k, float64(s.In.Hi-s.In.Lo), r.c.Inside.Bandwidth))
	case plan.Copy:
		r.done(i, k.now+r.reading(k, float64(s.In.Hi-s.In.Lo), r.c.Copy))
	case plan.Fold:
		r.done(i, k.now+r.reading(k, 2*float64(s.In.Hi-s.In.Lo), r.c.Combine))
	case plan.Scale:
		r.done(i, k.now+r.reading(k, float64(s.Out.Hi-s.Out.Lo), r.c.Combine))
	default:
		r.done(i, k.now)
	}
}

// reading is how long a rank takes over elements at a rate.
func (r *run) reading(k *rank, elements, rate float64) time.Duration {
	return seconds(elements * float64(r.element) / rate * k.slow)
}

// seconds returns a time of so many seconds, at most [timeMax].
func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), float64(timeMax)))
}

// meet lets a rank enter its exchange, and moves the frames whose other end is there.
func (r *run) meet(i int) {
	k := &r.ranks[i]
	s := k.step
	k.meets, k.sent, k.received, k.until = true, s.To < 0, s.From < 0, k.now
	if s.To >= 0 {
		if q := &r.ranks[s.To]; q.meets && !q.received && q.step.From == i {
			r.move(i, s.To, k.now)
		}
	}
	if s.From >= 0 {
		if q := &r.ranks[s.From]; q.meets && !q.sent && q.step.To == i {
			r.move(s.From, i, k.now)
		}
	}
	for _, peer := range []int{s.To, s.From} {
		if peer >= 0 {
			r.met(peer)
		}
	}
	r.met(i)
}

// met ends a rank's exchange if both halves are over.
func (r *run) met(i int) {
	k := &r.ranks[i]
	if k.meets && k.sent && k.received {
		k.meets = false
		r.done(i, k.until)
	}
}

// segmentBytes is what the executor moves at a time.
const segmentBytes = 256 << 10

// move moves a frame from a time on, when both ends are there.
func (r *run) move(from, to int, at time.Duration) {
	k, q := &r.ranks[from], &r.ranks[to]
	bytes := (k.step.Out.Hi - k.step.Out.Lo) * r.element
	start, took, latency := r.carry(r.p.Places[from].Host, r.p.Places[to].Host, bytes, at)
	end := start + took + latency
	k.sent, k.until = true, max(k.until, start+took)
	q.received, q.until = true, max(q.until, end)
	if q.step.Side != plan.Replace {
		segment := min(bytes, segmentBytes)
		last := seconds(2 * float64(segment) / r.c.Combine * q.slow)
		all := seconds(2 * float64(bytes) / r.c.Combine * q.slow)
		first := time.Duration(float64(took) * float64(segment) / float64(max(1, bytes)))
		q.until = max(q.until, end+last, start+latency+first+all)
	}
	r.result.Frames++
}

// carry occupies what a frame goes through, and returns from when on, for how long, and the latency after it.
func (r *run) carry(from, to, bytes int, at time.Duration) (start, took, latency time.Duration) {
	if from == to {
		return at, seconds(float64(bytes) / r.c.Inside.Bandwidth), r.c.Inside.Latency
	}
	out, in := &r.hosts[from], &r.hosts[to]
	took = seconds(float64(bytes) / r.c.Outside.Bandwidth)
	start = min(max(at, out.out, in.in), timeMax)
	if r.c.Oversub > 1 {
		start = min(max(start, r.core), timeMax)
		r.core = start + seconds(float64(bytes)*r.c.Oversub/(r.c.Outside.Bandwidth*float64(r.c.Hosts)))
	}
	out.out, in.in = start+took, start+took
	out.sent += min(bytes, math.MaxInt-out.sent)
	return start, took, r.c.Outside.Latency
}

// signal raises a rank's mark, and frees those that wait for it.
func (r *run) signal(i int) {
	k := &r.ranks[i]
	d := r.domains[r.p.Places[i].Domain]
	mark := k.step.Mark
	k.marks = append(k.marks, k.now)
	for len(d.raised) <= mark {
		d.raised, d.last = append(d.raised, 0), append(d.last, 0)
	}
	d.raised[mark]++
	d.last[mark] = max(d.last[mark], k.now)
	waiting := d.wait[mark]
	delete(d.wait, mark)
	r.done(i, k.now)
	for _, w := range waiting {
		r.await(w)
	}
}

// await ends a rank's wait if what it waits for has been raised, else registers it.
func (r *run) await(i int) {
	k := &r.ranks[i]
	d := r.domains[r.p.Places[i].Domain]
	mark := k.step.Mark
	at := time.Duration(-1)
	switch {
	case k.step.From >= 0:
		if marks := r.ranks[k.step.From].marks; mark < len(marks) {
			at = marks[mark]
		}
	case mark < len(d.raised) && d.raised[mark] == len(d.ranks):
		at = d.last[mark]
	}
	if at < 0 {
		d.wait[mark] = append(d.wait[mark], i)
		return
	}
	end := k.now
	if len(d.ranks) > 1 {
		end = max(end, at+r.c.Inside.Latency)
	}
	r.done(i, end)
}

// queue holds the ranks that can take a step, the earliest first; of equal ones the lower rank.
type queue struct{ items []item }

type item struct {
	at   time.Duration
	rank int
}

func (q *queue) Len() int { return len(q.items) }

func (q *queue) Less(i, j int) bool {
	a, b := q.items[i], q.items[j]
	return a.at < b.at || a.at == b.at && a.rank < b.rank
}

func (q *queue) Swap(i, j int) { q.items[i], q.items[j] = q.items[j], q.items[i] }
func (q *queue) Push(x any)    { q.items = append(q.items, x.(item)) }

func (q *queue) Pop() any {
	last := q.items[len(q.items)-1]
	q.items = q.items[:len(q.items)-1]
	return last
}
