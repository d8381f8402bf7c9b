package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/tensor"
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
	judge func(peer int, h transport.Header) error
	posts [transport.PostsMax]post // count from first on
	first int
	count int

	wake   chan struct{} // one token ends one wait; see wait
	parked atomic.Bool
	closed atomic.Bool
	down   chan transport.PeerDown
	peers  []peer
	failed sync.Once

	mu      sync.Mutex
	answer  func(seq uint64) []byte
	asked   map[uint32]chan []byte // questions on their way, by tag
	lastTag uint32
	timers  []*time.Timer // of connections that broke
}

var (
	_ transport.Poster   = (*endpoint)(nil)
	_ transport.Splitter = (*endpoint)(nil)
	_ transport.Asker    = (*endpoint)(nil)
	_ transport.Placer   = (*endpoint)(nil)
)

// peer is what an endpoint knows of another rank.
type peer struct {
	up      atomic.Bool // all streams are there
	wanted  atomic.Bool // somebody has been asked to dial
	fate    atomic.Pointer[fate]
	streams []*stream // fixed once up; before, guarded by the endpoint's mu

	// Used by the rank's goroutine only.
	sent uint64 // frames to it, and from it, so far
	got  uint64
}

// fate is what has become of a peer. It is replaced, never changed.
type fate struct {
	gone   error // the first reason why it is of no use: ErrClosed, a *Failure, or that it is lost
	broken bool  // a data connection ended; what that means is about to be known
}

func newEndpoint(g *group, rank int) *endpoint {
	n := len(g.ranks)
	e := &endpoint{
		group: g, rank: rank, wake: make(chan struct{}, 1), down: make(chan transport.PeerDown, n), peers: make([]peer, n),
		asked: map[uint32]chan []byte{},
	}
	for i := range e.peers {
		e.peers[i].fate.Store(&fate{})
		e.peers[i].streams = make([]*stream, g.world.node.cfg.Streams)
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

func (e *endpoint) Rank() int { return e.rank }

func (e *endpoint) Size() int { return len(e.peers) }

func (e *endpoint) Transport() string { return "tcp" }

func (e *endpoint) Reach(int) transport.Reach { return transport.Messages }

// Encrypts implements [transport.Encrypter].
func (e *endpoint) Encrypts(peer int) bool {
	w := e.group.world
	proc := w.proc[e.group.ranks[peer]]
	return w.node.cfg.TLS != nil && proc != w.self && !w.near[proc]
}

func (e *endpoint) Places() []transport.Place { return e.group.places }

func (e *endpoint) Publish(transport.Slot) {}

func (e *endpoint) Peer(int) *transport.Slot { return nil }

func (e *endpoint) Inspect(judge func(peer int, h transport.Header) error) { e.judge = judge }

func (e *endpoint) Down() <-chan transport.PeerDown { return e.down }

// Retire has nothing to do: no peer reaches this rank's memory.
func (e *endpoint) Retire(tensor.Memory) {}

func (e *endpoint) Split(id uint64, ranks []int) (transport.Endpoint, error) {
	if id == rootID {
		return nil, fmt.Errorf("tcp: group %d is the whole", rootID)
	}
	world := make([]int, len(ranks))
	for i, r := range ranks {
		if r < 0 || r >= len(e.peers) {
			return nil, fmt.Errorf("tcp: rank %d in a group of %d", r, len(e.peers))
		}
		if slices.Contains(ranks[:i], r) {
			return nil, fmt.Errorf("tcp: rank %d twice in the group %v", r, ranks)
		}
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
	e.failed.Do(func() {
		text := append([]byte(nil), reason[:min(len(reason), transport.ReasonMax)]...)
		e.group.world.say(e.group, &message{kind: msgFailed, from: uint32(e.rank), text: text}, -1)
	})
}

func (e *endpoint) Close() error {
	e.mu.Lock()
	again := e.closed.Swap(true) // under the mutex: want starts no dial after it
	e.mu.Unlock()
	if again {
		return nil
	}
	e.group.world.say(e.group, &message{kind: msgClosed, from: uint32(e.rank)}, -1)
	e.cancel()
	e.work.Wait()
	e.mu.Lock()
	var streams []*stream
	for i := range e.peers {
		streams = append(streams, e.peers[i].streams...)
	}
	timers := e.timers
	e.timers = nil
	for tag, answer := range e.asked {
		delete(e.asked, tag)
		close(answer)
	}
	e.mu.Unlock()
	for _, t := range timers {
		t.Stop()
	}
	for _, s := range streams {
		if s != nil {
			s.close()
		}
	}
	e.unpark()
	e.group.world.drop(e)
	return nil
}

// unpark ends the wait of the rank if it is in one.
func (e *endpoint) unpark() {
	if e.parked.Load() && e.parked.CompareAndSwap(true, false) {
		e.wake <- struct{}{}
	}
}

// want sees to it that there is a connection with a peer, some time.
func (e *endpoint) want(rank int) {
	p := &e.peers[rank]
	if p.wanted.Load() || p.wanted.Swap(true) {
		return
	}
	if !e.group.dials(e.rank, rank) {
		m := &message{kind: msgConnect, from: uint32(e.rank), to: uint32(rank)}
		e.group.world.say(e.group, m, e.group.proc(rank))
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed.Load() {
		e.work.Go(func() { e.dial(rank) })
	}
}

// dial makes the connections with a peer.
func (e *endpoint) dial(rank int) {
	w := e.group.world
	for i := range e.peers[rank].streams {
		a, err := w.node.dial(e.ctx, w.target(e.group.proc(rank)), hello{
			purpose: listener.Data, stream: uint8(i), streams: uint8(w.node.cfg.Streams), job: w.node.job,
			world: w.key.id, group: e.group.id, members: e.group.members, epoch: w.key.epoch, from: uint32(e.rank), to: uint32(rank),
		}, w.node.cfg.Handshake)
		if err == nil {
			err = e.attach(a, rank, nil)
		}
		if err != nil {
			e.broke(rank, nil, fmt.Errorf("no connection: %w", err))
			return
		}
	}
}

// welcome takes a data connection from a peer.
func (e *endpoint) welcome(a *arrival) error {
	return e.attach(a, int(a.from), func() error { return a.answer(nil) })
}

// attach makes a connection one of the peer's streams; answer, if given, accepts it.
func (e *endpoint) attach(a *arrival, rank int, answer func() error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := &e.peers[rank]
	var err error
	switch {
	case e.closed.Load():
		err = listener.Refuse(listener.Group, "rank %d has closed its end", e.rank)
	case p.streams[a.stream] != nil:
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
	if t, ok := a.raw.(*net.TCPConn); ok && e.group.world.node.cfg.SocketBuffer > 0 {
		// If the system does not allow as much, it takes what it allows.
		t.SetReadBuffer(e.group.world.node.cfg.SocketBuffer)
		t.SetWriteBuffer(e.group.world.node.cfg.SocketBuffer)
	}
	keepAlive(a.raw, e.group.world.node.cfg.KeepAlive)
	p.streams[a.stream] = newStream(newWire(a.raw, a.shim), a.stream, a.raw.RemoteAddr(), e.unpark)
	for _, s := range p.streams {
		if s == nil {
			return nil
		}
	}
	p.wanted.Store(true)
	p.up.Store(true)
	e.unpark()
	return nil
}

// hear takes a message about a rank, or a question.
func (e *endpoint) hear(m *message, proc int) {
	from := int(m.from)
	if from >= len(e.peers) || from == e.rank || e.group.proc(from) != proc || m.kind >= msgConnect && int(m.to) != e.rank {
		return // not about anybody whom that process may speak for, or not for this rank
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
		e.tell(m, proc)
	case msgAnswer:
		e.mu.Lock()
		answer := e.asked[m.tag]
		delete(e.asked, m.tag)
		e.mu.Unlock()
		if answer != nil {
			if m.known {
				answer <- append([]byte{}, m.text...)
			}
			close(answer)
		}
	}
}

// lose tells that a process is gone.
func (e *endpoint) lose(proc int, err error) {
	for r := range e.peers {
		if r != e.rank && e.group.proc(r) == proc {
			e.lost(r, err)
		}
	}
}

// lost says that a peer is of no use any more, unless it was known before.
func (e *endpoint) lost(rank int, err error) {
	e.settle(rank, func(f *fate) {
		if f.gone == nil {
			f.gone = err
		}
	})
}

// settle changes what is known of a peer, tells Down if it is gone, and wakes the rank. What is known already wakes nobody: a rank
// that waits for others meets a broken connection each time it looks around, and would never block.
func (e *endpoint) settle(rank int, change func(*fate)) {
	e.mu.Lock()
	p := &e.peers[rank]
	was := p.fate.Load()
	now := *was
	change(&now)
	if now.broken == was.broken && (now.gone == nil) == (was.gone == nil) {
		e.mu.Unlock()
		return
	}
	p.fate.Store(&now)
	if was.gone == nil && now.gone != nil {
		e.down <- transport.PeerDown{Rank: rank, Err: now.gone} // has room for every rank once
	}
	e.mu.Unlock()
	e.unpark()
}

// brokenGrace is how long a broken data connection may be explained by the control connection: that the peer has closed its
// end, or that its process is gone.
const brokenGrace = 500 * time.Millisecond

// broke says that a connection with a peer has ended, or could not be made.
func (e *endpoint) broke(rank int, from net.Addr, err error) {
	if errors.Is(err, errFrame) {
		e.group.world.node.acceptor.Refuse(from, &listener.Refusal{Reason: listener.Frame, Text: fmt.Sprintf("rank %d: %v", rank, err)})
		e.lost(rank, err)
		return
	}
	if errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) {
		err = fmt.Errorf("its host cannot be reached: %w", err) // as the first connection says, whose end may be noticed later
	}
	e.settle(rank, func(f *fate) {
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
