package main

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/freeport"
)

// startSlurm starts a Slurm cluster with two nodes of two processors on this host, on loopback and in a folder of its
// own, and returns the environment of its commands. Without Slurm it skips the test.
func startSlurm(t *testing.T) []string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can start Slurm's daemons")
	}
	path := os.Getenv("PATH") + ":/usr/sbin:/sbin"
	t.Setenv("PATH", path)
	for _, program := range []string{"munged", "slurmctld", "slurmd", "srun", "sinfo"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("no %s here: install slurmctld, slurmd, slurm-client and munge", program)
		}
	}
	dir, err := os.MkdirTemp("", "slurm") // short: the name of a socket has few characters
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	host, _, _ = strings.Cut(host, ".")
	port := freeport.Take(t, 3)
	key := make([]byte, 1024)
	_, _ = rand.Read(key) // never fails
	conf := fmt.Sprintf(`ClusterName=lockstep
SlurmctldHost=%[1]s(127.0.0.1)
SlurmctldPort=%[3]d
SlurmctldPidFile=%[2]s/ctld.pid
SlurmdPidFile=%[2]s/%%n.pid
SlurmdSpoolDir=%[2]s/spool-%%n
StateSaveLocation=%[2]s/state
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=%[2]s/munge.sock
CryptoType=crypto/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
KillWait=5
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname=%[1]s NodeAddr=127.0.0.1 Port=%[4]d CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname=%[1]s NodeAddr=127.0.0.1 Port=%[5]d CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
`, host, dir, port, port+1, port+2)
	file := filepath.Join(dir, "slurm.conf")
	for name, text := range map[string][]byte{"slurm.conf": []byte(conf), "munge.key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	env := append(os.Environ(), "SLURM_CONF="+file)
	start := func(args ...string) {
		cmd := exec.Command(args[0], args[1:]...)
		var out bytes.Buffer
		cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Signal(os.Interrupt)
			ended := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
			defer ended.Stop()
			if err := cmd.Wait(); t.Failed() {
				t.Logf("%v: %v\n%s", args, err, out.Bytes())
			}
		})
	}
	start("munged", "-F", "--key-file="+dir+"/munge.key", "--socket="+dir+"/munge.sock", "--pid-file="+dir+"/munge.pid",
		"--log-file="+dir+"/munge.log", "--seed-file="+dir+"/munge.seed", "--force")
	start("slurmctld", "-D", "-i", "-f", file)
	start("slurmd", "-D", "-f", file, "-N", "n0")
	start("slurmd", "-D", "-f", file, "-N", "n1")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		sinfo := exec.Command("sinfo", "-h", "-o", "%n %t", "-N")
		sinfo.Env = env
		out, _ := sinfo.CombinedOutput()
		if strings.Count(string(out), "idle") == 2 {
			return env
		}
		if time.Now().After(deadline) {
			t.Fatalf("the nodes are not idle after a minute: %s", out)
		}
	}
}

// TestSlurm trains under srun, on two nodes with two tasks each, to the weights of four replicas in one process.
func TestSlurm(t *testing.T) {
	skipShort(t, "it starts a Slurm cluster")
	env := startSlurm(t)
	hash := regexp.MustCompile(`weights hash +([0-9a-f]{64})`)
	args := []string{"train", "--model", "mlp", "--steps", "5", "--progress", "none"}
	one, err := lockstepProcess(t, append(args, "--replicas", "4")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, one)
	}
	want := hash.FindSubmatch(one)
	several := lockstepProcess(t, append(args, "--replicas", "1", "--strategy", "multi-worker")...)
	cmd := exec.Command("srun", append([]string{"-N", "2", "--ntasks-per-node", "2", "--time", "2"}, several.Args...)...)
	// The nodes have names that only this Slurm knows, so their address is given.
	cmd.Env = append(several.Env, "LOCKSTEP_STORE=tcp://127.0.0.1:"+fmt.Sprint(freeport.Take(t, 1)))
	for _, v := range env {
		if strings.HasPrefix(v, "SLURM_CONF=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got := hash.FindAllSubmatch(out, -1)
	if len(want) != 2 || len(got) != 4 {
		t.Fatalf("%d hashes, want one of each of 4 workers:\n%s", len(got), out)
	}
	for _, h := range got {
		if !bytes.Equal(h[1], want[1]) {
			t.Errorf("weights hash %s, want %s", h[1], want[1])
		}
	}
	if !bytes.Contains(out, []byte("worker 3 of 4, by Slurm")) {
		t.Errorf("the workers did not find the job by Slurm:\n%s", out)
	}
}
