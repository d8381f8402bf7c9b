package membership

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
)

// MemberConfig configures a worker's membership.
type MemberConfig struct {
	// Store and Key are those of [ReporterConfig].
	Store rendezvous.Store
	Key   string
	Epoch uint32
	// Worker is this worker. Nodes are the workers of each node, ascending; the nodes are ordered by their first
	// worker. The number of a node is that of its first worker, unless Numbers has others.
	Worker  int
	Nodes   [][]int
	Numbers []int
	// File is the file of this worker's node. The member does not close it.
	File *NodeFile
	// Agent reports that another process than a worker reports for this node.
	Agent  bool
	Timing Timing
	// State returns this worker's state. It is called by one goroutine at a time.
	State func() Heartbeat
}

// Member is a worker's membership in its job. Run runs it; the other methods are safe for concurrent use.
type Member struct {
	cfg   MemberConfig
	node  int   // index in cfg.Nodes
	peers []int // the workers of this node
	slot  int

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at each new answer
	view     View
	viewAt   time.Time
	answerAt time.Time
	by       int  // the slot of the worker that wrote the answer
	released bool // the writer of the answer has left
	sent     map[uint64]time.Time
	echo     uint64    // the latest heartbeat of this worker that the store has acknowledged
	running  time.Time // when this worker wrote it, without the time since then in which this process did not run
	fenced   bool      // the store refuses this node's reports
	failed   error     // why the latest heartbeat could not be written; nil: it was
}

// The reasons for which [Member.Lost] ends a worker that has not lost another one. Each is a [rendezvous.ErrLost] too.
var (
	// ErrDeclaredLost: the others have declared this worker lost.
	ErrDeclaredLost error = endReason("the others have declared this worker lost")
	// ErrAgent: the agent of this node, lockstep run, does not report for its workers.
	ErrAgent error = endReason("the agent of this node does not report for its workers")
	// ErrFile: this worker cannot write its heartbeats.
	ErrFile error = endReason("this worker cannot write its heartbeats")
)

type endReason string

// Error implements error.
func (e endReason) Error() string { return "membership: " + string(e) }

// Is reports that the worker has lost its store, by which it takes part in the job.
func (e endReason) Is(err error) bool { return err == rendezvous.ErrLost }

// NewMember returns a member. Silence counts from now.
func NewMember(cfg MemberConfig) *Member {
	m := &Member{cfg: cfg, changed: make(chan struct{}), sent: map[uint64]time.Time{}}
	m.node = slices.IndexFunc(cfg.Nodes, func(workers []int) bool { return slices.Contains(workers, cfg.Worker) })
	m.peers = cfg.Nodes[m.node]
	m.slot = slices.Index(m.peers, cfg.Worker)
	now := time.Now()
	m.answerAt, m.viewAt, m.running = now, now, now
	return m
}

// leaveWithin bounds the last report of a reporter that leaves.
const leaveWithin = 2 * time.Second

// Run publishes this worker's heartbeats until ctx ends, and then that it has left. It reports for the node while no
// agent and no lower worker of the node does.
func (m *Member) Run(ctx context.Context) {
	var work sync.WaitGroup
	work.Go(func() { m.publish(ctx) })
	ticker := time.NewTicker(max(m.cfg.Timing.Min, time.Millisecond))
	defer ticker.Stop()
	var reporter *Reporter
	stop := func() {}
	var count uint64
	all := m.cfg.Agent || m.slot > 0 // only the first worker removes the file
	for due := time.Now(); ctx.Err() == nil; {
		now := time.Now()
		count = m.poll(now, now.Sub(due), count)
		switch mine := m.reports(now); {
		case mine && reporter == nil:
			reporter = m.newReporter()
			running, cancel := context.WithCancel(ctx)
			var ended sync.WaitGroup
			ended.Go(func() { reporter.Run(running) })
			stop = func() { cancel(); ended.Wait() }
		case !mine && reporter != nil:
			stop()
			reporter, stop = nil, func() {}
		}
		if !all {
			if all = m.allOpened(); all {
				m.cfg.File.Remove() // the processes that have it open need no name
			}
		}
		due = time.Now().Add(m.cfg.Timing.Min) // reading the file may have taken long: this process ran meanwhile
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
	work.Wait()
	stop()
	if !all {
		m.cfg.File.Remove()
	}
	if reporter != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveWithin)
		defer cancel()
		reporter.Leave(last)
	}
}

// allOpened reports whether all workers of the node have opened the file.
func (m *Member) allOpened() bool {
	for slot := range m.peers {
		if _, seen := latestIn(m.cfg.File, slot); !seen {
			return false
		}
	}
	return true
}

// publish writes this worker's heartbeats into its slot.
func (m *Member) publish(ctx context.Context) {
	timing := &m.cfg.Timing
	for count := uint64(1); ; count++ {
		select {
		case <-timing.Wake: // included in this heartbeat
		default:
		}
		began := time.Now()
		m.write(count, ctx.Err() != nil)
		if ctx.Err() != nil || !timing.wait(ctx, began) {
			m.write(count+1, true)
			return
		}
	}
}

// sentMax is how many heartbeats are remembered that the store has not acknowledged: with one each 200 milliseconds,
// those of 13 minutes.
const sentMax = 1 << 12

// write writes a heartbeat.
func (m *Member) write(count uint64, final bool) {
	h := m.cfg.State()
	h.Count, h.Final, h.Timeout = count, final, -1
	if m.cfg.Timing.Timeout > 0 {
		h.Timeout = milliseconds(m.cfg.Timing.Timeout)
	}
	m.mu.Lock()
	m.sent[count] = time.Now()
	delete(m.sent, count-sentMax) // the store has not acknowledged it for long, and later ones suffice
	m.mu.Unlock()
	text := encode(&h)
	for _, part := range []*string{&h.Text, &h.Phase} {
		if len(text) > slotBytes-slotHead {
			*part = ""
			text = encode(&h)
		}
	}
	failed := m.cfg.File.write(m.slot, count, text) // then this worker becomes silent
	m.mu.Lock()
	m.failed = failed
	m.mu.Unlock()
}

// wait waits until the next heartbeat is due, given the time of the last one. It reports false if ctx ends
// before.
func (t *Timing) wait(ctx context.Context, last time.Time) bool {
	timer := time.NewTimer(time.Until(last.Add(t.Every)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	case <-t.Wake:
	}
	timer.Reset(time.Until(last.Add(min(t.Min, t.Every))))
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// poll reads the reporter's answer, if it is new. late is the time for which this process did not run.
func (m *Member) poll(now time.Time, late time.Duration, last uint64) uint64 {
	a, fresh := m.cfg.File.answer(last)
	m.mu.Lock()
	defer m.mu.Unlock()
	if late > m.cfg.Timing.Every {
		m.answerAt = sooner(m.answerAt.Add(late), now)
		m.running = sooner(m.running.Add(late), now)
	}
	if !fresh {
		return last
	}
	m.answerAt, m.by, m.released = now, a.By, a.Released
	if m.slot < len(a.Echo) && a.Echo[m.slot] > m.echo {
		if at, ok := m.sent[a.Echo[m.slot]]; ok {
			m.echo = a.Echo[m.slot]
			if m.running.Before(at) {
				m.running = at
			}
			for c := range m.sent {
				if c <= m.echo {
					delete(m.sent, c)
				}
			}
		}
	}
	changed := a.Fenced && !m.fenced
	m.fenced = m.fenced || a.Fenced
	if v, err := decodeView(a.View); err == nil && (v.Term != m.view.Term || v.Count != m.view.Count) {
		m.view, m.viewAt, changed = *v, now, true
	}
	if changed {
		close(m.changed)
		m.changed = make(chan struct{})
	}
	return a.count
}

func sooner(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// reports reports whether this worker reports for its node: the first one, unless it is silent; then the next one.
func (m *Member) reports(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.cfg.Agent:
		return false
	case m.slot == 0:
		return true
	}
	after := min(time.Duration(m.slot)*m.cfg.Timing.Min, m.cfg.Timing.lease())
	if !m.released {
		after += m.cfg.Timing.lease()
	}
	return m.by == m.slot && now.Sub(m.answerAt) < m.cfg.Timing.lease() || now.Sub(m.answerAt) >= after
}

// newReporter returns the reporter of the node.
func (m *Member) newReporter() *Reporter {
	cfg := ReporterConfig{
		Store: m.cfg.Store, Key: m.cfg.Key, Node: m.number(m.node), Order: m.node, Nodes: map[int][]int{},
		Timing: m.cfg.Timing, Early: len(m.cfg.Nodes) <= EarlyMax, By: m.slot,
	}
	for i, workers := range m.cfg.Nodes {
		cfg.Nodes[m.number(i)] = workers
	}
	r := NewReporter(cfg)
	m.mu.Lock()
	replaced, since := -1, m.answerAt
	if m.by < len(m.peers) && m.by != m.slot && !m.released {
		replaced = m.peers[m.by]
	}
	m.mu.Unlock()
	r.Watch(m.cfg.Epoch, m.cfg.File, m.peers, replaced, since)
	return r
}

// EarlyMax is the largest number of nodes that report more often than once a second: [ReporterConfig.Early].
const EarlyMax = 40

// number returns the number of a node.
func (m *Member) number(node int) int {
	if m.cfg.Numbers != nil {
		return m.cfg.Numbers[node]
	}
	return m.cfg.Nodes[node][0]
}

// Silence returns the time since this worker wrote the latest heartbeat that the store has acknowledged, without the
// time in which this process did not run.
func (m *Member) Silence() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Since(m.running)
}

// States returns the known state of all workers, by number.
func (m *Member) States() []WorkerState {
	out := m.viewed()
	for _, w := range m.peers {
		m.readSlot(&out[w])
	}
	return out
}

// Stalled returns the states of the workers that have made no progress for at least d. It reads the slots of these
// only: a host may have hundreds of workers, which all call it.
func (m *Member) Stalled(d time.Duration) []WorkerState {
	out := slices.DeleteFunc(m.viewed(), func(v WorkerState) bool { return v.Stalled < d })
	for i := range out {
		m.readSlot(&out[i])
	}
	return out
}

// readSlot updates the state of a worker from its slot, if it is one of this node.
func (m *Member) readSlot(v *WorkerState) {
	if slot := slices.Index(m.peers, v.Worker); slot >= 0 {
		if h, seen := latestIn(m.cfg.File, slot); seen {
			v.Heartbeat, v.Seen = h, true
		}
	}
}

// viewed returns the states of all workers as the latest view has them, without the slots of this node's workers.
func (m *Member) viewed() []WorkerState {
	n := 0
	for _, workers := range m.cfg.Nodes {
		n += len(workers)
	}
	out := make([]WorkerState, n)
	for i := range out {
		out[i] = WorkerState{Worker: i, Seen: true}
	}
	m.mu.Lock()
	v := m.view
	age := min(time.Since(m.viewAt), 2*m.cfg.Timing.Every) // an older view says nothing about now
	m.mu.Unlock()
	if v.Epoch != m.cfg.Epoch { // of an earlier run, or before a restart
		v.First, v.Left = nil, nil
	}
	if f := v.First; f != nil {
		out[0].Heartbeat, out[0].Seen, out[0].Stalled = f.Heartbeat, f.Count > 0, fromMilliseconds(f.Stalled)
	}
	for _, r := range v.Left {
		for w := r[0]; w <= r[1] && w < n; w++ {
			out[w].Heartbeat.Final = true
		}
	}
	for i := range v.Doubts {
		d := &v.Doubts[i]
		if d.Epoch != m.cfg.Epoch && !d.Unseen {
			continue
		}
		for _, w := range d.Workers {
			if w >= n {
				continue
			}
			s := &out[w]
			s.Seen, s.Lost, s.HostReports = !d.Unseen, d.Lost, d.Reported
			if d.Silent > 0 {
				s.Silent = fromMilliseconds(d.Silent) + age
			}
			if d.Stalled > 0 {
				s.Stalled = fromMilliseconds(d.Stalled) + age
			}
			if d.Phase != "" {
				s.Heartbeat.Phase, s.Heartbeat.Progress = d.Phase, d.Progress
			}
		}
	}
	return out
}

// Latest returns the latest state of a worker: that of its slot, or that of its node's report in the store. The error
// is the store's.
func (m *Member) Latest(ctx context.Context, worker int) (WorkerState, error) {
	v := m.States()[worker]
	if slices.Contains(m.peers, worker) {
		return v, nil
	}
	node := slices.IndexFunc(m.cfg.Nodes, func(workers []int) bool { return slices.Contains(workers, worker) })
	text, _, err := m.cfg.Store.Get(ctx, m.cfg.Key+"/"+strconv.Itoa(m.number(node)))
	if err != nil {
		if errors.Is(err, rendezvous.ErrNotFound) {
			err = nil
		}
		return v, err
	}
	if r, err := DecodeReport(text); err == nil && r.Epoch == m.cfg.Epoch {
		for i := range r.Workers {
			if w := &r.Workers[i]; w.Worker == worker {
				v.Heartbeat, v.Seen = w.Heartbeat, w.Count > 0
				v.Silent, v.Stalled = max(v.Silent, fromMilliseconds(w.Silent)), max(v.Stalled, fromMilliseconds(w.Stalled))
			}
		}
	}
	return v, nil
}

// Lost waits until a worker is lost, and returns the one that has been silent longest. If the store has not
// acknowledged this worker's heartbeats for the timeout, or the others have declared this worker lost, the error is
// [rendezvous.ErrLost], and [ErrDeclaredLost], [ErrAgent], [ErrFile] or [rendezvous.ErrFenced] if that is the reason.
func (m *Member) Lost(ctx context.Context) (WorkerState, error) {
	for {
		m.mu.Lock()
		changed, silent, fenced := m.changed, time.Since(m.running), m.fenced
		m.mu.Unlock()
		if fenced {
			return WorkerState{Worker: -1}, rendezvous.ErrFenced
		}
		longest := WorkerState{Worker: -1}
		for _, v := range m.viewed() {
			if v.Lost {
				m.readSlot(&v)
			}
			switch {
			case !v.Lost || v.Heartbeat.Final:
			case v.Worker == m.cfg.Worker:
				if err := m.writeError(); err != nil { // why the others have received no heartbeat
					return v, err
				}
				return v, fmt.Errorf("%w: they have received no heartbeat of it for %v", ErrDeclaredLost,
					v.Silent.Round(time.Millisecond))
			case longest.Worker < 0 || v.Silent > longest.Silent:
				longest = v
			}
		}
		if longest.Worker >= 0 {
			return longest, nil
		}
		left := time.Hour
		if m.cfg.Timing.Timeout > 0 {
			left = m.cfg.Timing.Timeout - silent
		}
		if left <= 0 {
			return longest, m.leaseEnded(silent)
		}
		timer := time.NewTimer(min(left, max(m.cfg.Timing.Every, time.Millisecond)))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return longest, context.Cause(ctx)
		}
		timer.Stop()
	}
}

// writeError returns an ErrFile if the latest heartbeat could not be written.
func (m *Member) writeError() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrFile, m.failed)
}

// leaseEnded returns the error of a worker whose heartbeats the store has not acknowledged.
func (m *Member) leaseEnded(silent time.Duration) error {
	if err := m.writeError(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch answered := time.Since(m.answerAt); {
	case m.cfg.Agent && answered >= m.cfg.Timing.suspectAfter(): // it writes its answer even without a store
		return fmt.Errorf("%w: it has written no answer for %v", ErrAgent, answered.Round(time.Millisecond))
	}
	return fmt.Errorf("%w: it has not acknowledged this worker's heartbeats for %v", rendezvous.ErrLost,
		silent.Round(time.Millisecond))
}
