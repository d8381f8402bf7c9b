package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/cluster"
	"github.com/lockstep-ml/lockstep/cmd/lockstep/internal/clitest"
	"github.com/lockstep-ml/lockstep/internal/race"
)

// mpiruns are the launchers under which training is tested, and the names under which lockstep detects them.
var mpiruns = []struct {
	command  string
	args     []string
	detected string
}{
	{"mpirun.openmpi", []string{"--allow-run-as-root", "--oversubscribe"}, "by Open MPI"},
	{"mpirun.mpich", nil, "by MPICH (PMI)"},
}

// TestMPI: under mpirun, training with Lockstep's collectives gives the bits of one process. With MPI's collectives it
// reaches the same accuracy. The source of the job is printed.
func TestMPI(t *testing.T) {
	race.SkipTimed(t, "whole jobs under mpirun")
	one, _ := clitest.Train(t, append([]string{"--replicas", "2"}, small...)...)
	for _, m := range mpiruns {
		t.Run(m.detected, func(t *testing.T) {
			command, err := exec.LookPath(m.command)
			if err != nil {
				t.Skipf("%s is not installed", m.command)
			}
			for _, implementation := range []string{"auto", "mpi"} {
				dir := t.TempDir()
				out := underMPI(t, command, append(m.args, "-np", "2"),
					append([]string{"--implementation", implementation, "--out", dir}, small...))
				var s map[string]any
				text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
				if err == nil {
					err = json.Unmarshal(text, &s)
				}
				if err != nil || !strings.Contains(out, "worker 0 of 2 (the chief), "+m.detected) ||
					!strings.Contains(out, "worker 1 of 2, "+m.detected) {
					t.Fatalf("%v\n%s", err, out)
				}
				if own := implementation == "auto"; own && s["weights_hash"] != one["weights_hash"] ||
					own == strings.Contains(out, "which adds in another order") {
					t.Errorf("%s: weights %v, want %v\n%s", implementation, s["weights_hash"], one["weights_hash"], out)
				}
				if a, b := s["test_accuracy"].(float64), one["test_accuracy"].(float64); math.Abs(a-b) > 0.001 {
					t.Errorf("%s: accuracy %v, want %v", implementation, a, b)
				}
			}
		})
	}
}

// TestHydraOnHosts: under Hydra on several hosts, which passes no addresses, the workers find each other by its
// key-value space, with Lockstep's collectives and with MPI's. The hosts are names of this one.
func TestHydraOnHosts(t *testing.T) {
	race.SkipTimed(t, "whole jobs under mpirun")
	command, err := exec.LookPath("mpirun.mpich")
	if err != nil {
		t.Skip("mpirun.mpich is not installed")
	}
	one, _ := clitest.Train(t, append([]string{"--replicas", "2"}, small...)...)
	for _, implementation := range []string{"auto", "mpi"} {
		dir := t.TempDir()
		out := underMPI(t, command, []string{"-launcher", "fork", "-hosts", "127.0.0.1:1,127.0.0.2:1", "-np", "2"},
			append([]string{"--implementation", implementation, "--out", dir}, small...))
		var s map[string]any
		text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
		if err == nil {
			err = json.Unmarshal(text, &s)
		}
		if err != nil || !strings.Contains(out, "whose address the launcher passes on (PMI)") ||
			strings.Contains(out, "BAD TERMINATION") {
			t.Fatalf("%v\n%s", err, out)
		}
		if implementation == "auto" && s["weights_hash"] != one["weights_hash"] {
			t.Errorf("weights %v, want %v\n%s", s["weights_hash"], one["weights_hash"], out)
		}
	}
}

// TestOneWithoutMPI: workers with different collectives backends fail, and report the difference.
func TestOneWithoutMPI(t *testing.T) {
	t.Parallel()
	command, err := exec.LookPath("mpirun.openmpi")
	if err != nil {
		t.Skip("mpirun.openmpi is not installed")
	}
	script := `test "$OMPI_COMM_WORLD_RANK" = 0 && exec "$0" "$@" --implementation mpi; exec "$0" "$@"`
	out := underMPI(t, command, []string{"--allow-run-as-root", "--oversubscribe", "-np", "2", "sh", "-c", script}, small)
	if !strings.Contains(out, "use mpi, and those of") ||
		!strings.Contains(out, "want the same collectives on all workers") {
		t.Errorf("%s", out)
	}
}

// underMPI runs a launcher and returns the output of its processes.
func underMPI(t *testing.T, command string, args, flags []string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	args = append(append(append([]string{}, args...), exe, "train", "--strategy", "multi-worker", "--replicas", "1",
		"--progress", "none", "--rdzv-timeout", "5m"), flags...)
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Env = append(os.Environ(), clitest.AsCommand+"=1", "GOMAXPROCS=1", fmt.Sprintf("TMPDIR=%s", t.TempDir()))
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Logf("%s: %v", command, err)
	}
	return string(out)
}

// TestStoppedUnderMPI: if a worker is suspended during a reduction by MPI, the others name it and its last reported
// activity, long before the deadline of the call. Their records name the call in which they wait for it.
func TestStoppedUnderMPI(t *testing.T) {
	race.SkipTimed(t, "whole jobs under mpirun")
	command, err := exec.LookPath("mpirun.openmpi")
	if err != nil {
		t.Skip("mpirun.openmpi is not installed")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command, "--allow-run-as-root", "--oversubscribe", "-np", "2", exe, "train",
		"--strategy", "multi-worker",
		"--replicas", "1", "--model", "mlp", "--epochs", "10000", "--progress", "none", "--implementation", "mpi",
		"--heartbeat-timeout", "5s")
	records := t.TempDir()
	cmd.Env = append(os.Environ(), clitest.AsCommand+"=1", "GOMAXPROCS=1", "TMPDIR="+t.TempDir(),
		cluster.EnvRecords+"="+records)
	cmd.WaitDelay = 5 * time.Second
	pid, report := 0, ""
	member := regexp.MustCompile(`worker 1 \(rank 1, host .*, pid (\d+)\)`)
	lost := regexp.MustCompile(`worker 1 is lost: no heartbeat for (\S+):`)
	out, err := watch(t, cmd, func(line string) bool {
		switch m := member.FindStringSubmatch(line); {
		case pid == 0 && m != nil: // the chief lists the workers
			pid, _ = strconv.Atoi(m[1])
			if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
				t.Error(err)
			}
		case pid != 0 && strings.Contains(line, "was last seen") && report == "":
			report = line
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}
		return true
	})
	all := string(out)
	if pid != 0 && report == "" {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it would stay suspended
	}
	if err == nil || ctx.Err() != nil || !strings.Contains(report, fmt.Sprintf("pid %d) was last seen", pid)) {
		t.Errorf("%v, %v\n%s", err, ctx.Err(), all)
	}
	silent := time.Duration(0)
	if m := lost.FindStringSubmatch(all); m != nil {
		silent, _ = time.ParseDuration(m[1])
	}
	if silent < 5*time.Second { // how much later it is detected depends on the machine
		t.Errorf("the report does not state that worker 1 was silent for 5 s or longer:\n%s", all)
	}
	parted, err := clitest.Process(t, "doctor", records).CombinedOutput()
	for _, want := range []string{"records of 1 of 2 workers", "none of worker 1", "2 ranks"} {
		if !strings.Contains(string(parted), want) {
			t.Errorf("lockstep doctor, %v: %s\nwant %q", err, parted, want)
		}
	}
}
