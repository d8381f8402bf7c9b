package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/lockstep-ml/lockstep/cluster/secret"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/cli"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestNamespaces: two workers in separate network namespaces, connected by a veth pair, are two hosts. Without a secret
// they refuse to start. With one they give the bits of one process, encrypted or not.
func TestNamespaces(t *testing.T) {
	race.SkipTimed(t, "whole jobs in network namespaces")
	probe := exec.Command("ip", "link", "set", "lo", "up")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("needs root, network namespaces and iproute2: %v: %s", err, out)
	}
	want := hashOfOne(t, 4)
	t.Run("TLS", func(t *testing.T) {
		dir := t.TempDir()
		all := inNamespaces(t, []string{"LOCKSTEP_SECRET=" + secret.New().Text()}, append([]string{"--out", dir}, small...))
		wantHash(t, all, dir, want)
	})
	t.Run("data in plain text", func(t *testing.T) {
		dir := t.TempDir()
		all := inNamespaces(t, []string{"LOCKSTEP_SECRET=" + secret.New().Text()},
			append([]string{"--data-plaintext", "--port-range", "29610-29620", "--out", dir}, small...))
		wantHash(t, all, dir, want)
	})
	t.Run("no secret", func(t *testing.T) {
		for w, p := range inNamespaces(t, nil, small) {
			if p.code != cli.ExitError || !strings.Contains(p.stderr.String(), "--data-plaintext") ||
				!strings.Contains(p.stderr.String(), "LOCKSTEP_SECRET") {
				t.Errorf("worker %d: %v\nwant an error with the two ways out", w, p)
			}
		}
	})
}

// inNamespaces runs two workers of two replicas, each in a temporary network namespace.
func inNamespaces(t *testing.T, env, flags []string) []*workerProcess {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	all := make([]*workerProcess, 2)
	var ready []io.WriteCloser
	for w := range all {
		args := append([]string{
			"train", "--strategy", "multi-worker", "--replicas", "2", "--progress", "none",
			"--rdzv-timeout", "5m",
		}, flags...)
		network := fmt.Sprintf("read go && ip link set lo up && ip address add 10.78.0.%d/24 dev lockstep%d && ip link set "+
			"lockstep%d up && exec \"$@\"", w+1, w, w)
		p := &workerProcess{cmd: exec.CommandContext(t.Context(), "sh",
			append([]string{"-c", network, "sh", exe}, args...)...)}
		p.cmd.Env = append(append(os.Environ(), clitest.AsCommand+"=1", "GOMAXPROCS=1",
			fmt.Sprintf(`TF_CONFIG={"cluster":{"worker":["10.78.0.1:7070","10.78.0.2:7070"]},`+
				`"task":{"type":"worker","index":%d}}`, w)), env...)
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
		in, err := p.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := p.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		all[w], ready = p, append(ready, in)
	}
	cable := exec.Command("ip",
		strings.Fields(fmt.Sprintf("link add lockstep0 netns %d type veth peer name lockstep1 netns %d",
			all[0].cmd.Process.Pid, all[1].cmd.Process.Pid))...)
	if out, err := cable.CombinedOutput(); err != nil {
		t.Skipf("a veth pair cannot be created here: %v: %s", err, bytes.TrimSpace(out))
	}
	for _, in := range ready {
		if _, err := io.WriteString(in, "go\n"); err != nil {
			t.Error(err)
		}
		in.Close()
	}
	for _, p := range all {
		p.code = clitest.ExitCode(p.cmd.Wait())
	}
	return all
}
