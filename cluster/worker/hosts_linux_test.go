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
	probe := exec.Command("ip", "link", "set", "lo", "up")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("left out, for it needs root, network namespaces and iproute2: %v: %s", err, out)
	}
	told := readFailures(t)
	t.Run("no secret", func(t *testing.T) {
		t.Parallel()
		for _, p := range onHosts(t, func(*child) {}) {
			text := p.says(t, "error")
			told.check(t, "several hosts, no secret", p.kinds, text)
		}
	})
	t.Run("cut off", func(t *testing.T) {
		t.Parallel()
		all := onHosts(t, func(c *child) {
			c.Secret, c.Heartbeat = strings.Repeat("secret", 6), 3*time.Second
			if c.Worker == 1 {
				c.At, c.Do = 3, "wait"
			}
		})
		for _, p := range all {
			p.says(t, "joined")
		}
		all[1].says(t, "waits")
		cut := exec.Command("nsenter", "-t", fmt.Sprint(all[1].cmd.Process.Pid), "-n", "ip", "link", "set", all[1].link, "down")
		if out, err := cut.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		text := all[0].says(t, "error")
		told.check(t, "cut off", all[0].kinds, text)
		if err := all[1].goOn.Close(); err != nil {
			t.Error(err)
		}
		text = all[1].says(t, "error")
		told.check(t, "cut off", all[1].kinds, text)
	})
}

// onHosts starts two workers that have nothing but a cable in common.
func onHosts(t *testing.T, change func(*child)) []*process {
	t.Helper()
	var all []*process
	for w := range 2 {
		c := child{Worker: w, Workers: 2, Replicas: 1, Store: "tcp://10.79.0.1:7070", Job: "hosts", Steps: 6, At: -1, Rendezvous: testWait, Timeout: testWait}
		change(&c)
		var link string
		p := startBy(t, c, func(cmd *exec.Cmd) {
			link = fmt.Sprintf("lsw%d", w)
			set := fmt.Sprintf("read go && ip link set lo up && ip address add 10.79.0.%d/24 dev %s && ip link set %s up && exec \"$@\"", w+1, link, link)
			cmd.Args = append([]string{"sh", "-c", set, "sh"}, cmd.Path)
			cmd.Path = "/bin/sh"
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		})
		p.link = link
		all = append(all, p)
	}
	cable := exec.Command("ip", strings.Fields(fmt.Sprintf("link add lsw0 netns %d type veth peer name lsw1 netns %d", all[0].cmd.Process.Pid, all[1].cmd.Process.Pid))...)
	if out, err := cable.CombinedOutput(); err != nil {
		t.Skipf("no veth pair can be made here: %v: %s", err, out)
	}
	for _, p := range all {
		if _, err := io.WriteString(p.goOn, "go\n"); err != nil {
			t.Fatal(err)
		}
	}
	return all
}
