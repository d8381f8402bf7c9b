package collective

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/lockstep-ml/lockstep/transport"
)

// member is one rank's communicator over a transport.
//
// Every call is numbered when it starts. Calls run one at a time in that order: on the caller's goroutine for
// a Do, on the member's worker goroutine for a Start or a call of a DoAll. turn is the number of the call
// that may run.
type member struct {
	team  *team
	end   transport.Endpoint
	site  site
	rank  int
	local int           // index among the team's local ranks
	gone  chan struct{} // closed when the member is closed and no call is running any more
	mine  chan struct{} // one token: it is the waiting Do's turn
	work  chan struct{} // one token: the worker has something to do

	executor // used by the running call

	// Read by the other local ranks.
	inside  atomic.Bool             // in a call in which local ranks may access each other's memory; see team.depart
	shows   [2]atomic.Pointer[byte] // Dst of the even and the odd collectives; read once all ranks have entered
	pending atomic.Int64            // started calls that were not awaited

	mu       sync.Mutex
	next     uint64 // number of the next call, of any kind
	numbers  numbers
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
	splits   uint64 // number of Split calls so far; see Split
	closeErr error
	closed   chan struct{} // closed when Close has finished
	all      handle        // the handle of DoAll
}

var _ Observable = (*member)(nil)

func newMember(t *team, end transport.Endpoint) *member {
	m := &member{
		team:   t,
		end:    end,
		rank:   end.Rank(),
		gone:   make(chan struct{}),
		closed: make(chan struct{}),
		mine:   make(chan struct{}, 1),
		work:   make(chan struct{}, 1),
	}
	m.all = handle{m: m, done: make(chan struct{}, 1)}
	m.executor.open(m)
	return m
}

func (m *member) Rank() int { return m.rank }

func (m *member) Size() int { return m.team.size }

func (m *member) Err() error { return m.team.cause() }

func (m *member) Pending() int { return int(m.pending.Load()) }

func (m *member) Progress() (begun, over uint64, call string) {
	m.mu.Lock()
	begun, over = m.next, m.turn
	m.mu.Unlock()
	if begun == over {
		return begun, over, ""
	}
	m.textMu.Lock()
	defer m.textMu.Unlock()
	if m.current != nil {
		c := m.current.call()
		call = c.String()
	}
	return begun, over, call
}

func (m *member) Properties() Properties {
	return Properties{
		Canonical: m.team.cfg.Order == Canonical,
		Epoch:     m.team.cfg.Epoch,
		Transport: m.end.Transport(),
		Encrypted: m.encrypted(),
		Memory:    !m.site.spread(),
	}
}

// encrypted reports whether everything that this rank sends to other ranks is encrypted.
func (m *member) encrypted() bool {
	encrypted := m.end.Capabilities().Encrypted
	for r, ok := range encrypted {
		if r != m.rank && !ok {
			return false
		}
	}
	return len(encrypted) > 1
}

// refuse returns the error of a call without a context, or of a nil call. Such a call gets no number.
func (m *member) refuse(ctx context.Context) error {
	err := errors.New("a call that is nil")
	if ctx == nil {
		err = errors.New("a call without a context: want context.Background() at least")
	}
	return m.team.fail(&Error{Kind: ErrInvalid, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}, m.rank)
}

func (m *member) Do(ctx context.Context, call *Call) error {
	if ctx == nil || call == nil {
		return m.refuse(ctx)
	}
	t, ready, err := m.enter(call, blocking)
	if err != nil {
		return err
	}
	if !ready {
		m.block(ctx, m.mine, call, t, "the calls started before")
	}
	err = m.execute(ctx, call, t, true)
	m.finish(true)
	m.watchLeave(t, call, err)
	return err
}

// ticket is the position of a call among the calls of its rank.
type ticket struct {
	turn uint64 // among all calls
	// among the collectives, the sends to one peer, or the receives from one peer; it is in the call's header
	seq uint64
}

// numbers counts calls by kind.
type numbers [Recv + 1]counts

// counts has the counters of one kind, by peer; collectives have a single counter.
type counts []uint64

func (c counts) of(peer int) uint64 {
	if peer < len(c) {
		return c[peer]
	}
	return 0
}

func (c *counts) at(peer int) *uint64 {
	for len(*c) <= peer {
		*c = append(*c, 0)
	}
	return &(*c)[peer]
}

// of returns the counter of a call. A call with an invalid peer counts as a collective: it fails anyway.
func (n *numbers) of(call *Call) *uint64 {
	if call.pairwise() && call.Peer >= 0 {
		return n[call.Op].at(call.Peer)
	}
	return n[0].at(0)
}

// manner is how a call is made.
type manner uint8

const (
	started  manner = iota // Start
	blocking               // Do
	acting                 // DoAll
)

// enter numbers a call and reports whether it may run now.
func (m *member) enter(call *Call, how manner) (t ticket, ready bool, err error) {
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		return t, false, m.errClosed()
	}
	if how != started && m.blocked {
		doing := m.doing
		m.mu.Unlock()
		err := &Error{
			Kind: ErrBusy, Comm: m.team.cfg.Name, Rank: m.rank, Op: call.Op, Seq: doing, Name: call.name(),
			Err: fmt.Errorf("this rank is in call %d on another goroutine: one goroutine at a time may use a communicator", doing),
		}
		return t, false, m.team.fail(err, m.rank)
	}
	number := m.numbers.of(call)
	t = ticket{turn: m.next, seq: *number}
	*number++
	m.next++
	ready = m.turn == t.turn
	if how != started {
		m.blocked, m.doing, m.direct = true, t.turn, how == blocking
	}
	m.mu.Unlock()
	m.watchEnter(t, call)
	return t, ready, nil
}

// block waits for the token, which another goroutine sends. If ctx ends first, it fails the communicator, and
// that releases the token. call and what describe in the error what it waited for.
func (m *member) block(ctx context.Context, token <-chan struct{}, call *Call, t ticket, what string) {
	monitor, err := m.watchPark(t, call)
	if err != nil {
		m.team.abort(asError(m, err))
		<-token
		return
	}
	if monitor != nil {
		defer monitor.Unpark(m.rank)
	}
	select {
	case <-token:
	case <-ctx.Done():
		end := endOf(ctx)
		m.team.fail(&Error{
			Kind: end.kind(), Comm: m.team.cfg.Name, Rank: m.rank, Op: call.Op, Seq: t.seq, Name: call.name(),
			Err: fmt.Errorf("waiting for %s: %w", what, end),
		}, m.rank)
		<-token
	}
}

// finish passes the turn to the next call.
func (m *member) finish(blocked bool) {
	m.mu.Lock()
	if blocked {
		m.blocked = false
	}
	m.turn++
	switch {
	case m.blocked && m.direct && m.doing == m.turn:
		m.mine <- struct{}{}
	case len(m.queue) > 0 && m.queue[0].turn == m.turn:
		wake(m.work)
	}
	m.leaveLocked()
	m.mu.Unlock()
}

// leaveLocked closes gone when no call is running any more.
func (m *member) leaveLocked() {
	if m.closing && m.turn == m.next && !m.left {
		m.left = true
		close(m.gone)
	}
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (m *member) Abort(cause error) {
	err := &Error{Kind: ErrAborted, Comm: m.team.cfg.Name, Rank: m.rank, Err: cause}
	if cause == nil {
		m.team.abort(err)
		return
	}
	m.team.abort(asError(m, cause))
}

// asError returns err if it is a *Error or wraps one, else an *Error of kind ErrAborted that wraps it.
func asError(m *member, err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	return &Error{Kind: ErrAborted, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}
}

func (m *member) errClosed() error {
	return &Error{Kind: ErrClosed, Comm: m.team.cfg.Name, Rank: m.rank}
}

func (m *member) Close() error {
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		<-m.closed
		return m.closeErr
	}
	m.closing = true
	busy := m.turn != m.next
	m.leaveLocked()
	wake(m.work)
	m.mu.Unlock()
	if busy {
		m.team.abort(m.errClosed())
	}
	<-m.gone
	m.workers.Wait()
	cause := m.team.cause()
	m.team.book.Remove(m, cause != nil && !errors.Is(cause, ErrClosed))
	err := m.end.Close()
	m.team.leave()
	if n := m.Pending(); n > 0 {
		err = errors.Join(err, &Error{
			Kind: ErrInvalid, Comm: m.team.cfg.Name, Rank: m.rank,
			Err: fmt.Errorf("%d started calls were not awaited", n),
		})
	}
	m.closeErr = err
	close(m.closed)
	return err
}
