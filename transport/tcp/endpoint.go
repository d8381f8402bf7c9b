package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/internal/transport/waiting"
	"github.com/lockstep-ml/lockstep/transport"
)

// endpoint is one rank's end of a group.
type endpoint struct {
	group  *group
	rank   int
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup // dials

	// Used by the rank's goroutine only.
	inspect func(peer int, h transport.Header) error
	posts   [transport.PostsMax]post // a ring: count entries, starting at first
	first   int
	count   int

	waiter  waiting.Waiter
	polled  sockets // of a nap
	stepErr error   // of the last step

	wake   chan struct{} // one token ends one wait; see Park
	parked atomic.Bool
	closed atomic.Bool
	poller poller // ends long waits; opened under mu
	down   chan transport.PeerDown
	peers  []peer

	mu      sync.Mutex
	reason  []byte               // of Fail; nil before
	more    []transport.PeerDown // those for which down has no room
	answer  func(seq uint64) []byte
	queries map[uint32]chan []byte // without an answer yet, by tag
	lastTag uint32
	timers  []*time.Timer // of broken connections
}

// peer is the state of another rank.
type peer struct {
	up     atomic.Bool // stream is set
	wanted atomic.Bool // a dial was started or requested
	state  atomic.Pointer[peerState]
	stream *stream // fixed once up; before, guarded by the endpoint's mu

	// Used by the rank's goroutine only.
	sent uint64 // number of frames to it
	got  uint64 // number of frames from it
}

// peerState records whether a peer is down. It is immutable; changes replace it.
type peerState struct {
	gone   error // the first reason why it is down: ErrClosed, a *Failure, or the error of a lost connection
	broken bool  // a data connection ended; the reason may follow on the control connection
}

// alive is the state of every peer that is not down.
var alive peerState

// How a rank waits; see [waiting.Config].
const (
	pollsBatch = 1 // a step is at least one system call
	// Beside two processes that compute, a call of 4 bytes takes 0.11 ms, and 1.7 without the pause.
	turnsPause = 50 * time.Millisecond
)

// downMax is the room of an endpoint's channel of peers that are down.
const downMax = 64

func newEndpoint(g *group, rank int) *endpoint {
	n := len(g.ranks)
	e := &endpoint{
		group: g, rank: rank, wake: make(chan struct{}, 1), down: make(chan transport.PeerDown, min(n, downMax)),
		peers: make([]peer, n), queries: map[uint32]chan []byte{},
	}
	for i := range e.peers {
		e.peers[i].state.Store(&alive)
	}
	e.waiter = waiting.New(waiting.Config{
		Rank: rank, Room: g.world.roomNow, Batch: pollsBatch, Pause: turnsPause, Nap: waiting.NapMost,
	})
	e.poller.notify = e.unpark
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

func (e *endpoint) Rank() int { return e.rank }

func (e *endpoint) Size() int { return len(e.peers) }

func (e *endpoint) Transport() string { return "tcp" }

func (e *endpoint) Capabilities() transport.Capabilities {
	return transport.Capabilities{
		Places: e.group.places, SharedReceives: true, Encrypted: e.group.encrypted,
		Processors: e.group.world.processors,
	}
}

func (e *endpoint) Posts() transport.Poster { return e }

func (e *endpoint) Memory() transport.SharedMemory { return nil }

func (e *endpoint) Inspect(inspect func(peer int, h transport.Header) error) { e.inspect = inspect }

func (e *endpoint) Down() <-chan transport.PeerDown { return e.down }

func (e *endpoint) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if id == rootID {
		return nil, fmt.Errorf("tcp: group id %d is reserved for the whole group", rootID)
	}
	if _, err := transport.RankIn(ranks, e.rank, len(e.peers)); err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	world := make([]int, len(ranks))
	for i, r := range ranks {
		world[i] = e.group.ranks[r]
	}
	end, err := e.group.world.take(id, world, e.group.ranks[e.rank])
	if err != nil {
		return nil, err
	}
	return end, nil
}

func (e *endpoint) Fail(reason []byte) {
	if e.closed.Load() {
		return
	}
	var ranks []int // those that exchange frames with this one
	e.mu.Lock()
	again := e.reason != nil
	if !again {
		e.reason = append([]byte{}, reason[:min(len(reason), transport.ReasonMax)]...)
		for r := range e.peers {
			if e.peers[r].up.Load() {
				ranks = append(ranks, r)
			}
		}
	}
	e.mu.Unlock()
	if !again {
		e.group.world.fail(e.group, e.failedMessage(), ranks)
	}
}

// failedMessage returns the message of Fail, which was called.
func (e *endpoint) failedMessage() *message {
	w := e.group.world
	return &message{
		kind: msgFailed, group: e.group.id, from: uint32(e.rank), to: uint32(w.procs[w.self].ranks[0]), text: e.reason,
	}
}

// leave marks the endpoint as closed. It returns the message for the peers, or nil if the endpoint was closed before. A
// rank that has failed leaves with its failure: Fail does not notify the peers that it has exchanged nothing with.
func (e *endpoint) leave() *message {
	e.mu.Lock() // so that want starts no dial afterwards
	defer e.mu.Unlock()
	switch {
	case e.closed.Swap(true):
		return nil
	case e.reason != nil:
		return e.failedMessage()
	}
	return &message{kind: msgClosed, group: e.group.id, from: uint32(e.rank)}
}

// send sends a message about this group to a process.
func (e *endpoint) send(m *message, proc int) {
	m.group = e.group.id
	e.group.world.post(proc, m)
}

func (e *endpoint) Close() error {
	if !e.group.world.announce(e) {
		return nil
	}
	e.cancel()
	e.work.Wait()
	e.mu.Lock()
	var streams []*stream
	for i := range e.peers {
		streams = append(streams, e.peers[i].stream)
	}
	timers := e.timers
	e.timers = nil
	for tag, answer := range e.queries {
		delete(e.queries, tag)
		close(answer)
	}
	e.mu.Unlock()
	for _, t := range timers {
		t.Stop()
	}
	for _, s := range streams {
		if s != nil {
			if m := e.meter(); m != nil {
				m.remove(s)
			}
			s.close()
		}
	}
	e.poller.close()
	e.unpark()
	e.group.world.drop(e)
	return nil
}

// unpark wakes the rank if it waits.
func (e *endpoint) unpark() {
	if e.parked.Load() && e.parked.CompareAndSwap(true, false) {
		e.wake <- struct{}{}
	}
}

// want starts to connect with a peer, or requests that the peer dials, unless it did so before. It does not wait.
func (e *endpoint) want(rank int) {
	p := &e.peers[rank]
	if p.wanted.Load() || p.wanted.Swap(true) {
		return
	}
	if !e.group.dials(e.rank, rank) {
		e.connect(rank)
		return
	}
	e.group.world.post(e.group.proc(rank), nil) // the end of that link shows at once that the peer is down
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed.Load() {
		e.work.Go(func() { e.dial(rank) })
	}
}

// connect requests a data connection from a peer. One that has left answers with the message that it has left with.
func (e *endpoint) connect(rank int) {
	e.send(&message{kind: msgConnect, from: uint32(e.rank), to: uint32(rank)}, e.group.proc(rank))
}

// dial opens the data connection with a peer.
func (e *endpoint) dial(rank int) {
	w := e.group.world
	retry := w.node.retries()
	a, err := w.node.dial(e.ctx, w.target(e.group.proc(rank)), hello{
		purpose: listener.Data, job: w.node.job, world: w.key.id, group: e.group.id, members: e.group.members,
		epoch: w.key.epoch, from: uint32(e.rank), to: uint32(rank),
	}, func(err error, spent time.Duration) bool {
		return retry(err, spent) && !((noListener(err) || isSilent(err)) && e.peers[rank].gone())
	})
	if err == nil {
		err = e.attach(a, rank, nil)
	}
	switch {
	case err == nil:
	case hasLeft(err): // the control connection has the reason, whose message the refusal may have overtaken
		e.update(rank, func(f *peerState) { f.broken = true })
		e.connect(rank)
	default:
		e.broke(rank, nil, fmt.Errorf("no connection: %w", err))
	}
}

// accept accepts a data connection from a peer.
func (e *endpoint) accept(a *connection) error {
	return e.attach(a, int(a.from), func() error { return a.answer(nil) })
}

// attach uses a connection as the data connection with a peer; answer, if not nil, accepts it.
func (e *endpoint) attach(a *connection, rank int, answer func() error) (err error) {
	e.mu.Lock()
	defer func() {
		failed := err == nil && e.reason != nil
		e.mu.Unlock()
		if failed { // it was not notified by Fail
			e.send(e.failedMessage(), e.group.proc(rank))
		}
	}()
	p := &e.peers[rank]
	switch {
	case e.closed.Load():
		err = listener.Refuse(listener.Closed, "rank %d has closed its end", e.rank)
	case p.stream != nil:
		err = listener.Refuse(listener.Duplicate, "rank %d is connected already", rank)
	case answer != nil:
		err = answer()
	}
	if err != nil {
		if answer == nil {
			a.raw.Close()
		}
		return err
	}
	keepAlive(a.raw, e.group.world.node.cfg.KeepAlive)
	limitLocal(a.raw, e.group.world.crowded)
	p.stream = newStream(newWire(a.raw, a.shim, &e.poller), a.raw.RemoteAddr(), a.shim == nil && e.otherHost(rank))
	e.measure(p.stream, rank)
	p.wanted.Store(true)
	p.up.Store(true)
	e.unpark()
	return nil
}

// otherHost reports whether a rank of the group is on another host.
func (e *endpoint) otherHost(rank int) bool {
	w := e.group.world
	return w.host[e.group.proc(rank)] != w.host[w.self]
}

// meter returns the meter of the node, or nil.
func (e *endpoint) meter() *Meter { return e.group.world.node.cfg.Meter }

// measure adds the stream with a rank of the group on another host to the meter.
func (e *endpoint) measure(s *stream, rank int) {
	if e.meter() == nil || !e.otherHost(rank) {
		return
	}
	if info := newSocketInfo(s.w.socket()); info != nil {
		e.meter().add(s, e.group.ranks[rank], info)
	}
}

// receive handles a message about a rank, or a query.
func (e *endpoint) receive(m *message, proc int) {
	from := int(m.from)
	if uint64(m.from) >= uint64(len(e.peers)) || from == e.rank || m.kind >= msgConnect && int(m.to) != e.rank {
		return // not about another rank, or not for this one
	}
	if about := e.group.proc(from); about != proc && m.kind != msgFailed || m.kind == msgFailed &&
		about != e.group.world.proc[m.to] {
		return // not about a rank of the process that it comes from
	}
	switch m.kind {
	case msgClosed:
		e.lost(from, transport.ErrClosed)
	case msgFailed:
		e.lost(from, &transport.Failure{Reason: m.text})
	case msgConnect:
		if e.group.dials(e.rank, from) {
			e.want(from)
		}
	case msgAsk:
		e.reply(m, proc)
	case msgAnswer:
		e.mu.Lock()
		answer := e.queries[m.tag]
		delete(e.queries, m.tag)
		e.mu.Unlock()
		if answer != nil {
			if m.known {
				answer <- append([]byte{}, m.text...)
			}
			close(answer)
		}
	}
}

// lose marks the ranks of a lost process as down.
func (e *endpoint) lose(proc int, err error) {
	for r := range e.peers {
		if r != e.rank && e.group.proc(r) == proc {
			e.lost(r, err)
		}
	}
}

// lost marks a peer as down, unless it was down before.
func (e *endpoint) lost(rank int, err error) {
	e.update(rank, func(f *peerState) {
		if f.gone == nil {
			f.gone = err
		}
	})
}

// update changes the state of a peer, sends it to Down if it is down now, and wakes the rank. An update that changes
// nothing does not wake: a rank that waits for others finds a broken connection in every round, and would never block.
func (e *endpoint) update(rank int, change func(*peerState)) {
	e.mu.Lock()
	p := &e.peers[rank]
	was := p.state.Load()
	now := *was
	change(&now)
	if now.broken == was.broken && (now.gone == nil) == (was.gone == nil) {
		e.mu.Unlock()
		return
	}
	p.state.Store(&now)
	if was.gone == nil && now.gone != nil && !e.closed.Load() {
		e.deliver(transport.PeerDown{Rank: rank, Err: now.gone})
	}
	e.mu.Unlock()
	e.unpark()
}

// deliver sends a peer that is down to Down. Room for every peer would need memory for every pair of ranks. The caller
// holds mu.
func (e *endpoint) deliver(d transport.PeerDown) {
	if len(e.more) == 0 {
		select {
		case e.down <- d:
			return
		default:
			e.work.Go(e.forward)
		}
	}
	e.more = append(e.more, d)
}

// forward sends what down had no room for, until none is left or the endpoint is closed.
func (e *endpoint) forward() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(e.more) > 0 {
		d := e.more[0]
		e.mu.Unlock()
		select {
		case e.down <- d:
		case <-e.ctx.Done():
		}
		e.mu.Lock()
		if e.more = e.more[1:]; e.closed.Load() {
			return
		}
	}
	e.more = nil
}

// gone reports whether the peer is down.
func (p *peer) gone() bool { return p.state.Load().gone != nil }

// brokenGrace is how long a broken data connection waits for its reason on the control connection: that the peer has
// closed its endpoint, or that its process is lost.
const brokenGrace = 500 * time.Millisecond

// broke handles a connection with a peer that has ended or could not be opened.
func (e *endpoint) broke(rank int, from net.Addr, err error) {
	if errors.Is(err, errFrame) {
		e.group.world.node.acceptor.Refuse(from, &listener.Refusal{Reason: listener.Frame, Text: fmt.Sprintf("rank %d: %v",
			rank, err)})
		e.lost(rank, err)
		return
	}
	if errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		// the text of the control connection, whose end may be noticed later
		err = fmt.Errorf("its host cannot be reached: %w", err)
	}
	e.update(rank, func(f *peerState) {
		if f.broken || e.closed.Load() {
			return
		}
		f.broken = true
		if f.gone != nil {
			return
		}
		e.timers = append(e.timers, time.AfterFunc(brokenGrace, func() { e.lost(rank, err) }))
	})
}
