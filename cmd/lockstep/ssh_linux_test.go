package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// TestSSH starts jobs with -H over a real sshd. Two names and addresses of this machine act as two hosts. A training
// gives the bits of one process, the exit code is that of the worker that failed, and Ctrl-C leaves no process on the
// hosts.
func TestSSH(t *testing.T) {
	race.SkipTimed(t, "whole jobs over ssh")
	ssh := serveSSH(t)
	hosts := []string{"run", "-H", "far1:1,far2:1", "--ssh", ssh, "--rdzv-endpoint", "127.0.0.1", "--rdzv-timeout", "5m"}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}

	t.Run("training", func(t *testing.T) {
		want, dir := hashOfOne(t, 2), t.TempDir()
		args := slices.Concat(hosts, []string{
			"--", exe, "train", "--strategy", "multi-worker", "--replicas", "1",
			"--progress", "none", "--out", dir,
		}, small)
		p := &workerProcess{cmd: clitest.Process(t, args...)}
		p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
		p.code = clitest.ExitCode(p.cmd.Run())
		wantHash(t, []*workerProcess{p}, dir, want)
		for rank := range 2 {
			if !strings.Contains(p.stdout.String(), fmt.Sprintf("[rank%d] ", rank)) {
				t.Errorf("nothing of rank %d is shown:\n%s", rank, p.stdout.String())
			}
		}
	})

	t.Run("exit code", func(t *testing.T) {
		out, err := clitest.Process(t, slices.Concat(hosts,
			[]string{"--", "sh", "-c", "if [ $RANK = 1 ]; then exit 6; fi; exec sleep 1000"})...).CombinedOutput()
		if code := clitest.ExitCode(err); code != 6 || !strings.Contains(string(out),
			"who     worker 1 of 2, node 1, host ") {
			t.Errorf("exit code %d, want 6, and worker 1 to be named:\n%s", code, out)
		}
	})

	t.Run("Ctrl-C", func(t *testing.T) {
		cmd := clitest.Process(t, slices.Concat(hosts, []string{"--", "sh", "-c", "echo at $$; exec sleep 1000"})...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines, workers := bufio.NewScanner(stdout), []int(nil)
		for len(workers) < 2 && lines.Scan() {
			_, text, _ := strings.Cut(lines.Text(), "at ")
			if pid, err := strconv.Atoi(text); err == nil {
				workers = append(workers, pid)
			}
		}
		if err := cmd.Process.Signal(unix.SIGINT); err != nil {
			t.Fatal(err)
		}
		rest, _ := io.ReadAll(stdout)
		if code := clitest.ExitCode(cmd.Wait()); code != 130 || len(workers) != 2 {
			t.Fatalf("exit code %d, want 130; workers %v, want two:\n%s%s", code, workers, rest, stderr.String())
		}
		for _, pid := range workers {
			for begin := time.Now(); !errors.Is(unix.Kill(pid, 0), unix.ESRCH); time.Sleep(10 * time.Millisecond) {
				if time.Since(begin) > time.Minute {
					t.Fatalf("the worker with pid %d is still there", pid)
				}
			}
		}
	})

	t.Run("a host that has no sshd", func(t *testing.T) {
		out, err := clitest.Process(t, "run", "-H", "far1,nowhere", "--ssh", ssh, "--rdzv-endpoint", "127.0.0.1", "--",
			"sleep", "1000").CombinedOutput()
		if code := clitest.ExitCode(err); code != 1 || !strings.Contains(string(out), "host nowhere: ") {
			t.Errorf("exit code %d, want 1, and the host to be named:\n%s", code, out)
		}
	})
}

// serveSSH runs an sshd on loopback with new keys, and returns the ssh command that reaches it.
func serveSSH(t *testing.T) string {
	t.Helper()
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		sshd = "/usr/sbin/sshd" // it may not be in the path of the user
	}
	if _, err := os.Stat(sshd); err != nil {
		t.Skipf("needs Debian's openssh-server: %v", err)
	}
	dir := t.TempDir()
	for _, key := range []string{"host", "user"} {
		if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
			filepath.Join(dir, key)).CombinedOutput(); err != nil {
			t.Skipf("needs ssh-keygen: %v: %s", err, out)
		}
	}
	port := freeport.Take(t, 1)
	config := fmt.Sprintf(`
Port %d
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey %[2]s/host
AuthorizedKeysFile %[2]s/user.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
SetEnv %[3]s=1
`, port, dir, clitest.AsCommand) // the agents are this test binary, too
	client := fmt.Sprintf(`
Host far1
	HostName 127.0.0.1
Host far2
	HostName 127.0.0.2
Host nowhere
	HostName 127.0.0.3
Host *
Port %d
IdentityFile %[2]s/user
IdentitiesOnly yes
BatchMode yes
StrictHostKeyChecking no
UserKnownHostsFile %[2]s/known
LogLevel ERROR
`, port, dir)
	for name, text := range map[string]string{"sshd_config": config, "ssh_config": client} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	server := exec.Command(sshd, "-D", "-e", "-f", filepath.Join(dir, "sshd_config"))
	var log strings.Builder
	server.Stderr = &log
	if err := server.Start(); err != nil {
		t.Skipf("sshd does not start: %v", err)
	}
	ended := make(chan struct{})
	go func() { _ = server.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = server.Process.Kill() // it may have ended
		<-ended
		if t.Failed() {
			t.Logf("output of sshd:\n%s", log.String())
		}
	})
	for {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.2:%d", port)) // the address at which it listens last
		if err == nil {
			conn.Close()
			return "ssh -F " + filepath.Join(dir, "ssh_config")
		}
		select {
		case <-ended:
			t.Skipf("sshd does not work here: %s", log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
