package membership_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/internal/formula"
)

var (
	seed  = flag.Uint64("seed", 0, "repeat the random faults of this seed only")
	seeds = flag.Int("seeds", 12, "how many seeds of random faults")
	large = flag.Int("nodes", 0, "TestManyNodes: number of nodes, more than 5")
)

// cluster is a job of members in one process, whose nodes can be cut off and whose processes can be stopped.
type cluster struct {
	store   *rendezvous.Memory
	nodes   [][]int
	timing  membership.Timing
	members []*member
	agents  []*member
	lost    atomic.Int64  // the latest node that agents have declared lost; 0: none
	cut     []atomic.Bool // by node: it does not reach the store

	messages, bytes atomic.Int64
	failing         atomic.Bool // each fifth Swap fails, in turns before and after it was made
	noViews         atomic.Bool // all fail
	swaps           atomic.Int64
	fenced          atomic.Bool // the job is in a later epoch
	unwatch         func()      // ends watch

	spread, latency time.Duration // the longest random delay of a member's start, and of a message to or from the store
}

type member struct {
	*membership.Member
	worker int
	end    context.CancelFunc
	gate   *gate
	done   chan struct{}
	full   atomic.Bool // its disk is

	mu      sync.Mutex
	verdict membership.WorkerState
	err     error
	at      time.Time // when it was known
	lost    time.Time // when a view first declared this worker lost; zero: never
}

// gate holds the store's calls of a process that is stopped, as long as it is.
type gate struct {
	mu      sync.Mutex
	stopped chan struct{} // nil: it runs
}

// stop stops the process, and run lets it continue.
func (g *gate) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped = make(chan struct{})
}

func (g *gate) run() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped != nil {
		close(g.stopped)
	}
	g.stopped = nil
}

func (g *gate) closed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stopped != nil
}

func (g *gate) pass(ctx context.Context) error {
	g.mu.Lock()
	stopped := g.stopped
	g.mu.Unlock()
	if stopped == nil {
		return nil
	}
	select {
	case <-stopped:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// link is a process's way to the store: it counts, and waits while its node is cut off or its process stopped.
type link struct {
	rendezvous.Store
	c    *cluster
	node int
	m    *member
}

func (l *link) call(ctx context.Context, bytes int, f func(context.Context) int) error {
	if err := l.m.gate.pass(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for l.c.cut[l.node].Load() {
		timer := time.NewTimer(50 * time.Millisecond)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	l.c.messages.Add(1)
	l.c.bytes.Add(int64(bytes))
	l.c.delay(l.c.latency)
	got := f(ctx)
	l.c.delay(l.c.latency)
	if l.c.cut[l.node].Load() {
		return rendezvous.ErrLost // the answer is lost
	}
	if err := l.m.gate.pass(ctx); err != nil {
		return err
	}
	l.c.messages.Add(1)
	l.c.bytes.Add(int64(got))
	return nil
}

// delay waits for a random time.
func (c *cluster) delay(most time.Duration) {
	if most > 0 {
		time.Sleep(rand.N(most))
	}
}

// frame is what a message has besides its content.
const frame = 32

func (l *link) Set(ctx context.Context, key string, value []byte) (err error) {
	if e := l.call(ctx, frame+len(key)+len(value), func(ctx context.Context) int {
		if err = rendezvous.ErrFenced; !l.c.fenced.Load() {
			err = l.Store.Set(ctx, key, value)
		}
		return frame
	}); e != nil {
		return e
	}
	return err
}

func (l *link) Swap(ctx context.Context, key string, revision uint64, value []byte) (done bool, err error) {
	if e := l.call(ctx, frame+len(key)+len(value), func(ctx context.Context) int {
		n := l.c.swaps.Add(1)
		if done, err = false, rendezvous.ErrLost; l.c.noViews.Load() || l.c.failing.Load() && n%10 == 0 {
			return frame
		}
		if done, err = l.Store.Swap(ctx, key, revision, value); l.c.failing.Load() && n%10 == 5 {
			done, err = false, rendezvous.ErrLost
		}
		return frame
	}); e != nil {
		return false, e
	}
	return done, err
}

func (l *link) Changes(
	ctx context.Context, prefix string, after uint64,
) (entries []rendezvous.Entry, revision uint64, err error) {
	if e := l.call(ctx, frame+len(prefix), func(ctx context.Context) int {
		entries, revision, err = l.Store.Changes(ctx, prefix, after)
		n := frame
		for _, e := range entries {
			n += 16 + len(e.Key) + len(e.Value)
		}
		return n
	}); e != nil {
		return nil, 0, e
	}
	return entries, revision, err
}

// start starts a job of nodes with so many workers each, for which agents report unless they are nil.
func start(t *testing.T, nodes, workers int, timing membership.Timing, agents *membership.Timing) *cluster {
	t.Helper()
	return new(cluster).start(t, nodes, workers, timing, agents)
}

func (c *cluster) start(
	t *testing.T, nodes, workers int, timing membership.Timing, agents *membership.Timing,
) *cluster {
	t.Helper()
	c.store, c.timing, c.cut = rendezvous.NewMemory(), timing, make([]atomic.Bool, nodes)
	var numbers []int
	var files []*membership.NodeFile
	for n := range nodes {
		var mine []int
		for w := range workers {
			mine = append(mine, n*workers+w)
		}
		c.nodes = append(c.nodes, mine)
	}
	for n := range nodes {
		file := membership.NewMemoryFile(workers)
		files = append(files, file)
		if agents != nil {
			numbers = append(numbers, 100+n)
			a := &member{worker: -1, gate: &gate{}, done: make(chan struct{})}
			r := membership.NewReporter(membership.ReporterConfig{
				Store: &link{c.store.Open(), c, n, a}, Key: "job/heartbeats", Node: 100 + n, Order: n, Nonce: fmt.Sprint(n),
				Timing: *agents, Early: true, By: -1, OnView: func(_ context.Context, lost []membership.Doubt) error {
					for _, d := range lost {
						if d.Node >= 0 {
							c.lost.Store(int64(d.Node))
						}
					}
					return nil
				},
			})
			r.Watch(3, file.Through(func() { _ = a.gate.pass(context.Background()) }, &a.full), c.nodes[n], -1, time.Time{})
			ctx, end := context.WithCancel(t.Context())
			a.end = end
			c.agents = append(c.agents, a)
			go func() {
				defer close(a.done)
				c.delay(c.spread)
				r.Run(ctx)
			}()
		}
	}
	for n := range nodes {
		for _, w := range c.nodes[n] {
			m := &member{worker: w, gate: &gate{}, done: make(chan struct{})}
			m.verdict.Worker = -1
			own := timing
			if agents != nil {
				own = timing.Through(files[n])
			}
			m.Member = membership.NewMember(membership.MemberConfig{
				Store: &link{c.store.Open(), c, n, m}, Key: "job/heartbeats", Epoch: 3, Worker: w, Nodes: c.nodes,
				Numbers: numbers, Agent: agents != nil,
				File:   files[n].Through(func() { _ = m.gate.pass(context.Background()) }, &m.full),
				Timing: own, State: func() membership.Heartbeat {
					return membership.Heartbeat{Step: 12, Phase: "compute", Text: "in its step function, after 40 calls"}
				},
			})
			ctx, end := context.WithCancel(t.Context())
			m.end = end
			c.members = append(c.members, m)
			go func() {
				defer close(m.done)
				c.delay(c.spread)
				m.Run(ctx)
			}()
			go func() {
				v, err := m.Lost(ctx)
				if ctx.Err() == nil {
					m.mu.Lock()
					m.verdict, m.err, m.at = v, err, time.Now()
					m.mu.Unlock()
				}
			}()
		}
	}
	ctx, end := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { c.watch(ctx, c.store.Open()) })
	c.unwatch = func() { end(); watching.Wait() }
	return c
}

// watch records when a view in the store first declares each worker lost.
func (c *cluster) watch(ctx context.Context, store rendezvous.Store) {
	for after := uint64(0); ; {
		entries, revision, err := store.Changes(ctx, "job/heartbeats-view", after)
		if err != nil {
			return
		}
		after = revision
		for _, e := range entries {
			var v membership.View
			if json.Unmarshal(e.Value, &v) != nil {
				continue
			}
			for _, d := range v.Doubts {
				for _, w := range d.Workers {
					if m := c.members[w]; d.Lost {
						m.mu.Lock()
						if m.lost.IsZero() {
							m.lost = time.Now()
						}
						m.mu.Unlock()
					}
				}
			}
		}
	}
}

// stop ends all members.
func (c *cluster) stop() {
	for i := range c.cut {
		c.cut[i].Store(false)
	}
	all := append(slices.Clone(c.members), c.agents...)
	for _, m := range all {
		m.end()
		m.gate.run()
	}
	for _, m := range all {
		<-m.done
	}
	c.unwatch()
}

// result returns what a member has concluded.
func (m *member) result() (membership.WorkerState, time.Time, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.verdict, m.at, m.err
}

var usual = membership.Timing{Every: time.Second, Min: 200 * time.Millisecond, Timeout: 30 * time.Second}

// TestManyNodes starts -nodes nodes of 8 workers, counts their messages and bytes at the store beside the formula, and
// cuts 5 nodes off: all others must report that within the bound.
func TestManyNodes(t *testing.T) {
	if *large <= 5 {
		t.Skip("without -nodes: TestMessages counts for up to 128 nodes; .ci/long scale runs this for 512")
	}
	synctest.Test(t, func(t *testing.T) {
		c := start(t, *large, 8, usual, nil)
		defer c.stop()
		c.count(t, *large, 8)
		var lost []int
		for n := *large - 5; n < *large; n++ {
			c.cut[n].Store(true)
			lost = append(lost, c.nodes[n]...)
		}
		began := time.Now()
		bound := usual.Timeout + 3*usual.Every + time.Second
		messages, bytes := c.messages.Load(), c.bytes.Load()
		time.Sleep(bound)
		c.agree(t, lost, began, bound)
		var last time.Duration
		for _, m := range c.members[:(*large-5)*8] {
			_, at, _ := m.result()
			last = max(last, at.Sub(began))
		}
		t.Logf("5 nodes cut off: reported by all %d other workers within %v (heartbeat timeout %v), %d messages and %d "+
			"bytes in %v", len(c.members)-len(lost), last, usual.Timeout, c.messages.Load()-messages,
			c.bytes.Load()-bytes, bound)
	})
}

// TestMessages counts the messages and bytes at the store, and compares them with the formula: a node sends its report
// and reads the view, each with an answer; one node reads all reports and writes the view.
func TestMessages(t *testing.T) {
	for _, size := range [][2]int{{1, 8}, {2, 1}, {16, 8}, {128, 8}} {
		nodes, workers := size[0], size[1]
		if testing.Short() && nodes > 16 {
			continue
		}
		synctest.Test(t, func(t *testing.T) {
			c := start(t, nodes, workers, usual, nil)
			c.count(t, nodes, workers)
			c.stop()
		})
	}
}

// TestFailingStore: a store that fails some writes of the view does not delay the verdict on a silent worker.
func TestFailingStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 3, 1, usual, nil)
		defer c.stop()
		c.failing.Store(true)
		time.Sleep(time.Minute)
		c.agree(t, nil, time.Time{}, 0)
		began := time.Now()
		c.members[2].gate.stop()
		bound := usual.Timeout + 5*usual.Every
		time.Sleep(bound)
		c.agree(t, []int{2}, began, bound)
	})
}

// TestReasons: a worker that ends by itself says why.
func TestReasons(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, 1, usual, &usual)
		defer c.stop()
		time.Sleep(5 * time.Second)
		c.agents[1].gate.stop()
		time.Sleep(usual.Timeout + 2*usual.Every)
		if _, _, err := c.members[1].result(); !errors.Is(err, membership.ErrAgent) || !errors.Is(err, rendezvous.ErrLost) {
			t.Errorf("without its agent: %v, want ErrAgent", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 2, 2, usual, nil)
		defer c.stop()
		time.Sleep(5 * time.Second)
		c.fenced.Store(true)
		time.Sleep(3 * usual.Every)
		for _, m := range c.members {
			if _, _, err := m.result(); !errors.Is(err, rendezvous.ErrFenced) {
				t.Errorf("worker %d, when the next epoch has begun: %v, want ErrFenced", m.worker, err)
			}
		}
	})
	synctest.Test(t, func(t *testing.T) {
		c := start(t, 1, 2, usual, nil)
		defer c.stop()
		time.Sleep(5 * time.Second)
		c.members[1].full.Store(true)
		time.Sleep(usual.Timeout + 2*usual.Every)
		if _, _, err := c.members[1].result(); !errors.Is(err, membership.ErrFile) || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("on a full disk: %v, want ErrFile", err)
		}
	})
}

// count counts messages and bytes of a healthy job, and compares them with the formula.
func (c *cluster) count(t *testing.T, nodes, workers int) {
	t.Helper()
	time.Sleep(5*time.Second + usual.Min/4) // between two reports
	messages, bytes := c.messages.Load(), c.bytes.Load()
	const seconds = 8
	time.Sleep(seconds * time.Second)
	messages, bytes = (c.messages.Load()-messages)/seconds, (c.bytes.Load()-bytes)/seconds
	// Reports: 2 messages a node, of a head and M states. Views: 2 a node, without doubts only a head and the state
	// of worker 0. The coordinator: 2 for the view, and at most 2 for each of 5 reads of the reports a second.
	n, m := int64(nodes), int64(workers)
	most := 4*n + 2 + 2*5
	report, view := int64(frame+60+m*130), int64(4*frame+260)
	mostBytes := n*(2*report+view) + view + 5*2*frame
	size := fmt.Sprintf("%d nodes of %d workers: ", nodes, workers)
	formula.Row(t, size+"messages a second", int(messages), int(most), "at most 4 N + 12")
	formula.Row(t, size+"bytes a second", int(bytes), int(mostBytes), "at most 2 N (92 + 130 M) + 388 N + 708")
	// What was sent before the first of these seconds may be read in it: a report and a view of each node.
	most, mostBytes = most+4*n/seconds, mostBytes+n*(report+view)/seconds
	if messages > most || bytes > mostBytes || messages < 3*n {
		t.Errorf("%d messages and %d bytes a second, want at most %d and %d", messages, bytes, most, mostBytes)
	}
	for _, m := range c.members {
		if v, _, err := m.result(); v.Worker >= 0 || err != nil || m.Silence() > 2*usual.Every+usual.Min {
			t.Fatalf("worker %d: %v, %v, silent for %v", m.worker, v, err, m.Silence())
		}
	}
}

// TestFaults: random faults in virtual time. Without a fault no worker is lost. Every fault is found within the bound,
// all survivors name the same worker, and a worker that is cut off has ended before the others declare it lost.
func TestFaults(t *testing.T) {
	list := []uint64{*seed}
	if *seed == 0 {
		list = nil
		for s := range *seeds {
			list = append(list, uint64(s+1))
		}
	}
	for _, s := range list {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { oneFault(t, s) })
		})
	}
}

func oneFault(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 16))
	timing := usual
	timing.Timeout = time.Duration(8+r.IntN(23)) * time.Second
	nodes, workers := 1+r.IntN(6), 1+r.IntN(4)
	if nodes*workers == 1 {
		nodes = 2
	}
	var agents *membership.Timing
	if r.IntN(2) == 0 {
		other := timing
		other.Timeout += time.Duration(r.IntN(20)-5) * time.Second
		agents = &other
	}
	c := start(t, nodes, workers, timing, agents)
	defer c.stop()
	time.Sleep(time.Duration(r.Int64N(int64(20 * time.Second))))
	c.agree(t, nil, time.Time{}, 0)
	// A short outage, which is refuted: less than the timeout without the time in which a heartbeat is under way.
	node := r.IntN(nodes)
	short := time.Duration(r.Int64N(int64(timing.Timeout - 4*timing.Every)))
	c.cut[node].Store(true)
	time.Sleep(short)
	c.cut[node].Store(false)
	time.Sleep(2 * timing.Timeout)
	c.agree(t, nil, time.Time{}, 0)
	// A lasting one.
	var gone []int
	victim := r.IntN(nodes * workers)
	node = victim / workers
	began := time.Now()
	what := "stopped"
	switch n := r.IntN(3); {
	case nodes > 1 && n == 0:
		what = "cut off"
		c.cut[node].Store(true)
		gone = c.nodes[node]
	case nodes > 1 && n == 1 && agents != nil:
		what = "without its agent"
		c.agents[node].gate.stop()
		gone = c.nodes[node]
	default:
		c.members[victim].gate.stop()
		gone = []int{victim}
	}
	t.Logf("seed %d: %d nodes x %d workers, agents %v, timeout %v: worker %d is %s", seed, nodes, workers,
		agents != nil, timing.Timeout, victim, what)
	// The coordinator's node: one interval more. Another reporter of the node takes over after the lease, and reports the
	// silence since the former one's last answer.
	bound := timing.Timeout + 3*timing.Every + time.Second
	time.Sleep(bound)
	c.agree(t, gone, began, bound)
	if agents != nil && what != "stopped" {
		time.Sleep(max(0, agents.Timeout-timing.Timeout))
		if got := c.lost.Load(); got != int64(100+node) {
			t.Errorf("the agents have lost node %d, want %d", got, 100+node)
		}
		c.agents[node].gate.run()
	}
	// A process that comes back has no lease, and learns that it is lost.
	for _, w := range gone { // before it runs: a process that finds that it was suspended counts from then on
		if left := c.timing.Timeout - c.members[w].Silence(); left > 0 {
			t.Errorf("worker %d comes back with a lease of %v", w, left)
		}
	}
	c.cut[node].Store(false)
	for _, w := range gone {
		c.members[w].gate.run()
	}
	time.Sleep(4 * timing.Every)
	for _, w := range gone {
		if _, _, err := c.members[w].result(); !errors.Is(err, rendezvous.ErrLost) {
			t.Errorf("worker %d comes back and continues: %v", w, err)
		}
	}
}

// TestLeaseOrder: in jobs of many sizes, with heartbeats and messages at random times, some nodes are cut off, often
// with the coordinator. No view declares a worker lost before that worker has ended.
func TestLeaseOrder(t *testing.T) {
	sizes := []int{2, 3, 20}
	if !testing.Short() {
		sizes = nil
		for n := 2; n <= 70; n += 1 + n/8 {
			sizes = append(sizes, n)
		}
	}
	for _, nodes := range sizes {
		for _, agents := range []*membership.Timing{nil, &usual} {
			synctest.Test(t, func(t *testing.T) { leaseOrder(t, nodes, agents) })
		}
	}
}

func leaseOrder(t *testing.T, nodes int, agents *membership.Timing) {
	timing := usual
	timing.Timeout = 12 * time.Second
	c := &cluster{spread: 2 * time.Second, latency: rand.N(200 * time.Millisecond)}
	c.start(t, nodes, 1+rand.IntN(2), timing, agents)
	defer c.stop()
	c.failing.Store(rand.IntN(2) == 0)
	time.Sleep(5*time.Second + rand.N(5*time.Second))
	if rand.IntN(2) == 0 { // the coordinator reports, and writes no view
		c.noViews.Store(true)
		time.Sleep(rand.N(2 * timing.Every))
	}
	began := time.Now()
	first := rand.IntN(2) * rand.IntN(nodes)
	var gone []int
	for n := first; n < min(nodes, first+1+rand.IntN(min(5, nodes-1))); n++ {
		c.cut[n].Store(true)
		gone = append(gone, c.nodes[n]...)
	}
	c.noViews.Store(false)
	time.Sleep(2*timing.Timeout + 4*timing.Every) // two nodes may have to take over
	for _, w := range gone {
		c.members[w].ordered(t, began)
	}
}

// agree checks the verdicts of all members besides those that are gone.
func (c *cluster) agree(t *testing.T, gone []int, began time.Time, bound time.Duration) {
	t.Helper()
	for _, m := range c.members {
		v, at, err := m.result()
		switch {
		case slices.Contains(gone, m.worker):
			continue
		case gone == nil && (v.Worker >= 0 || err != nil):
			t.Fatalf("worker %d, without a fault: %v, %v", m.worker, v, err)
		case gone == nil:
			continue
		case err != nil:
			t.Errorf("worker %d: %v", m.worker, err)
		case !slices.Contains(gone, v.Worker):
			t.Errorf("worker %d blames %v, want one of %v", m.worker, v, gone)
		case at.Sub(began) > bound || at.Sub(began) < c.timing.Timeout-2*c.timing.Every:
			t.Errorf("worker %d: after %v, want at most %v", m.worker, at.Sub(began), bound)
		}
	}
	for _, w := range gone {
		if m := c.members[w]; !m.gate.closed() {
			m.ordered(t, began)
		}
	}
}

// ordered checks that a member that was cut off has ended before a view has declared it lost.
func (m *member) ordered(t *testing.T, began time.Time) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !errors.Is(m.err, rendezvous.ErrLost) || m.lost.IsZero() || m.at.After(m.lost) {
		t.Errorf("worker %d, which is cut off: %v at %v, want ErrLost before the verdict on it at %v", m.worker, m.err,
			m.at.Sub(began), m.lost.Sub(began))
	}
}

// TestHostReports: the verdict on a worker whose host reports says so, that on a whole host does not.
func TestHostReports(t *testing.T) {
	for _, whole := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := start(t, 2, 2, usual, nil)
			defer c.stop()
			time.Sleep(5 * time.Second)
			c.members[2].gate.stop() // the reporter of its node: the next worker takes over
			if whole {
				c.members[3].gate.stop()
			}
			time.Sleep(usual.Timeout + 5*usual.Every)
			if v, _, err := c.members[0].result(); err != nil || v.Worker < 2 || v.HostReports == whole {
				t.Errorf("the whole host %v: %+v, %v", whole, v, err)
			}
		})
	}
}
