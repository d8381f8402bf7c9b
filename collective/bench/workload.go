package bench

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// part is one rank's part in a call: its source, its destination, and the expected result.
type part struct {
	idle bool // this rank takes no part: a send between other ranks
	call collective.Call
	want []byte
	free []tensor.Memory
}

// newPart makes rank's part in a call over a vector of count elements. count is divisible by the number of
// ranks where every rank has a part of the vector.
func newPart(c collective.Communicator, o *Options, count int) (*part, error) {
	n, rank := c.Size(), c.Rank()
	p := &part{call: collective.Call{Op: o.Op, Reduce: o.Reduce, Type: o.Type, Root: o.Root}}
	if o.Op == collective.Send {
		switch {
		case rank%2 == 1:
			p.call.Op, p.call.Peer = collective.Recv, rank-1
		case rank+1 < n:
			p.call.Peer = rank + 1
		default:
			p.idle = true
			return p, nil
		}
	}
	each, role := count/n, p.call.Op.Role(rank == o.Root)
	give, get := role.Gives.Of(count, each), role.Gets.Of(count, each) // elements
	first := rank * role.Gives.Of(0, each)                             // in the whole vector: of Src
	oracle := o.newOracle(n)
	value := oracle.fold
	switch o.Op {
	case collective.AllReduce, collective.Reduce, collective.Barrier:
	case collective.ReduceScatter:
		value = func(i int) float64 { return oracle.fold(rank*each + i) }
	case collective.Broadcast:
		value = func(i int) float64 { return oracle.contribution(o.Root, i) }
	case collective.AllGather, collective.Gather:
		value = func(i int) float64 { return oracle.contribution(i/each, i) }
	case collective.Scatter:
		value = func(i int) float64 { return oracle.contribution(o.Root, rank*each+i) }
	case collective.AllToAll:
		value = func(i int) float64 { return oracle.contribution(i/each, rank*each+i%each) }
	case collective.Send:
		value = func(i int) float64 { return oracle.contribution(rank-1, i) }
	default:
		return nil, fmt.Errorf("bench: %v cannot be measured", o.Op)
	}
	if o.checks() > 0 {
		p.want = elements(o.Type, get, value)
	}
	var err error
	if p.call.Src, err = p.memory(c, o, elements(o.Type, give,
		func(i int) float64 { return oracle.contribution(rank, first+i) })); err != nil {
		return nil, err
	}
	p.call.Dst, err = p.memory(c, o, make([]byte, get*o.Type.Bytes()))
	return p, err
}

// alignment is the boundary from which [Options.Unaligned] counts.
const alignment = tensor.CacheLine

// memory returns memory of the requested kind and place with this content.
func (p *part) memory(c collective.Communicator, o *Options, content []byte) (tensor.Memory, error) {
	n := len(content)
	if n == 0 {
		return tensor.Memory{}, nil
	}
	if o.Buffers == "ordinary" {
		if o.Unaligned == 0 {
			return tensor.HostMemory(content), nil
		}
		placed := tensor.AlignedBytes(o.Unaligned+n, alignment)[o.Unaligned:]
		copy(placed, content)
		return tensor.HostMemory(placed), nil
	}
	m, err := c.NewBuffer(o.Unaligned + n)
	if err != nil {
		return m, err
	}
	p.free = append(p.free, m)
	m = m.Slice(o.Unaligned, o.Unaligned+n)
	copy(unsafe.Slice((*byte)(m.Ptr), m.Bytes), content)
	return m, nil
}

func (p *part) close() {
	for _, m := range p.free {
		if m.Owner != nil {
			m.Owner.Release()
		}
	}
}

// member is one rank of a measurement.
type member struct {
	world collective.Communicator // of all ranks
	comm  collective.Communicator // of the ranks of this one's group: world, if there is one group
	opts  *Options
	began time.Time // of the measurement

	barrierCall collective.Call
	firstLocal  bool            // it is the lowest rank of this process
	limits      []time.Duration // times of bare exchanges; 0 on ranks that are not firstLocal
}

// measureGroup measures every size on the ranks of this process, and reports rank 0's results.
func measureGroup(ctx context.Context, group collective.Group, opts Options, report func(Result) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	errs := make(chan error)
	for _, c := range group.Local() {
		go func() {
			err := measureRank(ctx, c, c.Rank() == group.Local()[0].Rank(), opts, report)
			if err != nil {
				cancel(err) // the others would wait for this rank
			}
			errs <- err
		}()
	}
	var err error
	for range group.Local() {
		if e := <-errs; e != nil && err == nil {
			err = e
		}
	}
	if err != nil && context.Cause(ctx) != nil {
		return context.Cause(ctx)
	}
	return err
}

func measureRank(
	ctx context.Context, world collective.Communicator, firstLocal bool, opts Options, report func(Result) error,
) error {
	m := &member{world: world, comm: world, opts: &opts, began: time.Now(), firstLocal: firstLocal}
	m.barrierCall.Op = collective.Barrier
	if opts.Split.By != "" {
		var err error
		opts.group = opts.Split.color(world.Rank())
		if m.comm, err = world.Split(ctx, opts.group, world.Rank()); err != nil {
			return err
		}
		defer m.comm.Close()
	}
	for _, size := range opts.Sizes {
		r, err := m.measure(ctx, size)
		if err != nil {
			return err
		}
		if world.Rank() == 0 {
			if err := report(r); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure times the calls of one size on one rank, and checks their results. Rank 0's result has the times.
func (m *member) measure(ctx context.Context, size int) (Result, error) {
	count := m.opts.count(size, m.comm.Size())
	p, err := newPart(m.comm, m.opts, count)
	if err != nil {
		return Result{}, err
	}
	defer p.close()
	bytes := count * m.opts.Type.Bytes()
	calls := m.opts.calls(size) // not by bytes, of which groups of different sizes may have different numbers
	for range m.opts.warmup(calls) {
		if _, err := m.timed(ctx, p); err != nil {
			return Result{}, err
		}
	}
	var times callTimes
	var overlap *Overlap
	if m.opts.bare != nil && m.firstLocal { // it alone exchanges
		m.opts.bare.resize(int(float64(bytes) * busFactor(m.opts.Op, m.opts.Processes)))
	}
	m.limits = m.limits[:0]
	if m.opts.Overlap {
		times, overlap, err = m.overlap(ctx, p, calls)
		for i := 0; i < calls && err == nil; i++ {
			err = m.timedBare(ctx)
		}
	} else {
		var own []time.Duration
		if own, err = m.times(ctx, p, calls); err == nil {
			times, err = m.average(ctx, p, own)
		}
	}
	if err != nil {
		return Result{}, err
	}
	r := m.opts.result(bytes, m.comm.Size(), &times)
	r.Overlap = overlap
	if len(m.limits) > 0 {
		limits, err := averageTimes(ctx, m.world, m.limits, m.firstLocal, m.opts.Processes)
		if err != nil {
			return r, err
		}
		r.Limit = median(limits.by(m.opts.Average))
	}
	if m.opts.checks() > 0 {
		list, err := m.check(ctx, p)
		if err != nil {
			return r, err
		}
		var wrong int64
		wrong, r.WrongText = m.opts.judge(list)
		r.Checks, r.Wrong = m.opts.checks(), &wrong
	}
	return r, m.barrier(ctx) // no rank may release its memory while another is in the last call
}

// times times calls one by one on this rank.
func (m *member) times(ctx context.Context, p *part, calls int) ([]time.Duration, error) {
	times := make([]time.Duration, 0, calls) // so that it does not grow between the calls
	for range calls {
		took, err := m.timed(ctx, p)
		if err != nil {
			return nil, err
		}
		times = append(times, took)
		if err := m.timedBare(ctx); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// timedBare makes a bare exchange after a barrier, if it is measured, and records its time. Ranks that do not exchange
// record 0.
func (m *member) timedBare(ctx context.Context) error {
	if !m.opts.Limit || !m.opts.bareExchange() {
		return nil
	}
	if err := m.barrier(ctx); err != nil {
		return err
	}
	if !m.firstLocal {
		m.limits = append(m.limits, 0)
		return nil
	}
	start := time.Now()
	err := m.opts.bare.exchange()
	m.limits = append(m.limits, time.Since(start))
	return err
}

// timed makes a call after a barrier, and returns its time.
func (m *member) timed(ctx context.Context, p *part) (time.Duration, error) {
	if err := m.barrier(ctx); err != nil {
		return 0, err
	}
	start := time.Since(m.began) // reading one clock: time.Now reads two, which takes as long as a tenth of a small call
	err := m.do(ctx, p)
	return time.Since(m.began) - start, err
}

// do makes the rank's call: as a non-blocking one where the overlap is measured.
func (m *member) do(ctx context.Context, p *part) error {
	switch {
	case p.idle:
		return nil
	case !m.opts.Overlap:
		return m.comm.Do(ctx, &p.call)
	}
	wait, err := m.start(ctx, p)
	if err != nil {
		return err
	}
	return wait()
}

// barrier waits for all ranks, those of other groups too.
func (m *member) barrier(ctx context.Context) error { return m.world.Do(ctx, &m.barrierCall) }
