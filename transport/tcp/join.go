package tcp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

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
	refused  chan struct{} // receives a token for each neighbour that could not be dialed
	failed   chan *missing // receives the first report that the group cannot be opened
	tokens   int           // number of tokens received from linked and refused

	// Guarded by the world's mu.
	reported map[int]bool // processes that have sent msgReady
	answered map[int]bool // processes that have answered a query
	missing  *missing     // what this process reports to its neighbours; nil: nothing
}

// missing is why a group cannot be opened, as one process reports it to the others.
type missing struct {
	reporter int // the lowest rank of the process that reports it
	rank     int // the lowest rank of the process that is missing
	late     bool
	text     string
}

const (
	// reportGrace is how long a process whose own links are complete waits after its deadline for the report of another
	// one that knows who is missing.
	reportGrace = 3 * time.Second
	// queryGrace is how much of that the processes that it waits for have to answer a query. One that does not is
	// suspended.
	queryGrace = time.Second
	// leaveGrace is how long a process that reports it waits for neighbours that are not connected yet.
	leaveGrace = 500 * time.Millisecond
)

func newJoining(w *world) *joining {
	j := &joining{
		parent: -1, linked: make(chan struct{}, len(w.next)), complete: make(chan struct{}),
		refused: make(chan struct{}, len(w.next)), failed: make(chan *missing, 1), reported: map[int]bool{},
		answered: map[int]bool{},
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
				j.refused <- struct{}{}
			}
		})
	}
	err := w.awaitAll(ctx, j)
	if err != nil {
		w.report(j)
	}
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

// await receives from ready. If the group cannot be opened, it returns the error, of which it notifies the neighbours.
func (w *world) await(ctx context.Context, j *joining, ready <-chan struct{}) error {
	select {
	case <-ready:
		if ready == j.linked {
			j.tokens++
		}
		return nil
	case m := <-j.failed:
		return w.reported(j, m)
	case <-ctx.Done():
	}
	cause := context.Cause(ctx)
	late := errors.Is(cause, context.DeadlineExceeded)
	ranks, text := w.missing()
	if len(ranks) == 0 && late {
		var err error
		if ranks, text, err = w.awaitReport(j, ready, cause); len(ranks) == 0 {
			return err
		}
	}
	dialed := (*transport.NotConnected)(nil)
	if errors.As(cause, &dialed) {
		ranks, text = dialed.Ranks, fmt.Sprintf("not connected with ranks %v", dialed.Ranks)
	}
	err := w.failedToJoin(fmt.Errorf("%s: %w", text, cause))
	if dialed == nil && !late {
		return err
	}
	w.notify(j, &missing{
		reporter: w.procs[w.self].ranks[0], rank: ranks[0], late: late, text: fmt.Sprintf("%s: %v", text, cause),
	})
	return &transport.NotConnected{Ranks: ranks, Err: err}
}

// awaitReport waits for what this process still needs after its deadline, although it is connected with its neighbours:
// for ready, for the report of a process that knows who is missing, or for an answer of those that are to send ready.
// It returns the ranks of one that does not answer, and describes them.
func (w *world) awaitReport(j *joining, ready <-chan struct{}, cause error) (ranks []int, text string, err error) {
	silent := w.silent(j)
	for _, p := range silent {
		// Its process answers a query of any rank, also of one that has no endpoint yet.
		w.post(p, &message{kind: msgAsk, from: uint32(w.procs[w.self].ranks[0]), to: uint32(w.procs[p].ranks[0])})
	}
	since := time.Now()
	for _, grace := range []time.Duration{queryGrace, reportGrace} {
		timer := time.NewTimer(time.Until(since.Add(grace)))
		defer timer.Stop()
		select {
		case <-ready:
			return nil, "", nil
		case m := <-j.failed:
			return nil, "", w.reported(j, m)
		case <-timer.C:
		}
		if grace == reportGrace {
			break
		}
		for _, p := range silent {
			w.mu.Lock()
			suspended := !j.answered[p]
			w.mu.Unlock()
			if suspended {
				return w.procs[p].ranks, fmt.Sprintf("the process of ranks %v at %s is connected, but does not respond: "+
					"it is suspended or overloaded", w.procs[p].ranks, w.procs[p].addr), nil
			}
		}
	}
	return nil, "", &transport.NotConnected{Err: w.failedToJoin(fmt.Errorf(
		"not all ranks have joined: this process is connected with those that it needs: %w", cause))}
}

// silent returns the processes whose report this process waits for: children, then the parent.
func (w *world) silent(j *joining) (procs []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range j.children {
		if !j.reported[p] {
			procs = append(procs, p)
		}
	}
	if len(procs) == 0 && j.parent >= 0 {
		procs = append(procs, j.parent)
	}
	return procs
}

// receiveAnswer records that a process responds, while this one joins the group.
func (w *world) receiveAnswer(proc int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.joining != nil {
		w.joining.answered[proc] = true
	}
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
	if text = "not all ranks have joined"; len(who) > 0 {
		text = "not connected with ranks " + strings.Join(who, ", ")
	}
	if last := w.node.acceptor.LastRefusal(); last != "" {
		text += " (" + last + ")"
	}
	return ranks, text
}

// notify sends the neighbours why the group cannot be opened: those that are connected, and those that connect later.
func (w *world) notify(j *joining, m *missing) {
	if w.graph.Mesh() {
		return // each finds out by itself
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	j.missing = m
	for _, l := range w.links {
		l.send(m.message())
	}
}

func (m *missing) message() *message {
	text := m.text[:min(len(m.text), newsTextMax)]
	return &message{kind: msgMissing, known: m.late, from: uint32(m.reporter), to: uint32(m.rank), text: []byte(text)}
}

// report waits shortly until all neighbours are connected that should be notified.
func (w *world) report(j *joining) {
	if j.missing == nil {
		return
	}
	timer := time.NewTimer(leaveGrace)
	defer timer.Stop()
	for ; j.tokens < len(w.next); j.tokens++ {
		select {
		case <-j.linked:
		case <-j.refused:
		case <-timer.C:
			return
		case <-w.ctx.Done():
			return
		}
	}
}

// reported returns the error of a group that cannot be opened according to another process, and passes the report on.
func (w *world) reported(j *joining, m *missing) error {
	w.notify(j, m)
	err := fmt.Errorf("rank %d reports: %s", m.reporter, m.text)
	if m.late {
		err = fmt.Errorf("%w (%w)", err, context.DeadlineExceeded)
	}
	return &transport.NotConnected{Ranks: w.procs[w.proc[m.rank]].ranks, Err: w.failedToJoin(err)}
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

// receiveMissing handles the report that the group cannot be opened.
func (w *world) receiveMissing(m *message) {
	if w.rankOf(m.from) >= 0 && w.rankOf(m.to) >= 0 {
		w.abandon(&missing{reporter: int(m.from), rank: int(m.to), late: m.known, text: string(m.text)})
	}
}

// abandon ends the wait for processes that have not joined, if it is not over.
func (w *world) abandon(m *missing) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.joining != nil && !w.graph.Mesh() {
		select {
		case w.joining.failed <- m:
		default:
		}
	}
}

// rankOf returns the rank in the world that a message names, or -1 if there is none.
func (w *world) rankOf(named uint32) int {
	if uint64(named) >= uint64(len(w.proc)) {
		return -1
	}
	return int(named)
}
