package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Node is a process's door: the port it listens on, and the groups whose ranks live here.
type Node struct {
	cfg      Config
	job      [16]byte
	listener net.Listener
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	work     sync.WaitGroup
	refused  [refusals]atomic.Uint64
	logged   [refusals]atomic.Int64 // when one was logged last, in nanoseconds since 1970

	lastRefused atomic.Pointer[string] // for errors of those who wait in vain

	mu      sync.Mutex
	worlds  map[worldKey]*world
	changed chan struct{} // closed, and replaced, when a world is added
	past    []worldKey    // of worlds that have ended, the latest pastMax
	latest  uint32        // epoch of the latest world
	retire  bool          // Close with the last world
	half    halfOpen
	closed  bool
}

// worldKey names a group that Node.Group made.
type worldKey struct {
	epoch uint32
	id    uint64
}

// Listen opens a node.
func Listen(cfg Config) (*Node, error) {
	cfg, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, job: cfg.job(), listener: cfg.Listener, worlds: map[worldKey]*world{}, changed: make(chan struct{})}
	if n.listener == nil {
		if n.listener, err = listen(cfg.Listen); err != nil {
			return nil, err
		}
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.work.Go(n.accept)
	return n, nil
}

// Addr returns the address that the node listens on, as others may dial it if that is no wildcard.
func (n *Node) Addr() string { return n.listener.Addr().String() }

// Refused returns how many connections were refused, or ended for what came through them, by reason: "magic", "version",
// "damaged", "job", "epoch", "group", "rank", "duplicate", "proof", "slow", "crowded", "frame". Reasons that did not occur
// are left out.
func (n *Node) Refused() map[string]uint64 {
	out := map[string]uint64{}
	for r := range n.refused {
		if c := n.refused[r].Load(); c > 0 {
			out[Refusal(r).String()] = c
		}
	}
	return out
}

// Close closes the port and all endpoints that are open. Closing again does nothing.
func (n *Node) Close() error {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	worlds := n.worlds
	n.worlds = map[worldKey]*world{}
	n.mu.Unlock()
	if closed {
		return nil
	}
	for _, w := range worlds {
		w.closeAll()
	}
	n.cancel()
	n.listener.Close()
	n.mu.Lock()
	n.half.makeRoom(0)
	n.mu.Unlock()
	n.work.Wait()
	return nil
}

// CloseWithGroups has the node close itself with the last end of its last group: at once, if it has none.
func (n *Node) CloseWithGroups() {
	n.mu.Lock()
	n.retire = true
	n.mu.Unlock()
	n.closeIfEmpty()
}

func (n *Node) closeIfEmpty() {
	n.mu.Lock()
	now := n.retire && len(n.worlds) == 0
	n.mu.Unlock()
	if now {
		n.Close()
	}
}

// accept takes connections until Close.
func (n *Node) accept() {
	for {
		c, err := n.listener.Accept()
		if n.ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return
		}
		if err != nil {
			// Out of descriptors, most likely: dropping strangers may help, and time does.
			n.mu.Lock()
			n.half.makeRoom(0)
			n.mu.Unlock()
			select {
			case <-time.After(50 * time.Millisecond):
			case <-n.ctx.Done():
			}
			continue
		}
		n.mu.Lock()
		n.half.makeRoom(n.cfg.HalfOpen - 1)
		n.half.add(c)
		n.mu.Unlock()
		n.work.Go(func() { n.greet(c) })
	}
}

// known takes a connection off the list of those that have not greeted. It reports false if it was dropped.
func (n *Node) known(c net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.half.remove(c)
}

// route hands a connection to the world that its greeting names. One that is not there yet is waited for until the deadline.
func (n *Node) route(a *arrival, deadline time.Time) error {
	key := worldKey{a.epoch, a.world}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	for {
		n.mu.Lock()
		w, changed, latest := n.worlds[key], n.changed, n.latest
		over := slices.Contains(n.past, key)
		n.mu.Unlock()
		switch {
		case w != nil:
			if !a.proven && !n.known(a.raw) {
				return errPushedOut
			}
			a.raw.SetDeadline(time.Time{})
			return w.welcome(a)
		case a.epoch < latest:
			return refuse(refusedEpoch, "it belongs to epoch %d, which is over: this is epoch %d", a.epoch, latest)
		case over:
			return refuse(refusedGroup, "the group is closed")
		}
		select {
		case <-changed:
		case <-timer.C:
			return refuse(refusedSlow, "the group %#x of epoch %d has not begun here within %v", a.world, a.epoch, n.cfg.Handshake)
		case <-n.ctx.Done():
			return refuse(refusedGroup, "the process is leaving")
		}
	}
}

// refuse counts and logs a refusal, of each kind at most one a second: strangers must not fill the disk.
func (n *Node) refuse(from net.Addr, err error) {
	reason := refusedDamaged
	if r := (*refusal)(nil); errors.As(err, &r) {
		reason = r.reason
	}
	count := n.refused[reason].Add(1)
	last := fmt.Sprintf("the last connection that was refused, from %v: %v", from, err)
	n.lastRefused.Store(&last)
	now := time.Now().UnixNano()
	before := n.logged[reason].Load()
	if n.ctx.Err() == nil && now-before >= int64(time.Second) && n.logged[reason].CompareAndSwap(before, now) {
		n.cfg.Logger.Warn("tcp: a connection is refused", "from", from, "reason", err, "kind", reason.String(), "of_this_kind", count)
	}
}
