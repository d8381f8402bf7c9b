package collective

import (
	"errors"
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
	notes    [3]noted   // of the even and the odd collectives, and of calls of two ranks; see notesMu
	current  *noted     // one of these
	waitsFor []int      // the ranks that the current wait is for
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

// notesMu returns the lock of what is noted of the calls, for readers on other goroutines. It is that of the
// front end's record: so a call locks once.
func (m *member) notesMu() *sync.Mutex { return &m.front.c.log.mu }

// Run executes a call.
func (m *member) Run(r *Running) error {
	x := &m.executor
	call := r.Call
	x.wait.begin(r)
	*x.begun.of(call)++
	p, err := x.prepare(r)
	if err != nil {
		return m.front.Error(r, ErrInvalid, err)
	}
	x.wait.timeout = r.Options.Timeout
	x.note(r, p)
	if call.pairwise() {
		err = x.pair(call, r.Count)
	} else {
		err = x.run(call, r.Count, &r.Options, p)
	}
	if err == nil {
		return nil
	}
	if x.wait.firm && m.site.whole {
		m.team.breakOff()
	}
	err = x.fail(err)
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

// fail determines what a failed wait means for the communicator, and returns the cause of its failure.
func (x *executor) fail(err error) error {
	f := x.m.front
	if errors.Is(err, errFailed) {
		<-f.Failed()
		return f.Err()
	}
	if v := (*monitorError)(nil); errors.As(err, &v) {
		return f.Abort(v.err)
	}
	if errors.Is(err, transport.ErrInterrupted) {
		if err = x.interrupted(); errors.Is(err, errFailed) {
			return x.fail(err)
		}
	}
	return f.Fail(x.diagnose(err))
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
	e := m.front.Error(m.wait.run, kind, err)
	e.Peers = m.missing()
	return e
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
	if m.front.Failing() { // read after inside was set: see team.depart
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
	if m.front.Failing() {
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
	if t.local == t.size || t.leaving.Load() > 0 || x.m.front.Failing() {
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
		case <-x.m.front.Failed():
			return errFailed
		case <-timer.C:
			return x.m.failure(ErrPeerLost, errors.New("a rank of another group over this transport has left the call"))
		}
	}
}

// causeWait is how long a rank waits for the reason why a call cannot start. It arrives at once, or never.
const causeWait = time.Second
