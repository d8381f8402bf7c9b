package worker_test

import (
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Two workers in network namespaces of their own, joined by a cable, are on two hosts: without a secret they do not begin, and when the
// cable is cut each finds the other out of reach.
func TestHosts(t *testing.T) {
	t.Parallel()
	probe := exec.Command("ip", "link", "add", "lsw0", "type", "bridge")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("left out, for it needs root, network namespaces with bridges and iproute2: %v: %s", err, out)
	}
	told := readFailures(t)
	t.Run("no secret", func(t *testing.T) {
		t.Parallel()
		for _, p := range onHosts(t, 2, func(*child) {}) {
			text := p.says(t, "error")
			told.check(t, "several hosts, no secret", p.kinds, text)
		}
	})
	t.Run("cut off", func(t *testing.T) {
		t.Parallel()
		all := onHosts(t, 2, func(c *child) {
			c.Secret, c.Heartbeat = strings.Repeat("secret", 6), 5*time.Second
			if c.Worker == 1 {
				c.At, c.Do = 3, "wait"
			}
		})
		for _, p := range all {
			p.says(t, "joined")
		}
		all[1].says(t, "waits")
		all[1].hosts(t, "ip", "link", "set", "lsw1", "down")
		since := time.Now()
		text := all[0].says(t, "error")
		t.Logf("worker 0 leaves %v after the cut", time.Since(since))
		told.check(t, "cut off", all[0].kinds, text)
		if err := all[1].goOn.Close(); err != nil {
			t.Error(err)
		}
		text = all[1].says(t, "error")
		t.Logf("worker 1 leaves %v after the cut", time.Since(since))
		told.check(t, "cut off", all[1].kinds, text)
	})
	t.Run("cut off from one other", func(t *testing.T) {
		t.Parallel()
		all := onHosts(t, 3, func(c *child) {
			c.Secret, c.Heartbeat = strings.Repeat("secret", 6), 5*time.Second
			if c.Worker == 2 {
				c.At, c.Do = 3, "wait"
			}
		})
		for _, p := range all {
			p.says(t, "joined")
		}
		all[2].says(t, "waits")
		for _, port := range []string{"port1", "port2"} { // both reach worker 0, on whose host the store is
			all[0].hosts(t, "ip", "link", "set", port, "type", "bridge_slave", "isolated", "on")
		}
		since := time.Now()
		text := all[1].says(t, "error")
		t.Logf("found after %v", time.Since(since))
		told.check(t, "cut off from one other", all[1].kinds, text)
		if err := all[2].goOn.Close(); err != nil {
			t.Error(err)
		}
		for _, p := range []*process{all[0], all[2]} {
			p.says(t, "error")
		}
	})
}

// hosts runs a command on a process's host.
func (p *process) hosts(t *testing.T, command ...string) {
	t.Helper()
	args := append([]string{"-t", fmt.Sprint(p.cmd.Process.Pid), "-n"}, command...)
	if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", command, err, out)
	}
}

// onHosts starts workers on hosts of their own, whose cables end in a switch on worker 0's.
func onHosts(t *testing.T, workers int, change func(*child)) []*process {
	t.Helper()
	var all []*process
	for w := range workers {
		c := child{Worker: w, Workers: workers, Replicas: 1, Store: "tcp://10.79.0.1:7070", Job: "hosts", Steps: 6, At: -1, Rendezvous: testWait, Timeout: testWait}
		change(&c)
		all = append(all, startBy(t, c, func(cmd *exec.Cmd) {
			set := fmt.Sprintf("read go && ip link set lo up && ip address add 10.79.0.%d/24 dev lsw%d && ip link set lsw%d up && exec \"$@\"", w+1, w, w)
			cmd.Args = append([]string{"sh", "-c", set, "sh"}, cmd.Path)
			cmd.Path = "/bin/sh"
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		}))
	}
	all[0].hosts(t, "ip", "link", "add", "lsw0", "type", "bridge")
	for w, p := range all[1:] {
		cable := fmt.Sprintf("link add port%d netns %d type veth peer name lsw%d netns %d", w+1, all[0].cmd.Process.Pid, w+1, p.cmd.Process.Pid)
		if out, err := exec.Command("ip", strings.Fields(cable)...).CombinedOutput(); err != nil {
			t.Skipf("no veth pair can be made here: %v: %s", err, out)
		}
		all[0].hosts(t, "ip", "link", "set", fmt.Sprintf("port%d", w+1), "master", "lsw0", "up")
	}
	for _, p := range all {
		if _, err := io.WriteString(p.goOn, "go\n"); err != nil {
			t.Fatal(err)
		}
	}
	return all
}
