package tcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/lockstep-ml/lockstep/transport"
)

// joining is the state of a world until all its processes have joined. Each process connects with its neighbours in
// the graph. Where that is not a mesh, it then reports to its parent in the tree that its whole subtree is connected,
// and the root's answer comes back down: all processes are in the group.
type joining struct {
	parent   int
	children []int
	linked   chan struct{} // receives a token for each neighbour that is connected
	ready    chan struct{} // receives a token for each child whose subtree is connected
	complete chan struct{} // closed when the parent reports that all are
	left     chan int      // receives the first process that is down

	reported map[int]bool // processes that have sent msgReady; guarded by the world's mu
}

func newJoining(w *world) *joining {
	j := &joining{
		parent: -1, linked: make(chan struct{}, len(w.next)), complete: make(chan struct{}), left: make(chan int, 1),
		reported: map[int]bool{},
	}
	if !w.graph.Mesh() {
		j.parent, j.children = w.graph.Parent(w.self), w.graph.Children(w.self)
	}
	j.ready = make(chan struct{}, len(j.children))
	return j
}

// join connects with the neighbours: this process dials those of lower ranks, and the others dial it. Then it waits
// until all processes have done so.
func (w *world) join(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(w.node.ctx, func() { cancel(transport.ErrClosed) })
	defer stop()
	var dialing sync.WaitGroup
	defer dialing.Wait()
	dials, give := context.WithCancel(w.ctx)
	defer give()
	j := w.joining
	for _, p := range w.next {
		if p > w.self {
			break
		}
		dialing.Go(func() {
			a, err := w.node.dial(dials, w.target(p), w.hello(p), forever)
			if err == nil {
				err = w.connected(a, p)
			}
			if err != nil {
				if w.ctx.Err() != nil { // the node closes
					cancel(transport.ErrClosed)
				}
				cancel(&transport.NotConnected{Ranks: w.procs[p].ranks, Err: err})
			}
		})
	}
	err := w.awaitAll(ctx, j)
	w.mu.Lock()
	w.joining = nil
	w.mu.Unlock()
	return err
}

// awaitAll waits until this process is connected with its neighbours, and all processes are with theirs.
func (w *world) awaitAll(ctx context.Context, j *joining) error {
	for range w.next {
		if err := w.await(ctx, j, j.linked); err != nil {
			return err
		}
	}
	for range j.children {
		if err := w.await(ctx, j, j.ready); err != nil {
			return err
		}
	}
	if j.parent >= 0 {
		w.post(j.parent, &message{kind: msgReady})
		if err := w.await(ctx, j, j.complete); err != nil {
			return err
		}
	}
	for _, p := range j.children {
		w.post(p, &message{kind: msgReady})
	}
	return nil
}

// await receives from ready. If the group cannot be opened, it returns the error, which names the neighbours that are
// not connected. Where that is not a mesh, a process that gives up leaves, and so do its neighbours then.
func (w *world) await(ctx context.Context, j *joining, ready <-chan struct{}) error {
	var down []int // ranks
	var cause error
	select {
	case <-ready:
		return nil
	case p := <-j.left:
		w.mu.Lock()
		down, cause = w.procs[p].ranks, w.gone[p]
		w.mu.Unlock()
		cause = fmt.Errorf("ranks %v have left before all had joined: %v", down, cause) // it is not this end that is closed
	case <-ctx.Done():
		cause = context.Cause(ctx)
	}
	ranks, text := w.missing()
	if dialed := (*transport.NotConnected)(nil); errors.As(cause, &dialed) {
		ranks, text = dialed.Ranks, fmt.Sprintf("not connected with ranks %v", dialed.Ranks)
	} else if down == nil && !errors.Is(cause, context.DeadlineExceeded) {
		return w.failedToJoin(fmt.Errorf("%s: %w", text, cause))
	}
	if len(ranks) == 0 {
		ranks = down
	}
	return &transport.NotConnected{Ranks: ranks, Err: w.failedToJoin(fmt.Errorf("%s: %w", text, cause))}
}

// failedToJoin adds the name of the group to the reason why it could not be opened.
func (w *world) failedToJoin(err error) error {
	return fmt.Errorf("tcp: group %#x of epoch %d: %w", w.key.id, w.key.epoch, err)
}

// missing returns the ranks of the neighbours that are not connected, and describes them.
func (w *world) missing() (ranks []int, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var who []string
	for _, p := range w.next {
		if w.links[p] == nil {
			ranks = append(ranks, w.procs[p].ranks...)
			who = append(who, fmt.Sprintf("%v at %s", w.procs[p].ranks, w.procs[p].addr))
		}
	}
	if text = "not all ranks have joined: this process is connected with those that it needs"; len(who) > 0 {
		text = "not connected with ranks " + strings.Join(who, ", ")
	}
	if last := w.node.acceptor.LastRefusal(); last != "" {
		text += " (" + last + ")"
	}
	return ranks, text
}

// receiveReady handles the report of a child that its subtree is connected, or of the parent that all processes are.
func (w *world) receiveReady(proc int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	j := w.joining
	if j == nil || j.reported[proc] {
		return
	}
	switch {
	case proc == j.parent:
		close(j.complete)
	case proc > w.self && w.graph.Linked(proc, w.self) && !w.graph.Mesh() && w.graph.Parent(proc) == w.self:
		j.ready <- struct{}{} // has room for each child once
	default:
		return
	}
	j.reported[proc] = true
}

// rankOf returns the rank in the world that a message names, or -1 if there is none.
func (w *world) rankOf(named uint32) int {
	if uint64(named) >= uint64(len(w.proc)) {
		return -1
	}
	return int(named)
}
