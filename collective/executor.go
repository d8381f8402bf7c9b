package collective

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective/plan"
	"github.com/lockstep-ml/lockstep/internal/kernel"
	"github.com/lockstep-ml/lockstep/transport"
)

// segmentBytes is how much is transferred or combined at once: between two segments a rank checks whether the
// communicator has failed, and the garbage collector can run even if the loops are assembly.
const segmentBytes = 256 << 10

// executor executes one rank's calls. One goroutine at a time uses it. It keeps everything that calls need,
// so that a repeated call allocates nothing.
type executor struct {
	m    *member
	wait waiter

	plans   map[planKey]*planned
	last    *planned // of the last call, with its key
	lastKey planKey

	signatures map[signed]*signature

	// State of the current call.
	header   transport.Header
	sum      uint64     // of the header
	sig      *signature // from which the header is made
	textMu   sync.Mutex // for readers on other goroutines
	notes    [3]noted   // of the even and the odd collectives, and of calls of two ranks
	current  *noted     // one of these
	callLog  callLog    // the last calls; guarded by textMu
	lastFrom []uint64   // by peer: number of the last call of which a frame was received, plus 1

	work   work
	half   plan.Step          // of a call of two ranks
	begun  numbers            // calls that were executed, including the current one
	sent   []uint32           // frames by receiver, since the start
	got    []uint32           // frames by sender
	seen   bool               // the header of the next awaited frame
	poster transport.Endpoint // nil: without non-blocking exchanges
	odd    oddFrame           // rejected by judge

	behind   []int // early: the ranks that have not entered
	scratch  *kernel.Scratch
	in, out  []vector         // Combine: the sources by rank, the distinct destinations
	src, dst []unsafe.Pointer // their addresses, or their blocks in the type of partial sums
	shadow   buffer           // the result, where other local ranks have the same Dst
	own      buffer           // Work where it is not Dst
	private  buffer           // Scratch
	received [transport.PostsMax]buffer
	gather   exchange                   // the second of two interleaved exchanges
	given    [transport.PostsMax]buffer // frames whose type differs from that of their memory
	wide     buffer                     // these blocks
}

func (x *executor) open(m *member) {
	x.m = m
	x.wait.m = m
	x.plans, x.signatures = map[planKey]*planned{}, map[signed]*signature{}
	x.callLog.began = time.Now()
	x.sent, x.got = make([]uint32, m.team.size), make([]uint32, m.team.size)
	x.lastFrom = make([]uint64, m.team.size)
	m.site = findSite(m.end)
	n := len(m.site.domain)
	x.src = make([]unsafe.Pointer, 0, n)
	x.dst = make([]unsafe.Pointer, 0, n)
	x.scratch = kernel.NewScratch(n)
	if m.end.Capabilities().Posts {
		x.poster = m.end
	}
	m.end.Inspect(x.judge)
	m.end.Answer(x.answer)
}

// execute executes a call and returns its error, which is the team's cause if the team failed.
func (x *executor) execute(ctx context.Context, call *Call, t ticket, user bool) error {
	m := x.m
	if err := m.team.cause(); err != nil {
		return err
	}
	x.wait.begin(ctx, call, t, user)
	*x.begun.of(call)++
	opts := m.team.cfg.of(call)
	count, p, err := x.prepare(call, &opts)
	if err == nil && ctx.Err() != nil {
		end := endOf(ctx)
		err = m.failure(end.kind(), fmt.Errorf("before the call began: %w", end))
	} else if err != nil {
		err = m.failure(ErrInvalid, err)
	}
	if err != nil {
		x.keepOdd(call, t, &opts)
		err = m.team.fail(err, m.rank)
		x.ended(t, err)
		return err
	}
	x.wait.timeout = opts.Timeout
	x.note(call, t, count, &opts, p)
	if call.pairwise() {
		err = x.pair(call, count)
	} else {
		err = x.run(call, count, &opts, p)
	}
	if err == nil {
		x.ended(t, nil)
		return nil
	}
	if x.wait.firm && m.site.whole {
		m.team.breakOff()
	}
	err = x.fail(err)
	x.ended(t, err)
	x.quit(call)
	return err
}

// quit leaves a failed call: when it returns, no local rank accesses this rank's memory any more.
func (x *executor) quit(call *Call) {
	m := x.m
	m.team.depart(m)
	if m.site.whole {
		return
	}
	src, dst := call.sides(m.rank)
	m.end.Retire(src)
	m.end.Retire(dst)
}

// fail determines what a failed wait means for the team, and returns the team's cause.
func (x *executor) fail(err error) error {
	m := x.m
	if errors.Is(err, errFailed) {
		<-m.team.done
		return m.team.err
	}
	if v := (*monitorError)(nil); errors.As(err, &v) {
		m.team.abort(asError(m, v.err))
		<-m.team.done
		return m.team.err
	}
	if errors.Is(err, transport.ErrInterrupted) {
		if err = x.interrupted(); errors.Is(err, errFailed) {
			return x.fail(err)
		}
	}
	return m.team.fail(x.diagnose(err), m.rank)
}

// diagnose translates an error of the transport.
func (x *executor) diagnose(err error) error {
	m := x.m
	e := (*Error)(nil)
	down := (*transport.PeerDown)(nil)
	if told := (*departure)(nil); errors.As(err, &told) {
		err = &told.down
	}
	switch {
	case errors.As(err, &e):
		return err
	case errors.Is(err, errOdd):
		return x.oddity()
	case errors.As(err, &down):
		if failure := (*transport.Failure)(nil); errors.As(down.Err, &failure) {
			if told, ok := decodeFailure(failure.Reason); ok {
				return told
			}
		}
		e = m.failure(ErrPeerLost, down)
		e.Peers = []int{down.Rank}
		return e
	case errors.Is(err, transport.ErrSize):
		return m.failure(ErrMismatch, err)
	case errors.Is(err, transport.ErrClosed):
		return m.failure(ErrClosed, err)
	}
	return m.failure(ErrAborted, err)
}

// failure returns an error of the current call.
func (m *member) failure(kind, err error) *Error {
	return &Error{
		Kind: kind, Comm: m.team.cfg.Name, Rank: m.rank, Op: m.wait.call.Op, Seq: m.wait.seq,
		Name: m.wait.call.name(), Peers: m.missing(), Err: err,
	}
}

// missing returns the ranks that the current wait is for.
func (m *member) missing() []int { return m.missingIn(nil) }

// missingIn appends them to a slice.
func (m *member) missingIn(to []int) []int {
	switch w := &m.wait; {
	case w.to >= 0 && m.seen && w.frames == 1:
		return append(to, w.to) // the other half has arrived
	case w.to >= 0 && w.from >= 0 && w.to != w.from:
		return append(to, min(w.to, w.from), max(w.to, w.from))
	case w.to >= 0:
		return append(to, w.to)
	case w.from >= 0:
		return append(to, w.from)
	case w.mark >= 0 && w.of >= 0:
		return append(to, w.of)
	case w.mark >= 0:
		return m.site.marker.Behind(w.mark, to)
	}
	return to
}

// run executes the plan of a checked call.
//
// In a domain of several ranks every call begins with flag 0, whatever its plan: until then a rank may
// withdraw, and then the call never starts. If all ranks are in one process, the call runs to its end on each
// of them from then on: a rank that finds the communicator aborted skips the remaining work, and records that
// (torn) before it sets its last flag, so that all ranks agree on the outcome. Otherwise every wait can end
// early, and a rank that leaves then waits until no local rank accesses its memory any more (see
// [team.depart]).
func (x *executor) run(call *Call, count int, o *Options, p *planned) error {
	m := x.m
	if err := x.begin(); err != nil {
		return err
	}
	w := &x.work
	*w = work{x: x, call: call, count: count, acc: partialType(call, o), wire: partialType(call, o), mean: call.mean()}
	w.src, w.dst = call.sides(m.rank)
	var err error
	switch {
	case m.site.marker != nil:
		err = x.together(w, p, o.Algorithm)
	default:
		w.assign(&p.open, m.team.local > 1)
		err = x.finish(w, &p.open, 0)
	}
	if err == nil {
		x.end()
	}
	return err
}

// begin enters a call that may access memory of other ranks. It fails if a peer is known to be gone.
func (x *executor) begin() error {
	m := x.m
	m.inside.Store(true)
	if m.team.fate.Load() != sound { // read after inside was set: see team.depart
		return errFailed
	}
	return x.down()
}

// down checks whether a peer is gone without which the call cannot succeed. A peer that has closed its
// endpoint may have done its part of a call by frames; it cannot have entered a call in memory.
func (x *executor) down() error {
	m := x.m
	for x.wait.told == nil {
		select {
		case down := <-m.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || m.site.marker != nil && m.site.in(down.Rank) {
				x.wait.told = keep(down)
			}
			continue
		default:
		}
		return nil
	}
	if told := x.wait.told; !errors.Is(told.down.Err, transport.ErrClosed) || !x.wait.call.pairwise() {
		return told
	}
	return nil
}

// departure is the loss of a peer that ends a call, as the endpoint reported it. It is not a PeerDown,
// because a transport on top of others may translate the ranks of PeerDown errors that pass through it.
type departure struct{ down transport.PeerDown }

func keep(down transport.PeerDown) *departure { return &departure{down} }

func (d *departure) Error() string { return d.down.Error() }

// end leaves a successful call.
func (x *executor) end() {
	m := x.m
	m.inside.Store(false)
	if m.team.fate.Load() != sound {
		m.team.departed()
	}
}

// together executes a plan in a domain.
func (x *executor) together(w *work, p *planned, named string) error {
	m := x.m
	script := &p.open
	half := int(x.header.Seq & 1)
	w.half = half
	if m.team.local > 1 {
		m.shows[half].Store((*byte)(w.dst.Ptr))
	}
	x.show(w)
	done := 0
	if !script.touchesPeers { // the peers' memory cannot change the plan
		done = script.early
		w.assign(script, m.team.local > 1 && !script.prefixStageOnly)
		if err := w.steps(script.steps[:done]); err != nil {
			return err
		}
	}
	if err := x.meet(); err != nil {
		return err
	}
	shared := m.team.local > 1 && m.team.share(m, half)
	switch {
	case script.touchesPeers:
		if x.hidden() || !script.sharedDst && x.aliased() {
			var err error
			if script, err = x.hide(p, named); err != nil {
				return m.failure(ErrInvalid, err)
			}
			w.offset = 1 // flag 0 was for entering the call; the steps before the plan's first flag are executed now
		}
		w.sharedDst = script.sharedDst
		w.assign(script, shared && !script.sharedDst)
	case shared && script.prefixStageOnly:
		w.assign(script, true)
	}
	return x.finish(w, script, done)
}

// finish executes the rest of a plan and delivers the result.
func (x *executor) finish(w *work, s *script, done int) error {
	committed := len(s.steps) - s.committed
	if err := w.steps(s.steps[done:committed]); err != nil {
		return err
	}
	w.committed = true
	if err := w.steps(s.steps[committed:]); err != nil {
		return err
	}
	if x.m.site.whole && x.m.team.torn.Load() {
		return errFailed
	}
	w.deliver()
	return nil
}

// hidden reports whether a rank of the domain uses memory in the call that not all ranks of the domain can
// access.
func (x *executor) hidden() bool {
	for _, r := range x.m.site.domain {
		if s := x.m.site.marker.Peer(r); s.Src.Ptr == nil && s.Src.Bytes > 0 || s.Dst.Ptr == nil && s.Dst.Bytes > 0 {
			return true
		}
	}
	return false
}

// aliased reports whether two ranks of the domain have one Dst.
func (x *executor) aliased() bool {
	domain, marker := x.m.site.domain, x.m.site.marker
	for i, r := range domain {
		dst := marker.Peer(r).Dst.Ptr
		for _, other := range domain[:i] {
			if dst != nil && marker.Peer(other).Dst.Ptr == dst {
				return true
			}
		}
	}
	return false
}

// meet waits until all ranks of the domain have entered the call, and compares their calls.
func (x *executor) meet() error {
	if err := x.signal(0); err != nil {
		return err
	}
	if err := x.await(-1, 0); err != nil {
		return err
	}
	return x.compare()
}

func (x *executor) signal(mark int) error { return x.m.site.marker.Signal(mark) }

// await waits for a flag of a rank, or of all. The wait for flag 0 can be interrupted; then one atomic
// variable in the transport decides: either this rank withdraws and the call never starts, or it has started,
// whatever interrupted the wait.
func (x *executor) await(rank, mark int) error {
	m := x.m
	x.wait.mark, x.wait.of = mark, rank
	for {
		err := m.site.marker.Await(&x.wait, rank, mark)
		switch {
		case err == nil:
			x.wait.firm, x.wait.mark = m.site.whole, -1
			return nil
		case errors.Is(err, transport.ErrInterrupted) || mark > 0:
			return err
		}
		m.team.leaving.Add(1)
		if m.site.marker.Withdraw() {
			return err
		}
		m.team.leaving.Add(-1)
		if !m.site.whole {
			return err
		}
		x.wait.firm = true
	}
}

// interrupted returns why the current call can never start: a rank has withdrawn, or a team has failed. If it
// is this team, its cause is known or will be shortly. Otherwise it is another team over the same transport,
// which is sending its cause.
func (x *executor) interrupted() error {
	t := x.m.team
	if t.local == t.size || t.leaving.Load() > 0 || t.fate.Load() != sound {
		return errFailed
	}
	if told := x.wait.told; told != nil {
		return told
	}
	timer := time.NewTimer(causeWait)
	defer timer.Stop()
	for {
		select {
		case down := <-x.m.end.Down():
			if !errors.Is(down.Err, transport.ErrClosed) || x.m.site.in(down.Rank) {
				return keep(down)
			}
		case <-t.done:
			return errFailed
		case <-timer.C:
			return x.m.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
		}
	}
}

// causeWait is how long a rank waits for the reason why a call cannot start. It arrives at once, or never.
const causeWait = time.Second
