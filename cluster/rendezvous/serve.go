package rendezvous

import (
	"context"
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
)

// serverConn is a connection of a client that has completed the handshake.
type serverConn struct {
	server  *Server
	session *session
	raw     net.Conn
	conn    idleConn

	// Held while a response is written, and while the corresponding change is made: a change that has taken
	// effect, which others may see, is answered before the server announces its end.
	writing sync.Mutex

	mu    sync.Mutex
	waits map[uint64]context.CancelFunc // current calls of Changes and Wait
}

// serve answers requests until the connection ends.
func (c *serverConn) serve() {
	ctx, cancel := context.WithCancel(c.server.ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer c.raw.Close()
	defer cancel()
	for {
		b, err := readFrame(c.conn)
		var q request
		if err == nil {
			err = q.decode(b)
		}
		if err == nil {
			err = c.handle(ctx, &work, &q)
		}
		if err != nil {
			if r := (*listener.Refusal)(nil); errors.As(err, &r) {
				c.server.acceptor.Refuse(c.raw.RemoteAddr(), err)
			}
			return
		}
	}
}

// handle answers a request, at once or in a goroutine of work.
func (c *serverConn) handle(ctx context.Context, work *sync.WaitGroup, q *request) error {
	switch q.op {
	case opCancel:
		c.mu.Lock()
		cancel := c.waits[q.id]
		c.mu.Unlock()
		if cancel != nil {
			cancel()
		}
		return nil
	case opChanges, opWait:
		ctx, cancel := context.WithCancel(ctx)
		c.mu.Lock()
		busy := len(c.waits) >= waitsMax || c.waits[q.id] != nil
		if !busy {
			c.waits[q.id] = cancel
		}
		c.mu.Unlock()
		if busy {
			cancel()
			return c.send(&response{id: q.id, status: statusBusy})
		}
		work.Go(func() { c.wait(ctx, cancel, q) })
		return nil
	}
	p := response{id: q.id}
	c.writing.Lock()
	defer c.writing.Unlock()
	if c.server.memory.answer(c, q, &p) {
		return c.write(&p)
	}
	return nil
}

// wait answers a call of Changes or Wait.
func (c *serverConn) wait(ctx context.Context, cancel context.CancelFunc, q *request) {
	defer cancel()
	p := response{id: q.id}
	look := changed(q.key, q.revision)
	if q.op == opWait {
		look = awaited(q.key, int(min(q.revision, math.MaxInt32)))
	}
	var err error
	p.entries, p.revision, err = c.server.memory.wait(ctx, q.key, look)
	c.mu.Lock()
	delete(c.waits, q.id)
	c.mu.Unlock()
	switch {
	case errors.Is(err, ErrCompacted):
		p.status = statusCompacted
	case err != nil:
		return // canceled, by the client or the connection's end
	}
	if c.send(&p) != nil {
		c.raw.Close()
	}
}

func (c *serverConn) send(p *response) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	return c.write(p)
}

// write writes a response. The caller holds c.writing.
func (c *serverConn) write(p *response) error {
	for _, piece := range p.encode() {
		if _, err := c.conn.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

// notifyEnd notifies the client that the server ends, and closes the connection.
func (c *serverConn) notifyEnd() {
	timer := time.AfterFunc(notifyEndWithin, func() { c.raw.Close() })
	defer timer.Stop()
	c.send(&response{status: statusClosing})
	c.raw.Close()
}

// answer executes a request that needs no waiting. It reports whether the client still waits for the
// response.
func (m *Memory) answer(from *serverConn, q *request, p *response) bool {
	switch q.op {
	case opPing:
		return true
	case opGet, opList:
		m.mu.Lock()
		defer m.mu.Unlock()
		p.revision = m.table.revision
		if q.op == opList {
			p.entries = m.table.list(q.key)
		} else if e, ok := m.table.get(q.key); ok {
			p.entries = []Entry{e}
		} else {
			p.status = statusNo
		}
		return true
	}
	s, awaited := from.session, false
	err := m.change(q.key, func(t *table) (bool, error) {
		var todo bool
		if todo, awaited = s.begin(from, q); !todo {
			return false, nil
		}
		if len(s.made) >= madeMax {
			p.status = statusBusy
			return false, nil
		}
		if err := t.permits(q.token); err != nil {
			return false, err
		}
		done, err := t.answer(q, p)
		if done {
			s.made[q.id] = struct{}{}
		}
		return done, err
	})
	switch {
	case errors.Is(err, ErrFenced):
		p.status = statusFenced
	case err != nil:
		p.status = statusFull
	}
	return awaited
}

// answer executes a change, unless it must be skipped. It reports whether it took effect.
func (t *table) answer(q *request, p *response) (done bool, err error) {
	switch q.op {
	case opSet:
		return t.doSet(q.key, q.value)
	case opDelete:
		return t.remove(q.key), nil
	case opSwap:
		done, err = t.doSwap(q.key, q.revision, q.value)
	case opCreate:
		var current []byte
		if current, done, err = t.doCreate(q.key, q.value); !done && err == nil {
			p.entries = []Entry{{Key: q.key, Value: current}}
		}
	}
	if !done && err == nil {
		p.status = statusNo
	}
	return done, err
}
