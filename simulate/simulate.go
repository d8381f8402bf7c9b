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

// Result is the cost of a collective.
type Result struct {
	Time    time.Duration // of the slowest rank
	Fastest time.Duration // of the fastest rank
	Steps   int           // of all ranks
	Frames  int           // of all ranks
	Sent    int           // bytes sent by the card of the busiest host
}

// Event is one executed step of one rank.
type Event struct {
	Rank, Host int
	Step       plan.Step
	Start, End time.Duration
}

// Run executes the plans of a problem on the cluster. [Cluster.Problem] must have completed the problem. If watch
// is not nil, Run calls it at the end of every step. Run returns an error if ctx is cancelled, the cluster is
// invalid, the algorithm does not fit the problem, the plans deadlock, or the simulation needs more memory than is
// available.
func Run(ctx context.Context, c Cluster, a plan.Algorithm, p plan.Problem, elementBytes int, watch func(Event)) (Result,
	error,
) {
	if err := c.check(); err != nil {
		return Result{}, err
	}
	if err := a.Fits(p); err != nil {
		return Result{}, fmt.Errorf("simulate: %s: %w", a.Name, err)
	}
	if p.Size != c.Ranks || len(p.Places) != c.Ranks {
		return Result{}, fmt.Errorf("simulate: a problem of %d ranks at %d places, on a cluster of %d ranks", p.Size,
			len(p.Places), c.Ranks)
	}
	r := newRun(&c, a, p, elementBytes, watch)
	defer r.stop()
	return r.run(ctx)
}

// run is one simulation. It processes ranks in the order of their clocks, so events are processed in order of time.
type run struct {
	c       *Cluster
	p       plan.Problem
	element int
	watch   func(Event)
	ranks   []rank
	hosts   []host
	domains map[int]*domain
	core    time.Duration // the time from which the switch is free
	ready   queue         // ranks that can execute their next step
	left    int           // ranks with an unfinished plan
	memory  uint64        // bytes that the program may use
	tooLong bool          // a rank has reached [timeMax]
	result  Result
}

// timeMax bounds the simulated time, about 18 years: sums of a few such times do not overflow.
const timeMax = time.Duration(1 << 59)

// rank is the state of one rank.
type rank struct {
	next  func() (plan.Step, bool)
	stop  func()
	step  plan.Step
	begun time.Duration // start of the step
	now   time.Duration
	slow  float64         // factor of its computing time
	flags []time.Duration // when it set each flag

	// State of its exchange.
	exchanging     bool
	sent, received bool
	until          time.Duration
}

// host is a network card.
type host struct {
	out, in time.Duration // the times from which each direction is free
	sent    int
}

// domain holds the flags of a domain, and the ranks that wait for them.
type domain struct {
	ranks  []int
	raised []int           // by flag: number of ranks that raised it
	last   []time.Duration // by flag: when the last rank raised it
	wait   map[int][]int   // by flag: the ranks that wait for it
}

func newRun(c *Cluster, a plan.Algorithm, p plan.Problem, elementBytes int, watch func(Event)) *run {
	r := &run{
		c: c, p: p, element: elementBytes, watch: watch, ranks: make([]rank, p.Size), hosts: make([]host, c.Hosts),
		domains: map[int]*domain{}, memory: math.MaxUint64,
	}
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

// interrupted returns the error that must end the simulation now, or nil.
func (r *run) interrupted(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case r.tooLong:
		return fmt.Errorf("simulate: the collective takes more than %.0f years: check sizes, rates and factors",
			timeMax.Hours()/24/365)
	case usedMemory() > r.memory:
		return fmt.Errorf("simulate: plans of %d ranks need more memory than the %d bytes that are available: simulate "+
			"fewer ranks", len(r.ranks), r.memory)
	}
	return nil
}

// run executes steps until all plans have ended.
func (r *run) run(ctx context.Context) (Result, error) {
	r.left = len(r.ranks)
	r.result.Fastest = 1<<63 - 1
	for i := range r.ranks {
		if i&63 == 0 {
			if err := r.interrupted(ctx); err != nil {
				return Result{}, err
			}
		}
		r.load(i)
	}
	for turn := 0; len(r.ready.items) > 0; turn++ {
		if turn&1023 == 0 || r.tooLong {
			if err := r.interrupted(ctx); err != nil {
				return Result{}, err
			}
		}
		r.execute(heap.Pop(&r.ready).(item).rank)
	}
	if r.tooLong {
		return Result{}, r.interrupted(ctx)
	}
	if r.left > 0 {
		for i := range r.ranks {
			if k := &r.ranks[i]; k.step.Kind != 0 {
				return Result{}, fmt.Errorf("simulate: deadlock: %d ranks wait forever: rank %d at %v", r.left, i, k.step)
			}
		}
	}
	for _, h := range r.hosts {
		r.result.Sent = max(r.result.Sent, h.sent)
	}
	return r.result, nil
}

// load loads the next step of a rank and queues the rank, or records that its plan has ended.
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

// done ends the step of a rank at a time.
func (r *run) done(i int, at time.Duration) {
	k := &r.ranks[i]
	k.now = at
	r.tooLong = r.tooLong || at >= timeMax
	if r.watch != nil {
		r.watch(Event{Rank: i, Host: r.p.Places[i].Host, Step: k.step, Start: k.begun, End: at})
	}
	r.load(i)
}

// execute executes the current step of a rank, as far as it can.
func (r *run) execute(i int) {
	k := &r.ranks[i]
	s := k.step
	switch s.Kind {
	case plan.Exchange:
		r.exchange(i)
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

// reading returns the time that a rank needs for a number of elements at a rate.
func (r *run) reading(k *rank, elements, rate float64) time.Duration {
	return seconds(elements * float64(r.element) / rate * k.slow)
}

// seconds converts seconds to a duration of at most [timeMax].
func seconds(s float64) time.Duration {
	return time.Duration(min(s*float64(time.Second), float64(timeMax)))
}

// exchange starts the exchange of a rank, and transfers the frames whose other end has started its exchange.
func (r *run) exchange(i int) {
	k := &r.ranks[i]
	s := k.step
	k.exchanging, k.sent, k.received, k.until = true, s.To < 0, s.From < 0, k.now
	if s.To >= 0 {
		if q := &r.ranks[s.To]; q.exchanging && !q.received && q.step.From == i {
			r.move(i, s.To, k.now)
		}
	}
	if s.From >= 0 {
		if q := &r.ranks[s.From]; q.exchanging && !q.sent && q.step.To == i {
			r.move(s.From, i, k.now)
		}
	}
	for _, peer := range []int{s.To, s.From} {
		if peer >= 0 {
			r.finish(peer)
		}
	}
	r.finish(i)
}

// finish ends the exchange of a rank if both directions are complete.
func (r *run) finish(i int) {
	k := &r.ranks[i]
	if k.exchanging && k.sent && k.received {
		k.exchanging = false
		r.done(i, k.until)
	}
}

// segmentBytes is the segment size of the executor.
const segmentBytes = 256 << 10

// move transfers a frame, starting at the time when both ends have started their exchange.
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

// carry occupies the cards and the switch for a frame. It returns the start and duration of the transfer, and the
// latency after it.
func (r *run) carry(from, to, bytes int, at time.Duration) (start, took, latency time.Duration) {
	if from == to {
		return at, seconds(float64(bytes) / r.c.Inside.Bandwidth), r.c.Inside.Latency
	}
	out, in := &r.hosts[from], &r.hosts[to]
	bandwidth, cable := r.c.Outside.Bandwidth, r.c.onCable(bytes)
	took = seconds(cable / bandwidth)
	start = min(max(at, out.out, in.in), timeMax)
	if r.c.Oversub > 1 {
		start = min(max(start, r.core), timeMax)
		r.core = start + seconds(cable*r.c.Oversub/(bandwidth*float64(r.c.Hosts)))
	}
	out.out, in.in = start+took, start+took
	out.sent += min(bytes, math.MaxInt-out.sent)
	return start, took, r.c.Outside.Latency
}

// signal sets a flag of a rank, and resumes the ranks that wait for it.
func (r *run) signal(i int) {
	k := &r.ranks[i]
	d := r.domains[r.p.Places[i].Domain]
	flag := k.step.Flag
	k.flags = append(k.flags, k.now)
	for len(d.raised) <= flag {
		d.raised, d.last = append(d.raised, 0), append(d.last, 0)
	}
	d.raised[flag]++
	d.last[flag] = max(d.last[flag], k.now)
	waiting := d.wait[flag]
	delete(d.wait, flag)
	r.done(i, k.now)
	for _, w := range waiting {
		r.await(w)
	}
}

// await ends the wait of a rank if its flag has been raised, else registers the rank.
func (r *run) await(i int) {
	k := &r.ranks[i]
	d := r.domains[r.p.Places[i].Domain]
	flag := k.step.Flag
	at := time.Duration(-1)
	switch {
	case k.step.From >= 0:
		if flags := r.ranks[k.step.From].flags; flag < len(flags) {
			at = flags[flag]
		}
	case flag < len(d.raised) && d.raised[flag] == len(d.ranks):
		at = d.last[flag]
	}
	if at < 0 {
		d.wait[flag] = append(d.wait[flag], i)
		return
	}
	end := k.now
	if len(d.ranks) > 1 {
		end = max(end, at+r.c.Inside.Latency)
	}
	r.done(i, end)
}

// queue holds the ranks that can execute a step, ordered by time, then by rank.
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
