//go:build unix

package launch

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster/rendezvous"
	"github.com/lockstep-ml/lockstep/cluster/secret"
)

// nodeProcess is an agent in a separate process, which can be killed.
type nodeProcess struct {
	cmd *exec.Cmd
	out *output
}

// nodeMain is an agent as its environment variable describes it: its node, the number of nodes, the folder of the
// store, the number of restarts, and its worker's script.
func nodeMain(words string) {
	w := strings.SplitN(words, " ", 5)
	number := func(s string) int { n, _ := strconv.Atoi(s); return n }
	store, err := rendezvous.Open(context.Background(), "file://"+w[2], rendezvous.Config{})
	if err != nil {
		panic(err)
	}
	a, err := New(Config{
		Command: []string{"sh", "-c", w[4]}, Workers: 1, Node: number(w[0]), Nodes: number(w[1]), Store: store,
		StoreURL: "file://" + w[2], RestartsMax: number(w[3]),
		Guard: guardCommand(), Stdout: os.Stdout, Stderr: os.Stderr, Env: os.Environ(), HeartbeatTimeout: nodeLost,
		Settle: 50 * time.Millisecond, Grace: 500 * time.Millisecond,
		RendezvousTimeout: patience,
	})
	if err != nil {
		panic(err)
	}
	o, err := a.Run(context.Background())
	fmt.Printf("ended with %d after %d restarts: %v\n", o.Code, o.Restarts, err)
	os.Exit(o.Code)
}

const (
	cutNodes     = 3
	cutHeartbeat = 3 * time.Second
	cutEndpoint  = "10.81.0.1:29400"
)

// cutNodeMain is an agent that reaches the others over TCP: its node and its worker's script.
func cutNodeMain(words string) {
	number, script, _ := strings.Cut(words, " ")
	node, err := strconv.Atoi(number)
	if err != nil {
		panic(err)
	}
	key, err := secret.Parse(strings.Repeat("secret", 6))
	if err != nil {
		panic(err)
	}
	store := StoreConfig{
		Backend: "tcp", Endpoint: cutEndpoint, ID: "cut", Secret: key, Serve: node == 0,
		Logger: slog.Default(),
	}
	opened, err := store.Open(context.Background())
	if err != nil {
		panic(err)
	}
	a, err := New(Config{
		Command: []string{
			"sh", "-c",
			script,
		}, ID: "cut", Workers: 1, Node: node, Nodes: cutNodes, RestartsMax: 6, HeartbeatTimeout: cutHeartbeat,
		Store: opened.Store, StoreURL: opened.URL, StoreHolder: opened.Holder, Address: fmt.Sprintf("10.81.0.%d",
			node+1), Guard: guardCommand(),
		Stdout: os.Stdout, Stderr: os.Stderr, Env: os.Environ(), Settle: 50 * time.Millisecond, Grace: 500 * time.Millisecond,
		RendezvousTimeout: patience,
	})
	if err != nil {
		panic(err)
	}
	o, err := a.Run(context.Background())
	opened.Close()
	fmt.Printf("ended with %d after %d restarts: %v\n", o.Code, o.Restarts, err)
	os.Exit(o.Code)
}

// nodeLost is the heartbeat timeout of these agents. An agent that gets no processor time for that long is lost, and
// then it is back or replaced, like any other.
const nodeLost = 10 * time.Second

func startNode(t *testing.T, node, nodes int, folder string, restarts int, script string) *nodeProcess {
	t.Helper()
	n := &nodeProcess{cmd: exec.CommandContext(t.Context(), os.Args[0]), out: &output{}}
	n.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d %s %d %s", asNode, node, nodes, folder, restarts, script))
	n.cmd.Stdout, n.cmd.Stderr = n.out, n.out
	n.cmd.WaitDelay = time.Minute // for its output; nothing of it is left that holds it open
	if err := n.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.cmd.Process.Kill(); _ = n.cmd.Wait() })
	return n
}

func (n *nodeProcess) kill(t *testing.T) {
	t.Helper()
	if err := n.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = n.cmd.Wait()
}

// wait waits for the agent's end. One that does not end in a long time shows its goroutines.
func (n *nodeProcess) wait(t *testing.T, code int) {
	t.Helper()
	stuck := time.AfterFunc(patience, func() { _ = n.cmd.Process.Signal(syscall.SIGQUIT) })
	defer stuck.Stop()
	if _ = n.cmd.Wait(); n.cmd.ProcessState.ExitCode() != code {
		t.Errorf("exit code %d, want %d:\n%s", n.cmd.ProcessState.ExitCode(), code, n.out)
	}
}

// untilEnd is a script of workers that exit when a file exists.
func untilEnd(file string) string {
	return `echo "epoch $LOCKSTEP_EPOCH of $RANK of $WORLD_SIZE"; while ! [ -e '` + file + `' ]; do sleep 0.05; done`
}

// untilReplaced is a worker that exits with code 0 in epoch 1.
const untilReplaced = `echo "epoch $LOCKSTEP_EPOCH of $RANK of $WORLD_SIZE"; [ $LOCKSTEP_EPOCH = 1 ] && exit 0; while :; do sleep 0.05; done`

// TestReplaced: any node's agent is killed, and another takes its node slot: the job continues in the next epoch,
// and all agents report what happened.
func TestReplaced(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for several seconds until agents are lost; the README's command runs it")
	}
	for lost := range 2 {
		t.Run(fmt.Sprint("node ", lost), func(t *testing.T) {
			t.Parallel()
			folder := filepath.Join(t.TempDir(), "store")
			var nodes []*nodeProcess
			for i := range 3 {
				nodes = append(nodes, startNode(t, i, 3, folder, 2, untilReplaced))
			}
			for i, n := range nodes {
				n.out.await(t, fmt.Sprintf("[rank%d] epoch 0 of %d of 3\n", i, i))
			}
			old := nodes[lost].cmd.Process.Pid
			nodes[lost].kill(t)
			nodes[lost] = startNode(t, lost, 3, folder, 2, untilReplaced)
			for i, n := range nodes {
				n.wait(t, 0)
				wants := []string{fmt.Sprintf("[rank%d] epoch 1 of %d of 3\n", i, i), "ended with 0 after 1 restarts: <nil>"}
				if i != lost {
					wants = append(
						wants, fmt.Sprintf("node %d (host %s, pid %d) is lost, and its workers with it", lost, hostName(t), old),
						fmt.Sprintf("the agent of its node %d (host %s, pid %d) is lost: ", lost, hostName(t), old),
						"starting all 3 workers again: restart 1 of 2\n")
				}
				for _, want := range wants {
					if !strings.Contains(n.out.String(), want) {
						t.Errorf("node %d did not say %q:\n%s", i, want, n.out)
					}
				}
			}
		})
	}
}

func hostName(t *testing.T) string {
	t.Helper()
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// TestStoppedAgentIsReplaced: an agent that is stopped until another has its node slot ends its workers when it
// continues, and reports why.
func TestStoppedAgentIsReplaced(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for several seconds until an agent is lost; the README's command runs it")
	}
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "store")
	end := filepath.Join(t.TempDir(), "end")
	workers := untilEnd(end)
	a, b := startNode(t, 0, 2, folder, 1, workers), startNode(t, 1, 2, folder, 1, workers)
	a.out.await(t, "[rank0] epoch 0")
	b.out.await(t, "[rank1] epoch 0")
	if err := b.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c := startNode(t, 1, 2, folder, 1, workers)
	c.out.await(t, "[rank1] epoch 1")
	if err := b.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	b.wait(t, 1)
	if err := os.WriteFile(end, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	a.wait(t, 0)
	c.wait(t, 0)
	if want := "was taken"; !strings.Contains(b.out.String(), want) {
		t.Errorf("the agent that was replaced does not report %q:\n%s", want, b.out)
	}
}

// TestDuplicateIsRefused: a second agent of a node whose agent is alive is refused. The error names both, and the
// job is not affected.
func TestDuplicateIsRefused(t *testing.T) {
	t.Parallel() // it waits for a second
	memory := rendezvous.NewMemory()
	done := filepath.Join(t.TempDir(), "done")
	nodes := launchNodes(t, `echo ready; until [ -e `+done+` ]; do sleep 0.02; done`, func(c *Config) {
		c.Store, c.RestartsMax, c.HeartbeatTimeout = memory.Open(), 1, 10*time.Second
	}, 1, 1)
	for i, n := range nodes {
		n.out.await(t, fmt.Sprintf("[rank%d] ready\n", i))
	}
	err := runNode(t, t.Context(),
		Config{Node: 1, Nodes: 2, Store: memory.Open(), RestartsMax: 1, HeartbeatTimeout: 10 * time.Second})
	if want := fmt.Sprintf("node 1 of job \"lockstep\" joined twice: its agent is on host %s as pid %d, and is alive; "+
		"this one is on host %s as pid %d", hostName(t), os.Getpid(), hostName(t), os.Getpid()); err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := os.WriteFile(done, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, n := range nodes {
		if o := n.wait(t); o.Code != 0 || o.Restarts != 0 {
			t.Errorf("node %d: %+v\n%s", i, o, n.err)
		}
	}
}

// TestCannotReplace: an agent that cannot take a lost agent's node slot reports why, and the job continues to wait
// for another.
func TestCannotReplace(t *testing.T) {
	for name, c := range map[string]struct {
		has, comes Config
		want       string
	}{
		"no restarts": {
			Config{},
			Config{},
			"which cannot be replaced with --max-restarts 0; if that run of the job is over, choose another --rdzv-id",
		},
		"other restarts": {Config{RestartsMax: 1}, Config{RestartsMax: 2}, "was started with --max-restarts 1, node 1"},
		"other heartbeat timeout": {
			Config{RestartsMax: 1},
			Config{RestartsMax: 1, HeartbeatTimeout: 40 * time.Second},
			"node 0 (host near, pid 7) was started with --heartbeat-timeout 30s, node 1",
		},
		"other nodes": {Config{RestartsMax: 1}, Config{RestartsMax: 1, Nodes: 3}, "expects 2 nodes, but node 1"},
		"other workers": {
			Config{RestartsMax: 1},
			Config{RestartsMax: 1, Workers: 2},
			"has 2 workers, but node 1 (host far, pid 42), which it would replace, had 1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			memory := rendezvous.NewMemory()
			nonce := ghost(t, memory, registration{RestartsMax: c.has.RestartsMax, Heartbeat: 30 * time.Second})
			store := memory.Open()
			p := newPeers(&Agent{cfg: Config{ID: "lockstep", Nodes: 2, Store: store, HeartbeatTimeout: time.Hour}})
			first := registration{
				Host: "near", PID: 7, Workers: 1, Ports: []int{2}, RestartsMax: c.has.RestartsMax, Heartbeat: 30 * time.Second,
			}
			if err := p.takeSlot(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			m := `{"epoch":0,"slots":[{"node":0,"workers":1},{"node":1,"host":"far","pid":42,"workers":1}]}`
			if err := store.Set(t.Context(), p.keyOf(&epochMembers{}), []byte(m)); err != nil {
				t.Fatal(err)
			}
			if err := p.lose(t.Context(), 1, nonce, time.Second); err != nil {
				t.Fatal(err)
			}
			c.comes.Command, c.comes.Node, c.comes.Store, c.comes.Workers = []string{"true"}, 1, memory.Open(), max(1,
				c.comes.Workers)
			c.comes.Nodes = max(2, c.comes.Nodes)
			a, err := New(c.comes)
			if err != nil {
				t.Fatal(err)
			}
			if _, err = a.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want one that says %q", err, c.want)
			}
			if _, _, err := store.Get(t.Context(), p.keyOf(&jobEnd{})); err == nil {
				t.Error("it has ended the job for the others")
			}
		})
	}
}

// TestOtherHeartbeatTimeout: a job whose agents were started with different heartbeat timeouts does not begin. The
// error of each agent names both, and their values.
func TestOtherHeartbeatTimeout(t *testing.T) {
	t.Parallel()
	memory := rendezvous.NewMemory()
	errs := make(chan error, 2)
	for node, timeout := range []time.Duration{20 * time.Second, 40 * time.Second} {
		cfg := Config{
			Command: []string{"false"}, Workers: 1, Node: node, Nodes: 2, Store: memory.Open(), HeartbeatTimeout: timeout,
			RendezvousTimeout: patience,
		}
		a, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := a.Run(t.Context())
			errs <- err
		}()
	}
	who := fmt.Sprintf("(host %s, pid %d)", hostName(t), os.Getpid())
	for range 2 {
		err := <-errs
		if err == nil {
			t.Error("an agent has run the job")
			continue
		}
		first := fmt.Sprintf("node 0 %s was started with --heartbeat-timeout 20s, node 1 %s with 40s", who, who)
		second := fmt.Sprintf("node 1 %s was started with --heartbeat-timeout 40s, node 0 %s with 20s", who, who)
		if !strings.Contains(err.Error(), first) && !strings.Contains(err.Error(), second) {
			t.Errorf("error %v, want one that says %s", err, first)
		}
	}
}

// TestTooLate: an agent that joins after the job has ended reports that: at once if the store ends with the job,
// otherwise when no other agent joins.
func TestTooLate(t *testing.T) {
	memory := rendezvous.NewMemory()
	for i, n := range launchNodes(t, `exit 3`, func(c *Config) { c.Store = memory.Open() }, 1, 1) {
		if o := n.wait(t); o.Code != 3 {
			t.Errorf("node %d: outcome %+v", i, o)
		}
	}
	out := &output{}
	late := Config{
		Node: 1, Nodes: 2, Store: memory.Open(), StoreHolder: "node 0",
		RendezvousTimeout: 100 * time.Millisecond, Stderr: out,
	}
	err := runNode(t, t.Context(), late)
	if err == nil || !strings.Contains(err.Error(), "the job has ended with code 3 at ") ||
		!strings.Contains(err.Error(), "worker ") {
		t.Errorf("error %v", err)
	}
	late.Store, late.StoreHolder = memory.Open(), ""
	err = runNode(t, t.Context(), late)
	if want := `an earlier run of job "lockstep" is over: the job has ended with code 3`; err == nil ||
		!strings.Contains(err.Error(), want) || !strings.Contains(out.String(), want) {
		t.Errorf("error %v, want one that says %q; said:\n%s", err, want, out)
	}
}
