package collective

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lockstep-ml/lockstep/collective/flight"
	"github.com/lockstep-ml/lockstep/collective/internal/fingerprint"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/timeline"
)

// communicator is the front end of one rank's communicator.
//
// Every call is numbered when it starts. Calls run one at a time in that order: on the caller's goroutine for
// a Do, on the rank's worker goroutine for a Start or a call of a DoAll. turn is the number of the call that
// may run.
type communicator struct {
	group   *group
	rank    int
	backend Backend
	run     Running       // used by the running call
	log     callLog       // the last calls
	gone    chan struct{} // closed when the communicator is closed and no call is running any more
	mine    chan struct{} // one token: it is the waiting Do's turn
	work    chan struct{} // one token: the worker has something to do
	pending atomic.Int64  // started calls that were not awaited

	sole  atomic.Uint64 // the state while no call or only a Do is in progress: see sole.go
	ahead atomic.Uint64 // then: how many more collectives than calls were counted, modulo 2^64

	mu       sync.Mutex // see lock, which makes next to doing valid
	next     uint64     // number of the next call, of any kind
	numbers  fingerprint.Numbers
	turn     uint64
	blocked  bool   // a Do or DoAll is in progress, or waits for its turn
	direct   bool   // it is a Do
	doing    uint64 // the turn of the blocking call
	queue    []*handle
	free     []*handle // awaited handles, for reuse
	working  bool      // the worker is running
	closing  bool
	left     bool // gone is closed
	workers  sync.WaitGroup
	splits   uint64 // number of Split calls so far
	closeErr error
	closed   chan struct{} // closed when Close has finished
	all      handle        // the handle of DoAll
}

func newCommunicator(g *group, b Backend) *communicator {
	c := &communicator{
		group:   g,
		rank:    b.Rank(),
		backend: b,
		gone:    make(chan struct{}),
		closed:  make(chan struct{}),
		mine:    make(chan struct{}, 1),
		work:    make(chan struct{}, 1),
	}
	c.all = handle{c: c, done: make(chan struct{}, 1)}
	c.log.began = time.Now().Add(-1)
	return c
}

func (c *communicator) Rank() int { return c.rank }

func (c *communicator) Size() int { return c.group.size }

func (c *communicator) Err() error { return c.group.cause() }

func (c *communicator) Pending() int { return int(c.pending.Load()) }

func (c *communicator) Progress() (begun, over uint64, call string) {
	begun, over = c.counts()
	if begun == over {
		return begun, over, ""
	}
	return begun, over, c.log.latest()
}

func (c *communicator) Properties() Properties {
	p := c.backend.Properties()
	p.Canonical, p.Epoch = c.group.cfg.Order == Canonical, c.group.cfg.Epoch
	return p
}

func (c *communicator) NewBuffer(bytes int) (tensor.Memory, error) {
	if bytes < 0 {
		return tensor.Memory{}, c.failure(ErrInvalid, fmt.Errorf("a buffer of %d bytes", bytes))
	}
	c.lock()
	closing := c.closing
	c.unlock()
	if closing {
		return tensor.Memory{}, c.failure(ErrClosed, nil)
	}
	memory, err := c.backend.NewBuffer(bytes)
	if err != nil { // only this call fails: the communicator stays usable
		return tensor.Memory{}, c.failure(ErrInvalid, err)
	}
	return memory, nil
}

// failure returns an error outside of a call.
func (c *communicator) failure(kind, err error) *Error {
	return &Error{Kind: kind, Comm: c.group.cfg.Name, Rank: c.rank, Err: err}
}

// callError returns an error of a call.
func (c *communicator) callError(call *Call, t ticket, kind, err error) *Error {
	e := c.failure(kind, err)
	e.Op, e.Seq, e.Name = call.Op, t.seq, call.name()
	return e
}

// contextError returns the error of a call that the end of a context ends.
func (c *communicator) contextError(ctx context.Context, call *Call, t ticket, why string) *Error {
	end := endOf(ctx)
	return c.callError(call, t, end.kind(), fmt.Errorf("%s: %w", why, end))
}

// asError returns err if it is a *Error or wraps one, else an *Error of kind ErrAborted whose cause is err.
func (c *communicator) asError(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	return c.failure(ErrAborted, err)
}

// refuse returns the error of a call without a context, or of a nil call. Such a call gets no number.
func (c *communicator) refuse(ctx context.Context) error {
	err := errors.New("a call that is nil")
	if ctx == nil {
		err = errors.New("a call without a context: want context.Background() at least")
	}
	return c.group.fail(c.failure(ErrInvalid, err), c.rank)
}

func (c *communicator) Do(ctx context.Context, call *Call) error { return c.do(ctx, call, nil) }

// do executes a call, and then, as a part of it, a function unless it is nil.
func (c *communicator) do(ctx context.Context, call *Call, then func() error) error {
	if ctx == nil || call == nil {
		return c.refuse(ctx)
	}
	t, ready, err := c.enter(call, blocking)
	if err != nil {
		return err
	}
	if !ready {
		c.block(ctx, c.mine, call, t, "the calls started before")
	}
	err = c.execute(ctx, call, t, true)
	if err == nil && then != nil {
		err = then()
	}
	if !c.finishSole(t.turn) {
		c.finish(true)
	}
	c.leaveMonitor(t.seq, call, err)
	return err
}

// execute executes the call that may run, and returns its error, which is the cause if the group failed.
func (c *communicator) execute(ctx context.Context, call *Call, t ticket, user bool) error {
	g := c.group
	if err := g.cause(); err != nil {
		return err
	}
	r := &c.run
	r.Ctx, r.Call, r.ticket, r.user = ctx, call, t, user
	g.cfg.options(&r.Options, call)
	var err error
	if r.Count, err = call.check(c.rank, g.size, &r.Options); err != nil {
		err = c.callError(call, t, ErrInvalid, err)
	} else if ctx.Err() != nil {
		err = c.contextError(ctx, call, t, "before the call began")
	} else if err = call.before(ctx); err != nil {
		err = c.callError(call, t, ErrAborted, err)
	} else {
		entered := g.cfg.Timeline.Now()
		err = c.backend.Run(r)
		c.record(r, entered)
	}
	if err != nil {
		err = g.fail(err, c.rank)
	} else if call.After != nil {
		call.After()
	}
	c.log.ended(r, err)
	return err
}

// record adds the call that has just ended to the timeline, if there is one.
func (c *communicator) record(r *Running, entered time.Duration) {
	to := c.group.cfg.Timeline
	if to == nil || c.log.used != r.turn+1 {
		return // the call failed before it began
	}
	k := &c.log.calls[r.turn%keptCalls] // only this goroutine changes it
	to.Add(timeline.Event{
		Kind: timeline.Collective, Replica: c.worldRank(), Start: entered, End: to.Now(), Op: k.call.Op,
		Algorithm: k.call.Algorithm, Comm: c.group.cfg.Name,
		Seq: uint64(c.group.cfg.Epoch)<<40 | r.seq, Bytes: int64(r.Count * r.Call.Type.Bytes()),
	})
}

// worldRank returns the rank in the group that Open made.
func (c *communicator) worldRank() int {
	if c.group.world == nil {
		return c.rank
	}
	return c.group.world[c.rank]
}

// manner is how a call is made.
type manner uint8

const (
	started  manner = iota // Start
	blocking               // Do
	acting                 // DoAll
)

// enter numbers a call and reports whether it may run now.
func (c *communicator) enter(call *Call, how manner) (t ticket, ready bool, err error) {
	if how == blocking && !call.Op.Pairwise() {
		if t, ready = c.enterSole(); ready {
			c.enterMonitor(t.seq, call)
			return t, true, nil
		}
	}
	c.lock()
	if c.closing {
		c.unlock()
		return t, false, c.failure(ErrClosed, nil)
	}
	if how != started && c.blocked {
		doing := c.doing
		c.unlock()
		err := fmt.Errorf(
			"this rank is in call %d on another goroutine: one goroutine at a time may use a communicator", doing)
		return t, false, c.group.fail(c.callError(call, ticket{seq: doing}, ErrBusy, err), c.rank)
	}
	peer := call.Peer
	if peer >= c.group.size {
		peer = -1 // not checked yet, and Next counts by peer
	}
	t = ticket{turn: c.next, seq: c.numbers.Next(call.Op, peer)}
	c.next++
	ready = c.turn == t.turn
	if how != started {
		c.blocked, c.doing, c.direct = true, t.turn, how == blocking
	}
	c.unlock()
	c.enterMonitor(t.seq, call)
	return t, ready, nil
}

// enterMonitor reports to the monitor, if there is one, that a call begins.
func (c *communicator) enterMonitor(seq uint64, call *Call) {
	if m := c.group.cfg.Monitor; m != nil {
		m.Enter(c.rank, seq, call)
	}
}

// parkMonitor reports that the caller's goroutine is about to block. It returns the monitor to notify when the
// goroutine runs again, or nil if there is none.
func (c *communicator) parkMonitor(seq uint64, call *Call) (Monitor, error) {
	m := c.group.cfg.Monitor
	if m == nil {
		return nil, nil
	}
	return m, m.Park(c.rank, seq, call)
}

// leaveMonitor reports that a call has ended.
func (c *communicator) leaveMonitor(seq uint64, call *Call, err error) {
	if m := c.group.cfg.Monitor; m != nil {
		m.Leave(c.rank, seq, call, err)
	}
}

// block waits for the token, which another goroutine sends. If ctx ends first, it fails the communicator, and
// that releases the token. call and what describe in the error what it waited for.
func (c *communicator) block(ctx context.Context, token <-chan struct{}, call *Call, t ticket, what string) {
	monitor, err := c.parkMonitor(t.seq, call)
	if err != nil {
		c.group.abort(c.asError(err))
		<-token
		return
	}
	if monitor != nil {
		defer monitor.Unpark(c.rank)
	}
	select {
	case <-token:
	case <-ctx.Done():
		c.group.fail(c.contextError(ctx, call, t, "waiting for "+what), c.rank)
		<-token
	}
}

// finish passes the turn to the next call.
func (c *communicator) finish(blocked bool) {
	c.lock()
	if blocked {
		c.blocked = false
	}
	c.turn++
	switch {
	case c.blocked && c.direct && c.doing == c.turn:
		c.mine <- struct{}{}
	case len(c.queue) > 0 && c.queue[0].turn == c.turn:
		wake(c.work)
	}
	c.leaveLocked()
	c.unlock()
}

// leaveLocked closes gone when no call is running any more.
func (c *communicator) leaveLocked() {
	if c.closing && c.turn == c.next && !c.left {
		c.left = true
		close(c.gone)
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (c *communicator) Abort(cause error) { c.group.abort(c.asError(cause)) }

func (c *communicator) Close() error {
	c.lock()
	if c.closing {
		c.unlock()
		<-c.closed
		return c.closeErr
	}
	c.closing = true
	busy := c.turn != c.next
	c.leaveLocked()
	wake(c.work)
	c.unlock()
	if busy {
		c.group.abort(c.failure(ErrClosed, nil))
	}
	<-c.gone
	c.workers.Wait()
	cause := c.group.cause()
	c.group.book.remove(c, cause != nil && !errors.Is(cause, ErrClosed))
	err := c.backend.Close()
	c.group.leave()
	if n := c.Pending(); n > 0 {
		err = errors.Join(err, c.failure(ErrInvalid, fmt.Errorf("%d started calls were not awaited", n)))
	}
	c.closeErr = err
	close(c.closed)
	return err
}

// flight returns the rank's record. It may be called at any time, also while the rank is in a call.
func (c *communicator) flight() flight.Rank {
	g, d := c.group, &c.log
	out := flight.Rank{Comm: g.cfg.Name, Epoch: g.cfg.Epoch, Rank: c.rank, Size: g.size, World: g.world}
	d.mu.Lock()
	calls := slices.Clone(d.calls)
	used, waits, of, missing := d.used, d.waits, slices.Clone(d.of), d.missing
	d.mu.Unlock()
	if missing != nil {
		of = missing()
	}
	c.lock() // read after the calls: a call that had ended by then counts as ended
	over, next := c.turn, c.next
	out.Entered = c.numbers.Of(0, 0)
	c.unlock()
	if err := g.cause(); err != nil {
		out.Err = firstLine(err)
	}
	for turn := used - min(used, uint64(len(calls))); turn < used; turn++ {
		k := &calls[turn%keptCalls]
		if k.turn != turn || k.call == nil || k.call.Op == "" {
			continue // it ended before it began, or there were fewer calls
		}
		call := k.record(d.began)
		switch {
		case k.err != nil:
			call.State, call.Err = flight.Failed, firstLine(k.err)
		case turn < over:
			call.State = flight.Done
		case waits == turn+1:
			call.State = flight.Waiting
		default:
			call.State = flight.Running
		}
		if call.State != flight.Done && waits == turn+1 {
			call.WaitsFor = of
		}
		out.Calls = append(out.Calls, call)
	}
	out.Queued = int(next - max(used, over))
	return out
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
