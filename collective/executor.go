package collective

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
)

// segmentBytes is how much is moved or combined at a time: between two segments a rank looks whether the communicator
// has failed, and the garbage collector gets its turn even if the loops are assembly.
const segmentBytes = 256 << 10

// executor carries out one rank's plans. One goroutine at a time uses it. It keeps what calls need, so that a call like an
// earlier one allocates nothing.
type executor struct {
	m     *member
	wait  waiter
	plans map[planKey][]plan.Step

	// Of the current call.
	header transport.Header
	labels [2]label // of the odd and the even calls
	sent   []uint32 // frames by receiver, since the beginning
	got    []uint32 // frames by sender

	behind   []int // early: the ranks that have not entered
	scratch  *kernel.Scratch
	src, dst []unsafe.Pointer // Combine: the sources by rank, the distinct destinations
	stage    buffer           // the result, where Dst may be shared by ranks that exchange messages
	wide     buffer           // Work in float32
	received buffer           // one segment
}

// planKey is everything that a plan depends on.
type planKey struct {
	algorithm string
	op        Op
	mean      bool
	count     int
	root      int
	order     Order
}

// plansMax bounds the plans that a member remembers. A model has fewer distinct calls; one that has more pays for
// generating plans now and then.
const plansMax = 512

func (x *executor) open(m *member) {
	x.m = m
	x.wait.m = m
	x.plans = map[planKey][]plan.Step{}
	x.sent, x.got = make([]uint32, m.team.size), make([]uint32, m.team.size)
	if marker, ok := m.end.(transport.Marker); ok {
		m.marker = marker
		x.src = make([]unsafe.Pointer, m.team.size)
		x.dst = make([]unsafe.Pointer, 0, m.team.size)
		x.scratch = kernel.NewScratch(m.team.size)
	}
	m.end.Inspect(x.judge)
}

// execute carries out a call and returns its error, which is the team's cause if it failed.
func (x *executor) execute(ctx context.Context, call *Call, seq uint64, user bool) error {
	m := x.m
	if err := m.team.cause(); err != nil {
		return err
	}
	x.wait.begin(ctx, call, seq, user)
	count, opts, steps, err := x.prepare(call)
	x.label(call, seq, count, &opts)
	if err != nil {
		return m.team.fail(m.failure(ErrInvalid, err), m.rank)
	}
	if ctx.Err() != nil {
		end := endOf(ctx)
		return m.team.fail(m.failure(end.kind(), fmt.Errorf("before the call began: %w", end)), m.rank)
	}
	x.wait.timeout = opts.Timeout
	x.header = fingerprint(m.team, seq, call, count, &opts)
	err = x.run(call, count, &opts, steps)
	clear(x.src)
	clear(x.dst)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errFailed):
		<-m.team.done
		return m.team.err
	default:
		return x.fail(err)
	}
}

// prepare checks the call by itself and finds its plan.
func (x *executor) prepare(call *Call) (count int, o Options, steps []plan.Step, err error) {
	o = x.m.team.cfg.of(call)
	if count, err = call.check(x.m.rank, x.m.team.size, &o); err != nil {
		return count, o, nil, err
	}
	key := planKey{o.Algorithm, call.Op, call.Op == AllReduce && call.Reduce == Mean, count, call.Root, o.Order}
	if steps, ok := x.plans[key]; ok {
		return count, o, steps, nil
	}
	p := Problem{Op: call.Op, Reduce: call.Reduce, Size: x.m.team.size, Count: count, Root: call.Root, Order: o.Order}
	if call.Op != Broadcast {
		p.Root = 0
	}
	reach := transport.Messages
	if x.m.marker != nil {
		reach = transport.Memory
	}
	a, err := choose(p, reach, o.Algorithm)
	if err != nil {
		return count, o, nil, err
	}
	if len(x.plans) >= plansMax {
		clear(x.plans)
	}
	steps = slices.Collect(a.Steps(p, x.m.rank))
	x.plans[key] = steps
	return count, o, steps, nil
}

// label remembers what the call is, for errors, here and on ranks that see its slot. There are two, as there are two slots.
func (x *executor) label(call *Call, seq uint64, count int, o *Options) {
	l := &x.labels[seq&1]
	l.name, l.algo, l.shape = "", o.Algorithm, l.shape[:0]
	if call.Manifest != nil {
		l.name = call.Manifest.Name
		if call.Manifest.Shape != nil {
			l.shape = append(l.shape, call.Manifest.Shape...)
			return
		}
	}
	l.shape = append(l.shape, count)
}

// fail settles what a failed wait means for the team.
func (x *executor) fail(err error) error {
	m := x.m
	if v := (*verdict)(nil); errors.As(err, &v) {
		m.team.abort(asError(m, v.err))
		<-m.team.done
		return m.team.err
	}
	e := (*Error)(nil)
	down := (*transport.PeerDown)(nil)
	switch {
	case errors.As(err, &e):
	case errors.As(err, &down):
		e = m.failure(ErrPeerLost, err)
		e.Peers = []int{down.Rank}
	case errors.Is(err, transport.ErrSize):
		e = m.failure(ErrMismatch, err)
	case errors.Is(err, transport.ErrClosed):
		e = m.failure(ErrClosed, err)
	default:
		e = m.failure(ErrAborted, err)
	}
	return m.team.fail(e, m.rank)
}

// failure returns an error of the current call.
func (m *member) failure(kind, err error) *Error {
	return &Error{
		Kind: kind, Comm: m.team.cfg.Name, Rank: m.rank, Op: m.wait.call.Op, Seq: m.wait.seq,
		Name: m.wait.call.name(), Peers: m.missing(), Err: err,
	}
}

// missing returns the ranks that the current wait is for.
func (m *member) missing() []int {
	switch w := &m.wait; {
	case w.to >= 0 && w.from >= 0 && w.to != w.from:
		return []int{min(w.to, w.from), max(w.to, w.from)}
	case w.to >= 0:
		return []int{w.to}
	case w.from >= 0:
		return []int{w.from}
	case m.marker != nil && w.mark >= 0:
		return m.marker.Behind(w.mark, nil)
	}
	return nil
}

// run carries out the plan of a checked call.
//
// Where all peers are reached by memory, every call begins with mark 0, whatever its plan: until then a rank may
// withdraw; from then on all ranks are in the library, and the call runs to its end on each. A rank that finds the
// communicator aborted leaves out the work that is left, and says so (torn) before it raises its last mark, so that all
// ranks agree on the outcome.
func (x *executor) run(call *Call, count int, o *Options, steps []plan.Step) error {
	m := x.m
	w := work{x: x, call: call, count: count, acc: call.Type, mean: call.Op == AllReduce && call.Reduce == Mean}
	if o.Accumulate == AccumulateFloat32 && call.Op == AllReduce && call.Type.Bytes() == 2 && call.Type.IsFloat() {
		w.acc = tensor.Float32
	}
	w.inMemory = len(steps) > 0 && steps[0].Kind == plan.Signal
	if m.marker != nil {
		if err := x.meet(call, w.inMemory); err != nil {
			return err
		}
	}
	if !w.inMemory {
		w.assign()
	}
	for i := range steps {
		if err := w.step(&steps[i]); err != nil {
			return err
		}
	}
	if w.inMemory {
		if m.team.torn.Load() {
			return errFailed
		}
		return nil
	}
	w.deliver()
	return nil
}

// meet enters a call in memory and returns when all ranks have entered it and their calls agree.
func (x *executor) meet(call *Call, inMemory bool) error {
	m := x.m
	select {
	case down := <-m.end.Down():
		return &down // it cannot have entered this call
	default:
	}
	l := &x.labels[x.header.Seq&1]
	slot := transport.Slot{Header: x.header, Name: l.name, Shape: l.shape, Algorithm: l.algo}
	if inMemory {
		slot.Src, slot.Dst = call.Src, call.Dst
	}
	m.marker.Publish(slot)
	if err := x.signal(0); err != nil {
		return err
	}
	if err := x.await(0); err != nil {
		return err
	}
	return x.compare()
}

func (x *executor) signal(mark int) error {
	if x.m.marker.Signal(mark) != nil {
		return x.interrupted()
	}
	return nil
}

// await waits for a mark. The wait for mark 0 can be ended, and then one atomic in the transport decides: either this rank
// withdraws and the call never starts, or it has started, whatever ended the wait, and goes on.
func (x *executor) await(mark int) error {
	x.wait.mark = mark
	for {
		err := x.m.marker.Await(&x.wait, -1, mark)
		switch {
		case err == nil:
			x.wait.firm, x.wait.mark = true, -1
			return nil
		case errors.Is(err, transport.ErrInterrupted):
			return x.interrupted()
		case mark > 0:
			return err
		}
		x.m.team.leaving.Add(1)
		if x.m.marker.Withdraw() {
			return err
		}
		x.m.team.leaving.Add(-1)
		x.wait.firm = true
	}
}

// interrupted says why the current call can never start: a rank has withdrawn, or a team has failed. If it is this team,
// its cause is there or on its way. Else it is another one over the same transport, whose cause is not known here.
func (x *executor) interrupted() error {
	t := x.m.team
	if t.local == t.size || t.leaving.Load() > 0 || t.fate.Load() != sound {
		return errFailed
	}
	return x.m.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
}

// early holds the calls of the peers that have entered the current call against this rank's, so that a mismatch is found
// without those that have not: their slots, or where there are none what local peers have blocked in. It is called before
// a wait blocks.
func (m *member) early() error {
	if m.marker == nil {
		return m.team.meet(m)
	}
	if m.wait.mark != 0 {
		return nil
	}
	m.behind = m.marker.Behind(0, m.behind[:0])
	behind := m.behind
	for peer := range m.team.size {
		if !slices.Contains(behind, peer) && m.marker.Peer(peer).Header != m.header {
			return m.mismatch(func(r int) bool { return !slices.Contains(behind, r) })
		}
	}
	return nil
}

// compare holds all ranks' slots against this rank's.
func (x *executor) compare() error {
	for peer := range x.m.team.size {
		if x.m.marker.Peer(peer).Header != x.header {
			return x.m.mismatch(func(int) bool { return true })
		}
	}
	return nil
}

// mismatch says which of the ranks that are here call what, from their slots: the first rank here speaks for all that
// agree with it, then the first that does not.
func (m *member) mismatch(here func(rank int) bool) error {
	var calls []agreed
	for r := range m.team.size {
		if !here(r) {
			continue
		}
		slot := m.marker.Peer(r)
		at := slices.IndexFunc(calls, func(g agreed) bool { return g.slot.Header == slot.Header })
		if at < 0 {
			calls = append(calls, agreed{slot: slot})
			at = len(calls) - 1
		}
		calls[at].ranks = append(calls[at].ranks, r)
	}
	if len(calls) < 2 {
		return nil
	}
	first := calls[0]
	var text string
	var peers []int
	for _, g := range calls[1:] {
		text += g.text() + ", "
		peers = append(peers, g.ranks...)
	}
	second := calls[1]
	err := m.failure(ErrMismatch, fmt.Errorf("%s%s: %s", text, first.text(),
		differ(&first.slot.Header, &second.slot.Header, first.label(), second.label())))
	err.Peers = peers
	return err
}

// agreed is the ranks that make the same call.
type agreed struct {
	ranks []int
	slot  *transport.Slot
}

func (g *agreed) label() *label {
	return &label{name: g.slot.Name, shape: g.slot.Shape, algo: g.slot.Algorithm}
}

func (g *agreed) text() string {
	verb := "calls"
	if len(g.ranks) > 1 {
		verb = "call"
	}
	return fmt.Sprintf("%s %s %s", ranksText(g.ranks), verb, describe(&g.slot.Header, g.label()))
}
