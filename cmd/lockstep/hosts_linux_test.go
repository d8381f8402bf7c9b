package main

import (
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// hostsAddress is the address of the first of two hosts.
const hostsAddress = "10.79.0.1"

// twoHosts are two network namespaces, connected by a veth pair, for the time of the test.
type twoHosts struct{ pids [2]int }

// at holds the prefix of a command, by host.
func (h *twoHosts) at(host int) []string {
	return []string{"nsenter", "-t", fmt.Sprint(h.pids[host]), "-n"}
}

// openHosts creates two hosts, or returns what is missing.
func openHosts(t *testing.T) (h *twoHosts, why string) {
	t.Helper()
	h = &twoHosts{}
	for i := range h.pids {
		holder := exec.Command("sh", "-c", "echo ready && read end")
		holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		in, err := holder.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := holder.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := holder.Start(); err != nil {
			return nil, fmt.Sprintf("it needs root and network namespaces: %v", err)
		}
		t.Cleanup(func() { in.Close(); _ = holder.Wait() })
		if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
			t.Fatal(err)
		}
		h.pids[i] = holder.Process.Pid
	}
	run := func(command ...string) {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil && why == "" {
			why = fmt.Sprintf("it needs nsenter, and iproute2 with veth: %v: %v: %s", command, err,
				strings.TrimSpace(string(out)))
		}
	}
	run("ip", "link", "add", "lockstep0", "netns", fmt.Sprint(h.pids[0]), "type", "veth", "peer", "name", "lockstep1",
		"netns", fmt.Sprint(h.pids[1]))
	for i := range h.pids {
		device := fmt.Sprintf("lockstep%d", i)
		run(append(h.at(i), "ip", "link", "set", "lo", "up")...)
		run(append(h.at(i), "ip", "address", "add", fmt.Sprintf("10.79.0.%d/24", i+1), "dev", device)...)
		run(append(h.at(i), "ip", "link", "set", device, "up")...)
	}
	if why != "" {
		return nil, why
	}
	return h, ""
}
