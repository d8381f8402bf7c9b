package worker_test

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/race"
	"github.com/lockstep-ml/lockstep/internal/testnet"
)

// TestHosts: workers in separate network namespaces are on different hosts. Without a secret they do not start, and
// when
// a cable is cut, each reports the other as unreachable.
func TestHosts(t *testing.T) {
	t.Parallel()
	failures := readFailures(t)
	t.Run("no secret", func(t *testing.T) {
		t.Parallel()
		_, all := onHosts(t, 2, func(*child) {})
		for _, p := range all {
			text := p.says(t, "error")
			failures.check(t, "several hosts, no secret", p.kinds, text)
		}
	})
	t.Run("cut off", func(t *testing.T) {
		t.Parallel()
		network, all := onHosts(t, 2, func(c *child) {
			c.Secret, c.Heartbeat = strings.Repeat("secret", 6), 5*time.Second
			if c.Worker == 1 {
				c.At, c.Do = 3, "wait"
			}
		})
		for _, p := range all {
			p.says(t, "joined")
		}
		all[1].says(t, "waits")
		network.SetLink(t, 1, true, "down")
		since := time.Now()
		text := all[0].says(t, "error")
		t.Logf("worker 0 leaves %v after the cut", time.Since(since))
		failures.check(t, "cut off", all[0].kinds, text)
		if err := all[1].goOn.Close(); err != nil {
			t.Error(err)
		}
		text = all[1].says(t, "error")
		t.Logf("worker 1 leaves %v after the cut", time.Since(since))
		failures.check(t, "cut off", all[1].kinds, text)
	})
	t.Run("cut off from one other", func(t *testing.T) {
		t.Parallel()
		race.SkipShort(t, "it waits 5 s for a heartbeat")
		network, all := onHosts(t, 3, func(c *child) {
			c.Secret, c.Heartbeat = strings.Repeat("secret", 6), 5*time.Second
			if c.Worker == 2 {
				c.At, c.Do = 3, "wait"
			}
		})
		for _, p := range all {
			p.says(t, "joined")
		}
		all[2].says(t, "waits")
		network.Isolate(t, 1, 2) // both reach worker 0, on whose host the store is
		since := time.Now()
		text := all[1].says(t, "error")
		t.Logf("found after %v", time.Since(since))
		failures.check(t, "cut off from one other", all[1].kinds, text)
		if err := all[2].goOn.Close(); err != nil {
			t.Error(err)
		}
		for _, p := range []*process{all[0], all[2]} {
			p.says(t, "error")
		}
	})
}

// onHosts starts each worker on a separate host; the hosts are joined by a switch.
func onHosts(t *testing.T, workers int, change func(*child)) (*testnet.Switch, []*process) {
	t.Helper()
	network := testnet.NewSwitch(t, "10.79.0", workers)
	var all []*process
	for w := range workers {
		c := child{
			Worker: w, Workers: workers, Replicas: 1, Store: "tcp://10.79.0.1:7070", Job: "hosts", Steps: 6, At: -1,
			Rendezvous: testWait, Timeout: testWait,
		}
		change(&c)
		all = append(all, startBy(t, c, func(cmd *exec.Cmd) {
			on := network.Command(w, cmd.Path)
			cmd.Path, cmd.Err = exec.LookPath(on[0])
			cmd.Args = on
		}))
	}
	return network, all
}
