package shm

import (
	"slices"
	"sync/atomic"
	"time"
)

// query is a rank's query to another rank, in the block of the querying rank. The other rank writes the answer there
// too. A rank has one query at a time. If an answer is so late that the next query exists, both answers may be written:
// the text is then wrong, but it is only shown to people.
type query struct {
	number atomic.Uint64 // of the query, from 1; set last
	to     atomic.Int32
	_      [4]byte
	seq    atomic.Uint64

	answered atomic.Uint64 // number of the answered query; set last
	length   atomic.Uint32
	_        [64 - 36]byte
	text     [reasonBytes]byte
}

// queryTimeout bounds the wait for an answer.
const queryTimeout = 500 * time.Millisecond

func (e *endpoint) Answer(text func(seq uint64) []byte) { e.answer.Store(&text) }

// Ask writes the query and rings. It does not affect the wait of the rank, which may be in Park.
func (e *endpoint) Ask(peer int, seq uint64) []byte {
	g := e.g
	if e.closed.Load() || peer == e.rank || g.lost(peer) != nil {
		return nil
	}
	if other := g.ends[peer].Load(); other != nil {
		return other.answerTo(seq)
	}
	select {
	case <-e.reply: // to a query that timed out
	default:
	}
	a := &e.mine.query
	a.to.Store(int32(peer))
	a.seq.Store(seq)
	number := a.number.Add(1)
	g.head.asked.Add(1)
	g.world.ring(g.process[peer])
	timer := time.NewTimer(queryTimeout)
	defer timer.Stop()
	for a.answered.Load() != number {
		select {
		case <-e.reply:
		case <-timer.C:
			return nil
		}
	}
	n := min(a.length.Load(), reasonBytes)
	return slices.Clone(a.text[:n:n])
}

// answerTo returns this rank's answer to a query.
func (e *endpoint) answerTo(seq uint64) []byte {
	text := e.answer.Load()
	if text == nil || *text == nil {
		return nil
	}
	return (*text)(seq)
}

// answer answers the queries to local ranks, and wakes the ranks that have received an answer.
func (w *world) answer() {
	type question struct {
		g      *group
		e      *endpoint // the queried rank
		from   int
		number uint64
	}
	var questions []question
	w.mu.Lock()
	for _, g := range w.groups {
		if now := g.head.asked.Load(); now != g.asked {
			g.asked = now
			for r := range g.ranks {
				a := &g.block(r).query
				number, to := a.number.Load(), int(a.to.Load())
				if number == g.answered[r] || to < 0 || to >= g.ranks {
					continue
				}
				if e := g.ends[to].Load(); e != nil {
					g.answered[r] = number
					questions = append(questions, question{g, e, r, number})
				}
			}
		}
		for r := range g.ends {
			if e := g.ends[r].Load(); e != nil && e.mine.query.answered.Load() == e.mine.query.number.Load() {
				select {
				case e.reply <- struct{}{}:
				default:
				}
			}
		}
	}
	w.mu.Unlock()
	for _, q := range questions {
		q.g.reply(q.e, q.from, q.number)
	}
}

// reply answers a query, unless a newer query replaced it.
func (g *group) reply(e *endpoint, from int, number uint64) {
	g.life.RLock()
	defer g.life.RUnlock()
	if g.gone {
		return
	}
	a := &g.block(from).query
	text := e.answerTo(a.seq.Load())
	if a.number.Load() != number {
		return
	}
	a.length.Store(uint32(copy(a.text[:], text)))
	a.answered.Store(number)
	g.world.ring(g.process[from])
}
