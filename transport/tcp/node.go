package tcp

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/internal/listener"
	"github.com/lockstep-ml/lockstep/internal/transport/overlay"
)

// Node holds the groups of a process and the port on which their connections arrive. The port may be shared with other
// services. Its methods may be called concurrently.
type Node struct {
	cfg      Config
	job      [16]byte
	listener *listener.Listener
	acceptor *listener.Acceptor
	meshMax  int             // of the graphs of its groups, see [overlay.New]
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc

	mu      sync.Mutex
	worlds  map[worldKey]*world
	changed chan struct{} // closed, and replaced, when a world is added
	past    []worldKey    // keys of the latest pastMax closed worlds
	latest  uint32        // highest epoch of any world
	retire  bool          // close with the last world
	closed  bool
}

// worldKey identifies a group that Node.Group created.
type worldKey struct {
	epoch uint32
	id    uint64
}

// Listen opens a node. The caller must close it.
func Listen(cfg Config) (*Node, error) {
	cfg = cfg.filled()
	n := &Node{
		cfg: cfg, job: listener.JobID(cfg.Job), listener: cfg.SharedListener, worlds: map[worldKey]*world{},
		changed: make(chan struct{}), meshMax: overlay.MeshMax,
	}
	var err error
	if n.listener == nil {
		n.listener, err = listener.Open(listener.Config{
			Listen: cfg.Listen, Listener: cfg.Listener, Handshake: cfg.Handshake, HalfOpen: cfg.HalfOpen, Logger: cfg.Logger,
		})
		if err != nil {
			return nil, fmt.Errorf("tcp: %w", err)
		}
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.acceptor, err = n.listener.Serve(listener.ServiceConfig{
		Services: []listener.Service{
			listener.Control,
			listener.Data,
		}, Rules: n.rules(), Job: &cfg.Job, Plain: true, Handle: n.handle,
	})
	if err != nil {
		n.cancel()
		n.closeListener()
		return nil, fmt.Errorf("tcp: %w", err)
	}
	return n, nil
}

// rules returns the security settings of all connections.
func (n *Node) rules() listener.Rules {
	return listener.Rules{
		TLS: n.cfg.TLS, Authenticate: n.cfg.Authenticate,
		Below: func(c net.Conn) net.Conn { return &shim{Conn: c} },
	}
}

// Addr returns the address that the node listens on. Others can dial it unless it is a wildcard.
func (n *Node) Addr() string { return n.listener.Addr() }

// Refused returns the number of connections that were refused, or closed because of invalid data, by reason: "magic",
// "version", "damaged", "service", "job", "epoch", "group", "rank", "duplicate", "proof", "slow", "crowded", "frame".
// It omits reasons that did not occur.
func (n *Node) Refused() map[string]uint64 { return n.acceptor.Counts() }

// Close closes the port, unless it is [Config.SharedListener], and all open endpoints. Closing again does nothing.
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
	n.acceptor.Close()
	n.closeListener()
	return nil
}

func (n *Node) closeListener() {
	if n.cfg.SharedListener == nil {
		n.listener.Close()
	}
}

// CloseWithGroups makes the node close itself when the last endpoint of its last group is closed: at once if it has no
// group.
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

// route passes a connection to the world that its hello names. It waits until the deadline for a world that does not
// exist yet.
func (n *Node) route(a *connection) error {
	key := worldKey{a.epoch, a.world}
	timer := time.NewTimer(time.Until(a.at.Deadline))
	defer timer.Stop()
	for {
		n.mu.Lock()
		w, changed, latest := n.worlds[key], n.changed, n.latest
		over := slices.Contains(n.past, key)
		n.mu.Unlock()
		switch {
		case w != nil:
			if err := a.at.Establish(); err != nil {
				return err
			}
			a.raw.SetDeadline(time.Time{})
			return w.accept(a)
		case a.epoch < latest:
			return listener.Refuse(listener.Epoch, "it belongs to epoch %d, which is over: this is epoch %d", a.epoch, latest)
		case over:
			return listener.Refuse(listener.Closed, "the group is closed")
		}
		select {
		case <-changed:
		case <-timer.C:
			return listener.Refuse(listener.Slow, "group %#x of epoch %d was not started here within %v", a.world, a.epoch,
				n.cfg.Handshake)
		case <-n.ctx.Done():
			return listener.Refuse(listener.NoService, "the process is shutting down")
		}
	}
}
