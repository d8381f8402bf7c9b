package collective

import (
	"context"
	"errors"
	"sync/atomic"
)

// handle is a call that the member's worker executes. The handles of started calls are reused after they were
// awaited, so a loop of started calls allocates nothing.
type handle struct {
	m    *member
	ctx  context.Context
	call *Call
	ticket
	err    error         // valid once done has its token
	done   chan struct{} // one token: the call has ended
	waited atomic.Bool
	all    bool // part of a DoAll
}

var _ Handle = (*handle)(nil)

func (m *member) Start(ctx context.Context, call *Call) (Handle, error) {
	if ctx == nil || call == nil {
		return nil, m.refuse(ctx)
	}
	t, _, err := m.enter(call, started)
	if err != nil {
		return nil, err
	}
	h := m.newHandle()
	h.ctx, h.call, h.ticket, h.err = ctx, call, t, nil
	h.waited.Store(false)
	m.pending.Add(1)
	m.enqueue(h)
	return h, nil
}

// newHandle returns an awaited handle for reuse, or a new one.
func (m *member) newHandle() *handle {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.free); n > 0 {
		h := m.free[n-1]
		m.free = m.free[:n-1]
		return h
	}
	return &handle{m: m, done: make(chan struct{}, 1)}
}

// enqueue passes an entered call to the worker.
func (m *member) enqueue(h *handle) {
	m.mu.Lock()
	m.queue = append(m.queue, h)
	if !m.working {
		m.working = true
		m.workers.Go(m.serve)
	}
	m.mu.Unlock()
	wake(m.work)
}

// serve is the worker: it executes the queued calls until Close.
func (m *member) serve() {
	for {
		m.mu.Lock()
		var h *handle
		if len(m.queue) > 0 && m.queue[0].turn == m.turn {
			h = m.queue[0]
			n := copy(m.queue, m.queue[1:])
			m.queue[n] = nil
			m.queue = m.queue[:n]
		}
		end := m.closing && m.turn == m.next
		m.mu.Unlock()
		switch {
		case h != nil:
			h.err = m.execute(h.ctx, h.call, h.ticket, false)
			m.finish(h.all)
			h.done <- struct{}{}
		case end:
			return
		default:
			select {
			case <-m.work:
			case <-m.gone:
			}
		}
	}
}

func (h *handle) Wait(ctx context.Context) error {
	m := h.m
	if h.waited.Swap(true) {
		return &Error{Kind: ErrInvalid, Comm: m.team.cfg.Name, Rank: m.rank, Seq: h.seq, Err: errors.New("the handle was awaited before")}
	}
	select {
	case <-h.done:
	default:
		m.block(ctx, h.done, h.call, h.ticket, "a started call")
	}
	m.pending.Add(-1)
	m.watchLeave(h.ticket, h.call, h.err)
	err := h.err
	h.ctx, h.call = nil, nil
	m.mu.Lock()
	m.free = append(m.free, h)
	m.mu.Unlock()
	return err
}
