package testnet

import (
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Switch is a switch with hosts on cables, each in a network namespace without a name. All of them are removed at the
// end of the test.
type Switch struct {
	hub   int   // the process that holds the switch's namespace
	hosts []int // those that hold the hosts'
}

// device is the name of a host's end of its cable, and of the switch.
const device = "lockstep"

// NewSwitch returns a switch with hosts, which have the addresses subnet.1, subnet.2, …: "10.81.0". It skips the test
// where network namespaces, bridges or pairs of virtual devices cannot be made.
func NewSwitch(t testing.TB, subnet string, hosts int) *Switch {
	t.Helper()
	probe := exec.Command("ip", "link", "add", device, "type", "bridge")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("needs root, network namespaces with bridges, and iproute2: %v: %s", err, out)
	}
	s := &Switch{hub: holdNamespace(t)}
	run(t, s.hub, "ip link add "+device+" type bridge")
	run(t, s.hub, "ip link set "+device+" up")
	for i := range hosts {
		pid := holdNamespace(t)
		s.hosts = append(s.hosts, pid)
		cable := fmt.Sprintf("link add port%d netns %d type veth peer name %s netns %d", i, s.hub, device, pid)
		if out, err := exec.Command("ip", strings.Fields(cable)...).CombinedOutput(); err != nil {
			t.Skipf("needs veth pairs: %v: %s", err, out)
		}
		run(t, s.hub, fmt.Sprintf("ip link set port%d master %s up", i, device))
		run(t, pid, "ip link set lo up")
		run(t, pid, fmt.Sprintf("ip address add %s.%d/24 dev %s", subnet, i+1, device))
		run(t, pid, "ip link set "+device+" up")
	}
	return s
}

// holdNamespace starts a process that keeps a network namespace until the test ends, and returns its number.
func holdNamespace(t testing.TB) (pid int) {
	t.Helper()
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
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = holder.Wait() })
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		t.Fatal(err)
	}
	return holder.Process.Pid
}

// Command returns the arguments of a command that runs program on a host, as the same process.
func (s *Switch) Command(host int, program ...string) []string {
	return inNamespace(s.hosts[host], program...)
}

func inNamespace(pid int, program ...string) []string {
	return append([]string{"nsenter", "-t", strconv.Itoa(pid), "-n"}, program...)
}

func run(t testing.TB, pid int, command string) {
	t.Helper()
	args := inNamespace(pid, strings.Fields(command)...)
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// SetLink sets a host's cable "down" or "up": at the host's end, where sending fails at once, or at the switch's.
func (s *Switch) SetLink(t testing.TB, host int, hostEnd bool, state string) {
	t.Helper()
	if hostEnd {
		run(t, s.hosts[host], "ip link set "+device+" "+state)
		return
	}
	run(t, s.hub, fmt.Sprintf("ip link set port%d %s", host, state))
}

// Isolate cuts the hosts off from each other; they still reach all others.
func (s *Switch) Isolate(t testing.TB, hosts ...int) {
	t.Helper()
	for _, host := range hosts {
		run(t, s.hub, fmt.Sprintf("ip link set port%d type bridge_slave isolated on", host))
	}
}

// CapReceives limits the receive buffers of a host's TCP connections that are opened later, in bytes. It skips the test
// where the kernel cannot.
func (s *Switch) CapReceives(t testing.TB, host, bytes int) {
	t.Helper()
	// The three numbers are the least size, the first one, and the largest one to which the kernel lets a buffer grow.
	set := fmt.Sprintf("echo 4096 %d %d >/proc/sys/net/ipv4/tcp_rmem", bytes, bytes)
	args := inNamespace(s.hosts[host], "sh", "-c", set)
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Skipf("needs to set net.ipv4.tcp_rmem in a network namespace: %v: %s", err, out)
	}
}

// CapLink limits the rate of a host's cable in both directions: "100mbit". So many bytes ("128kb") pass at once after
// a pause. It skips the test where the kernel or iproute2 cannot.
func (s *Switch) CapLink(t testing.TB, host int, rate, burst string) {
	t.Helper()
	for _, end := range s.ends(host) {
		args := inNamespace(end.pid, "tc", "qdisc", "replace", "dev", end.device, "root", "tbf", "rate", rate, "burst",
			burst, "latency", "50ms")
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("needs tc with the token bucket filter: %v: %s", err, out)
		}
	}
}

// UncapLink removes the limit of CapLink.
func (s *Switch) UncapLink(t testing.TB, host int) {
	t.Helper()
	for _, end := range s.ends(host) {
		args := inNamespace(end.pid, "tc", "qdisc", "delete", "dev", end.device, "root")
		_ = exec.Command(args[0], args[1:]...).Run() // it may have none
	}
}

// cableEnd is one end of a host's cable.
type cableEnd struct {
	pid    int // a process in its namespace
	device string
}

func (s *Switch) ends(host int) []cableEnd {
	return []cableEnd{{s.hosts[host], device}, {s.hub, fmt.Sprintf("port%d", host)}}
}
