//go:build unix

package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/failure"
	"github.com/lockstep-ml/lockstep/cluster/membership"
	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cluster/status"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// launchNodes starts an agent for each number of workers, as the nodes of one job.
func launchNodes(t *testing.T, script string, change func(*Config), workers ...int) []*started {
	t.Helper()
	memory := rendezvous.NewMemory()
	var out []*started
	for node, n := range workers {
		out = append(out, launchScript(t, script, func(c *Config) {
			c.Workers, c.Node, c.Nodes, c.Store = n, node, len(workers), memory.Open()
			if change != nil {
				change(c)
			}
		}))
	}
	return out
}

func TestNodesMakeOneJob(t *testing.T) {
	nodes := launchNodes(t, `echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK of $GROUP_WORLD_SIZE, $MASTER_PORT, $TF_CONFIG"`, nil, 2, 1, 3)
	var all []string
	for i, n := range nodes {
		if o := n.wait(t); o.Code != 0 {
			t.Errorf("node %d: outcome %+v", i, o)
		}
		for line := range strings.Lines(n.out.String()) {
			_, line, _ = strings.Cut(strings.TrimSpace(line), "] ")
			all = append(all, line)
		}
	}
	slices.Sort(all)
	if len(all) != 6 {
		t.Fatalf("%d lines, want 6: %q", len(all), all)
	}
	_, shared, _ := strings.Cut(all[0], " of 3, ")
	port, cluster, _ := strings.Cut(shared, ", ")
	cluster, _, _ = strings.Cut(cluster, `,"task"`)
	if strings.Count(cluster, "127.0.0.1:") != 6 {
		t.Errorf("TF_CONFIG: %s", cluster)
	}
	for rank, place := range []string{"0 of 2, 0", "1 of 2, 0", "0 of 1, 1", "0 of 3, 2", "1 of 3, 2", "2 of 3, 2"} {
		if want := fmt.Sprintf(`%d of 6, %s of 3, %s, %s,"task":{"type":"worker","index":%d}}`, rank, place, port, cluster,
			rank); all[rank] != want {
			t.Errorf("rank %d: got %s\nwant %s", rank, all[rank], want)
		}
	}
}

// TestNodesRestartTogether: a failure on one node ends the workers of all nodes, which start again as one epoch,
// also those that had exited with code 0.
func TestNodesRestartTogether(t *testing.T) {
	dir := t.TempDir()
	nodes := launchNodes(t, `echo "epoch $LOCKSTEP_EPOCH of $RANK"; touch `+dir+`/said$RANK
[ $LOCKSTEP_EPOCH = 1 ] && exit 0
[ $RANK = 0 ] && exit 0
[ $RANK = 3 ] && for r in 0 1 2; do until [ -e `+dir+`/said$r ]; do sleep 0.02; done; done && exit 6
while :; do sleep 0.02; done`, func(c *Config) { c.RestartsMax = 2 }, 1, 2, 1)
	for i, n := range nodes {
		if o := n.wait(t); o.Code != 0 || o.Restarts != 1 {
			t.Errorf("node %d: outcome %+v:\n%s", i, o, n.err)
		}
		for _, want := range []string{
			"root cause: worker 3", "worker 3 of 4, node 2", "ended with exit code 6",
			"then    workers 1, 2: asked to exit", "restart 1 of 2",
		} {
			if !strings.Contains(n.err.String(), want) {
				t.Errorf("node %d did not report %q:\n%s", i, want, n.err)
			}
		}
	}
	for rank, n := range map[int]*started{0: nodes[0], 1: nodes[1], 2: nodes[1], 3: nodes[2]} {
		for epoch := range 2 {
			if want := fmt.Sprintf("[rank%d] epoch %d of %d\n", rank, epoch, rank); !strings.Contains(n.out.String(), want) {
				t.Errorf("not written: %q", want)
			}
		}
	}
}

// TestNodesEndWithOneCode: without restarts all agents end with the root cause's exit code.
func TestNodesEndWithOneCode(t *testing.T) {
	nodes := launchNodes(t, `[ $RANK = 1 ] && kill -9 $$; while :; do sleep 0.02; done`, nil, 1, 1)
	for i, n := range nodes {
		if o := n.wait(t); o.Code != 137 || o.Report == nil || o.Report.Root.Worker != 1 {
			t.Errorf("node %d: outcome %+v:\n%s", i, o, n.err)
		}
	}
}

// TestKilledWorkersAreReported: the other workers find in the store why they lost a worker that could not report its
// failure. At the end the store is empty.
func TestKilledWorkersAreReported(t *testing.T) {
	memory := rendezvous.NewMemory()
	s := launchScript(t, `trap '' TERM; [ $RANK = 1 ] && kill -9 $$; until [ -e $LOCKSTEP_RECORDS/enough ]; do sleep 0.02; done`, func(c *Config) {
		c.Store, c.Records = memory.Open(), t.TempDir()
	})
	store, key := memory.Open(), rendezvous.Key("lockstep", 0, "failure", "1")
	eventually(t, "the record", func() bool {
		text, _, err := store.Get(t.Context(), key)
		return err == nil && strings.Contains(string(text), "killed by SIGKILL")
	})
	if err := os.WriteFile(filepath.Join(s.agent.cfg.Records, "enough"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.wait(t)
	if left, _, err := store.List(t.Context(), ""); err != nil || len(left) > 0 {
		t.Errorf("left in the store: %v, %v", left, err)
	}
}

// TestInterruptReachesAllNodes: the user signals one agent, and the workers of all nodes get the signal once; the
// second signal kills all.
func TestInterruptReachesAllNodes(t *testing.T) {
	for _, times := range []int{1, 2} {
		t.Run(fmt.Sprint(times), func(t *testing.T) {
			t.Parallel()
			nodes := launchNodes(t, fmt.Sprintf(`trap 'n=$((n+1)); echo got $n' TERM; n=0; echo ready; while [ $n -lt %d ]; do sleep 0.02; done; exit 0`, times), nil, 1, 1)
			for i, n := range nodes {
				n.out.await(t, fmt.Sprintf("[rank%d] ready\n", i))
			}
			nodes[1].agent.Interrupt(sigTerminate)
			for i, n := range nodes {
				n.out.await(t, fmt.Sprintf("[rank%d] got 1\n", i))
			}
			if times == 2 {
				nodes[1].agent.Interrupt(sigTerminate)
			}
			for i, n := range nodes {
				if o := n.wait(t); o.Code != 130 || !o.Interrupted {
					t.Errorf("node %d: outcome %+v:\n%s", i, o, n.err)
				}
				if strings.Contains(n.out.String(), "got 2") {
					t.Errorf("node %d passed it on twice", i)
				}
			}
		})
	}
}

// runNode runs an agent that is expected to fail.
func runNode(t *testing.T, ctx context.Context, cfg Config) error {
	t.Helper()
	cfg.Command, cfg.Workers = []string{"sh", "-c", "while :; do sleep 0.02; done"}, 1
	a, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	o, err := a.Run(ctx)
	if o.Code == 0 {
		t.Errorf("outcome %+v", o)
	}
	return err
}

func TestNodesThatDoNotMeet(t *testing.T) {
	// the first ends before the store has answered
	for _, wait := range []time.Duration{time.Nanosecond, 100 * time.Millisecond} {
		t.Run(fmt.Sprint("missing for ", wait), func(t *testing.T) {
			err := runNode(t, t.Context(),
				Config{Nodes: 3, Node: 1, Store: rendezvous.NewMemory().Open(), RendezvousTimeout: wait})
			if want := "1 of 3 nodes joined (node 1"; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want one that says %q", err, want)
			}
		})
	}
	for name, atOnce := range map[string]bool{"with other restarts": false, "with other restarts, at once": true} {
		t.Run(name, func(t *testing.T) {
			memory := rendezvous.NewMemory()
			errs := make(chan error, 2)
			var looks sync.WaitGroup
			looks.Add(2)
			for node := range 2 {
				store := memory.Open()
				if atOnce {
					store = &atOneTime{Store: store, looks: &looks}
				}
				go func() {
					errs <- runNode(t, t.Context(), Config{Nodes: 2, Node: node, Store: store, RestartsMax: node})
				}()
			}
			for range 2 {
				if err := <-errs; err == nil || !strings.Contains(err.Error(), "--max-restarts") {
					t.Errorf("error %v, want one that says that restarts differ", err)
				}
			}
		})
	}
}

// atOneTime is a store that all agents read for the first time at the same time.
type atOneTime struct {
	rendezvous.Store
	first sync.Once
	looks *sync.WaitGroup
}

func (a *atOneTime) List(ctx context.Context, prefix string) ([]rendezvous.Entry, uint64, error) {
	entries, revision, err := a.Store.List(ctx, prefix)
	a.first.Do(func() {
		a.looks.Done()
		a.looks.Wait()
	})
	return entries, revision, err
}

// mute is a store to which an agent cannot write its first heartbeat.
type mute struct{ rendezvous.Store }

func (m mute) Set(ctx context.Context, key string, value []byte) error {
	if !strings.Contains(key, "/heartbeat/") {
		return m.Store.Set(ctx, key, value)
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestStoppedBeforeTheStart: the user stops one node before all have joined, in any state of it. All others end and
// report it. The agents that have joined wait as long as a test may take.
func TestStoppedBeforeTheStart(t *testing.T) {
	for name, c := range map[string]struct {
		store func(rendezvous.Store) rendezvous.Store
		ready bool // it waits for the others when it is stopped
	}{
		"while it waits":      {func(s rendezvous.Store) rendezvous.Store { return s }, true},
		"before it can begin": {func(s rendezvous.Store) rendezvous.Store { return s }, false},
		"when it has come":    {func(s rendezvous.Store) rendezvous.Store { return mute{s} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			memory := rendezvous.NewMemory()
			errs := make(chan error, 2)
			for _, node := range []int{0, 2} {
				go func() {
					errs <- runNode(t, t.Context(),
						Config{Nodes: 4, Node: node, Store: memory.Open(), RendezvousTimeout: 2 * patience})
				}()
			}
			await := func(nodes ...int) {
				p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 4, Store: memory.Open(), HeartbeatTimeout: time.Hour}})
				eventually(t, "the nodes to wait", func() bool {
					slots, _, _, err := p.read(t.Context())
					return err == nil && !slices.ContainsFunc(nodes, func(n int) bool { return slots[n] == nil || !slots[n].Ready })
				})
			}
			await(0, 2)
			a, err := New(Config{
				Command: []string{"true"}, Workers: 1, Nodes: 4, Node: 1, Store: c.store(memory.Open()),
				RendezvousTimeout: 2 * patience,
			})
			if err != nil {
				t.Fatal(err)
			}
			if !c.ready {
				a.Interrupt(sigTerminate)
			} else {
				go func() {
					await(1)
					a.Interrupt(sigTerminate)
				}()
			}
			const stopped = "node 1 was stopped by SIGTERM before all nodes joined"
			if o, err := a.Run(t.Context()); o.Code != 130 || !o.Interrupted || err == nil ||
				!strings.Contains(err.Error(), stopped) {
				t.Errorf("outcome %+v, error %v", o, err)
			}
			want := fmt.Sprintf("as reported by node 1 (host %s, pid %d): %s", hostName(t), os.Getpid(), stopped)
			for range 2 {
				if err := <-errs; err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want one that says %q", err, want)
				}
			}
		})
	}
}

// TestDuplicateStopped: stopping an agent whose node slot another has does not end the job of that one.
func TestDuplicateStopped(t *testing.T) {
	memory := rendezvous.NewMemory()
	ghost(t, memory, registration{Heartbeat: time.Hour})
	a, err := New(Config{
		Command: []string{"true"}, Workers: 1, Nodes: 2, Node: 1, Store: memory.Open(),
		HeartbeatTimeout: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	a.Interrupt(sigInterrupt)
	if o, err := a.Run(t.Context()); o.Code != 130 || err == nil ||
		!strings.Contains(err.Error(), "node 1 was stopped by SIGINT (Ctrl-C)") {
		t.Errorf("outcome %+v, error %v", o, err)
	}
	if text, _, err := memory.Open().Get(t.Context(), "=launch/lockstep/event/ended"); !errors.Is(err,
		rendezvous.ErrNotFound) {
		t.Errorf("how the job has ended: %s, %v", text, err)
	}
}

// TestLostAgent: without restarts an agent without heartbeats ends the job on the others, which name it.
func TestLostAgent(t *testing.T) {
	t.Parallel() // it waits for seconds
	race.SkipShort(t, "it waits 5 s for a heartbeat")
	memory := rendezvous.NewMemory()
	ghost(t, memory, registration{Heartbeat: ghostTime})
	err := runNode(t, t.Context(),
		Config{Nodes: 2, Store: memory.Open(), HeartbeatTimeout: ghostTime, Grace: 100 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "node 1 (host far, pid 42) is lost: no heartbeat for") {
		t.Errorf("error %v, want one that names node 1", err)
	}
}

// ghostTime allows an agent two seconds without processor time before it doubts the store.
const ghostTime = 4 * time.Second

// ghost has node 1 of 2 join epoch 0 and then do nothing.
func ghost(t *testing.T, memory *rendezvous.Memory, c registration) (nonce string) {
	t.Helper()
	c.Node, c.Host, c.PID, c.Workers, c.Address, c.Ports = 1, "far", 42, 1, "127.0.0.1", []int{1}
	a := &Agent{cfg: Config{ID: "lockstep", Node: 1, Nodes: 2, Store: memory.Open(), HeartbeatTimeout: time.Hour}}
	p := newPeers(a)
	if err := p.takeSlot(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := p.renew(t.Context(), 0, c); err != nil {
		t.Fatal(err)
	}
	return p.nonce
}

// TestLostAtTheStart: an agent that is lost between the last read of the slots and the start of the epoch is
// detected too.
func TestLostAtTheStart(t *testing.T) {
	t.Parallel() // it waits for seconds
	memory := rendezvous.NewMemory()
	nonce := ghost(t, memory, registration{Heartbeat: ghostTime})
	store := memory.Open()
	p := newPeers(&Agent{cfg: Config{ID: "lockstep", Node: 1, Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
	slots, _, _, err := p.read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	late := *slots[1]
	if err := p.lose(t.Context(), 1, nonce, time.Second); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- runNode(t, t.Context(),
			Config{Nodes: 2, Store: memory.Open(), HeartbeatTimeout: ghostTime, Grace: 100 * time.Millisecond})
	}()
	for slots[0] == nil || !slots[0].Ready {
		time.Sleep(time.Millisecond)
		if slots, _, _, err = p.read(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	members := &epochMembers{Slots: []nodeSlot{*slots[0], late}}
	if err := store.Set(t.Context(), p.keyOf(members), encode(members)); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil ||
		!strings.Contains(err.Error(), "node 1 (host far, pid 42) is lost: no heartbeat for") {
		t.Errorf("error %v, want one that names node 1", err)
	}
}

// muted is a store that can stop to accept changes without reporting it.
type muted struct {
	rendezvous.Store
	now atomic.Bool
}

func (m *muted) Set(ctx context.Context, key string, value []byte) error {
	if m.now.Load() {
		return rendezvous.ErrLost
	}
	return m.Store.Set(ctx, key, value)
}

// otherNode returns the reports of another agent's node.
func otherNode(store rendezvous.Store) *membership.Reporter {
	return membership.NewReporter(membership.ReporterConfig{
		Store: store, Key: rendezvous.JobKey("lockstep", status.Heartbeats), Node: 1, Order: 1, Nonce: "other",
		Timing: membership.Timing{Every: time.Second, Min: time.Second / 5, Timeout: missedMax * time.Second},
	})
}

// mayReport permits an agent without a slot to report for its node.
func mayReport(t *testing.T, p *peers) {
	t.Helper()
	if err := p.store.Set(t.Context(), p.reporterKey(), []byte(p.nonce)); err != nil {
		t.Fatal(err)
	}
}

// TestReportsAreFenced: the store refuses the reports, events and failure records of an agent whose slot another has
// taken, at whichever moment it was suspended, and those of an agent of a job that is over.
func TestReportsAreFenced(t *testing.T) {
	memory := rendezvous.NewMemory()
	newNode := func(store rendezvous.Store) *peers {
		return newPeers(&Agent{cfg: Config{ID: "lockstep", Node: 1, Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
	}
	sit := func(p *peers) error {
		return p.takeSlot(t.Context(), registration{Node: 1, Workers: 1, Ports: []int{1}})
	}
	replace := func(p, by *peers) {
		t.Helper()
		if err := by.lose(t.Context(), 1, p.nonce, time.Second); err != nil {
			t.Fatal(err)
		}
		if err := sit(by); err != nil {
			t.Fatal(err)
		}
	}
	report := func(p *peers, want error) {
		t.Helper()
		if err := p.reporter.First(t.Context()); !errors.Is(err, want) {
			t.Errorf("a report: %v, want %v", err, want)
		}
	}
	first, second, fourth := newNode(memory.Open()), newNode(memory.Open()), newNode(memory.Open())
	if err := sit(first); err != nil {
		t.Fatal(err)
	}
	replace(first, second)
	report(first, rendezvous.ErrFenced)
	report(second, nil)
	for _, p := range []*peers{first, second} {
		stop, members := &epochStop{}, &epochMembers{ofEpoch: ofEpoch{5}}
		p.publish(stop)
		p.propose(members)
		p.record(failure.Record{Job: "lockstep", Worker: 1})
		p.writes.Wait()
		p.work.Wait()
		for _, key := range []string{p.keyOf(stop), p.keyOf(members), "lockstep/0/failure/1"} {
			if _, _, err := memory.Open().Get(t.Context(), key); (err == nil) != (p == second) {
				t.Errorf("%s of the agent that was replaced (%v): %v", key, p == first, err)
			}
		}
	}
	suspended := &between{Store: memory.Open(), key: second.reporterKey()}
	third := newNode(suspended) // it has taken the slot, and then another one takes it
	suspended.call = func() { replace(third, fourth) }
	if err := second.lose(t.Context(), 1, second.nonce, time.Second); err != nil {
		t.Fatal(err)
	}
	if err := sit(third); !errors.Is(err, errReplaced) {
		t.Errorf("an agent that was suspended: %v, want %v", err, errReplaced)
	}
	report(third, rendezvous.ErrFenced)
	report(fourth, nil)
	fourth.clean()
	report(fourth, rendezvous.ErrFenced)
	if entries, _, err := memory.Open().List(t.Context(), "lockstep/"); len(entries) > 0 || err != nil {
		t.Errorf("the job has left %v, %v", entries, err)
	}
}

// readOnly is a store that does not permit changes, as etcd for a user without the role.
type readOnly struct{ rendezvous.Store }

var errReadOnly = errors.New("permission denied")

func (readOnly) Create(context.Context, string, []byte) ([]byte, bool, error) {
	return nil, false, errReadOnly
}

// TestReadOnlyStore: an agent whose store does not permit changes ends with the reason.
func TestReadOnlyStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := readOnly{rendezvous.NewMemory().Open()}
		p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 1, Store: store, HeartbeatTimeout: 30 * time.Second}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		begin := time.Now()
		err := p.takeReports(ctx)
		if !errors.Is(err, errReadOnly) || !strings.Contains(err.Error(), `"=launch/lockstep/reporter/0"`) {
			t.Errorf("%v, want %v", err, errReadOnly)
		}
		if after := time.Since(begin); after > 20*time.Second {
			t.Errorf("after %v", after)
		}
	})
}

// TestDoubtedStore: a store that shows no heartbeats is lost if that lasts, however often it has happened for a
// moment before.
func TestDoubtedStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &muted{Store: rendezvous.NewMemory().Open()}
		p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 2, Store: store, HeartbeatTimeout: missedMax * time.Second}})
		mayReport(t, p)
		p.start()
		defer p.close(false)
		p.work.Go(func() {
			otherNode(store).Run(p.ctx)
		})
		for range 3 {
			time.Sleep(5 * time.Minute)
			store.now.Store(true)
			time.Sleep((missedMax + 1) * time.Second) // the second check comes after 14 s
			store.now.Store(false)
		}
		time.Sleep(5 * time.Minute)
		select {
		case in := <-p.inputs:
			t.Fatalf("got %+v, though the store was back each time", in)
		default:
		}
		store.now.Store(true)
		in := <-p.inputs
		if loss, is := in.(storeLost); !is || !errors.Is(loss.err, rendezvous.ErrLost) {
			t.Errorf("got %+v, want that the store is lost", in)
		}
	})
}

// TestStoreBackAfterNormalExit checks that an agent whose workers have exited normally waits for the other nodes for as
// long as they need when the store is back after an outage, and gives up when it is not.
func TestStoreBackAfterNormalExit(t *testing.T) {
	for name, back := range map[string]bool{"back": true, "lost": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				memory := rendezvous.NewMemory()
				store, other := &muted{Store: memory.Open()}, memory.Open()
				a := &Agent{cfg: Config{
					ID: "lockstep", Nodes: 2, Store: store,
					HeartbeatTimeout: missedMax * time.Second, RendezvousTimeout: 2 * time.Minute,
				}}
				a.peers = newPeers(a)
				p := a.peers
				mayReport(t, p)
				p.start()
				defer p.close(false)
				p.work.Go(func() {
					otherNode(other).Run(p.ctx)
				})
				s := a.newState()
				s.phase, s.slots = running, make([]*nodeSlot, 2)
				s.epoch = epoch{layout: layout{slots: make([]nodeSlot, 2)}, ends: map[int]nodeEnd{0: {}}}
				a.processes = &processes{agent: a}
				watched := make(chan struct{})
				go func() { defer close(watched); s = a.run(t.Context(), s, nil) }()

				time.Sleep(time.Minute)
				store.now.Store(true)
				time.Sleep(time.Minute)
				store.now.Store(!back)
				time.Sleep(10 * time.Minute)
				select {
				case <-watched:
					if back {
						t.Error("the agent gave the other node up, though the store was back")
					}
				default:
					if !back {
						t.Error("the agent still waits for the other node, though the store is lost")
					}
				}
				if err := other.Set(t.Context(), p.keyOf(&nodeEnd{Node: 1}), []byte(`{"node": 1}`)); err != nil {
					t.Fatal(err)
				}
				<-watched
				if e := s.epoch; e.gaveUp == back || e.storeOut == back {
					t.Errorf("given up: %v, the store is lost: %v; want both to be %v", e.gaveUp, e.storeOut, !back)
				}
			})
		})
	}
}

// forgetful is a store whose first write of each key fails with an unknown result: a key to create was not written,
// a key to change was.
type forgetful struct {
	rendezvous.Store
	mu   sync.Mutex
	seen map[string]bool
}

func (f *forgetful) first(key string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	seen := f.seen[key]
	f.seen[key] = true
	return !seen && strings.Contains(key, "/event/")
}

func (f *forgetful) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	if f.first("create " + key) {
		return nil, false, errors.New("no leader is elected")
	}
	return f.Store.Create(ctx, key, value)
}

func (f *forgetful) Swap(ctx context.Context, key string, revision uint64, value []byte) (bool, error) {
	done, err := f.Store.Swap(ctx, key, revision, value)
	if f.first("swap " + key) {
		return false, errors.New("there is no leader any more")
	}
	return done, err
}

// TestForgetfulStore: a node slot, the start of an epoch and the end of the job are written again if it is unknown
// whether they were written.
func TestForgetfulStore(t *testing.T) {
	t.Parallel() // it waits for seconds
	memory := rendezvous.NewMemory()
	for i, n := range launchNodes(t, `exit 3`,
		func(c *Config) { c.Store = &forgetful{Store: memory.Open(), seen: map[string]bool{}} }, 1, 1) {
		if o := n.wait(t); o.Code != 3 {
			t.Errorf("node %d: outcome %+v", i, o)
		}
	}
	if _, _, err := memory.Open().Get(t.Context(), "=launch/lockstep/event/ended"); err != nil {
		t.Errorf("how the job has ended: %v", err)
	}
}

// TestNotReplaced: the others wait for a lost agent, and the error names it if no agent replaces it.
func TestNotReplaced(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "it waits 8 s for a node")
	memory := rendezvous.NewMemory()
	ghost(t, memory, registration{RestartsMax: 1, Heartbeat: ghostTime})
	out := &output{}
	err := runNode(t, t.Context(), Config{
		Nodes: 2, Store: memory.Open(), HeartbeatTimeout: ghostTime, Grace: 100 * time.Millisecond, RestartsMax: 1,
		RendezvousTimeout: 3 * time.Second, Stderr: out,
	})
	for _, want := range []string{
		"node 1 (host far, pid 42) is lost, and no agent with --node-rank 1 has replaced it",
		"1 of 2 nodes joined (node 0 (host ",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one that says %q", err, want)
		}
	}
	for _, want := range []string{
		"node 1 (host far, pid 42) is lost, and its workers with it: no heartbeat for",
		"waiting up to 3s for another agent with --node-rank 1", "who     worker 1 of 2, node 1, host far",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("not said: %q in\n%s", want, out)
		}
	}
	if store := memory.Open(); true {
		left, _, err := store.List(t.Context(), "")
		if err != nil || len(left) != 1 ||
			!strings.Contains(string(left[0].Value), "no agent with --node-rank 1 has replaced it") {
			t.Errorf("left in the store: %v, %v, want how the job ended", left, err)
		}
	}
}

// TestSilentNode: a node whose agent does not answer is the root cause of its workers' loss; the workers that lost
// them are not.
func TestSilentNode(t *testing.T) {
	t.Parallel() // it waits for seconds
	memory := rendezvous.NewMemory()
	ghost(t, memory, registration{Heartbeat: ghostTime})
	out := &output{}
	a, err := New(Config{
		Command: []string{"sh", "-c", `echo '{"epoch":0,"worker":0,"kind":"lost","message":"lost worker 1","blames":[1],"time":"2026-01-02T03:04:05Z"}' > $LOCKSTEP_RECORDS/failure-0-0.json; exit 1`},
		Workers: 1, Nodes: 2, Store: memory.Open(), HeartbeatTimeout: ghostTime, Stderr: out,
	})
	if err != nil {
		t.Fatal(err)
	}
	o, err := a.Run(t.Context())
	if err == nil || o.Report == nil || o.Report.Root.Worker != 1 || o.Report.Root.Host != "far" {
		t.Errorf("outcome %+v, error %v:\n%s", o, err, out)
	}
	if want := "what    the agent of its node 1 (host far, pid 42) is lost: no heartbeat " +
		"for"; !strings.Contains(out.String(), want) {
		t.Errorf("not said: %q in\n%s", want, out)
	}
}

// late is a store that makes a change only when the test permits it, as if the request had been delayed in a
// connection.
type late struct {
	rendezvous.Store
	asked, let chan struct{}
}

func (l *late) Swap(ctx context.Context, key string, revision uint64, value []byte) (bool, error) {
	l.asked <- struct{}{}
	<-l.let
	return l.Store.Swap(ctx, key, revision, value)
}

// TestLostAgentEndsNothing: an agent that the others have declared lost does not end the job, even if it began to do
// so before.
func TestLostAgentEndsNothing(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprint("wants to before it is lost: ", before), func(t *testing.T) {
			memory := rendezvous.NewMemory()
			store := &late{Store: memory.Open(), asked: make(chan struct{}), let: make(chan struct{})}
			newNode := func(store rendezvous.Store) *peers {
				return newPeers(&Agent{cfg: Config{ID: "lockstep", Node: 1, Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
			}
			p := newNode(store)
			if err := p.takeSlot(t.Context(), registration{Node: 1, Workers: 1, Ports: []int{1}}); err != nil {
				t.Fatal(err)
			}
			lose := func() {
				if err := newNode(memory.Open()).lose(t.Context(), 1, p.nonce, time.Second); err != nil {
					t.Error(err)
				}
			}
			if before {
				go func() {
					<-store.asked
					lose()
					close(store.let)
				}()
			} else {
				lose()
				close(store.let)
			}
			p.endJob(t.Context(), 1, "it is over")
			if o, _, err := newNode(memory.Open()).readEnd(t.Context()); o != nil || err != nil {
				t.Errorf("the job has ended: %v, %v", o, err)
			}
		})
	}
}

// TestEndIsInTheSlot: the end of the job is known as soon as its agent has written it into its slot, and an agent
// that joins too late gets it.
func TestEndIsInTheSlot(t *testing.T) {
	memory := rendezvous.NewMemory()
	p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 2, Store: memory.Open(), HeartbeatTimeout: time.Hour}})
	if err := p.takeSlot(t.Context(), registration{Workers: 1, Ports: []int{1}}); err != nil {
		t.Fatal(err)
	}
	if !p.signEnd(t.Context(), &jobEnd{Code: 3, Text: "enough"}) { // it stops before it writes the key for late agents
		t.Fatal("not signed")
	}
	err := runNode(t, t.Context(), Config{Node: 1, Nodes: 2, Store: memory.Open(), StoreHolder: "node 0"})
	if err == nil || !strings.Contains(err.Error(), "the job has ended with code 3 at ") || !strings.Contains(err.Error(),
		"enough") {
		t.Errorf("error %v", err)
	}
	out := &output{}
	late := Config{Node: 1, Nodes: 2, Store: memory.Open(), RendezvousTimeout: 2 * patience, Stderr: out}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- runNode(t, ctx, late) }()
	out.await(t, "an earlier run of job \"lockstep\" is over: ")
	cancel() // it waits for the other node
	if err := <-ended; err == nil {
		t.Error("a run that was canceled ended without an error")
	}
}

// between is a store that calls a function once, before it changes a key.
type between struct {
	rendezvous.Store
	key  string
	call func()
	once sync.Once
}

func (b *between) before(key string) {
	if key == b.key && b.call != nil {
		b.once.Do(b.call)
	}
}

func (b *between) Swap(ctx context.Context, key string, revision uint64, value []byte) (bool, error) {
	b.before(key)
	return b.Store.Swap(ctx, key, revision, value)
}

func (b *between) Delete(ctx context.Context, key string) error {
	b.before(key)
	return b.Store.Delete(ctx, key)
}

// takeSlot takes the slot of a node, as the agent of one that has this registration.
func (p *peers) takeSlot(ctx context.Context, mine registration) error {
	cfg := Config{ID: p.job, Node: p.node, Nodes: p.nodes, Store: p.store, HeartbeatTimeout: time.Hour}
	a := &Agent{cfg: cfg, peers: p}
	s := a.newState()
	s.mine = mine
	s, actions := decide(s, time.Now(), begin{})
	for len(actions) > 0 && s.result == nil && s.phase != joining {
		in := a.perform(ctx, &s, actions[0])
		if actions = actions[1:]; in != nil {
			var more []action
			s, more = decide(s, time.Now(), in)
			actions = append(actions, more...)
		}
	}
	if s.result != nil {
		return s.result.err
	}
	return nil
}

// readEnd returns how the job has ended, nil if it has not, and the messages that hold it.
func (p *peers) readEnd(ctx context.Context) (o *jobEnd, held []message, err error) {
	messages, _, err := p.readMessages(ctx)
	o, held = endOf(messages)
	return o, held, err
}

// TestClearingEarlierRun: an agent that removes the end of an earlier run from a lasting store does not remove a
// node slot that another agent of the new run has taken meanwhile, nor the end of the new run, and leaves no end of the
// earlier run that is written meanwhile.
func TestClearingEarlierRun(t *testing.T) {
	begin := func(t *testing.T) (*rendezvous.Memory, func(node int, store rendezvous.Store) *peers, func(*peers)) {
		memory := rendezvous.NewMemory()
		newNode := func(node int, store rendezvous.Store) *peers {
			return newPeers(&Agent{cfg: Config{ID: "lockstep", Node: node, Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
		}
		sit := func(p *peers) {
			t.Helper()
			if err := p.takeSlot(t.Context(), registration{Node: p.node, Workers: 1, Ports: []int{1}}); err != nil {
				t.Fatal(err)
			}
		}
		return memory, newNode, sit
	}
	t.Run("taken", func(t *testing.T) {
		memory, newNode, sit := begin(t)
		earlier, next := newNode(1, memory.Open()), newNode(1, memory.Open())
		sit(earlier)
		earlier.endJob(t.Context(), 3, "enough")
		sit(newNode(0, &between{Store: memory.Open(), key: next.slotKey(), call: func() { sit(next) }}))
		if err := next.renew(t.Context(), 0, next.mine.registration); err != nil {
			t.Errorf("the agent that has taken its slot meanwhile: %v", err)
		}
	})
	t.Run("ended", func(t *testing.T) {
		memory, newNode, sit := begin(t)
		earlier, next := newNode(1, memory.Open()), newNode(0, memory.Open())
		sit(earlier)
		earlier.endJob(t.Context(), 3, "enough")
		end := func() { // the new run begins with node 0, and ends, while its node 1 removes the end of the earlier one
			sit(next)
			next.endJob(t.Context(), 7, "no more")
		}
		late := newNode(1, &between{Store: memory.Open(), key: earlier.slotKey(), call: end})
		err := late.takeSlot(t.Context(), registration{Node: 1, Workers: 1, Ports: []int{1}})
		if ended := (*jobEndedError)(nil); !errors.As(err, &ended) || ended.Code != 7 {
			t.Errorf("error %v, want one that says how the new run has ended", err)
		}
		if o, held, err := next.readEnd(t.Context()); err != nil || o == nil || o.Code != 7 || len(held) != 2 {
			t.Errorf("the end of the new run: %v, in %d keys, %v", o, len(held), err)
		}
	})
	t.Run("left", func(t *testing.T) {
		memory, newNode, sit := begin(t)
		earlier := newNode(1, memory.Open())
		sit(earlier)
		earlier.endJob(t.Context(), 3, "enough")
		leave := func() {
			if !earlier.leave() {
				t.Error("the agent of the earlier run has not left")
			}
		}
		next := newNode(0, &between{Store: memory.Open(), key: earlier.slotKey(), call: leave})
		sit(next)
		if earlier.leave() {
			t.Error("the agent of the earlier run has written to a slot that was cleared")
		}
		if o, _, err := next.readEnd(t.Context()); o != nil || err != nil {
			t.Errorf("the new run has ended: %v, %v", o, err)
		}
	})
}

// cuttable is a store whose link can be cut: calls wait until it is back.
type cuttable struct {
	rendezvous.Store
	mu   sync.Mutex
	back chan struct{} // closed when it is; nil: it is not cut
}

func (c *cuttable) cut() (back func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.back = make(chan struct{})
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		close(c.back)
		c.back = nil
	}
}

func (c *cuttable) wait(ctx context.Context) error {
	c.mu.Lock()
	back := c.back
	c.mu.Unlock()
	if back == nil {
		return nil
	}
	select {
	case <-back:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *cuttable) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	if err := c.wait(ctx); err != nil {
		return nil, 0, err
	}
	return c.Store.Get(ctx, key)
}

func (c *cuttable) Set(ctx context.Context, key string, value []byte) error {
	if err := c.wait(ctx); err != nil {
		return err
	}
	return c.Store.Set(ctx, key, value)
}

func (c *cuttable) Create(ctx context.Context, key string, value []byte) ([]byte, bool, error) {
	if err := c.wait(ctx); err != nil {
		return nil, false, err
	}
	return c.Store.Create(ctx, key, value)
}

func (c *cuttable) Swap(ctx context.Context, key string, revision uint64, value []byte) (bool, error) {
	if err := c.wait(ctx); err != nil {
		return false, err
	}
	return c.Store.Swap(ctx, key, revision, value)
}

func (c *cuttable) List(ctx context.Context, prefix string) ([]rendezvous.Entry, uint64, error) {
	if err := c.wait(ctx); err != nil {
		return nil, 0, err
	}
	return c.Store.List(ctx, prefix)
}

func (c *cuttable) Changes(ctx context.Context, prefix string, after uint64) ([]rendezvous.Entry, uint64, error) {
	entries, revision, err := c.Store.Changes(ctx, prefix, after)
	if cut := c.wait(ctx); cut != nil {
		return nil, 0, cut
	}
	return entries, revision, err
}

// startCuttable starts two nodes, whose workers end in epoch 1, and cuts node 1 off.
func startCuttable(t *testing.T, change func(*Config)) (nodes []*started, back func()) {
	t.Helper()
	memory := rendezvous.NewMemory()
	link := &cuttable{Store: memory.Open()}
	nodes = launchNodes(t, untilReplaced, func(c *Config) {
		c.Store, c.HeartbeatTimeout, c.RestartsMax, c.Grace = memory.Open(), 2*time.Second, 3, 500*time.Millisecond
		if c.Node == 1 {
			c.Store = link
		}
		if change != nil {
			change(c)
		}
	}, 1, 1)
	for i, n := range nodes {
		n.out.await(t, fmt.Sprintf("[rank%d] epoch 0 of %d of 2\n", i, i))
	}
	return nodes, link.cut()
}

// TestCutOffAgentComesBack: an agent that cannot reach the store ends its workers, but not the job, and takes its
// node slot again when it can.
func TestCutOffAgentComesBack(t *testing.T) {
	t.Parallel() // it waits for seconds
	nodes, back := startCuttable(t, nil)
	nodes[1].err.await(t, "lockstep run: node 1 waits up to 5m0s to reach the other nodes again\n")
	nodes[0].err.await(t, "waiting up to 5m0s for another agent with --node-rank 1\n")
	back()
	for i, n := range nodes {
		if o := n.wait(t); o.Code != 0 || o.Restarts != 1 {
			t.Errorf("node %d: outcome %+v\n%s", i, o, n.err)
		}
	}
	for i, want := range []string{fmt.Sprintf("lockstep run: node 1 (host %s, pid %d) is back\n", hostName(t),
		os.Getpid()), "lockstep run: node 1 reaches the other nodes again\n"} {
		if said := nodes[i].err.String(); !strings.Contains(said, want) || !strings.Contains(said,
			"starting all 2 workers again: restart 1 of 3\n") {
			t.Errorf("node %d did not say %q:\n%s", i, want, said)
		}
	}
	if said := nodes[1].err.String(); strings.Contains(said, "node 0 (") {
		t.Errorf("the node that was cut off blames the other:\n%s", said)
	}
}

// TestStoreIsAwaitedOnce: an agent whose workers have exited normally waits for a lost store, for the end of the other
// nodes' workers, up to the rendezvous timeout, and not a second time for the next epoch.
func TestStoreIsAwaitedOnce(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "it waits 10 s for a store")
	memory := rendezvous.NewMemory()
	link, out := &cuttable{Store: memory.Open()}, &output{}
	cfg := Config{
		Command: []string{"sh", "-c", `[ $RANK = 1 ] && exit 0; while :; do sleep 0.05; done`}, Workers: 1, Nodes: 2,
		HeartbeatTimeout: 2 * time.Second, RestartsMax: 3, RendezvousTimeout: 3 * time.Second, Stderr: out,
	}
	var ended [2]chan error
	for i, store := range []rendezvous.Store{memory.Open(), link} {
		cfg.Node, cfg.Store, ended[i] = i, store, make(chan error, 1)
		a, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer func() { cancel(); <-ended[i] }()
		go func() {
			_, err := a.Run(ctx)
			ended[i] <- err
			close(ended[i])
		}()
	}
	eventually(t, "the end of node 1's worker", func() bool {
		_, _, err := memory.Open().Get(t.Context(), "=launch/lockstep/event/end/0/1")
		return err == nil
	})
	link.cut()
	select {
	case err := <-ended[1]:
		if err == nil || !strings.Contains(err.Error(), "node 1 (host ") ||
			!strings.Contains(err.Error(), "cannot reach the rendezvous store") {
			t.Errorf("node 1: got %v, want that it cannot reach the store", err)
		}
	case <-time.After(patience):
		t.Fatalf("node 1 does not end:\n%s", out)
	}
	if text := out.String(); strings.Contains(text, "to reach the other nodes again") {
		t.Errorf("node 1 has waited a second time:\n%s", text)
	}
}

// TestCutOffAgentIsStopped: the user can stop an agent that cannot reach the store, which does not end the job of
// the others.
func TestCutOffAgentIsStopped(t *testing.T) {
	t.Parallel() // it waits for seconds
	race.SkipShort(t, "it waits 5 s for a heartbeat")
	memory := rendezvous.NewMemory()
	link := &cuttable{Store: memory.Open()}
	type result struct {
		o   Outcome
		err error
	}
	var agents [2]*Agent
	var said [2]*output
	var ended [2]chan result
	for i := range agents {
		said[i], ended[i] = &output{}, make(chan result, 1)
		cfg := Config{
			Command: []string{
				"sh", "-c",
				untilReplaced,
			}, Workers: 1, Node: i, Nodes: 2, Store: memory.Open(), HeartbeatTimeout: 2 * time.Second, RestartsMax: 3,
			Grace: 500 * time.Millisecond, Stdout: said[i], Stderr: said[i],
		}
		if i == 1 {
			cfg.Store = link
		}
		a, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		agents[i] = a
		go func() {
			o, err := a.Run(t.Context())
			ended[i] <- result{o, err}
		}()
	}
	for i, out := range said {
		out.await(t, fmt.Sprintf("[rank%d] epoch 0 of %d of 2\n", i, i))
	}
	back := link.cut()
	said[0].await(t, "waiting up to 5m0s for another agent with --node-rank 1\n")
	said[1].await(t, "lockstep run: node 1 waits up to 5m0s to reach the other nodes again\n")
	stop := func(i int, want string) {
		agents[i].Interrupt(sigInterrupt)
		select {
		case r := <-ended[i]:
			if r.o.Code != 130 || !r.o.Interrupted || r.err == nil || !strings.Contains(r.err.Error(), want) {
				t.Errorf("node %d: outcome %+v, error %v, want %s", i, r.o, r.err, want)
			}
		case <-time.After(patience):
			t.Fatalf("node %d does not end:\n%s", i, said[i])
		}
	}
	stop(1, "cannot reach the rendezvous store, so the state of the other nodes is unknown")
	back()
	p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 2, Store: memory.Open(), HeartbeatTimeout: time.Hour}})
	if o, _, err := p.readEnd(t.Context()); o != nil || err != nil {
		t.Errorf("the job has ended: %v, %v", o, err)
	}
	stop(0, "node 0 was stopped by SIGINT (Ctrl-C)")
}

// TestLostStore: when the agent that serves the store has exited, the others end their workers and report it.
func TestLostStore(t *testing.T) {
	for _, restarts := range []int{0, 3} { // a store that has ended is not waited for
		t.Run(fmt.Sprint(restarts, " restarts"), func(t *testing.T) { lostStore(t, restarts) })
	}
}

func lostStore(t *testing.T, restarts int) {
	key := secret.New()
	opened, err := StoreConfig{Backend: "tcp", ID: "job", Secret: key, Serve: true}.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other, err := StoreConfig{
		Backend: "tcp", Endpoint: strings.TrimPrefix(opened.URL, "tcp://"), ID: "job",
		Secret: key,
	}.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	out := &output{}
	script := func(c *Config) {
		c.ID, c.Nodes, c.Stdout, c.Command, c.Workers = "job", 2, out, []string{
			"sh", "-c",
			"echo ready; while :; do sleep 0.02; done",
		}, 1
		c.RestartsMax = restarts
	}
	var cfgs [2]Config
	for i, p := range []*JobStore{opened, other} {
		script(&cfgs[i])
		cfgs[i].Node, cfgs[i].Store, cfgs[i].StoreURL = i, p.Store, p.URL
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	errs := make(chan error, 2)
	for i := range cfgs {
		a, err := New(cfgs[i])
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := a.Run(ctx)
			errs <- err
		}()
	}
	out.await(t, "[rank0] ready")
	out.await(t, "[rank1] ready")
	opened.Close()
	for range 2 {
		select {
		case err := <-errs:
			if err == nil || !strings.Contains(err.Error(), "cannot be reached any more") {
				t.Errorf("error %v", err)
			}
		case <-time.After(patience):
			t.Fatal("an agent does not end")
		}
	}
}

func TestWrongSecretIsRefused(t *testing.T) {
	opened, err := StoreConfig{Backend: "tcp", ID: "job", Secret: secret.New(), Serve: true}.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p, err := StoreConfig{
		Backend: "tcp", Endpoint: strings.TrimPrefix(opened.URL, "tcp://"), ID: "job",
		Secret: secret.New(),
	}.Open(ctx)
	if err == nil {
		p.Close()
		t.Fatal("a stranger was let in")
	}
}

func TestServeElsewhere(t *testing.T) {
	_, err := StoreConfig{Backend: "tcp", Endpoint: "192.0.2.7:29400", ID: "job", Serve: true}.Open(t.Context())
	if err == nil || !strings.Contains(err.Error(), "192.0.2.7") ||
		!strings.Contains(err.Error(), "node 0 serves the store") {
		t.Errorf("error %v, want one that says that the endpoint must be node 0's", err)
	}
}

func TestEtcdURL(t *testing.T) {
	for in, want := range map[string]string{
		"a:1": "etcd://a:1/lockstep", "a:1,b:2/p/q": "etcd://a:1,b:2/p/q",
		"https://a:1,https://[::1]:2/": "etcds://a:1,[::1]:2/lockstep",
		"":                             "", "host": "", "ftp://h:1": "", "h:1,,h:2": "", "http://": "",
	} {
		got, err := etcdURL(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: got %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"root:hunter2@a:1", "root:hunter2/x@a:1", "root:hunter2,x@a:1", "a:1,root:hunter2/@b:2"} {
		if _, err := etcdURL(in); err == nil || strings.Contains(err.Error(), "hunter2") ||
			!strings.Contains(err.Error(), "set ETCDCTL_USER and ETCDCTL_PASSWORD") {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestParseHosts(t *testing.T) {
	for in, want := range map[string]string{
		"a":                            "[{a 7}]",
		"a:2,b:3":                      "[{a 2} {b 3}]",
		"u@a:2, b":                     "[{u@a 2} {b 7}]",
		"[fd00::1]:2,fd00::2,10.0.0.1": "[{fd00::1 2} {fd00::2 7} {10.0.0.1 7}]",
		"":                             "", "a,,b": "", "a:0": "", "a:x": "", "a,a:2": "", "-oProxyCommand=x": "", "a b": "",
		":2": "",
	} {
		got, err := ParseHosts(in, 7)
		if err != nil && want != "" || err == nil && fmt.Sprint(got) != want {
			t.Errorf("%q: got %v, %v; want %s", in, got, err, want)
		}
	}
}

func FuzzParseHosts(f *testing.F) {
	f.Add("u@a:2,[fd00::1]:3,b")
	f.Fuzz(func(t *testing.T, s string) {
		hosts, err := ParseHosts(s, 1)
		for _, h := range hosts {
			if err == nil && (h.Name == "" || h.Workers < 1 || h.Name[0] == '-') {
				t.Errorf("%q: host %+v", s, h)
			}
		}
	})
}

// fakeSSH is an ssh that runs the line in a shell here, from another folder, and records its arguments.
func fakeSSH(t *testing.T) (command []string, notes string) {
	t.Helper()
	dir := t.TempDir()
	notes = filepath.Join(dir, "notes")
	path := filepath.Join(dir, "ssh")
	text := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> '%s'\ncd /\nFAKE_HOST=$1 exec sh -c \"$2\"\n", notes)
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return []string{path}, notes
}

// asFollower is the command of an agent on another host.
func followCommand() []string { return []string{"/usr/bin/env", asFollower + "=1", os.Args[0]} }

type remoteRun struct {
	remote   *Remote
	out, err *output
	code     chan int
	failure  error
}

func launchRemote(t *testing.T, script string, change func(*Remote)) *remoteRun {
	t.Helper()
	r := &remoteRun{out: &output{}, err: &output{}, code: make(chan int, 1)}
	ssh, _ := fakeSSH(t)
	r.remote = &Remote{
		Config: Config{
			Command: []string{"sh", "-c", script}, Dir: t.TempDir(), ID: "job", RendezvousTimeout: patience, Grace: time.Minute,
			Stdout: r.out, Stderr: r.err,
			Env: []string{"MINE=it's mine"},
		},
		Hosts: []Host{{"a", 2}, {"b", 1}}, SSH: ssh, Agent: followCommand(),
		Address: "127.0.0.1:0", Secret: secret.New(),
	}
	if change != nil {
		change(r.remote)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		code, err := r.remote.Run(ctx)
		r.failure = err
		r.code <- code
	}()
	return r
}

func (r *remoteRun) wait(t *testing.T) int {
	t.Helper()
	select {
	case code := <-r.code:
		return code
	case <-time.After(patience):
		t.Fatalf("it does not return; written:\n%s%s", r.out, r.err)
		return -1
	}
}

func TestHosts(t *testing.T) {
	var dir, key, notes string
	r := launchRemote(t, `echo "$FAKE_HOST $RANK of $WORLD_SIZE in $PWD, $MINE"; [ "$LOCKSTEP_SECRET" ] && echo safe`,
		func(r *Remote) {
			dir, key = r.Config.Dir, r.Secret.Text()
			r.SSH, notes = fakeSSH(t)
		})
	if code := r.wait(t); code != 0 || r.failure != nil {
		t.Fatalf("code %d, %v:\n%s", code, r.failure, r.err)
	}
	for rank, host := range []string{"a", "a", "b"} {
		for _, want := range []string{
			fmt.Sprintf("[rank%d] %s %d of 3 in %s, it's mine\n", rank, host, rank, dir),
			fmt.Sprintf("[rank%d] safe\n", rank),
		} {
			if !strings.Contains(r.out.String(), want) {
				t.Errorf("not written: %q in\n%s", want, r.out)
			}
		}
	}
	text, err := os.ReadFile(notes)
	if err != nil || strings.Count(string(text), "exec") != 2 || strings.Contains(string(text), key) ||
		strings.Contains(string(text), "MINE") {
		t.Errorf("what ssh was given: %s, %v", text, err)
	}
}

// TestHostsFail: the exit code is the root cause's, and one block reports it.
func TestHostsFail(t *testing.T) {
	t.Parallel() // it waits for seconds
	r := launchRemote(t, `[ $RANK = 2 ] && exit 5; while :; do sleep 0.02; done`,
		func(r *Remote) { r.Config.RestartsMax = 1 })
	if code := r.wait(t); code != 5 || r.failure != nil {
		t.Fatalf("code %d, %v:\n%s", code, r.failure, r.err)
	}
	if n := strings.Count(r.err.String(), "root cause: worker 2"); n != 2 {
		t.Errorf("%d blocks, want one for each of two epochs:\n%s", n, r.err)
	}
}

// TestHostsInterrupted: one signal is forwarded once to the workers of all hosts.
func TestHostsInterrupted(t *testing.T) {
	r := launchRemote(t, `trap 'n=$((n+1))' INT; n=0; echo ready; while [ $n = 0 ]; do sleep 0.02; done; sleep 0.3; echo "ended after $n"`, nil)
	for rank := range 3 {
		r.out.await(t, fmt.Sprintf("[rank%d] ready\n", rank))
	}
	r.remote.Interrupt(os.Interrupt)
	if code := r.wait(t); code != 130 || r.failure != nil || strings.Count(r.out.String(), "ended after 1\n") != 3 {
		t.Errorf("code %d, %v:\n%s%s", code, r.failure, r.out, r.err)
	}
}

// TestHostsKilled: the second signal kills all workers.
func TestHostsKilled(t *testing.T) {
	r := launchRemote(t, `trap 'echo got' INT; echo "child $$"; while :; do sleep 0.02; done`, nil)
	eventually(t, "three processes", func() bool { return strings.Count(r.out.String(), "child") == 3 })
	r.remote.Interrupt(os.Interrupt)
	eventually(t, "three signals", func() bool { return strings.Count(r.out.String(), "got") == 3 })
	r.remote.Interrupt(os.Interrupt)
	if code := r.wait(t); code != 130 || r.failure != nil {
		t.Errorf("code %d, %v:\n%s%s", code, r.failure, r.out, r.err)
	}
	for _, pid := range pids(t, r.out.String()) {
		if processRuns(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

func TestHostsThatCannotBeReached(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Remote)
		want   string
	}{
		"no ssh": {func(r *Remote) { r.SSH = []string{"/no/such/ssh"} }, "host a: "},
		"ssh fails": {
			func(r *Remote) { r.SSH = []string{"sh", "-c", `echo "no route to $0" >&2; exit 255`} },
			"no route to ",
		},
		"one host fails": {
			func(r *Remote) { r.SSH = []string{"sh", "-c", `[ $0 = b ] && exit 255; sh -c "$1"`} },
			"host b: the agent ended with exit code 255",
		},
		"no lockstep": {
			func(r *Remote) { r.Agent = []string{"/no/such/lockstep"} },
			"install the same lockstep at this path",
		},
		"no folder": {
			func(r *Remote) { r.Config.Dir = "/no/such/folder" },
			"the working directory of the job, /no/such/folder, does not exist on this host",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := launchRemote(t, `while :; do sleep 0.02; done`, c.change)
			if code := r.wait(t); code != 1 || r.failure == nil || !strings.Contains(r.failure.Error(), c.want) {
				t.Errorf("code %d, error %v, want one that says %q", code, r.failure, c.want)
			}
		})
	}
}

// TestHostsInterruptedEarly checks that a user's signal is not reported as a failure of a host that ssh has not
// reached yet.
func TestHostsInterruptedEarly(t *testing.T) {
	begun := filepath.Join(t.TempDir(), "begun")
	r := launchRemote(t, "true", func(r *Remote) {
		r.SSH = []string{"sh", "-c", `[ $0 = b ] && { echo > ` + begun + `; read order; read signal; exit 255; }; sh -c "$1"`}
	})
	eventually(t, "ssh to b to be started", func() bool { _, err := os.Stat(begun); return err == nil })
	r.remote.Interrupt(os.Interrupt)
	r.remote.Interrupt(os.Interrupt)
	if code := r.wait(t); code != 130 || r.failure != nil {
		t.Errorf("code %d, %v:\n%s%s", code, r.failure, r.out, r.err)
	}
}

// TestLauncherKilled: the agents on the hosts end their workers when the launcher has exited.
func TestLauncherKilled(t *testing.T) {
	t.Parallel()
	race.SkipShort(t, "it waits 7 s until agents have noticed")
	ssh, _ := fakeSSH(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	temp := t.TempDir()
	cmd.Env = append(os.Environ(), "TMPDIR="+temp, asRemote+"="+ssh[0])
	out := &output{}
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.WaitDelay = time.Minute // for its output; nothing of it is left that holds it open
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "three processes", func() bool {
		return strings.Count(out.String(), "child ") == 3 && strings.HasSuffix(out.String(), "\n")
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for _, pid := range pids(t, out.String()) {
		eventually(t, fmt.Sprintf("process %d to end", pid), func() bool { return !processRuns(pid) })
	}
	eventually(t, "the folders for records to go", func() bool {
		left, err := os.ReadDir(temp)
		return err == nil && len(left) == 0
	})
}

// TestEndpointPassword: a password in an endpoint is an error that does not show it.
func TestEndpointPassword(t *testing.T) {
	for _, endpoint := range []string{"root:hunter2@a:2379", "https://root:hunter2@a:2379/x", "a:1,root:hunter2@b:2"} {
		_, err := StoreConfig{Backend: "etcd", Endpoint: endpoint}.Open(t.Context())
		if err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), "ETCDCTL_PASSWORD") {
			t.Errorf("%s: %v, want an error without the password", endpoint, err)
		}
	}
}
