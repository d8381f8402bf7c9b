package mpi_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lockstep-ml/lockstep/internal/race"
)

// launcher is the mpirun of one MPI implementation.
type launcher struct {
	name     string // of the maker
	commands []string
	args     func(np int) []string
}

var launchers = []launcher{
	{"Open MPI", []string{"mpirun.openmpi"}, func(np int) []string {
		return []string{"--allow-run-as-root", "--oversubscribe", "-np", fmt.Sprint(np)}
	}},
	{"MPICH", []string{"mpirun.mpich", "mpiexec.hydra"}, func(np int) []string { return []string{"-np", fmt.Sprint(np)} }},
}

// mpirun runs this test binary under a launcher and returns its output.
func (l *launcher) mpirun(t *testing.T, np int, what string, extra []string, env ...string) (string, error) {
	t.Helper()
	var command string
	for _, c := range l.commands {
		if path, err := exec.LookPath(c); err == nil {
			command = path
		}
	}
	if command == "" {
		t.Skipf("%s is not installed: no %s in the path", l.name, strings.Join(l.commands, " or "))
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command, append(append(slices.Clone(extra), l.args(np)...), exe)...)
	// Open MPI's launchers keep a common folder there, which two that begin at once may both be about to make: then one of
	// them fails.
	cmd.Env = append(append(os.Environ(), asRank+"="+what, "GOMAXPROCS=2", "TMPDIR="+t.TempDir()), env...)
	cmd.WaitDelay = 5 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s did not end: %s", command, out.String())
	}
	return out.String(), err
}

// eachLauncher runs a test with each launcher.
func eachLauncher(t *testing.T, f func(t *testing.T, l *launcher)) {
	t.Parallel()
	for i := range launchers {
		t.Run(launchers[i].name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			f(t, &launchers[i])
		})
	}
}

// TestExercise checks the results of every operation, with one replica per process and with several, in equal and
// unequal numbers.
func TestExercise(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		counts := []string{"1,3,2", "1,1", "2,1"}
		if testing.Short() {
			counts = counts[:1]
		}
		for _, replicas := range counts {
			seed := rand.Uint64()
			np := strings.Count(replicas, ",") + 1
			out, err := l.mpirun(t, np, "exercise", nil, "LOCKSTEP_TEST_REPLICAS="+replicas,
				fmt.Sprintf("LOCKSTEP_TEST_SEED=%d", seed))
			if err != nil || strings.Count(out, "EXERCISED 24") != np {
				t.Fatalf("replicas %s, seed %d: %v\n%s", replicas, seed, err, out)
			}
		}
	})
}

// prints runs two processes and checks that their output contains each text.
func (l *launcher) prints(t *testing.T, np int, what string, extra []string, wants ...string) string {
	t.Helper()
	out, err := l.mpirun(t, np, what, extra)
	for _, want := range wants {
		if !strings.Contains(out, want) {
			t.Fatalf("%s: %v\n%s\nwant %q", what, err, out, want)
		}
	}
	return out
}

func TestMismatch(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		out := l.prints(t, 2, "mismatch", nil, `rank 0 calls all_reduce SUM float32 [10] of "gradients"`,
			`rank 1 calls all_reduce SUM float32 [11] of "gradients"`)
		if strings.Count(out, "mismatch: rank 0 calls") != 2 {
			t.Errorf("want it on both ranks:\n%s", out)
		}
	})
}

// TestDeadline checks that a call that one process does not make ends on the others.
func TestDeadline(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		l.prints(t, 2, "absent", nil, `call 0, all_reduce of "gradients": deadline exceeded`, "AFTER true")
	})
}

// TestKilled checks that a killed process does not leave the others waiting: the launcher ends them or, if configured
// not to, their deadline does. (MPICH's launcher ends them in any case.)
func TestKilled(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		if l.name == "MPICH" {
			l.prints(t, 2, "killed", nil, "BAD TERMINATION")
			return
		}
		out := l.prints(t, 2, "killed", []string{"--enable-recovery"}, "RESULT 3")
		if !strings.Contains(out, "deadline exceeded") && !strings.Contains(out, "peer lost") {
			t.Errorf("%s", out)
		}
	})
}

// TestStopped checks that the others' waits end at the deadline if a process is suspended.
func TestStopped(t *testing.T) {
	race.SkipShort(t, "it waits 5 s for a process")
	eachLauncher(t, func(t *testing.T, l *launcher) { l.prints(t, 2, "stopped", nil, "RESULT 3", "deadline exceeded") })
}

func TestAlone(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		l.prints(t, 1, "alone", nil, "the job has 2 processes",
			"joins 1: start all of them with the launcher of this library")
	})
}

func TestRebuild(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) {
		if out := l.prints(t, 2, "rebuild", nil); strings.Count(out, "REBUILT epoch 1") != 2 {
			t.Errorf("%s", out)
		}
	})
}

func TestEnded(t *testing.T) {
	eachLauncher(t, func(t *testing.T, l *launcher) { l.prints(t, 2, "again", nil, "cannot be started again") })
}
