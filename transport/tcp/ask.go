package tcp

import (
	"time"

	"github.com/lockstep-ml/lockstep/transport"
)

// askTimeout bounds the wait for an answer, during which the rank handles nothing else.
const askTimeout = 500 * time.Millisecond

func (e *endpoint) Answer(text func(seq uint64) []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = text
}

// Ask sends a query on the control connection. A goroutine of the peer's process answers it even if the rank is
// blocked.
func (e *endpoint) Ask(rank int, seq uint64) []byte {
	if rank < 0 || rank >= len(e.peers) || rank == e.rank || e.closed.Load() || e.peers[rank].state.Load().gone != nil {
		return nil
	}
	answer := make(chan []byte, 1)
	e.mu.Lock()
	e.lastTag++
	tag := e.lastTag
	e.queries[tag] = answer
	e.mu.Unlock()
	m := &message{kind: msgAsk, from: uint32(e.rank), to: uint32(rank), tag: tag, seq: seq}
	e.send(m, e.group.proc(rank))
	timer := time.NewTimer(askTimeout)
	defer timer.Stop()
	select {
	case text := <-answer:
		return text
	case <-timer.C:
		e.mu.Lock()
		delete(e.queries, tag)
		e.mu.Unlock()
		return nil
	}
}

// reply answers a query.
func (e *endpoint) reply(m *message, proc int) {
	e.mu.Lock()
	answer := e.answer
	e.mu.Unlock()
	back := &message{kind: msgAnswer, from: uint32(e.rank), to: m.from, tag: m.tag, seq: m.seq}
	if answer != nil {
		back.text = answer(m.seq)
		back.known = back.text != nil
		back.text = back.text[:min(len(back.text), transport.ReasonMax)]
	}
	e.send(back, proc)
}
