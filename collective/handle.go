package collective

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
)

// handle is a call that the rank's worker executes. The handles of started calls are reused after they were
// awaited, so a loop of started calls allocates nothing.
type handle struct {
	c    *communicator
	ctx  context.Context
	call *Call
	ticket
	err    error         // valid once done has its token
	done   chan struct{} // one token: the call has ended
	waited atomic.Bool
	all    bool // part of a DoAll
}

var _ Handle = (*handle)(nil)

func (c *communicator) Start(ctx context.Context, call *Call) (Handle, error) {
	if ctx == nil || call == nil {
		return nil, c.refuse(ctx)
	}
	t, _, err := c.enter(call, started)
	if err != nil {
		return nil, err
	}
	h := c.newHandle()
	h.ctx, h.call, h.ticket, h.err = ctx, call, t, nil
	h.waited.Store(false)
	c.pending.Add(1)
	c.enqueue(h)
	return h, nil
}

func (g *group) DoAll(ctx context.Context, calls []Call) error {
	if len(calls) != len(g.members) {
		return g.fail(&Error{
			Kind: ErrInvalid, Comm: g.cfg.Name, Rank: -1,
			Err: fmt.Errorf("%d calls for %d local ranks", len(calls), len(g.members)),
		}, g.members[0].rank)
	}
	if ctx == nil {
		return g.members[0].refuse(ctx)
	}
	var err error
	entered := 0
	for i, c := range g.members {
		t, _, e := c.enter(&calls[i], acting)
		if e != nil {
			g.abort(e) // the calls entered so far cannot complete
			err = e
			break
		}
		h := &c.all
		h.ctx, h.call, h.ticket, h.all = ctx, &calls[i], t, true
		entered++
	}
	for _, c := range g.members[:entered] {
		c.enqueue(&c.all)
	}
	for _, c := range g.members[:entered] {
		h := &c.all
		<-h.done
		if h.err != nil && err == nil {
			err = h.err
		}
		c.leaveMonitor(h.seq, h.call, h.err)
		h.ctx, h.call = nil, nil
	}
	return err
}

// newHandle returns an awaited handle for reuse, or a new one.
func (c *communicator) newHandle() *handle {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.free); n > 0 {
		h := c.free[n-1]
		c.free = c.free[:n-1]
		return h
	}
	return &handle{c: c, done: make(chan struct{}, 1)}
}

// enqueue passes an entered call to the worker.
func (c *communicator) enqueue(h *handle) {
	c.lock()
	c.queue = append(c.queue, h)
	if !c.working {
		c.working = true
		c.workers.Go(c.serve)
	}
	c.unlock()
	wake(c.work)
}

// serve is the worker: it executes the queued calls until Close.
func (c *communicator) serve() {
	for {
		c.lock()
		var h *handle
		if len(c.queue) > 0 && c.queue[0].turn == c.turn {
			h = c.queue[0]
			n := copy(c.queue, c.queue[1:])
			c.queue[n] = nil
			c.queue = c.queue[:n]
		}
		end := c.closing && c.turn == c.next
		c.unlock()
		switch {
		case h != nil:
			h.err = c.execute(h.ctx, h.call, h.ticket, false)
			c.finish(h.all)
			h.done <- struct{}{}
		case end:
			return
		default:
			select {
			case <-c.work:
			case <-c.gone:
			}
		}
	}
}

func (h *handle) Wait(ctx context.Context) error {
	c := h.c
	if h.waited.Swap(true) {
		err := c.failure(ErrInvalid, errors.New("the handle was awaited before"))
		err.Seq = h.seq
		return err
	}
	select {
	case <-h.done:
	default:
		c.block(ctx, h.done, h.call, h.ticket, "a started call")
	}
	c.pending.Add(-1)
	c.leaveMonitor(h.seq, h.call, h.err)
	err := h.err
	h.ctx, h.call = nil, nil
	c.mu.Lock()
	c.free = append(c.free, h)
	c.mu.Unlock()
	return err
}
