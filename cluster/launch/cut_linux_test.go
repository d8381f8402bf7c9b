package launch

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/testnet"
)

var cutsFlag = flag.Int("cuts", 3, "cuts of TestCut, spread over 4.4 to 20 seconds; 20 are the whole sweep")

const (
	cutShortest  = 4400 * time.Millisecond
	cutLongest   = 20 * time.Second
	cutLongestIn = 10 * time.Second // unless the whole sweep is made
)

// TestCut: a node whose link to the others is cut for longer than the heartbeat timeout takes its node slot again
// when the link is back, and the job continues in a later epoch. No node ends the job, and none reports a healthy
// one as lost.
func TestCut(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for several seconds until a link is back; the README's command runs it")
	}
	t.Parallel()
	t.Run("the store is killed", func(t *testing.T) {
		t.Parallel()
		cutByKill(t)
	})
	longest := cutLongest
	if *cutsFlag < 20 {
		longest = cutLongestIn
	}
	for i := range *cutsFlag {
		length := cutShortest
		if *cutsFlag > 1 {
			length += (longest - cutShortest) * time.Duration(i) / time.Duration(*cutsFlag-1)
		}
		// The node that is cut off: mostly one that only uses the store, sometimes the one that serves it.
		node := []int{2, 1, 0}[i%3]
		t.Run(fmt.Sprintf("node %d for %v", node, length.Round(time.Millisecond)), func(t *testing.T) {
			t.Parallel()
			cutOnce(t, node, length, i%2 == 1)
		})
	}
}

// cutOnce cuts one node off, at its own end of the cable or at the switch's.
func cutOnce(t *testing.T, node int, length time.Duration, ownEnd bool) {
	network, nodes := startCut(t)
	network.SetLink(t, node, ownEnd, "down")
	time.Sleep(length)
	network.SetLink(t, node, ownEnd, "up")
	since := time.Now()
	for i, n := range nodes {
		n.wait(t, 0)
		said := n.out.String()
		if !strings.Contains(said, "ended with 0 after ") || !strings.Contains(said, "starting all 3 workers again") {
			t.Errorf("node %d did not go on:\n%s", i, said)
		}
		for other := range cutNodes { // if the store is cut off, its node sees no other, and reports that
			if healthy := other != node && node != 0; healthy && strings.Contains(said,
				fmt.Sprintf("node %d (host %s, pid %d) is lost", other, hostName(t), nodes[other].cmd.Process.Pid)) {
				t.Errorf("node %d says that node %d is lost, which is healthy:\n%s", i, other, said)
			}
		}
	}
	t.Logf("ended %v after the link was back", time.Since(since).Round(10*time.Millisecond))
}

// cutByKill kills the agent that serves the store. The others do not wait for it as for a cut link, since the
// content of the store is lost.
func cutByKill(t *testing.T) {
	_, nodes := startCut(t)
	nodes[0].kill(t)
	since := time.Now()
	for _, n := range nodes[1:] {
		n.wait(t, 1)
		for _, want := range []string{
			"ended with 1 after 0 restarts",
			"the store cannot be reached any more; it ended with node 0's lockstep run, and so does the job",
		} {
			if !strings.Contains(n.out.String(), want) {
				t.Errorf("not said: %q in\n%s", want, n.out)
			}
		}
	}
	t.Logf("ended %v after it was killed", time.Since(since).Round(10*time.Millisecond))
}

// startCut starts a job of nodes on a switch, whose workers never exit in the first epoch.
func startCut(t *testing.T) (*testnet.Switch, []*nodeProcess) {
	network := testnet.NewSwitch(t, "10.81.0", cutNodes)
	const script = `echo "epoch $LOCKSTEP_EPOCH of $RANK of $WORLD_SIZE"; [ $LOCKSTEP_EPOCH != 0 ] && sleep 1 && exit 0; while :; do sleep 0.1; done`
	var nodes []*nodeProcess
	for i := range cutNodes {
		n := &nodeProcess{out: &output{}}
		command := network.Command(i, os.Args[0])
		n.cmd = exec.CommandContext(t.Context(), command[0], command[1:]...)
		n.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s", asCutNode, i, script))
		n.cmd.Stdout, n.cmd.Stderr = n.out, n.out
		n.cmd.WaitDelay = time.Minute
		if err := n.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.cmd.Process.Kill(); _ = n.cmd.Wait() })
		nodes = append(nodes, n)
	}
	for i, n := range nodes {
		n.out.await(t, fmt.Sprintf("[rank%d] epoch 0 of %d of 3\n", i, i))
	}
	return network, nodes
}
