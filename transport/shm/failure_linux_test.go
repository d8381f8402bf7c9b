package shm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/tensor"
	"github.com/lockstep-ml/lockstep/transport"
	"github.com/lockstep-ml/lockstep/transport/shm"
)

func init() {
	parts["wait"] = waitPart
	parts["leave"] = leavePart
	parts["open"] = openPart
	parts["write"] = writePart
	parts["late"] = latePart
	parts["join"] = joinPart
}

func (c *child) open() (transport.Endpoint, error) {
	ctx, cancel := soon()
	defer cancel()
	ends, err := shm.Open(ctx, c.cfg)
	if err != nil {
		return nil, err
	}
	return ends[0], nil
}

// openPart opens an endpoint, and closes it on request.
func openPart(c *child) error {
	m, err := c.open()
	if err != nil {
		return err
	}
	c.say("open")
	c.wait()
	return m.Close()
}

// joinPart joins, and opens nothing until it is killed.
func joinPart(c *child) error {
	ctx, cancel := soon()
	defer cancel()
	joined, err := shm.Join(ctx, c.cfg)
	if err != nil {
		return err
	}
	c.say("joined")
	c.wait()
	runtime.KeepAlive(joined)
	return nil
}

// latePart enters a call on request, and then closes its endpoint on request.
func latePart(c *child) error {
	m, err := c.open()
	if err != nil {
		return err
	}
	c.say("open")
	c.wait()
	if _, err := begin(m, transport.Slot{}); err != nil {
		return err
	}
	c.wait()
	return m.Close()
}

// leavePart makes three calls, and ends without Close in the fourth if arg is 0, or closes.
func leavePart(c *child) error {
	m, err := c.open()
	if err != nil {
		return err
	}
	for range 3 {
		if _, err := begin(m, transport.Slot{}); err != nil {
			return err
		}
	}
	if c.arg == 0 {
		os.Exit(0)
	}
	return m.Close()
}

// waitPart makes calls until it gets an error: calls with flags, or if arg is 1, with frames around the ring.
func waitPart(c *child) error {
	m, err := c.open()
	if err != nil {
		return err
	}
	defer m.Close()
	m.Inspect(func(int, transport.Header) error { return nil })
	c.say("open")
	data := make([]byte, 1<<20)
	n := m.Size()
	for {
		if c.arg == 1 {
			err = m.Exchange(background, (m.Rank()+1)%n, transport.Frame{Data: data}, (m.Rank()+n-1)%n, make([]byte, len(data)))
		} else {
			_, err = begin(m, transport.Slot{})
		}
		if err != nil {
			return err
		}
	}
}

// TestKilled checks that the ranks that wait for a killed process are notified without any deadline, and that no socket
// remains when all processes have ended.
func TestKilled(t *testing.T) {
	for arg, what := range []string{"flags", "frames"} {
		t.Run(what, func(t *testing.T) {
			cfg := config(t, 3)
			var children []*started
			for r := range 3 {
				cfg.Ranks = []int{r}
				children = append(children, start(t, "wait", arg, cfg))
			}
			for _, c := range children {
				c.says("open")
			}
			time.Sleep(20 * time.Millisecond) // in mid-call, most likely
			killed := time.Now()
			if err := children[1].cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			for _, r := range []int{0, 2} {
				// With frames, the rank that does not exchange with rank 1 may see the end of the other survivor first.
				line := children[r].line()
				if !strings.Contains(line, "rank 1 is down: process ") &&
					(what == "flags" || !strings.Contains(line, "has closed its end")) {
					t.Errorf("rank %d printed %q", r, line)
				}
			}
			t.Logf("all survivors were notified after %v", time.Since(killed).Round(time.Millisecond))
			for _, c := range children {
				c.cmd.Wait()
			}
			if n := sockets(t, cfg); n > 0 {
				t.Errorf("%d sockets with the name of the group remain", n)
			}
		})
	}
}

// TestKilledWithoutListener checks that when the process with rank 0 has left, by Close or because it was killed, the
// others still notice each other's end.
func TestKilledWithoutListener(t *testing.T) {
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed=%v", kill), func(t *testing.T) {
			cfg := config(t, 4)
			var children []*started
			for _, r := range []int{0, 1, 2} {
				cfg.Ranks = []int{r}
				children = append(children, start(t, "open", 0, cfg))
			}
			cfg.Ranks = []int{3}
			end, err := (&child{cfg: cfg}).open()
			if err != nil {
				t.Fatal(err)
			}
			defer end.Close()
			for i, c := range children {
				c.says("open")
				what := "has ended"
				if i == 0 && !kill {
					c.in()
					what = "has closed its end"
				} else if err := c.cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				select {
				case down := <-end.Down():
					if down.Rank != i || !strings.Contains(down.Error(), what) {
						t.Errorf("after the end of rank %d: %v, want it, which %s", i, down.Error(), what)
					}
				case <-time.After(10 * time.Second):
					t.Fatalf("the end of rank %d was not noticed", i)
				}
				c.cmd.Wait()
			}
		})
	}
}

// TestKilledWhileListenerStopped checks that the end of a process, before or after it has opened its rank, is noticed
// while the process with rank 0 is stopped.
func TestKilledWhileListenerStopped(t *testing.T) {
	for part, says := range map[string]string{"open": "open", "join": "joined"} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			cfg := config(t, 4)
			var children []*started
			for r, part := range []string{"open", "open", part} {
				cfg.Ranks = []int{r}
				children = append(children, start(t, part, 0, cfg))
			}
			cfg.Ranks = []int{3}
			end, err := (&child{cfg: cfg}).open()
			if err != nil {
				t.Fatal(err)
			}
			defer end.Close()
			for i, c := range children {
				if i < 2 {
					c.says("open")
				} else {
					c.says(says)
				}
			}
			if err := children[0].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			defer children[0].cmd.Process.Signal(syscall.SIGCONT)
			if err := children[2].cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			select {
			case down := <-end.Down():
				if down.Rank != 2 || !strings.Contains(down.Error(), "has ended") {
					t.Errorf("%v, want that the process of rank 2 has ended", down.Error())
				}
			case <-time.After(20 * time.Second):
				t.Fatal("the end of rank 2 was not noticed")
			}
		})
	}
}

// TestBellWithoutPoller checks that ranks are woken in a process whose bell Go's poller does not watch, and that Close
// ends the wait for that bell.
func TestBellWithoutPoller(t *testing.T) {
	ctx, cancel := soon()
	defer cancel()
	cfg := config(t, 2, 1)
	other := start(t, "late", 0, cfg)
	cfg.Ranks = []int{0}
	ends, err := shm.OpenUnpolled(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	m := ends[0]
	defer m.Close()
	other.says("open")
	m.Memory().Publish(&transport.Slot{})
	if err := m.Memory().Signal(0); err != nil {
		t.Fatal(err)
	}
	blocks, done := make(chan struct{}, 1), make(chan error, 1)
	go func() { done <- m.Memory().Await(blocking{ctx, blocks}, -1, 0) }()
	<-blocks
	other.in()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		cancel()
		t.Errorf("the rank was not woken: %v", <-done)
	}
}

// sockets returns how many sockets of this host have the name of the group.
func sockets(t *testing.T, cfg shm.Config) int {
	t.Helper()
	names, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(names, []byte(shm.Address(cfg.Name)))
}

// TestEnds checks that a process that ends without Close is reported as lost, and one that closes as closed.
func TestEnds(t *testing.T) {
	for arg, want := range []string{"has ended", "has closed its end"} {
		t.Run(want, func(t *testing.T) {
			cfg := config(t, 2, 1)
			start(t, "leave", arg, cfg)
			cfg.Ranks = []int{0}
			c := &child{cfg: cfg}
			m, err := c.open()
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			for call := 0; ; call++ {
				_, err = begin(m, transport.Slot{})
				if err != nil {
					var down *transport.PeerDown
					if call != 3 || !errors.As(err, &down) || down.Rank != 1 || !strings.Contains(err.Error(), want) {
						t.Errorf("call %d: %v, want a PeerDown in call 3 with %q", call, err, want)
					}
					break
				}
			}
			select {
			case d := <-m.Down():
				if d.Rank != 1 || !strings.Contains(d.Error(), want) {
					t.Errorf("Down reports %v", &d)
				}
			case <-time.After(time.Minute):
				t.Error("Down reports nothing")
			}
		})
	}
}

// writePart enters a call and reports it. On request it writes into all memory that it can reach.
func writePart(c *child) error {
	m, err := c.open()
	if err != nil {
		return err
	}
	if _, err := begin(m, transport.Slot{}); err != nil {
		return err
	}
	c.say("in")
	c.wait()
	for r := range m.Size() {
		fill(m.Memory().StagingBuffer(r), 0xee)
		if src := m.Memory().Peer(r).Src; src.Ptr != nil {
			fill(src.HostBytes(), 0xee)
		}
	}
	_, err = begin(m, transport.Slot{})
	return err
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

// TestStopped: only the deadline detects a stopped process. What it writes when it continues affects neither the group
// that was created meanwhile, nor a buffer that was allocated since.
func TestStopped(t *testing.T) {
	cfg := config(t, 2, 1)
	sleeper := start(t, "write", 0, cfg)
	cfg.Ranks = []int{0}
	m, err := (&child{cfg: cfg}).open()
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	named := buffer(t, m, 1<<20)
	if _, err := begin(m, transport.Slot{Src: named}); err != nil {
		t.Fatal(err)
	}
	sleeper.says("in")
	if err := sleeper.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	m.Memory().Publish(&transport.Slot{})
	if err := m.Memory().Signal(0); err != nil {
		t.Fatal(err)
	}
	patience, cancel := context.WithTimeout(background, 100*time.Millisecond)
	defer cancel()
	if err := m.Memory().Await(patience, -1, 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("waiting for a stopped process: %v", err)
	}
	if behind := m.Memory().Behind(0, nil); !slices.Equal(behind, []int{1}) || !m.Memory().Withdraw() {
		t.Fatalf("ranks %v are behind, or the call has started", behind)
	}
	m.Fail([]byte("rank 1 is stuck"))
	m.Memory().Retire(named)
	named.Owner.Release()

	fresh := buffer(t, m, 1<<20)
	fill(fresh.HostBytes(), 7)
	next := config(t, 2, 0, 1)
	next.Epoch = 4
	ends, err := shm.Open(background, next)
	if err != nil {
		t.Fatal(err)
	}
	staging := [][]byte{ends[0].Memory().StagingBuffer(0), ends[0].Memory().StagingBuffer(1)}
	for r, s := range staging {
		fill(s, 7)
		defer ends[r].Close()
	}

	if err := sleeper.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	sleeper.in()
	sleeper.says("error: ", transport.ErrInterrupted.Error())
	for what, b := range map[string][]byte{
		"a new buffer": fresh.HostBytes(), "staging buffer 0": staging[0],
		"staging buffer 1": staging[1],
	} {
		if i := slices.IndexFunc(b, func(x byte) bool { return x != 7 }); i >= 0 {
			t.Errorf("the stopped process wrote into %s, which is in use, at %d", what, i)
		}
	}
	if b := named.HostBytes(); b[0] != 0xee {
		t.Error("the process did not write into the buffer of its call: this test checks nothing")
	}
}

func buffer(t *testing.T, m transport.Endpoint, bytes int) tensor.Memory {
	t.Helper()
	mem, err := m.Memory().NewBuffer(bytes)
	if err != nil {
		t.Fatal(err)
	}
	return mem
}

// TestRefused checks that a process of another group is refused, and that both sides report what differs.
func TestRefused(t *testing.T) {
	ctx, cancel := soon()
	defer cancel()
	right := config(t, 3)
	right.Authenticate = secret.New().Authenticate(secret.Group, right.Job, right.Epoch)
	group := make(chan error, 2)
	for _, ranks := range [][]int{{0}, {1, 2}} {
		cfg := right
		cfg.Ranks = ranks
		go func() {
			ends, err := shm.Open(ctx, cfg)
			group <- err
			<-ctx.Done()
			for _, e := range ends {
				e.Close()
			}
			group <- nil
		}()
	}
	for range 2 {
		if err := <-group; err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name   string
		change func(*shm.Config)
		want   []string
	}{
		{"job", func(c *shm.Config) { c.Job = "other" }, []string{"job", `"other"`, `"job"`}},
		{"epoch", func(c *shm.Config) { c.Epoch = 2 }, []string{"epoch is 3 there, and 2 here"}},
		{"group", func(c *shm.Config) { c.Group = 9 }, []string{"group is 0 there, and 9 here"}},
		{"size", func(c *shm.Config) { c.Size = 5 }, []string{"size of the group is 3 there, and 5 here"}},
		{"secret", func(c *shm.Config) {
			c.Authenticate = secret.New().Authenticate(secret.Group, c.Job, c.Epoch)
		}, []string{"the other end refuses this end's proof: it has another secret, job or epoch"}},
		{"no secret", func(c *shm.Config) { c.Authenticate = nil }, []string{
			"one of the two processes has a secret, the other has none",
		}},
		{"started twice", func(c *shm.Config) {}, []string{fmt.Sprintf("rank 2 is taken by process %d", os.Getpid())}},
		{"first one started twice", func(c *shm.Config) { c.Ranks = []int{0} }, []string{"another process", "rank 0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			wrong := right
			wrong.Ranks = []int{2}
			test.change(&wrong)
			ends, err := shm.Open(ctx, wrong)
			if err == nil {
				ends[0].Close()
				t.Fatal("the process was accepted")
			}
			for _, want := range append(test.want, "process ", right.Name) {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("refused with %q, want %q in it", err, want)
				}
			}
		})
	}
	cancel()
	<-group
	<-group
}

// TestWaiting checks that a process of another epoch does not end the wait for the right processes, and that the errors
// of the listening process and of a dialing one name the group.
func TestWaiting(t *testing.T) {
	cfg := config(t, 3)
	listening, joining, stale := cfg, cfg, cfg
	listening.Ranks, joining.Ranks, stale.Ranks, stale.Epoch = []int{0}, []int{2}, []int{1}, 2
	ctx, cancel := context.WithCancelCause(background)
	errs := make(chan error, 2)
	for _, c := range []shm.Config{listening, joining} {
		go func() {
			_, err := shm.Open(ctx, c)
			errs <- err
		}()
	}
	if _, err := shm.Open(ctx, stale); err == nil || !strings.Contains(err.Error(), "the epoch is 3 there, and 2 here") {
		t.Errorf("a process of an old epoch: %v", err)
	}
	cancel(errors.New("enough"))
	for range 2 {
		if err := <-errs; err == nil || !strings.Contains(err.Error(), "enough") || !strings.Contains(err.Error(), cfg.Name) {
			t.Errorf("after the end of the context: %v", err)
		}
	}
	alone, stop := context.WithTimeout(background, 10*time.Millisecond)
	defer stop()
	if _, err := shm.Open(alone, joining); err == nil || !strings.Contains(err.Error(), "does not listen") {
		t.Errorf("without a listening process: %v", err)
	}
}

// TestJoiningProcessDies checks that if a process that has joined dies while the group waits for others, another
// process can join with its ranks.
func TestJoiningProcessDies(t *testing.T) {
	cfg := config(t, 3, 1)
	first := start(t, "open", 0, cfg)
	opened := make(chan error, 2)
	ctx, cancel := soon()
	defer cancel()
	open := func(ranks ...int) {
		cfg := cfg
		cfg.Ranks = ranks
		ends, err := shm.Open(ctx, cfg)
		if err == nil {
			ends[0].Close()
		}
		opened <- err
	}
	go open(0)
	for sockets(t, cfg) < 2 { // of the listener, and of the accepted connection
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond) // it has joined, most likely; else it dies during the handshake
	first.cmd.Process.Kill()
	first.cmd.Wait()
	second := start(t, "open", 0, cfg)
	go open(2)
	second.says("open")
	second.in()
	for range 2 {
		if err := <-opened; err != nil {
			t.Error(err)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, test := range []struct {
		cfg  shm.Config
		want string
	}{
		{shm.Config{Size: 1, Ranks: []int{0}}, "Name is empty"},
		{shm.Config{Name: "a", Ranks: []int{0}}, "Size is 0"},
		{shm.Config{Name: "a", Size: 10000, Ranks: []int{0}}, "Size is 10000"},
		{shm.Config{Name: "a", Size: 1}, "Ranks is empty"},
		{shm.Config{Name: "a", Size: 2, Ranks: []int{1, 0}}, "ranks [1 0] of a group of 2"},
		{shm.Config{Name: "a", Size: 2, Ranks: []int{2}}, "ranks [2] of a group of 2"},
		{shm.Config{Name: "a", Size: 1, Ranks: []int{0}, ArenaBytes: -1}, "ArenaBytes is -1"},
		{shm.Config{Name: "a", Size: 1, Ranks: []int{0}, Job: strings.Repeat("j", 2000)}, "Job has 2000 bytes"},
	} {
		if _, err := shm.Open(background, test.cfg); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Open(%+v): %v, want %q", test.cfg, err, test.want)
		}
	}
}
