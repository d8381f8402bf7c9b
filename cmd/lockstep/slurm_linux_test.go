package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/freeport"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// slurm is a Slurm cluster with two nodes of two processors on this host, on loopback, with all files in one folder.
type slurm struct {
	dir  string
	conf string // its variable SLURM_CONF
	// slurmd starts the daemon of a node, and kill has a function for each node that kills it.
	slurmd func(node string)
	kill   map[string]func()
}

// startSlurm starts a Slurm cluster. Without Slurm it skips the test.
func startSlurm(t *testing.T) *slurm {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can start Slurm's daemons")
	}
	path := os.Getenv("PATH") + ":/usr/sbin:/sbin"
	t.Setenv("PATH", path)
	for _, program := range []string{"munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo"} {
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
	s := &slurm{dir: dir, conf: "SLURM_CONF=" + file, kill: map[string]func(){}}
	start := func(args ...string) *os.Process {
		cmd := exec.Command(args[0], args[1:]...)
		var out bytes.Buffer
		cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), s.conf), &out, &out
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
		return cmd.Process
	}
	start("munged", "-F", "--key-file="+dir+"/munge.key", "--socket="+dir+"/munge.sock", "--pid-file="+dir+"/munge.pid",
		"--log-file="+dir+"/munge.log", "--seed-file="+dir+"/munge.seed", "--force")
	start("slurmctld", "-D", "-i", "-f", file)
	s.slurmd = func(node string) {
		daemon := start("slurmd", "-D", "-f", file, "-N", node)
		s.kill[node] = func() { _ = daemon.Kill() }
	}
	s.slurmd("n0")
	s.slurmd("n1")
	s.awaitIdle(t)
	return s
}

// awaitIdle waits until both nodes are ready for a job.
func (s *slurm) awaitIdle(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		sinfo := exec.Command("sinfo", "-h", "-o", "%n %t", "-N")
		sinfo.Env = append(os.Environ(), s.conf)
		out, _ := sinfo.CombinedOutput()
		if strings.Count(string(out), "idle\n") == 2 { // not idle*, a node that does not respond
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the nodes are not idle after a minute: %s", out)
		}
	}
}

// command returns a command of Slurm, in whose tasks this test binary is lockstep.
func (s *slurm) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	// The nodes have names that only this Slurm knows, so their address is given.
	cmd.Env = append(os.Environ(), clitest.AsCommand+"=1", s.conf, "TMPDIR="+s.dir,
		cluster.EnvStore+"=tcp://127.0.0.1:"+fmt.Sprint(freeport.Take(t, 1)))
	cmd.Dir, cmd.WaitDelay = s.dir, 5*time.Second
	return cmd
}

// TestSlurm runs trainings of 4 workers, on two nodes with two tasks each.
func TestSlurm(t *testing.T) {
	race.SkipTimed(t, "it starts a Slurm cluster")
	s := startSlurm(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const steps = 40
	training := []string{"train", "--model", "mlp", "--steps", fmt.Sprint(steps), "--progress", "none"}
	workers := append(training[:len(training):len(training)], "--replicas", "1", "--strategy", "multi-worker")
	one, err := clitest.Process(t, append(training, "--replicas", "4")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, one)
	}
	hash := regexp.MustCompile(`weights hash +([0-9a-f]{64})`)
	want := hash.FindSubmatch(one)
	if want == nil {
		t.Fatalf("no hash:\n%s", one)
	}
	check := func(t *testing.T, out []byte, err error) {
		t.Helper()
		got := hash.FindAllSubmatch(out, -1)
		if err != nil || len(got) != 4 {
			t.Fatalf("%v, %d hashes, want one of each of 4 workers:\n%s", err, len(got), out)
		}
		for _, h := range got {
			if !bytes.Equal(h[1], want[1]) {
				t.Errorf("weights hash %s, want that of 4 replicas in one process, %s", h[1], want[1])
			}
		}
		if !bytes.Contains(out, []byte("worker 3 of 4, by Slurm")) {
			t.Errorf("the workers did not find the job by Slurm:\n%s", out)
		}
	}
	srun := append([]string{"srun", "-N", "2", "--ntasks-per-node", "2", "--time", "2", exe}, workers...)

	t.Run("srun", func(t *testing.T) {
		out, err := s.command(t, srun...).CombinedOutput()
		check(t, out, err)
	})

	t.Run("srun --mpi=pmi2", func(t *testing.T) { // the launcher passes the store's address on
		cmd := s.command(t, append([]string{"srun", "--mpi=pmi2"}, srun[1:]...)...)
		cmd.Env = slices.DeleteFunc(cmd.Env, func(v string) bool { return strings.HasPrefix(v, cluster.EnvStore+"=") })
		out, err := cmd.CombinedOutput()
		check(t, bytes.ReplaceAll(out, []byte("by MPICH (PMI)"), []byte("by Slurm")), err)
		if !bytes.Contains(out, []byte("by MPICH (PMI)")) || !bytes.Contains(out, []byte("the launcher passes on (PMI)")) {
			t.Errorf("the workers did not use the launcher's key-value space:\n%s", out)
		}
	})

	t.Run("sbatch", func(t *testing.T) {
		render := clitest.Process(t, append([]string{
			"render", "slurm", "--nnodes", "2", "--nproc-per-node", "2",
			"--max-restarts", "1", "--time", "4", "--", exe,
		}, workers...)...)
		script, err := render.Output()
		if err != nil {
			t.Fatal(err)
		}
		sbatch := s.command(t, "sbatch", "--wait")
		sbatch.Stdin = bytes.NewReader(script)
		out, err := sbatch.CombinedOutput()
		logs, _ := filepath.Glob(filepath.Join(s.dir, "train-*.log"))
		if len(logs) != 1 {
			t.Fatalf("%v, %v: want one log\n%s", err, logs, out)
		}
		log, _ := os.ReadFile(logs[0])
		check(t, log, err)
	})

	t.Run("killed slurmd", func(t *testing.T) {
		cmd := s.command(t, srun...)
		killed := false
		out, err := watch(t, cmd, func(line string) bool {
			if !killed && member.MatchString(line) {
				killed = true
				s.kill["n1"]()
			}
			return true
		})
		check(t, out, err) // the tasks are children of slurmstepd and go on
		if !killed {
			t.Errorf("the chief did not list the workers:\n%s", out)
		}
		s.slurmd("n1")
		s.awaitIdle(t)
	})

	t.Run("lost node", func(t *testing.T) {
		cmd := s.command(t, append(srun, "--steps", "100000", "--heartbeat-timeout", "5s")...)
		var lost []int // the processes of node n1: slurmstepd and its tasks
		members, named := 0, 0
		out, _ := watch(t, cmd, func(line string) bool {
			if m := member.FindStringSubmatch(line); m != nil && members < 4 {
				members++
				pid, _ := strconv.Atoi(m[2])
				step := parentOf(t, pid)
				t.Cleanup(func() { // Slurm lets slurmstepd wait for the lost node
					_ = syscall.Kill(pid, syscall.SIGKILL)
					_ = syscall.Kill(step, syscall.SIGKILL)
				})
				if m[1] == "n1" {
					lost = append(lost, step, pid)
				}
				if members == 4 {
					// A lost node sends nothing more, not even the end of its connections.
					s.kill["n1"]()
					for _, pid := range lost {
						_ = syscall.Kill(pid, syscall.SIGSTOP)
					}
				}
			}
			if lostNode.MatchString(line) {
				named++
			}
			return named < 2
		})
		if named != 2 {
			t.Errorf("%d workers named the lost node and its workers, want 2:\n%s", named, out)
		}
	})
}

// lostNode matches the last line of a worker that ends because node n1 is lost.
var lostNode = regexp.MustCompile(`^lockstep: train: .*peer lost: worker [23] is lost: no heartbeat for [0-9.]+s, ` +
	`and none from worker [23] of the same host n1: the host is down or cannot be reached`)

// member matches a worker in the chief's list: its host and its process.
var member = regexp.MustCompile(`worker \d+ \(rank \d+, host (\w+), pid (\d+)\)`)

// parentOf returns the parent of a process.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`PPid:\t(\d+)`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("no parent in %s", text)
	}
	parent, _ := strconv.Atoi(string(m[1]))
	return parent
}

// watch runs a command and calls a function with every line of its output, until the command ends, or the function
// returns false and watch kills it. It returns the whole output.
func watch(t *testing.T, cmd *exec.Cmd, line func(string) bool) ([]byte, error) {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	cmd.Stdout, cmd.Stderr = write, write
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	var all []byte
	for lines := bufio.NewScanner(read); lines.Scan(); {
		all = append(append(all, lines.Bytes()...), '\n')
		if !line(lines.Text()) {
			_ = cmd.Process.Kill()
			break
		}
	}
	return all, cmd.Wait()
}
