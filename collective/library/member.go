package library

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/tensor"
)

// member is one rank's communicator. Its calls run one at a time, in the order in which they were started: a
// Do on the caller's goroutine, any other call on a separate goroutine, which waits for the previous call.
type member struct {
	team    *team
	rank    int
	local   int
	pending atomic.Int64 // started calls that were not awaited

	mu       sync.Mutex
	tail     chan struct{} // closed when the latest call has ended
	blocked  bool          // in a Do or DoAll
	seq      uint64        // of the next collective
	sends    map[int]uint64
	recvs    map[int]uint64
	begun    uint64
	over     uint64
	text     string // the current call
	callLog  callLog
	closing  bool
	closed   chan struct{}
	closeErr error
}

var _ collective.Observable = (*member)(nil)

func newMember(t *team, rank, local int) *member {
	m := &member{team: t, rank: rank, local: local, tail: make(chan struct{}), closed: make(chan struct{}), sends: map[int]uint64{}, recvs: map[int]uint64{}}
	close(m.tail)
	return m
}

func (m *member) Rank() int { return m.rank }

func (m *member) Size() int { return m.team.size }

func (m *member) Err() error { return m.team.cause() }

func (m *member) Pending() int { return int(m.pending.Load()) }

func (m *member) Properties() collective.Properties {
	return collective.Properties{Epoch: m.team.cfg.Epoch, Transport: m.team.backend.Transport()}
}

func (m *member) Progress() (begun, over uint64, call string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.begun > m.over {
		call = m.text
	}
	return m.begun, m.over, call
}

// NewBuffer returns memory of the Go heap: the backend's memory is separate.
func (m *member) NewBuffer(bytes int) (tensor.Memory, error) {
	if bytes < 0 {
		return tensor.Memory{}, m.failure(collective.ErrInvalid, fmt.Errorf("a buffer of %d bytes", bytes))
	}
	const align = 64
	b := make([]byte, bytes+align)
	skip := -int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) & (align - 1)
	return tensor.HostMemory(b[skip : skip+bytes]), nil
}

func (m *member) Abort(cause error) {
	if e := (*collective.Error)(nil); cause == nil || !errors.As(cause, &e) {
		cause = m.failure(collective.ErrAborted, cause)
	}
	m.team.abort(cause)
}

func (m *member) failure(kind, err error) *collective.Error {
	return &collective.Error{Kind: kind, Comm: m.team.cfg.Name, Rank: m.rank, Err: err}
}

// ticket is the position of a call among the calls of its rank.
type ticket struct {
	before   <-chan struct{} // closed when the previous call has ended
	over     chan struct{}
	turn     uint64 // among all calls of the rank
	seq      uint64 // among the collectives, the sends to one peer, or the receives from one peer
	blocking bool
}

// enter numbers a call.
func (m *member) enter(call *collective.Call, blocking bool) (ticket, error) {
	m.mu.Lock()
	switch {
	case m.closing:
		m.mu.Unlock()
		return ticket{}, m.failure(collective.ErrClosed, nil)
	case blocking && m.blocked:
		m.mu.Unlock()
		err := m.failure(collective.ErrBusy, errors.New("this rank is in a call on another goroutine: one goroutine at a time may use a communicator"))
		err.Op = call.Op
		return ticket{}, m.team.fail(err, m.rank)
	}
	t := ticket{before: m.tail, over: make(chan struct{}), blocking: blocking, turn: m.begun, seq: m.seq}
	m.tail = t.over
	m.blocked = m.blocked || blocking
	m.begun++
	switch call.Op {
	case collective.Send:
		t.seq = m.sends[call.Peer]
		m.sends[call.Peer]++
	case collective.Recv:
		t.seq = m.recvs[call.Peer]
		m.recvs[call.Peer]++
	default:
		m.seq++
	}
	m.mu.Unlock()
	m.team.watchEnter(m.rank, t, call)
	return t, nil
}

// leave passes the turn to the next call.
func (m *member) leave(t ticket) {
	m.mu.Lock()
	if t.blocking {
		m.blocked = false
	}
	m.over++
	m.mu.Unlock()
	close(t.over)
}

// refuse returns the error of a call without a context, or of a nil call. Such a call gets no number.
func (m *member) refuse(ctx context.Context) error {
	err := errors.New("a call that is nil")
	if ctx == nil {
		err = errors.New("a call without a context: want context.Background() at least")
	}
	return m.team.fail(m.failure(collective.ErrInvalid, err), m.rank)
}

func (m *member) Do(ctx context.Context, call *collective.Call) error {
	if ctx == nil || call == nil {
		return m.refuse(ctx)
	}
	t, err := m.enter(call, true)
	if err != nil {
		return err
	}
	err = m.carryOut(ctx, call, t, true)
	m.leave(t)
	m.team.watchLeave(m.rank, t, call, err)
	return err
}

// carryOut waits for the call's turn and executes it. own reports that it runs on the caller's goroutine,
// which the monitor watches.
func (m *member) carryOut(ctx context.Context, call *collective.Call, tk ticket, own bool) (err error) {
	w := &wait{m: m, ctx: ctx, call: call, ticket: tk, own: own}
	defer w.stop()
	select {
	case <-tk.before:
	default:
		if err := w.until(func(done chan<- error) { <-tk.before; done <- nil }); err != nil {
			<-tk.before // the previous calls have also failed, and end
		}
	}
	if err := m.team.cause(); err != nil {
		return err
	}
	count, err := m.check(call)
	m.keep(call, tk, count)
	defer func() { m.ended(tk, err) }()
	if err != nil {
		e := w.failure(collective.ErrInvalid, err)
		return m.team.fail(e, m.rank)
	}
	m.mu.Lock()
	m.text = textOf(call, count)
	m.mu.Unlock()
	if pairwise(call) {
		return m.exchange(w, count)
	}
	_, err = m.together(w, func(r *round) error { return m.team.collective(w, r) }, count)
	return err
}

// check validates the call and returns the number of elements of the whole vector.
func (m *member) check(call *collective.Call) (int, error) {
	t := m.team
	if o := call.Options; o != nil {
		name := t.backend.Transport()
		switch {
		case o.Order == collective.Canonical:
			return 0, fmt.Errorf("order Canonical was requested, but %s does not keep the canonical order of sums", name)
		case o.Algorithm != "":
			return 0, fmt.Errorf("algorithm %s was requested, but %s chooses its algorithms itself", o.Algorithm, name)
		}
	}
	count, err := call.Check(m.rank, t.size)
	if err == nil && call.Op.Reduces() && len(t.ranks) > 1 && !t.backend.Reduces(wideType(call.Type)) {
		err = fmt.Errorf("%s cannot reduce %v", t.backend.Transport(), call.Type)
	}
	return count, err
}

func (m *member) Close() error {
	m.mu.Lock()
	if m.closing {
		m.mu.Unlock()
		<-m.closed
		return m.closeErr
	}
	m.closing = true
	busy, tail := m.begun != m.over, m.tail
	m.mu.Unlock()
	if busy {
		m.team.abort(m.failure(collective.ErrClosed, nil))
	}
	<-tail
	cause := m.team.cause()
	m.team.book.Remove(m, cause != nil && !errors.Is(cause, collective.ErrClosed))
	err := m.team.leave()
	if n := m.Pending(); n > 0 {
		err = errors.Join(err, m.failure(collective.ErrInvalid, fmt.Errorf("%d started calls were not awaited", n)))
	}
	m.closeErr = err
	close(m.closed)
	return err
}

// handle is a call on a separate goroutine.
type handle struct {
	m      *member
	call   *collective.Call
	ticket ticket
	err    error // valid once done is closed
	done   chan struct{}
	waited atomic.Bool
}

func (m *member) Start(ctx context.Context, call *collective.Call) (collective.Handle, error) {
	if ctx == nil || call == nil {
		return nil, m.refuse(ctx)
	}
	t, err := m.enter(call, false)
	if err != nil {
		return nil, err
	}
	h := &handle{m: m, call: call, ticket: t, done: make(chan struct{})}
	m.pending.Add(1)
	go h.run(ctx)
	return h, nil
}

func (h *handle) run(ctx context.Context) {
	h.err = h.m.carryOut(ctx, h.call, h.ticket, false)
	h.m.leave(h.ticket)
	close(h.done)
}

func (h *handle) Wait(ctx context.Context) error {
	m := h.m
	if h.waited.Swap(true) {
		return m.failure(collective.ErrInvalid, errors.New("the handle was awaited before"))
	}
	select {
	case <-h.done:
	default:
		h.block(ctx)
	}
	m.pending.Add(-1)
	m.team.watchLeave(m.rank, h.ticket, h.call, h.err)
	return h.err
}

// block waits until the call has ended. The monitor and the end of ctx can end it.
func (h *handle) block(ctx context.Context) {
	m := h.m
	monitor, err := m.team.watchPark(m.rank, h.ticket, h.call)
	if err != nil {
		m.Abort(err)
		<-h.done
		return
	}
	if monitor != nil {
		defer monitor.Unpark(m.rank)
	}
	select {
	case <-h.done:
	case <-ctx.Done():
		w := &wait{m: m, call: h.call, ticket: h.ticket}
		m.team.fail(w.ended(ctx, "waiting for a started call"), m.rank)
		<-h.done
	}
}
